"""A memory plan in words, as JSON, and as values of the Helm chart."""

from __future__ import annotations

import dataclasses
import json
import math

from services.common.config import flag_name, to_argv
from services.fleet.planner.config import PlanConfig
from services.fleet.planner.gpus import CPU
from services.fleet.planner.memory import MemoryPlan
from services.worker.sizing.pool import gib

_LENGTHS = (1024, 4096, 8192, 32_768, 131_072)
_GIB = 1 << 30
_SLOTS_FLAG = flag_name("max_running_requests")


def text(plan: MemoryPlan, config: PlanConfig) -> str:
    """The plan for a person."""
    on_cpu = plan.device == CPU
    where = "this machine" if on_cpu and not config.memory_gib else plan.device
    kind = plan.dtype if config.quantization == "none" else config.quantization
    rows = [
        ("free" if not on_cpu else "memory", gib(plan.total), _total_note(plan, config)),
        ("weights", gib(plan.weights), f"{kind}{_stored(plan)}"),
    ]
    if not on_cpu:
        rows += [
            ("activations", gib(plan.activations), "estimated; a worker measures it at start"),
            ("CUDA graphs", gib(plan.graphs), "assumed; a worker measures it at start"),
        ]
    rows.append(
        ("KV pool", gib(plan.kv), f"{plan.pages:,} pages, {plan.token_bytes:,} bytes a token")
    )
    if plan.pages == plan.most_pages:
        all_slots = f"{plan.max_running_requests} requests of {plan.max_model_len:,} tokens"
        rows.append(("", "", f"all that {all_slots} can use ({_SLOTS_FLAG})"))
    ranks = f", on each of {plan.tp} ranks" if plan.tp > 1 else ""
    lines = [f"{plan.model} on {where}{ranks}:", ""]
    lines += [f"  {name:<14}{size:>12}  {note}" for name, size, note in rows]
    lines += ["", _capacity(plan), "", "  tokens a request   requests at once"]
    lines += [_row(plan, length) for length in _lengths(plan, config)]
    command = " ".join(["shoal serve", *flags(config)])
    return "\n".join([*lines, "", command, ""])


def as_json(plan: MemoryPlan, config: PlanConfig) -> str:
    """The plan for a program."""
    lengths = {str(length): plan.requests(length) for length in _lengths(plan, config)}
    derived = {
        "kv_bytes": plan.kv,
        "kv_tokens": plan.kv_tokens,
        "requests_at_once": lengths,
        "flags": flags(config),
    }
    return json.dumps({**dataclasses.asdict(plan), **derived}, indent=2) + "\n"


def helm(plan: MemoryPlan, config: PlanConfig) -> str:
    """Values for the chart, as YAML."""
    lines = [f"# {plan.model} on {plan.device}: {_capacity(plan)}"]
    if plan.hub_id:
        lines += ["model:", "  source: hub", "  hub:", f"    id: {json.dumps(plan.hub_id)}"]
    elif config.model:
        lines.append("# The model is a local one: name where the cluster has it, as model.source.")
    lines.append("worker:")
    if plan.device == CPU:
        # A quarter of the limit becomes the pool there; and a process takes more than its tensors.
        quarters, tensors = 4 * plan.kv * plan.tp, (plan.weights + plan.kv) * plan.tp
        memory = max(math.ceil(quarters / _GIB), math.ceil(tensors / _GIB) + 1)
        lines += [
            f"  tensorParallel: {plan.tp}",
            "  resources:",
            f'    requests: {{cpu: "{max(2, plan.tp)}", memory: {memory}Gi}}',
            f'    limits: {{cpu: "{max(4, plan.tp)}", memory: {memory}Gi}}',
        ]
    else:
        host = math.ceil(plan.weights / _GIB) + 4  # the files pass through it, a part at a time
        lines += [
            "  image: {repository: shoal-worker-cuda}",
            f"  tensorParallel: {plan.tp}",
            f"  gpu: {{count: {plan.tp}}}",
            "  resources:",
            f'    requests: {{cpu: "{2 * plan.tp}", memory: {host}Gi}}',
            f'    limits: {{cpu: "{4 * plan.tp}", memory: {2 * host}Gi}}',
        ]
    if options := _chart_options(config):
        lines += ["  config:", *(f"    {name}: {value}" for name, value in options.items())]
    return "\n".join([*lines, ""])


def flags(config: PlanConfig) -> list[str]:
    """Flags for `shoal serve` or `shoal worker` that make the planned worker."""
    return [flag for flag in to_argv(config.worker()) if not flag.startswith("--device=cpu")]


def _chart_options(config: PlanConfig) -> dict[str, str]:
    """The planned flags that the chart takes as options of the worker, in camel case."""
    options: dict[str, str] = {}
    for flag in to_argv(config.worker()):
        name, _, value = flag.removeprefix("--").partition("=")
        if name not in ("model", "tp", "device"):
            first, *rest = name.split("-")
            options[first + "".join(part.title() for part in rest)] = value or "true"
    return options


def _capacity(plan: MemoryPlan) -> str:
    cut = f", of the model's {plan.context:,}" if plan.max_model_len < plan.context else ""
    return (
        f"{plan.kv_tokens:,} tokens of KV in all; a request may have"
        f" {plan.max_model_len:,} tokens{cut}"
    )


def _row(plan: MemoryPlan, length: int) -> str:
    requests = plan.requests(length)
    note = f"   as many as {_SLOTS_FLAG}" if requests == plan.max_running_requests else ""
    return f"  {length:>16,}   {requests:>16,}{note}"


def _lengths(plan: MemoryPlan, config: PlanConfig) -> list[int]:
    if config.context:
        return [config.context]
    return sorted({n for n in _LENGTHS if n < plan.max_model_len} | {plan.max_model_len})


def _stored(plan: MemoryPlan) -> str:
    return f", {gib(plan.stored_bytes)} as stored" if plan.stored_bytes else ", from the shape"


def _total_note(plan: MemoryPlan, config: PlanConfig) -> str:
    if plan.device == CPU:
        return "of which a quarter, at most 4 GiB, is for KV"
    whose = "as given" if config.memory_gib else "before loading"
    return f"{whose}; {flag_name('memory_ratio')} {config.memory_ratio} of it is used"

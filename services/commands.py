"""The words after `shoal`: what each does, where its `main(argv)` is and what it needs.

Text alone, so that whoever reads it imports no service.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass


@dataclass(frozen=True)
class Command:
    """One command. `config` names the class of its flags in its package's config module."""

    summary: str
    module: str
    config: str
    extras: tuple[str, ...] = ()
    role: str = ""

    def config_class(self) -> type:
        """The dataclass of its flags; imports its module."""
        module, _, name = self.config.rpartition(".")
        found: type = getattr(importlib.import_module(module), name)
        return found


COMMANDS: dict[str, Command] = {
    "serve": Command(
        "a whole fleet on this machine, as processes",
        "services.fleet",
        "services.fleet.config.FleetConfig",
        ("gateway", "worker"),
    ),
    "chat": Command(
        "an interactive chat with a running fleet, or with one of its own",
        "services.client.chat",
        "services.client.chat.config.ChatConfig",
        ("gateway",),
    ),
    "top": Command(
        "a fleet, live in the terminal",
        "services.client.top",
        "services.client.top.config.TopConfig",
        ("gateway",),
    ),
    "bench": Command(
        "a load client of any OpenAI API: latencies, throughput, a report",
        "services.client.bench",
        "services.client.bench.config.BenchConfig",
        ("gateway",),
    ),
    "doctor": Command(
        "checks a machine, a model or a fleet before trouble",
        "services.client.doctor",
        "services.client.doctor.config.DoctorConfig",
        ("gateway",),
    ),
    "plan": Command(
        "what a model takes of a GPU, and what fits beside it",
        "services.fleet.planner",
        "services.fleet.planner.config.PlanConfig",
    ),
    "download": Command(
        "fetch a model into the local hub cache, ahead of the services",
        "services.fleet.download",
        "services.fleet.download.__main__.DownloadConfig",
    ),
    "completion": Command(
        "what a shell needs to complete these commands and their flags",
        "services.client.completion",
        "services.client.completion.config.CompletionConfig",
        ("gateway",),
    ),
    "gateway": Command(
        "the front door: REST, SSE and gRPC for clients",
        "services.gateway",
        "services.gateway.config.GatewayConfig",
        ("gateway",),
    ),
    "tokenizer": Command(
        "text to token ids",
        "services.tokenizer",
        "services.tokenizer.config.TokenizerConfig",
        ("tokenizer",),
    ),
    "detokenizer": Command(
        "token ids to text",
        "services.tokenizer",
        "services.tokenizer.config.DetokenizerConfig",
        ("tokenizer",),
        role="detokenizer",
    ),
    "worker": Command(
        "a model replica: the engine",
        "services.worker",
        "services.worker.config.WorkerConfig",
        ("worker",),
    ),
}
GROUPS = {
    "everything": ("serve", "chat", "top", "bench"),
    "before the start": ("doctor", "plan", "download", "completion"),
    "one service": ("gateway", "tokenizer", "detokenizer", "worker"),
}

"""The CUDA path on a GPU: built, checked, then timed against the machine's own ceilings.

    python -m bench.gpu [--budget 420] [--json PATH]

It needs torch, flashinfer and a GPU, and no model: weights are random, in the shapes of a
small model and of Llama 3.1 8B. The ceilings are measured too, by copying memory and by one
large product, so shares are of what this GPU does, not of a data sheet. It ends with a table
and one line of JSON. Exit status: 0 if every check passed, 1 if one failed, 2 without a GPU.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench import gpu_checks, gpu_engine
from bench.gpu_checks import Comparison, Generated
from services.common.config import option, parse
from services.common.errors import StartupError
from services.worker.attention import flashinfer_build
from services.worker.attention.flashinfer import Heads
from services.worker.models.config import ModelConfig

_CONTEXT = 1024  # tokens behind each row of a timed decode step
_DECODE_STEPS, _WARM_UP = 32, 8
_BATCHES = (1, 8, 64, 256)
_PREFILL = [2048] * 4
_HEADS = (Heads(16, 4, 64), Heads(9, 3, 64), Heads(32, 8, 128), Heads(8, 8, 128))
_COPIED, _SIDE = 1 << 30, 8192  # bytes copied, side of the squares multiplied
SHAPES = {"small": gpu_engine.SMALL, "llama-8b": gpu_engine.LLAMA_8B}


@dataclass(frozen=True)
class BenchConfig:
    """What is run, and for how long."""

    budget: float = option(420.0, "seconds after which no further part is begun")
    shapes: tuple[str, ...] = option(tuple(SHAPES), "shapes that are timed: small, llama-8b")
    json: str = option("", "file for the figures; default: none")


@dataclass
class Report:
    """What was found, and what there was no time for."""

    device: str
    torch: str
    flashinfer: str
    bandwidth: float = 0.0  # bytes/s, reading and writing
    flops: float = 0.0  # of a bfloat16 product
    checks: dict[str, str] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)  # of the table


class Bench:
    """The parts, each begun only within the budget."""

    def __init__(self, config: BenchConfig) -> None:
        self._config = config
        self._device = torch.device("cuda", 0)
        self._started = time.perf_counter()
        self.report = Report(
            torch.cuda.get_device_name(self._device), torch.__version__, _flashinfer_version()
        )

    def run(self) -> None:
        """Everything, in order of worth."""
        self._part("build", self._build)
        self._part("ceilings", self._ceilings)
        self._part("attention", self._check_attention)
        self._part("greedy", self._check_greedy)
        for name in self._config.shapes:
            self._part(f"timings of {name}", partial(self._time, name))

    def _part(self, name: str, run: Callable[[], None]) -> None:
        elapsed = time.perf_counter() - self._started
        if elapsed > self._config.budget:
            _say(f"{name}: left out, {elapsed:.0f} s are gone")
            self.report.skipped.append(name)
            return
        _say(f"{name} ...")
        run()
        _say(f"{name}: done after {time.perf_counter() - self._started:.0f} s")

    def _build(self) -> None:
        flashinfer_build.build([64, 128], [torch.bfloat16])

    def _ceilings(self) -> None:
        pair = torch.zeros(2, _COPIED, dtype=torch.uint8, device=self._device)
        self.report.bandwidth = 2 * _COPIED / _timed(lambda: pair[0].copy_(pair[1]))
        a = torch.randn(_SIDE, _SIDE, dtype=torch.bfloat16, device=self._device)
        self.report.flops = 2 * _SIDE**3 / _timed(lambda: a @ a)

    def _check_attention(self) -> None:
        dtype = torch.bfloat16
        for heads in _HEADS:
            for page_size in (1, 16):
                error = gpu_checks.attention_error(heads, dtype, page_size, self._device)
                self._check(
                    f"attention {heads.num_heads}/{heads.num_kv_heads}x{heads.head_dim},"
                    f" page {page_size}",
                    error <= gpu_checks.TOLERANCE[dtype],
                    f"off by {error:.4f} at most",
                )

    def _check_greedy(self) -> None:
        rng = np.random.default_rng(1)
        prompts = [rng.integers(3, 32000, int(n)).tolist() for n in rng.integers(5, 400, 8)]

        def run(*, overlap: bool = True, **options: Any) -> Generated:
            with gpu_engine.random_engine(
                gpu_engine.SMALL, _progress, num_pages=2000, max_running_requests=64, **options
            ) as engine:
                return gpu_checks.generate(engine, prompts, 64, overlap=overlap)

        graphs = run()
        self._compare("graphs on and off", graphs, run(disable_cuda_graph=True))
        self._compare("overlap on and off", graphs, run(overlap=False))
        self._compare("again", graphs, run())
        reference = run(attention_backend="torch_reference")
        self._compare("flashinfer and torch_reference", graphs, reference)

    def _compare(self, name: str, first: Generated, second: Generated) -> None:
        result: Comparison = gpu_checks.compare(first, second)
        said = f"{result.equal} of {result.total} requests equal"
        if result.equal < result.total:
            said += f"; the others part where two tokens lie within {result.worst_margin:.3f}"
        self._check(f"greedy, {name}", result.fine, said)

    def _check(self, name: str, passed: bool, said: str) -> None:
        self.report.checks[name] = said
        if not passed:
            self.report.failed.append(name)
        _say(f"  {'ok  ' if passed else 'FAIL'} {name}: {said}")

    def _time(self, name: str) -> None:
        shape = SHAPES[name]
        with gpu_engine.random_engine(shape, _progress) as engine:
            for rows in _BATCHES:
                self._time_decode(name, shape, engine, rows)
            self._time_prefill(name, shape, engine)
            self._time_overlap(name, engine)

    def _time_decode(self, name: str, shape: ModelConfig, engine: Any, rows: int) -> None:
        info = engine.info
        pages = -(-(_CONTEXT + _DECODE_STEPS + _WARM_UP) // info.page_size)
        shared = rows * pages > info.num_pages
        batches = [
            gpu_engine.make_batch(
                info, step, [_CONTEXT + step] * rows, [1] * rows, pages, admit=step == 0
            )
            for step in range(_DECODE_STEPS + _WARM_UP)
        ]
        times = gpu_engine.run_steps(engine, batches, _WARM_UP)
        moved = gpu_engine.weight_bytes(shape) + rows * _CONTEXT * gpu_engine.kv_bytes(shape)
        self._row(
            name,
            f"decode, batch {rows}" + (" (pages shared)" if shared else ""),
            times,
            rows / times.step,
            moved / times.step / self.report.bandwidth if self.report.bandwidth else 0.0,
            "bandwidth",
        )

    def _time_prefill(self, name: str, shape: ModelConfig, engine: Any) -> None:
        pages = -(-max(_PREFILL) // engine.info.page_size)
        batches = [
            gpu_engine.make_batch(
                engine.info, step, [0] * len(_PREFILL), _PREFILL, pages, admit=step == 0
            )
            for step in range(8)
        ]
        times = gpu_engine.run_steps(engine, batches, 3)
        done = gpu_engine.prefill_flops(shape, _PREFILL) / times.step
        share = done / self.report.flops if self.report.flops else 0.0
        self._row(name, "prefill, 4 x 2048", times, sum(_PREFILL) / times.step, share, "matmul")

    def _time_overlap(self, name: str, engine: Any) -> None:
        rng = np.random.default_rng(2)
        prompts = [rng.integers(3, 30000, 128).tolist() for _ in range(64)]
        for overlap in (True, False):
            started = time.perf_counter()
            made = gpu_checks.generate(engine, prompts, 128, overlap=overlap, report=False)
            seconds = time.perf_counter() - started
            self.report.rows.append(
                {
                    "shape": name,
                    "what": f"64 requests, overlap {'on' if overlap else 'off'}",
                    "ms_a_step": 1000 * seconds / made.steps,
                    "tokens_a_second": 64 * 128 / seconds,
                    "share": None,
                    "of": "",
                    "bubble": made.bubble / seconds,
                }
            )

    def _row(
        self,
        name: str,
        what: str,
        times: gpu_engine.StepTimes,
        tokens: float,
        share: float,
        of: str,
    ) -> None:
        row = {
            "shape": name,
            "what": what,
            "ms_a_step": 1000 * times.step,
            "tokens_a_second": tokens,
            "share": share,
            "of": of,
            "bubble": times.bubble,
        }
        self.report.rows.append(row)
        _say(f"  {what}: {row['ms_a_step']:.2f} ms, {tokens:.0f} tokens/s, {share:.0%} of {of}")


def table(report: Report) -> str:
    """The figures for people."""
    lines = [
        f"{report.device}, torch {report.torch}, flashinfer {report.flashinfer}",
        f"ceilings: {report.bandwidth / 1e12:.2f} TB/s copied, {report.flops / 1e12:.0f} TFLOP/s"
        " in a bfloat16 product",
        f"{'shape':<10}{'what':<34}{'ms/step':>9}{'tokens/s':>10}{'share':>18}{'bubble':>8}",
    ]
    for row in report.rows:
        share = f"{row['share']:.0%} {row['of']}" if row["share"] is not None else ""
        lines.append(
            f"{row['shape']:<10}{row['what']:<34}{row['ms_a_step']:>9.2f}"
            f"{row['tokens_a_second']:>10.0f}{share:>18}{row['bubble']:>8.1%}"
        )
    lines.append(
        f"checks: {len(report.checks) - len(report.failed)} of {len(report.checks)} passed"
    )
    lines += [f"FAILED: {name}: {report.checks[name]}" for name in report.failed]
    lines += [f"left out for time: {name}" for name in report.skipped]
    return "\n".join(lines)


def _timed(run: Callable[[], object], repeats: int = 10) -> float:
    """Seconds that a device operation takes, the median of several."""
    run()
    torch.cuda.synchronize()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        run()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return sorted(times)[repeats // 2]


def _progress(phase: str, done: int, total: int) -> None:
    if done == total:
        _say(f"  {phase}: {total}")


def _say(line: str) -> None:
    print(line, flush=True)


def _flashinfer_version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("flashinfer-python")
    except PackageNotFoundError:
        return "none"


def main(argv: list[str]) -> int:
    """The command; returns the exit status."""
    config = parse(
        BenchConfig, argv, prog="python -m bench.gpu", description="Benchmark of the CUDA path."
    )
    if unknown := set(config.shapes) - set(SHAPES):
        print(f"bench.gpu: unknown shapes {', '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    if not torch.cuda.is_available():
        print(
            f"bench.gpu: there is no GPU that torch {torch.__version__} can use; nothing was run",
            file=sys.stderr,
        )
        return 2
    bench = Bench(config)
    try:
        bench.run()
    except StartupError as error:  # FlashInfer is missing, or the model does not fit
        print(f"bench.gpu: {error}", file=sys.stderr)
        return 2
    _say("\n" + table(bench.report))
    line = json.dumps(asdict(bench.report))
    if config.json:
        Path(config.json).write_text(line + "\n")
    _say(line)
    return 1 if bench.report.failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

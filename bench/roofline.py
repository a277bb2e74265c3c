"""How near the engine comes to what this machine allows, by the embedded model in float32.

    python -m bench.roofline

Three things, each against a limit that is measured beside it in the same run:

    decode     a step of one row, against torch's products of the same matrices with one row and
               nothing else: the time to read the weights
    prefill    a prompt, against torch's products of the same matrices with so many rows
    attention  decode rows over long contexts, a layer, against a sum over the same keys and
               values: the time to read each once

torch's products are the quicker of oneDNN's on packed weights and the plain ones. Engine and
limits take turns; a share is the median over the rounds of limit / engine.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F

from bench import bars
from bench.figures import OWN, Rounds, finish
from services.common import logs
from services.common.config import option, parse
from services.common.model_files import resolve
from services.worker.attention.base import AttentionMetadata
from services.worker.attention.native import NativeBackend
from services.worker.attention.pool import KvPool
from services.worker.config import WorkerConfig, num_threads
from services.worker.core import Batch, IntArray
from services.worker.engine.loading import load_model, read_model_config
from services.worker.engine.sampler import Sampler
from services.worker.engine.steps import StepRunner
from services.worker.layers.parallel import Parallel
from services.worker.models.config import ModelConfig
from services.worker.native.kernels import Kernels

PAGE_SIZE = 16
DECODED_AFTER = 128  # tokens before the one that is decoded alone
LAYERS = 4  # whose keys and values attention takes in turn, so that none stays in a cache

Product = Callable[[torch.Tensor], torch.Tensor]
Timed = Callable[[], object]


@dataclass(frozen=True)
class BenchConfig:
    """What is measured."""

    model: str = option("", "hub id, directory or .gguf file; default: the embedded model")
    rounds: int = option(5, "times each is measured; the median counts")
    prompt: int = option(512, "tokens of the prompt")
    rows: int = option(32, "rows of the attention")
    context: int = option(1024, "tokens that each of these attends to")
    num_threads: int = option(0, "CPU threads; default: all cores")
    json: str = option("", "file for the figures; default: none")


class Products:
    """torch's products of a model's matrices: every layer's, and the head's for one row."""

    def __init__(self, model: ModelConfig) -> None:
        hidden, attended = model.hidden_size, model.num_heads * model.head_dim
        qkv = attended + 2 * model.num_kv_heads * model.head_dim
        layer = [
            (qkv, hidden),
            (hidden, attended),
            (2 * model.intermediate_size, hidden),
            (hidden, model.intermediate_size),
        ]
        self._layers = [torch.randn(shape) for _ in range(model.num_layers) for shape in layer]
        self._head = torch.randn(model.vocab_size, hidden)

    def kinds(self, rows: int) -> dict[str, Timed]:
        """What computes them all for so many rows, by name."""
        inputs = {weight.shape[1]: torch.randn(rows, weight.shape[1]) for weight in self._layers}
        one = torch.randn(1, self._head.shape[1])
        return {
            name: partial(
                _run_all,
                [(product(weight), inputs[weight.shape[1]]) for weight in self._layers]
                + [(product(self._head), one)],
            )
            for name, product in (("plain", _plain), ("packed", _packed))
        }


def _plain(weight: torch.Tensor) -> Product:
    return lambda x: F.linear(x, weight)


def _packed(weight: torch.Tensor) -> Product:
    reordered = torch.ops.mkldnn._reorder_linear_weight(weight, None)
    return lambda x: torch.ops.mkldnn._linear_pointwise(x, reordered, None, "none", [], "")


def _run_all(products: list[tuple[Product, torch.Tensor]]) -> None:
    for product, x in products:
        product(x)


class Engine:
    """The model, a step at a time and on this thread, as its limits are measured."""

    def __init__(self, config: BenchConfig, kernels: Kernels) -> None:
        pages = -(-max(config.prompt, DECODED_AFTER + 1) // PAGE_SIZE)
        worker = WorkerConfig(
            model=config.model,
            device="cpu",
            page_size=PAGE_SIZE,
            num_pages=pages,
            max_prefill_tokens=config.prompt,
            max_running_requests=1,
            num_threads=config.num_threads,
        )
        loaded = load_model(worker, Parallel(), lambda *_: None)
        sampler = Sampler(1, loaded.info.vocab_size, kernels=kernels)
        self._steps = StepRunner(loaded.runner, sampler, Parallel())
        self._pages = np.arange(pages, dtype=np.int32)[None]

    def decode(self) -> None:
        self._steps.step(self._batch(DECODED_AFTER, 1))

    def prefill(self, length: int) -> None:
        self._steps.step(self._batch(0, length))

    def _batch(self, start: int, length: int) -> Batch:
        return rows_batch(1, start, length, self._pages)


class Attention:
    """Attention of a decode batch over contexts of one length, and its floor."""

    def __init__(self, config: BenchConfig, model: ModelConfig, kernels: Kernels) -> None:
        pages = -(-config.context // PAGE_SIZE)
        self._pool = KvPool.allocate(
            num_layers=LAYERS,
            num_pages=config.rows * pages,
            page_size=PAGE_SIZE,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            dtype=torch.float32,
            head_major=True,
        )
        for tensor in (self._pool.k, self._pool.v):
            tensor.normal_()
        order = np.random.default_rng(1).permutation(config.rows * pages).astype(np.int32)
        batch = rows_batch(config.rows, config.context - 1, 1, order.reshape(config.rows, pages))
        plan = NativeBackend(self._pool, kernels).plan(AttentionMetadata.of(batch))
        self._attend = partial(kernels.paged_attention, rows=plan.rows)
        self._query = torch.randn(config.rows, model.num_heads, model.head_dim)

    def attend(self) -> None:
        for layer in range(LAYERS):
            self._attend(self._query, layer=layer)

    def read(self) -> None:
        for layer in range(LAYERS):
            keys, values = self._pool.layer(layer)
            keys.sum()
            values.sum()


def rows_batch(rows: int, start: int, length: int, pages: IntArray) -> Batch:
    """Rows of `length` tokens from a position on; pages: [rows, pages a row]"""
    return Batch(
        step=0,
        slots=np.arange(rows, dtype=np.int32),
        start=np.full(rows, start, np.int32),
        query_lens=np.full(rows, length, np.int32),
        input_ids=np.full(rows * length, 10, np.int32),
        page_tables=pages,
        sample=np.ones(rows, np.bool_),
        output_positions=np.zeros(rows, np.int32),
    )


@dataclass(frozen=True, slots=True)
class Comparison:
    """What the engine does, what limits it, and how often each runs in a round."""

    engine: Timed
    limits: dict[str, Timed]
    repeats: int
    parts: int = 1  # equal ones, of which a run does so many: one is told

    def measure(self, name: str, rounds: Rounds) -> None:
        """One round: the engine and its limits in turn."""
        for system, timed in {OWN: self.engine, **self.limits}.items():
            rounds.add(system, name, self._milliseconds(timed))

    def _milliseconds(self, timed: Timed) -> float:
        """The median of the runs."""
        times = []
        for _ in range(self.repeats):
            started = time.perf_counter()
            timed()
            times.append(time.perf_counter() - started)
        return 1000 * statistics.median(times) / self.parts


def compare(config: BenchConfig) -> Rounds:
    """Milliseconds of all, round by round. Raises SystemExit where there are no native kernels."""
    torch.set_num_threads(num_threads(WorkerConfig(num_threads=config.num_threads)))
    kernels = Kernels.load()
    if kernels is None:
        raise SystemExit("the native kernels are not there: install a C++ compiler")
    model = read_model_config(resolve(config.model))
    engine, products = Engine(config, kernels), Products(model)
    attention = Attention(config, model, kernels)
    prefill = partial(engine.prefill, config.prompt)
    comparisons = {
        "decode": Comparison(engine.decode, products.kinds(1), 20),
        "prefill": Comparison(prefill, products.kinds(config.prompt), 1),
        "attention": Comparison(attention.attend, {"sum": attention.read}, 5, LAYERS),
    }
    rounds = Rounds()
    with torch.inference_mode():
        for name, comparison in comparisons.items():
            comparison.measure(name, Rounds())  # touches pages and starts threads
            for _ in range(config.rounds):
                comparison.measure(name, rounds)
    return rounds


def main(argv: list[str]) -> None:
    """Measures, prints, and writes the figures to a file if one is named."""
    config = parse(BenchConfig, argv, prog="bench.roofline", description=__doc__ or "")
    logs.setup("bench", level="warning")
    rounds = compare(config)
    print("milliseconds")
    finish("roofline", config, rounds)
    print(f"\n{bars.limit_table(rounds)}")


if __name__ == "__main__":
    main(sys.argv[1:])

"""Whether the CUDA path computes what it should: against the reference, and against itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from services.worker.attention.base import AttentionMetadata
from services.worker.attention.flashinfer import (
    FlashInferBackend,
    Heads,
    Workspace,
    load_library,
)
from services.worker.attention.pool import KvPool
from services.worker.attention.torch_reference import TorchReferenceBackend
from services.worker.core import Batch, Engine, SamplingParams
from services.worker.scheduler.request import Commands, Submission
from services.worker.scheduler.scheduler import Scheduler

LAYERS, PAGES = 2, 512
# bfloat16 keeps 8 bits: what is summed to about 1 is right to some 2^-8.
TOLERANCE = {torch.bfloat16: 3e-2, torch.float16: 5e-3}
# Where two runs part, their likeliest tokens lie this close, in log-probability (bfloat16).
MARGIN = 0.25


def attention_error(
    heads: Heads, dtype: torch.dtype, page_size: int, device: torch.device, *, seed: int = 0
) -> float:
    """The greatest difference to the reference over random decode, prefill and mixed batches,
    and over decode by fixed buffers."""
    rng = np.random.default_rng(seed)
    pools = [_pool(heads, dtype, page_size, device, seed) for _ in range(2)]
    backend = FlashInferBackend(load_library(), pools[0], heads, Workspace(device))
    reference = TorchReferenceBackend(pools[1])
    graphs = backend.graph_plans([8], context=PAGES * page_size)
    worst = 0.0
    for kind in ("decode", "prefill", "mixed", "mixed", "fixed"):
        metadata = random_metadata(rng, kind, page_size)
        tokens = int(metadata.offsets[-1])
        qk = torch.randn(tokens, heads.num_heads + heads.num_kv_heads, heads.head_dim)
        v = torch.randn(tokens, heads.num_kv_heads, heads.head_dim)
        qk, v = qk.to(device, dtype), v.to(device, dtype)
        q, k = qk[:, : heads.num_heads], qk[:, heads.num_heads :]
        if kind == "fixed":
            graphs[8].update(metadata)
        plan = graphs[8] if kind == "fixed" else backend.plan(metadata)
        expected = reference.plan(metadata)
        for layer in range(LAYERS):
            difference = plan.forward(q, k, v, layer) - expected.forward(q, k, v, layer)
            worst = max(worst, float(difference.abs().max()))
    return worst


def random_metadata(rng: np.random.Generator, kind: str, page_size: int) -> AttentionMetadata:
    """Eight rows on random pages: decode rows, then chunks, as the kind has them."""
    rows, chunks = 8, {"decode": 0, "fixed": 0, "prefill": 8, "mixed": 3}[kind]
    longest = min(PAGES // rows * page_size, 700)
    kv_lens = rng.integers(1, longest + 1, rows)
    query_lens = np.ones(rows, np.int64)
    for row in range(rows - chunks, rows):
        query_lens[row] = rng.integers(1, kv_lens[row] + 1)
    pages, width = rng.permutation(PAGES), PAGES // rows
    return AttentionMetadata.of(
        Batch(
            step=0,
            slots=np.arange(rows, dtype=np.int32),
            start=(kv_lens - query_lens).astype(np.int32),
            query_lens=query_lens.astype(np.int32),
            input_ids=np.zeros(int(query_lens.sum()), np.int32),
            page_tables=pages.reshape(rows, width).astype(np.int32),
            sample=np.ones(rows, np.bool_),
            output_positions=np.zeros(rows, np.int32),
        )
    )


def _pool(
    heads: Heads, dtype: torch.dtype, page_size: int, device: torch.device, seed: int
) -> KvPool:
    pool = KvPool.allocate(
        num_layers=LAYERS,
        num_pages=PAGES,
        page_size=page_size,
        num_kv_heads=heads.num_kv_heads,
        head_dim=heads.head_dim,
        dtype=dtype,
        device=device,
    )
    torch.manual_seed(seed)  # of every device
    for tensor in (pool.k, pool.v):
        tensor.normal_()
    return pool


@dataclass(frozen=True, slots=True)
class Generated:
    """What a run made: ids by request, and how far ahead of the next each was."""

    tokens: list[list[int]]
    margins: list[list[float]]
    bubble: float  # seconds
    steps: int


def generate(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    *,
    overlap: bool = True,
    report: bool = True,
) -> Generated:
    """Greedy continuations of prompts that arrive at once, by a scheduler.

    Margins are there if they are to be reported, which costs time.
    """
    scheduler = Scheduler(engine, overlap=overlap, cache="none", max_running_requests=64)
    sampling = SamplingParams(
        temperature=0.0,
        max_tokens=max_tokens,
        logprobs=2 if report else None,
        ignore_eos=True,
    )
    submits = [
        Submission(handle, np.array(prompt, np.int32), sampling)
        for handle, prompt in enumerate(prompts)
    ]
    tokens: list[list[int]] = [[] for _ in prompts]
    margins: list[list[float]] = [[] for _ in prompts]
    commands, clock = Commands(submits), 0.0
    while True:
        output = scheduler.step(commands, clock)
        commands, clock = Commands(), clock + 1.0
        for handle, token in output.tokens:
            tokens[handle].append(token)
        for handle, entries in output.logprobs.items():
            margins[handle] += [e.top_logprobs[0] - e.top_logprobs[1] for e in entries]
        if scheduler.idle:
            counters = scheduler.counters
            return Generated(tokens, margins, counters.bubble, counters.num_steps)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two runs of the same prompts: requests alike, and the margin where the worst one parts."""

    equal: int
    total: int
    worst_margin: float  # 0 where all are equal

    @property
    def fine(self) -> bool:
        return self.worst_margin <= MARGIN


def compare(first: Generated, second: Generated) -> Comparison:
    """Where a request parts from itself, its two likeliest tokens must have been close."""
    equal, worst = 0, 0.0
    for ours, theirs, margins in zip(first.tokens, second.tokens, first.margins, strict=True):
        parting = next(
            (i for i, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1]), None
        )
        if parting is None:
            equal += 1
        else:
            worst = max(worst, margins[parting])
    return Comparison(equal, len(first.tokens), worst)

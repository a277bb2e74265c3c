"""`--deterministic`: the same bits alone, in company, in any chunks, preempted and resumed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from services.common.errors import StartupError
from services.worker.config import WorkerConfig
from services.worker.core import Batch, Engine, PendingStep, SamplingParams
from services.worker.engine import torch_engine
from services.worker.scheduler.request import Commands, Submission
from services.worker.scheduler.scheduler import Scheduler
from tests.full import in_full_only
from tests.worker.models.checkpoints import save_tiny

_LENGTHS = (5, 70, 33, 150, 17, 64, 1)
_OUTPUTS = 14
_EMBEDDED_OUTPUTS = 12


class Resized:
    """An engine that says it has fewer pages, or that it takes shorter chunks."""

    def __init__(self, engine: Engine, **changes: int) -> None:
        self.info = dataclasses.replace(engine.info, **changes)  # type: ignore[arg-type]
        self._engine = engine

    def launch(self, batch: Batch) -> PendingStep:
        return self._engine.launch(batch)

    def check(self) -> None:
        pass

    def close(self) -> None:
        """The engine belongs to the fixture."""


@dataclasses.dataclass
class Answers:
    """By handle: tokens, and the log-probabilities of each with its alternatives."""

    tokens: dict[int, list[int]] = dataclasses.field(default_factory=dict)
    logprobs: dict[int, list[tuple[float, ...]]] = dataclasses.field(default_factory=dict)
    prompt_logprobs: dict[int, list[tuple[float, ...]]] = dataclasses.field(default_factory=dict)
    num_preempted: int = 0


def submissions(vocab_size: int, outputs: int) -> list[Submission]:
    """Greedy and drawn rows, filtered and penalised ones, with and without prompt logprobs."""
    rng = np.random.default_rng(1)
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.8},
        {"temperature": 0.8, "top_p": 0.9},
        {"temperature": 0.0, "prompt_logprobs": 2},
        {"temperature": 1.0, "min_p": 0.02, "frequency_penalty": 0.5},
        {"temperature": 0.0, "repetition_penalty": 1.2},
        {"temperature": 1.0, "top_k": 20},
    ]
    return [
        Submission(
            handle,
            rng.integers(3, vocab_size, length),
            SamplingParams(max_tokens=outputs, ignore_eos=True, logprobs=2, seed=handle, **kind),
        )
        for handle, (length, kind) in enumerate(zip(_LENGTHS, kinds, strict=True))
    ]


def serve(
    engine: Engine, requests: Sequence[Submission], *, overlap: bool = True, apart: int = 0
) -> Answers:
    """Serves requests all at once, or each `apart` steps after the one before."""
    scheduler = Scheduler(engine, max_running_requests=8, overlap=overlap)
    answers, waiting, step = Answers(), list(requests), 0
    while waiting or not scheduler.idle:
        count = len(waiting) if not apart else int(step % apart == 0)
        taken, waiting, step = waiting[:count], waiting[count:], step + 1
        output = scheduler.step(Commands(taken), 0.0)
        for handle, token in output.tokens:
            answers.tokens.setdefault(handle, []).append(token)
        for field in ("logprobs", "prompt_logprobs"):
            for handle, entries in getattr(output, field).items():
                bits = [(entry.logprob, *entry.top_logprobs) for entry in entries]
                getattr(answers, field).setdefault(handle, []).extend(bits)
    answers.num_preempted = scheduler.counters.num_preempted
    return answers


def load(model: str, *, deterministic: bool = True, **options: Any) -> Engine:
    config = WorkerConfig(
        model=model,
        deterministic=deterministic,
        page_size=4,
        num_pages=160,
        max_running_requests=8,
        num_threads=1,
        **options,
    )
    return torch_engine.load(config, lambda *_: None)


@pytest.fixture(scope="module", params=["llama-bias", "qwen3_moe"])
def engine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    path = tmp_path_factory.mktemp("model")
    save_tiny(path, request.param)
    engine = load(str(path))
    yield engine
    engine.close()


def check(engine: Engine, outputs: int) -> None:
    """Every way of serving the same requests gives the same bits."""
    requests = submissions(engine.info.vocab_size, outputs)
    together = serve(engine, requests)
    assert set(together.tokens) == set(range(len(requests)))
    alone = Answers()
    for request in requests:
        answer = serve(engine, [request])
        alone.tokens |= answer.tokens
        alone.logprobs |= answer.logprobs
        alone.prompt_logprobs |= answer.prompt_logprobs
    assert alone == together
    ways = {
        "without overlap": serve(engine, requests, overlap=False),
        "in small chunks": serve(Resized(engine, max_prefill_tokens=13), requests),
        "staggered": serve(engine, requests, apart=3),
    }
    for way, answers in ways.items():
        assert answers == together, way
    squeezed = serve(Resized(engine, num_pages=64), requests)
    assert squeezed.num_preempted > 0
    assert dataclasses.replace(squeezed, num_preempted=0) == together
    check_resumed(engine, requests, together, cut=outputs // 2)


def check_resumed(
    engine: Engine, requests: Sequence[Submission], whole: Answers, *, cut: int
) -> None:
    """A request that begins with `cut` emitted tokens goes on with the same bits."""
    resumed = [
        dataclasses.replace(request, resume_ids=whole.tokens[request.handle][:cut])
        for request in requests
    ]
    answers = serve(engine, resumed)
    assert answers.tokens == {handle: ids[cut:] for handle, ids in whole.tokens.items()}
    assert answers.logprobs == {handle: rows[cut:] for handle, rows in whole.logprobs.items()}


def test_the_same_bits_however_a_request_is_served(engine: Engine) -> None:
    check(engine, _OUTPUTS)


@in_full_only
def test_the_embedded_model_gives_the_same_bits_however_it_is_served() -> None:
    engine = load("")
    try:
        check(engine, _EMBEDDED_OUTPUTS)
    finally:
        engine.close()


def test_the_fingerprint_tells_it(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    prints = set()
    for deterministic in (True, False):
        engine = load(str(tmp_path), deterministic=deterministic)
        prints.add(engine.info.fingerprint)
        engine.close()
    assert len(prints) == 2


@pytest.mark.parametrize(
    "options", [{"dtype": "bfloat16"}, {"attention_backend": "torch_reference"}]
)
def test_what_cannot_be_deterministic_is_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    save_tiny(tmp_path)
    with pytest.raises(StartupError, match="--deterministic needs the native kernels"):
        load(str(tmp_path), **options)

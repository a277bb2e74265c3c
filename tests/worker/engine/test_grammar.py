"""Grammars on a real model: what it samples is valid, alone, in company and preempted."""

from __future__ import annotations

import os
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from llguidance import LLTokenizer

from services.common.text.vocabulary import build_vocabulary
from services.worker.config import WorkerConfig
from services.worker.core import Admission, FinishReason, SamplingParams
from services.worker.engine.build import build
from services.worker.engine.masking import SampleMasks
from services.worker.engine.sampler import Sampler
from services.worker.grammar.vocabulary import load_vocabulary
from services.worker.rank import make_scheduler
from services.worker.scheduler.request import Commands, Submission
from tests.full import FULL
from tests.worker.grammar.grammars import (
    Case,
    choice_case,
    random_case,
    regex_case,
    schema_case,
    text_of,
)
from tests.worker.models.checkpoints import save_tiny

VOCAB = 259
NUM_RANDOM = 300 if FULL else 40


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model over bytes."""
    directory = tmp_path_factory.mktemp("bytes")
    save_tiny(directory, vocab_size=VOCAB, eos_token_id=257, bos_token_id=256)
    build_vocabulary("byte").tokenizer.save(str(directory / "tokenizer.json"))
    return directory


@pytest.fixture(scope="module")
def vocabulary(model: Path) -> LLTokenizer:
    return load_vocabulary(str(model))


Job = tuple[Case | None, SamplingParams]


def run(
    model: Path, vocabulary: LLTokenizer, jobs: list[Job], *, num_pages: int = 4096, overlap: bool
) -> tuple[list[list[int]], int]:
    """The outputs of requests that come all at once, and how often one was preempted."""
    config = WorkerConfig(
        model=str(model), num_pages=num_pages, page_size=4, num_threads=1,
        disable_overlap=not overlap, max_running_requests=64,
    )  # fmt: skip
    engine = build(config, lambda phase, done, total: None)
    scheduler = make_scheduler(engine, config)
    submissions = [
        Submission(
            handle,
            [handle % 250 + 1] * (handle % 7 + 1),
            sampling,
            matcher=case.matcher(vocabulary) if case is not None else None,
        )
        for handle, (case, sampling) in enumerate(jobs)
    ]
    outputs: list[list[int]] = [[] for _ in jobs]
    commands = Commands(submissions)
    try:
        while True:
            output = scheduler.step(commands, 0.0)
            commands = Commands()
            for handle, token in output.tokens:
                outputs[handle].append(token)
            assert not output.rejected
            for finished in output.finished:
                if jobs[finished.handle][0] is not None:
                    assert finished.reason is FinishReason.STOP
            if scheduler.idle:
                return outputs, scheduler.counters.num_preempted
    finally:
        scheduler.abandon()
        engine.close()


def constrained(case: Case, seed: int, **more: float) -> Job:
    params = {"temperature": float(seed % 2), **more}
    return case, SamplingParams(seed=seed, max_tokens=450, grammar=case.grammar, **params)  # type: ignore[arg-type]


def plain(seed: int) -> Job:
    return None, SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)


@pytest.mark.parametrize("overlap", [True, False])
def test_outputs_are_valid_beside_plain_rows_that_do_not_change(
    model: Path, vocabulary: LLTokenizer, overlap: bool
) -> None:
    seed = int(os.environ.get("SHOAL_SEED", "1"))
    random = Random(seed)
    jobs = [plain(0) for _ in range(5)]
    alone, _ = run(model, vocabulary, jobs, overlap=overlap)
    for _ in range(0, NUM_RANDOM, 20):
        cases = [random_case(random) for _ in range(20)]
        all_jobs = [*jobs, *(constrained(case, n, top_p=0.9) for n, case in enumerate(cases))]
        outputs, _ = run(model, vocabulary, all_jobs, overlap=overlap)
        assert outputs[: len(jobs)] == alone
        for case, token_ids in zip(cases, outputs[len(jobs) :], strict=True):
            assert case.valid(text_of(token_ids)), text_of(token_ids)
    print(f"{NUM_RANDOM} random grammars, seed {seed}")


@pytest.mark.parametrize("overlap", [True, False])
def test_preemption_changes_no_output(model: Path, vocabulary: LLTokenizer, overlap: bool) -> None:
    cases = [
        regex_case("(ab|cd){25}"),
        choice_case("yes, please do that", "no, thank you"),
        schema_case({"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 9, "maxItems": 9}),
    ] * 4
    jobs = [constrained(case, seed) for seed, case in enumerate(cases)]
    roomy, _ = run(model, vocabulary, jobs, overlap=overlap)
    tight, num_preempted = run(model, vocabulary, jobs, num_pages=60, overlap=overlap)
    assert num_preempted > 0
    assert tight == roomy
    for case, token_ids in zip(cases, tight, strict=True):
        assert case.valid(text_of(token_ids))


def masks_of(allowed: dict[int, list[int]], vocab: int) -> SampleMasks:
    bits = np.zeros((len(allowed), -(-vocab // 32) * 32), np.bool_)
    for place, ids in enumerate(allowed.values()):
        bits[place, ids] = True
    words = np.packbits(bits, axis=1, bitorder="little").view(np.int32)
    return SampleMasks(np.array(list(allowed), np.int64), words)


@pytest.mark.parametrize("alone", [True, False])
def test_a_mask_holds_against_bias_penalties_filters_and_bans(alone: bool) -> None:
    torch.manual_seed(1)
    vocab, rows = 1003, 24
    sampler = Sampler(rows, vocab, alone=alone)
    for slot in range(rows):
        sampling = SamplingParams(
            temperature=(0.0, 0.7, 1.0)[slot % 3],
            top_k=(0, 3)[slot % 2],
            top_p=(1.0, 0.5)[slot // 2 % 2],
            min_p=(0.0, 0.3)[slot // 4 % 2],
            logit_bias={7: 100.0, 1002: -100.0},
            presence_penalty=2.0,
            min_tokens=50,
            logprobs=3,
        )
        ids = np.array([7], np.int32)
        sampler.admit(Admission(slot, ids, ids, sampling, banned_ids=(1002,)))
    allowed = {row: [row + 20, 1002] if row % 2 else [1002] for row in range(1, rows)}
    logits = torch.randn(rows, vocab) * 5
    slots, positions = np.arange(rows, dtype=np.int32), np.full(rows, 3, np.int32)
    tokens, reported = sampler.sample(logits.clone(), slots, positions, masks_of(allowed, vocab))
    assert reported is not None
    unmasked = Sampler.sample(sampler, logits.clone(), slots, positions)[1]
    assert unmasked is not None
    assert tokens[0] == 7, "the row without a mask follows its bias"
    for row, choices in allowed.items():
        assert int(tokens[row]) in choices
    raw = torch.log_softmax(logits, dim=1)
    for row, entry in enumerate(reported[1].entries()):
        assert entry.logprob == pytest.approx(float(raw[row, tokens[row]]), abs=1e-4)
        assert list(entry.top_token_ids) == raw[row].topk(3).indices.tolist()

"""Requests that come at the worst moment, or ask for the edge; on the fake engine."""

from __future__ import annotations

import random

import pytest

from services.common.errors import ErrorCode
from services.worker.core import FinishReason, SamplingParams
from services.worker.scheduler.request import Commands
from tests.worker.scheduler.harness import EOS, VOCAB, Harness, Schedule, make_info

SCHEDULES: list[Schedule] = ["prefill-first", "decode-first", "mixed"]
OVERLAP = pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "serial"])


def prompt(length: int, seed: int = 0) -> list[int]:
    return [(seed * 31 + 7 * i) % 250 for i in range(length)]


@OVERLAP
def test_abort_of_a_request_in_the_batch_in_flight(overlap: bool) -> None:
    """Nothing that the batch uses is free before it is done; its token is dropped."""
    harness = Harness(make_info(num_pages=40), cache="none", overlap=overlap)
    victim, other = harness.submit(prompt(40), 400), harness.submit(prompt(8, 2), 20)
    while len(victim.tokens) < 3:
        harness.step()
    seen = len(victim.tokens)
    assert bool(harness.engine.in_flight) == overlap
    harness.abort(victim)
    newcomer = harness.submit(prompt(30, 3), 10)  # wants the pages at once
    harness.run()
    assert (victim.reason, len(victim.tokens)) == (FinishReason.ABORT, seen)
    assert (len(other.tokens), len(newcomer.tokens)) == (20, 10)
    harness.check_tokens()


@OVERLAP
@pytest.mark.parametrize("steps_between", [0, 1, 2])
def test_abort_then_the_same_prompt_again(overlap: bool, steps_between: int) -> None:
    harness = Harness(make_info(num_pages=20), overlap=overlap)
    for _ in range(5):
        victim = harness.submit(prompt(50), 20)
        for _ in range(4):
            harness.step()
        harness.abort(victim)
        for _ in range(steps_between):
            harness.step()
    last = harness.submit(prompt(50), 20)
    harness.run()
    assert last.tokens == last.oracle(20)
    harness.check_tokens()


@OVERLAP
@pytest.mark.parametrize("page_size", [4, 16])
def test_two_prompts_that_part_inside_a_page(page_size: int, overlap: bool) -> None:
    """What they share of that page is computed twice, and neither sees the other's rest."""
    harness = Harness(make_info(page_size=page_size), overlap=overlap)
    common = prompt(2 * page_size + page_size // 2)
    first = harness.submit([*common, 1, 2, 3], 10)
    harness.run()
    second = harness.submit([*common, 4, 5, 6], 10)
    third = harness.submit([*common, 7, 8, 9, *prompt(page_size, 4)], 10)
    harness.run()
    assert first.tokens != second.tokens != third.tokens
    assert (second.cached_tokens, third.cached_tokens) == (2 * page_size, 2 * page_size)
    harness.check_tokens()


@OVERLAP
def test_max_tokens_of_zero_and_below(overlap: bool) -> None:
    harness = Harness(overlap=overlap)
    none = harness.submit(prompt(9), 0)
    negative = harness.submit(prompt(9), -1)
    one = harness.submit(prompt(9), 1)
    harness.run()
    assert (none.tokens, none.reason) == ([], FinishReason.LENGTH)
    assert negative.error is not None
    assert negative.error.param == "max_tokens"
    assert len(one.tokens) == 1


@OVERLAP
@pytest.mark.parametrize("boundary", range(8))
def test_abort_at_every_boundary_of_a_prefill_in_three_chunks(overlap: bool, boundary: int) -> None:
    harness = Harness(make_info(max_prefill_tokens=16), overlap=overlap)
    other = harness.submit(prompt(5, seed=9), 30)
    victim = harness.submit(prompt(45), 4)
    for _ in range(boundary):
        harness.step()
    harness.abort(victim)
    again = harness.submit(prompt(45), 4)  # the same prompt, in the very same step
    harness.run()
    assert victim.reason in (FinishReason.ABORT, FinishReason.LENGTH)
    assert len(other.tokens) == 30
    assert len(again.tokens) == 4
    harness.check_tokens()


@OVERLAP
def test_an_abort_frees_its_pages_within_two_steps(overlap: bool) -> None:
    harness = Harness(make_info(), cache="none", overlap=overlap)
    client = harness.submit(prompt(40), 400)
    for _ in range(10):
        harness.step()
    harness.abort(client)
    harness.step()
    assert client.reason is FinishReason.ABORT
    harness.step()
    assert harness.scheduler.gauges().num_free_pages == 256


def test_an_abort_of_an_unknown_or_ended_handle_is_ignored() -> None:
    harness = Harness()
    client = harness.submit(prompt(3), 1)
    harness.run()
    output = harness.scheduler.step(Commands(aborts=[client.submission.handle, 12345]), 1.0)
    assert not output


@OVERLAP
def test_equal_long_prompts_at_once_in_a_nearly_full_pool(overlap: bool) -> None:
    harness = Harness(make_info(num_pages=24), max_running=32, overlap=overlap)
    for _ in range(32):
        harness.submit(prompt(60), 12)
    harness.run()
    assert all(len(client.tokens) == 12 for client in harness.clients.values())
    harness.check_tokens()


@OVERLAP
def test_a_prompt_that_is_cached_whole_still_computes_its_last_token(overlap: bool) -> None:
    harness = Harness(make_info(page_size=4), overlap=overlap)
    first = harness.submit(prompt(16), 3)
    harness.run()
    second = harness.submit(prompt(16), 3)
    harness.run()
    assert second.tokens == first.tokens
    assert first.cached_tokens == 0
    assert second.cached_tokens == 12
    assert harness.scheduler.counters.num_prefix_hit_tokens == 12


@OVERLAP
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_prompts_around_a_page_s_edge(page_size: int, overlap: bool) -> None:
    harness = Harness(make_info(page_size=page_size), overlap=overlap)
    lengths = {page_size - 1, page_size, page_size + 1, 2 * page_size, 2 * page_size + 1} - {0}
    for _ in range(2):
        for length in lengths:
            harness.submit(prompt(length), 2 * page_size + 1)
        harness.run()
    harness.check_tokens()


@OVERLAP
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_the_exact_edge_of_the_context(page_size: int, overlap: bool) -> None:
    info = make_info(page_size=page_size, num_pages=64 // page_size, max_model_len=64)
    harness = Harness(info, overlap=overlap)
    clamped = harness.submit(prompt(60), 100)
    one = harness.submit(prompt(63), 1)
    last = harness.submit(prompt(63), 100)
    full = harness.submit(prompt(64), 1)
    harness.run()
    assert [len(c.tokens) for c in (clamped, one, last, full)] == [4, 1, 1, 0]
    assert clamped.reason is one.reason is last.reason is FinishReason.LENGTH
    assert full.error is not None
    assert full.error.code is ErrorCode.CONTEXT_LENGTH_EXCEEDED
    assert "64 tokens" in full.error.message
    harness.check_tokens()


@OVERLAP
def test_a_pool_smaller_than_the_context_is_the_context(overlap: bool) -> None:
    info = make_info(page_size=4, num_pages=8, max_model_len=512)
    harness = Harness(info, overlap=overlap)
    assert harness.scheduler.info.max_model_len == 32
    too_long = harness.submit(prompt(32), 1)
    fits = harness.submit(prompt(20), 500)
    harness.run()
    assert too_long.error is not None
    assert "32 tokens" in too_long.error.message
    assert len(fits.tokens) == 12
    harness.check_tokens()


@OVERLAP
@pytest.mark.parametrize(
    ("ids", "sampling"),
    [
        ([], {}),
        ([VOCAB], {}),
        ([-1], {}),
        ([1], {"max_tokens": -1}),
        ([1], {"temperature": float("nan")}),
        ([1], {"temperature": 2.5}),
        ([1], {"top_p": 0.0}),
        ([1], {"top_k": -2}),
        ([1], {"logit_bias": {VOCAB: 1.0}}),
        ([1], {"logit_bias": {1: float("inf")}}),
        ([1], {"repetition_penalty": 0.0}),
        ([1], {"logprobs": 1000}),
    ],
)
def test_what_can_never_be_served_is_refused_at_once(
    ids: list[int], sampling: dict[str, float], overlap: bool
) -> None:
    harness = Harness(overlap=overlap)
    params = SamplingParams(**{"max_tokens": 3} | sampling)  # type: ignore[arg-type]
    bad = harness.submit(ids, sampling=params)
    good = harness.submit(prompt(3), 3)
    harness.run()
    assert bad.error is not None
    assert bad.error.code is ErrorCode.INVALID_ARGUMENT
    assert not bad.accepted
    assert len(good.tokens) == 3


@OVERLAP
@pytest.mark.parametrize("where", ["first", "last allowed", "ignored", "too early"])
def test_end_of_sequence(where: str, overlap: bool) -> None:
    harness = Harness(overlap=overlap)
    params = {
        "first": SamplingParams(logit_bias={EOS: 100.0}),
        "last allowed": SamplingParams(logit_bias={EOS: 100.0}, min_tokens=4, max_tokens=5),
        "ignored": SamplingParams(logit_bias={EOS: 100.0}, ignore_eos=True, max_tokens=3),
        "too early": SamplingParams(logit_bias={EOS: 100.0}, min_tokens=9, max_tokens=5),
    }[where]
    client = harness.submit(prompt(6), sampling=params)
    harness.run()
    assert client.finished is not None
    answer = (client.tokens, client.finished.reason, client.finished.stop_token_id)
    assert (
        answer
        == {
            "first": ([EOS], FinishReason.STOP, EOS),
            "last allowed": ([*client.oracle(4), EOS], FinishReason.STOP, EOS),
            "ignored": ([EOS] * 3, FinishReason.LENGTH, None),
            "too early": (client.oracle(5), FinishReason.LENGTH, None),
        }[where]
    )


@OVERLAP
def test_stop_ids_end_a_request_even_if_eos_is_ignored(overlap: bool) -> None:
    harness = Harness(overlap=overlap)
    expected = harness.submit(prompt(6), 1).oracle(30)
    stop = next(token for token in expected[3:] if token not in expected[:3])
    where = expected.index(stop)
    sampling = SamplingParams(stop_token_ids=frozenset({stop}), ignore_eos=True, max_tokens=30)
    early = harness.submit(prompt(6), sampling=sampling)
    at_the_end = SamplingParams(stop_token_ids=frozenset({stop}), max_tokens=where + 1)
    last = harness.submit(prompt(6), sampling=at_the_end)
    harness.run()
    for client in (early, last):
        assert client.tokens == expected[: where + 1]
        assert client.finished is not None
        assert client.finished.reason is FinishReason.STOP
        assert client.finished.stop_token_id == stop


@OVERLAP
def test_a_thousand_aborts_in_random_order_leave_no_page_behind(overlap: bool) -> None:
    rng = random.Random(1)
    harness = Harness(make_info(num_pages=100), max_running=16, overlap=overlap)
    alive = []
    for number in range(1000):
        alive.append(harness.submit(prompt(rng.randint(1, 80), number % 7), 100))
        if rng.random() < 0.3:
            harness.step()
        if len(alive) > 10:
            harness.abort(alive.pop(rng.randrange(len(alive))))
    for client in alive:
        harness.abort(client)
    harness.run()
    harness.step(flush_cache=True)
    assert harness.scheduler.gauges().num_free_pages == 100
    big = harness.submit(prompt(390), 5)
    harness.run()
    assert len(big.tokens) == 5

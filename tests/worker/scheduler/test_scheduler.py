"""The scheduler's hostile cases, one by one, on the fake engine."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from services.common.errors import ErrorCode
from services.worker.core import FinishReason, SamplingParams
from services.worker.scheduler import intake
from services.worker.scheduler.request import Commands, Submission
from tests.worker.scheduler.harness import EOS, VOCAB, Harness, Schedule, make_info

SCHEDULES: list[Schedule] = ["prefill-first", "decode-first", "mixed"]
OVERLAP = pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "serial"])


def prompt(length: int, seed: int = 0) -> list[int]:
    return [(seed * 31 + 7 * i) % 250 for i in range(length)]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_overlap_and_serial_give_the_same_answers_over_random_arrivals(schedule: Schedule) -> None:
    def serve(overlap: bool) -> list[tuple[list[int], FinishReason | None]]:
        rng = random.Random(5)
        harness = Harness(make_info(num_pages=30), schedule=schedule, overlap=overlap)
        for number in range(60):
            length, max_tokens = rng.randint(1, 60), rng.randint(1, 40)
            forced = {EOS: 100.0} if rng.random() < 0.3 else {}
            sampling = SamplingParams(
                max_tokens=max_tokens, logit_bias=forced, min_tokens=rng.randint(0, 10)
            )
            harness.submit(prompt(length, number % 5), sampling=sampling, priority=number % 3)
            for _ in range(rng.randint(0, 6)):
                harness.step()
        harness.run()
        assert harness.scheduler.counters.num_preempted > 0
        return [(client.tokens, client.reason) for client in harness.clients.values()]

    assert serve(overlap=True) == serve(overlap=False)


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


def test_an_abort_frees_its_pages_within_two_steps() -> None:
    harness = Harness(make_info(), cache="none")
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


def test_a_prompt_that_is_cached_whole_still_computes_its_last_token() -> None:
    harness = Harness(make_info(page_size=4))
    first = harness.submit(prompt(16), 3)
    harness.run()
    second = harness.submit(prompt(16), 3)
    harness.run()
    assert second.tokens == first.tokens
    assert first.cached_tokens == 0
    assert second.cached_tokens == 12
    assert harness.scheduler.counters.num_prefix_hit_tokens == 12


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_prompts_around_a_page_s_edge(page_size: int) -> None:
    harness = Harness(make_info(page_size=page_size))
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


def test_a_pool_smaller_than_the_context_is_the_context() -> None:
    harness = Harness(make_info(page_size=4, num_pages=8, max_model_len=512))
    assert harness.scheduler.info.max_model_len == 32
    too_long = harness.submit(prompt(32), 1)
    fits = harness.submit(prompt(20), 500)
    harness.run()
    assert too_long.error is not None
    assert "32 tokens" in too_long.error.message
    assert len(fits.tokens) == 12
    harness.check_tokens()


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
    ids: list[int], sampling: dict[str, float]
) -> None:
    harness = Harness()
    params = SamplingParams(**{"max_tokens": 3} | sampling)  # type: ignore[arg-type]
    bad = harness.submit(ids, sampling=params)
    good = harness.submit(prompt(3), 3)
    harness.run()
    assert bad.error is not None
    assert bad.error.code is ErrorCode.INVALID_ARGUMENT
    assert not bad.accepted
    assert len(good.tokens) == 3


def test_a_min_tokens_that_no_array_holds_is_as_much_as_there_can_be() -> None:
    sampling = SamplingParams(min_tokens=2**32 - 1)
    checked = intake.check(Submission(1, prompt(3), sampling), make_info(max_model_len=64))
    assert (checked.max_tokens, checked.min_tokens) == (61, 61)


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


def test_a_thousand_aborts_in_random_order_leave_no_page_behind() -> None:
    rng = random.Random(1)
    harness = Harness(make_info(num_pages=100), max_running=16)
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


@OVERLAP
def test_a_preempted_request_continues_as_if_nothing_had_happened(overlap: bool) -> None:
    harness = Harness(make_info(num_pages=12), overlap=overlap)
    sampling = SamplingParams(max_tokens=30, logprobs=1, prompt_logprobs=0)
    clients = [harness.submit(prompt(9, seed), sampling=sampling) for seed in range(3)]
    harness.run()
    assert harness.scheduler.counters.num_preempted > 0
    for client in clients:
        assert client.tokens == client.oracle(30)
        assert [entry.token_id for entry in client.logprobs] == client.tokens
        assert client.prompt_logprobs is not None
        assert [e.token_id for e in client.prompt_logprobs] == list(client.submission.prompt_ids)


def test_the_lowest_priority_then_the_youngest_is_preempted() -> None:
    harness = Harness(make_info(num_pages=12))
    important = harness.submit(prompt(9, 1), 30, priority=1)
    older = harness.submit(prompt(9, 2), 30)
    younger = harness.submit(prompt(9, 3), 30)
    ends: list[int] = []
    while not all(client.ended for client in (important, older, younger)):
        ends += [row.handle for row in harness.step().finished]
    assert ends == [client.submission.handle for client in (important, older, younger)]
    harness.check_tokens()


@OVERLAP
def test_a_resumed_request_gets_what_is_left(overlap: bool) -> None:
    harness = Harness(overlap=overlap)
    whole = harness.submit(prompt(10), 20)
    outputs = whole.oracle(20)
    cut = [harness.submit(prompt(10), 20, resume_ids=outputs[:n]) for n in (1, 7, 19, 20)]
    over = harness.submit(prompt(10), 99, resume_ids=[*outputs[:3], EOS])
    harness.run()
    assert [client.tokens for client in cut] == [outputs[1:], outputs[7:], outputs[19:], []]
    assert all(client.reason is FinishReason.LENGTH for client in cut)
    assert (over.tokens, over.reason) == ([], FinishReason.STOP)


def test_prompt_logprobs_compute_what_is_cached_and_may_be_all_there_is() -> None:
    harness = Harness(make_info(max_prefill_tokens=8))
    harness.submit(prompt(20), 2)
    harness.run()
    sampling = SamplingParams(max_tokens=0, prompt_logprobs=2)
    client = harness.submit(prompt(20), sampling=sampling)
    nothing = harness.submit(prompt(20), 0)
    harness.run()
    assert client.prompt_logprobs is not None
    assert [entry.token_id for entry in client.prompt_logprobs] == prompt(20)
    assert client.prompt_logprobs[0].top_token_ids == ()
    assert (client.tokens, client.reason) == ([], FinishReason.LENGTH)
    assert (nothing.tokens, nothing.reason) == ([], FinishReason.LENGTH)


def test_salts_do_not_share_a_prefix() -> None:
    harness = Harness()
    clients = []
    for salt in ("a", "b", "a"):
        clients.append(harness.submit(prompt(40), 2, salt=salt))
        harness.run()
    cached = [client.cached_tokens for client in clients]
    assert cached == [0, 0, 36]


def test_rows_keep_their_order_and_chunks_their_budget() -> None:
    harness = Harness(make_info(max_prefill_tokens=32), max_running=16)
    for number in range(12):
        harness.submit(prompt(40, number), 40)
    harness.run()
    for batch in harness.engine.batches:
        decode = batch.slots[batch.query_lens == 1].tolist()
        assert batch.num_tokens <= 32 + len(decode)
    for before, after in pairwise(harness.engine.batches):
        kept = [slot for slot in before.slots.tolist() if slot in set(after.slots.tolist())]
        assert kept == [slot for slot in after.slots.tolist() if slot in set(kept)]


def test_a_long_prompt_does_not_stall_the_streams_when_mixed() -> None:
    harness = Harness(make_info(max_prefill_tokens=16), schedule="mixed")
    streams = [harness.submit(prompt(4, seed), 60) for seed in range(4)]
    for _ in range(4):
        harness.step()
    harness.submit(prompt(300, 9), 2)
    for _ in range(20):
        before = [len(client.tokens) for client in streams]
        harness.step()
        assert [len(client.tokens) - n for client, n in zip(streams, before, strict=True)] == [
            1
        ] * 4


def test_bubbles_count_only_while_there_is_work() -> None:
    harness = Harness()
    harness.submit(prompt(5), 3)
    harness.run()
    assert harness.scheduler.counters.bubble == 0.0  # the lazy engine reports no idle time
    assert harness.scheduler.counters.num_output_tokens == 3
    assert harness.scheduler.counters.num_prefill_tokens == 5

"""The scheduler's hostile cases, one by one, on the fake engine."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from services.worker.core import FinishReason, SamplingParams
from services.worker.scheduler import intake
from services.worker.scheduler.request import Submission
from tests.worker.scheduler.harness import EOS, Harness, Schedule, make_info

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


def test_a_min_tokens_that_no_array_holds_is_as_much_as_there_can_be() -> None:
    sampling = SamplingParams(min_tokens=2**32 - 1)
    checked = intake.check(Submission(1, prompt(3), sampling), make_info(max_model_len=64))
    assert (checked.max_tokens, checked.min_tokens) == (61, 61)


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


def test_a_resume_that_is_larger_than_the_pool_has_ended_and_holds_nobody_up() -> None:
    harness = Harness(make_info(num_pages=16))
    sampling = SamplingParams(max_tokens=4, prompt_logprobs=0)
    over = harness.submit(prompt(20), sampling=sampling, resume_ids=prompt(200))
    other = harness.submit(prompt(20), 2)
    harness.run(max_steps=200)
    assert over.prompt_logprobs is not None
    assert [entry.token_id for entry in over.prompt_logprobs] == prompt(20)
    assert (over.tokens, over.reason) == ([], FinishReason.LENGTH)
    assert len(other.tokens) == 2


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

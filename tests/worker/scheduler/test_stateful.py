"""Random lives of a scheduler: whatever happens, tokens are exact and the books balance.

Each of the seven variants goes on until it has made `_LEAST_STEPS` steps of the scheduler,
21,000 over all; `SHOAL_STATEFUL_EXAMPLES` multiplies that. Hypothesis prints how to repeat a
failure.
"""

from __future__ import annotations

import os
import random
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from services.worker.core import FinishReason, SamplingParams
from tests.worker.scheduler.harness import EOS, Cache, Client, Harness, Schedule, make_info

_SCALE = int(os.environ.get("SHOAL_STATEFUL_EXAMPLES", "1"))
_LEAST_STEPS = 3000 * _SCALE
_BASE = [(7 * i + i // 5) % 250 for i in range(90)]  # prompts are prefixes of it, with tails


class SchedulerMachine(RuleBasedStateMachine):
    """Clients come, leave, resume and go beyond the pool; the scheduler keeps up."""

    page_size: ClassVar[int]
    overlap: ClassVar[bool]
    cache: ClassVar[Cache]

    @initialize(
        schedule=st.sampled_from(["prefill-first", "decode-first", "mixed"]),
        pool_tokens=st.sampled_from([96, 160, 640]),
        max_running=st.sampled_from([6, 4, 1]),
        budget=st.sampled_from([3, 16, 64]),
    )
    def start(self, schedule: Schedule, pool_tokens: int, max_running: int, budget: int) -> None:
        info = make_info(
            page_size=self.page_size,
            num_pages=pool_tokens // self.page_size,
            max_model_len=min(pool_tokens, 128),
            max_prefill_tokens=budget,
        )
        self.harness = Harness(
            info,
            schedule=schedule,
            cache=self.cache,
            max_running=max_running,
            overlap=self.overlap,
        )

    @rule(
        length=st.integers(1, 70),
        tail=st.lists(st.integers(0, 255), max_size=3),
        max_tokens=st.integers(0, 30),
        priority=st.integers(-1, 1),
        salt=st.sampled_from(["", "", "tenant"]),
        eos_after=st.sampled_from([None, None, 0, 4]),
        prompt_logprobs=st.sampled_from([None, None, None, 1]),
        timeout=st.sampled_from([None, None, None, 0.0, 0.2]),
    )
    def submit(
        self,
        length: int,
        tail: list[int],
        max_tokens: int,
        priority: int,
        salt: str,
        eos_after: int | None,
        prompt_logprobs: int | None,
        timeout: float | None,
    ) -> None:
        sampling = SamplingParams(
            max_tokens=max_tokens,
            min_tokens=eos_after or 0,
            logit_bias={} if eos_after is None else {EOS: 100.0},
            prompt_logprobs=prompt_logprobs,
        )
        self.harness.submit(
            [*_BASE[:length], *tail],
            sampling=sampling,
            priority=priority,
            salt=salt,
            timeout=timeout,
        )

    @rule(seed=st.integers(0, 1 << 30))
    def burst(self, seed: int) -> None:
        """Many at once, evenly drawn, so that pools run out."""
        rng = random.Random(seed)
        for _ in range(rng.randint(3, 8)):
            tail = [rng.randrange(256) for _ in range(rng.randint(0, 20))]
            self.harness.submit(
                [*_BASE[: rng.randint(1, 20)], *tail],
                rng.randint(20, 50),
                priority=rng.randint(0, 2),
            )

    @rule(length=st.integers(1, 40), resumed=st.integers(1, 12), more=st.integers(0, 12))
    def resume(self, length: int, resumed: int, more: int) -> None:
        probe = Client(self.harness.submit(_BASE[:length], 1).submission)
        self.harness.submit(_BASE[:length], resumed + more, resume_ids=probe.oracle(resumed))

    @rule(choice=st.integers(0, 1 << 16))
    def abort(self, choice: int) -> None:
        clients = self.harness.clients
        if clients:
            self.harness.abort(clients[choice % len(clients)])

    @rule(count=st.integers(1, 12), flush=st.booleans())
    def steps(self, count: int, flush: bool) -> None:
        for index in range(count):
            self.harness.step(flush_cache=flush and index == 0)

    @precondition(lambda self: len(self.harness.clients) > 3)
    @rule()
    def settle(self) -> None:
        self.harness.run()

    def teardown(self) -> None:
        if not hasattr(self, "harness"):
            return
        self.harness.run()
        for client in self.harness.clients.values():
            check_answer(client, self.harness.scheduler.info.max_model_len)


def check_answer(client: Client, max_model_len: int) -> None:
    """The answer is the oracle's as far as it goes, and as long as it should be."""
    sampling = client.submission.sampling
    forced = sampling.min_tokens if sampling.logit_bias else None
    resumed = len(client.submission.resume_ids)
    expected = client.oracle(len(client.tokens))
    if forced is not None and len(client.tokens) > forced:
        expected = [*client.oracle(forced), EOS]
    assert client.tokens == expected
    if client.reason is FinishReason.STOP:
        assert client.tokens[-1] == EOS
    if client.reason is FinishReason.LENGTH:
        most = min(sampling.max_tokens, max_model_len - len(client.submission.prompt_ids))
        assert len(client.tokens) == max(most - resumed, 0)
    if client.reason not in (None, FinishReason.ABORT) and sampling.prompt_logprobs is not None:
        assert client.prompt_logprobs is not None
        ids = [entry.token_id for entry in client.prompt_logprobs]
        assert ids == list(client.submission.prompt_ids)


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "serial"])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_random_lives(page_size: int, overlap: bool) -> None:
    run_machine(page_size, overlap, "radix")


def test_random_lives_without_a_prefix_cache() -> None:
    run_machine(4, True, "none")


def run_machine(page_size: int, overlap: bool, cache: Cache) -> None:
    steps = preempted = 0

    class Machine(SchedulerMachine):
        def teardown(self) -> None:
            nonlocal steps, preempted
            super().teardown()
            if hasattr(self, "harness"):
                steps += self.harness.scheduler.counters.num_steps
                preempted += self.harness.scheduler.counters.num_preempted

    Machine.page_size, Machine.overlap, Machine.cache = page_size, overlap, cache
    while steps < _LEAST_STEPS:
        run_state_machine_as_test(
            Machine,
            settings=settings(
                max_examples=4,
                stateful_step_count=30,
                deadline=None,
                database=None,
                suppress_health_check=list(HealthCheck),
            ),
        )
    print(f"page size {page_size}, {overlap=}, {cache=}: {steps} steps, {preempted} preemptions")

"""The overlap loop: while the engine computes batch N, batch N+1 is decided and launched.

    step k     take commands -> schedule N+1 -> launch N+1 -> process the result of N
    engine     ... N ................................ N+1 ........................

The ids that N samples are not known when N+1 is built, so N+1 names them as "the slot's
last" and the engine fills them in. A request that ends in N therefore has a row too many
in N+1: its token is dropped, and its pages and slot are freed when N+1 is done. What a
row may sample under a grammar depends on those ids too: the forward of N+1 runs at once,
and the engine waits for the masks, filled in after N is processed, before it samples.

The scheduler owns every request and, through the KV cache, every page. It is called from
one thread, reads no clock and no socket, and knows an engine only as `core.Engine`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import Literal

from services.common.errors import DeadlineExceeded, Overloaded, ShoalError
from services.worker.core import Engine, EngineInfo, FinishReason, StepResult
from services.worker.scheduler import intake
from services.worker.scheduler.batching import InFlight, Rows, build_batch, mean_position
from services.worker.scheduler.masks import fill_masks
from services.worker.scheduler.planner import Planner
from services.worker.scheduler.policy import Policy
from services.worker.scheduler.request import (
    Commands,
    FinishedRequest,
    Request,
    State,
    StepOutput,
    Submission,
)
from services.worker.scheduler.residents import Residents
from services.worker.scheduler.stats import Counters, Gauges, StepTimes
from services.worker.scheduler.waiting import WaitingQueue


class Scheduler:
    """Decides every batch of one engine. `step` is the main verb."""

    def __init__(
        self,
        engine: Engine,
        *,
        schedule: Literal["prefill-first", "decode-first", "mixed"] = "mixed",
        cache: Literal["radix", "none"] = "radix",
        max_running_requests: int = 256,
        max_queue: int = 2048,
        overlap: bool = True,
    ) -> None:
        info = engine.info
        # A request alone must always fit, or it would wait for ever.
        capacity = info.num_pages * info.page_size
        self.info: EngineInfo = replace(info, max_model_len=min(info.max_model_len, capacity))
        self.counters = Counters()
        self._engine = engine
        self._overlap = overlap
        self._max_queue = max_queue
        self._policy = Policy(schedule, info.max_prefill_tokens)
        self._residents = Residents(info, max_running_requests, cache)
        self._waiting = WaitingQueue(self._least_time)
        self._planner = Planner(self._policy, self._residents, self._waiting, self.counters)
        self._requests: dict[int, Request] = {}  # live ones, by handle
        self._in_flight: deque[InFlight] = deque()
        self._num_submitted = 0
        self._had_work = False  # when the last step ended
        self._last_finish: float | None = None
        self._finish_interval = 0.0  # seconds between two finishes, smoothed
        self._now = 0.0

    @property
    def idle(self) -> bool:
        """Nothing is waiting, running or in flight: without commands `step` would do nothing."""
        return not self._requests and not self._in_flight

    def step(self, commands: Commands, now: float) -> StepOutput:
        """One turn of the loop. `now` is the caller's clock, in seconds.

        Blocks until the batch before the one it launches is done. Raises what the engine
        raised, after which no state is valid any more.
        """
        output = StepOutput()
        self._now = now
        self._take(commands, output)
        rows = self._planner.plan(in_flight=bool(self._in_flight))
        if rows is None:  # out of pages: what is in flight may free some, or be preempted then
            self._process_in_flight(output, keep=0)
            rows = self._planner.plan(in_flight=False)
        assert rows is not None, "with nothing in flight somebody can always be preempted"
        if rows.requests:
            self._launch(rows)
        output.started, self._planner.started = self._planner.started, []
        self._process_in_flight(output, keep=1 if rows.requests and self._overlap else 0)
        self._had_work = not self.idle
        return output

    def gauges(self) -> Gauges:
        """How busy the engine is now."""
        kv = self._residents.kv
        return Gauges(
            num_running=self._residents.num_running,
            num_waiting=len(self._waiting),
            num_requests=len(self._requests),
            num_pages=kv.num_pages,
            num_free_pages=kv.num_free,
            num_evictable_pages=kv.num_evictable,
            num_locked_pages=kv.num_locked,
            num_in_flight_pages=kv.num_in_flight,
            num_grammar_requests=sum(r.matcher is not None for r in self._residents.running),
        )

    def digest(self) -> list[int]:
        """Hashes of cached prefixes for routing, newest first."""
        return self._residents.kv.digest()

    def check_integrity(self) -> None:
        """Raises IntegrityError unless every page is in exactly one place."""
        self._residents.check_integrity()

    def abandon(self) -> None:
        """Lets the engine finish what was launched; for a caller that will not step again."""
        for batch in self._in_flight:
            if batch.masks is not None:
                batch.masks.set_filled()

    # --- commands in ---

    def _take(self, commands: Commands, output: StepOutput) -> None:
        for submission in commands.submits:
            try:
                self._submit(submission, output)
            except ShoalError as error:
                output.rejected.append((submission.handle, error))
        for handle in commands.aborts:
            request = self._requests.get(handle)
            if request is not None:  # else it ended while the abort was on its way
                self._end(request, FinishReason.ABORT, output)
        for request in self._waiting.pop_late(self._now):
            del self._requests[request.handle]
            request.state = State.ENDED
            self.counters.num_late += 1
            late = DeadlineExceeded(
                "The request waited for its turn until its deadline could not be met any more."
            )
            output.rejected.append((request.handle, late))
        if commands.num_flushes:
            output.num_flushes = commands.num_flushes
            output.flushed_pages = self._residents.kv.flush()

    def _submit(self, submission: Submission, output: StepOutput) -> None:
        """Queues a request, or ends it at once if nothing is left to compute."""
        assert submission.handle not in self._requests, "a handle is used twice at once"
        sampling = intake.check(submission, self.info)
        if not len(submission.resume_ids):  # a stream that has begun is never turned away
            self._check_room()
        assert (sampling.grammar is None) == (submission.matcher is None)
        ignore_eos = sampling.ignore_eos and sampling.grammar is None  # the end of a grammar ends
        eos_ids = frozenset() if ignore_eos else self.info.eos_token_ids
        self._num_submitted += 1
        request = Request(
            submission,
            sampling,
            eos_ids | sampling.stop_token_ids,
            sequence=self._num_submitted,
            now=self._now,
        )
        self._requests[request.handle] = request
        self._waiting.push(request)
        output.accepted.append(request.handle)
        reason = request.ending()
        if reason is None:
            return
        if request.prompt_logprobs is None:
            self._end(request, reason, output)
        else:  # the prompt alone is computed
            request.sampling = replace(sampling, max_tokens=len(request.output_ids))
            request.requeue()

    def _check_room(self) -> None:
        """Raises Overloaded if the queue is full. What a free slot awaits does not queue."""
        free_slots = 0 if self._planner.stuck else self._residents.slots.num_free
        if len(self._waiting) < self._max_queue + free_slots:
            return
        retry_after = min(max(len(self._waiting) * self._finish_interval, 1.0), 60.0)
        raise Overloaded(
            f"{len(self._waiting)} requests are waiting already; try again later.",
            retry_after=retry_after,
        )

    def _least_time(self, request: Request) -> float:
        """Seconds that a request needs if it is next, at twice the measured speed: who is
        dropped by this could not have been in time. 0 until the engine has shown its pace, and
        while it is idle: if all were dropped for one slow step, nothing would show another."""
        pace = self._policy.pace
        if not pace.settled or not self._residents.num_running:
            return 0.0
        cached = 0
        if request.prompt_logprobs is None:
            cached = self._residents.kv.cached_tokens(request.prefill_ids, request.cache_salt)
        prefill = pace.prompt_time(cached, len(request.prefill_ids) - cached) or 0.0
        num_steps = max(request.min_tokens - len(request.output_ids), 0)
        return 0.5 * (prefill + num_steps * (pace.decode_time or 0.0))

    # --- launch ---

    def _launch(self, rows: Rows) -> None:
        self.counters.num_steps += 1
        number = self.counters.num_steps
        batch = build_batch(
            number, rows, self._planner.admissions, self._residents.slots, self.info.vocab_size
        )
        self._planner.admissions.clear()
        ends: list[int] = (batch.start + batch.query_lens).tolist()
        sampled: list[bool] = batch.sample.tolist()
        for request, end, samples in zip(rows.requests, ends, sampled, strict=True):
            request.num_computed = end
            request.num_sampled += samples
            request.last_step = number
        num_prefill_tokens = rows.num_prefill_tokens
        self.counters.num_prefill_tokens += num_prefill_tokens
        launched = InFlight(
            number,
            requests=rows.requests,
            ends=ends,
            sampled=sampled,
            num_tokens=batch.num_tokens,
            num_prefill_tokens=num_prefill_tokens,
            prefill_position=mean_position(ends, rows),
            pending=self._engine.launch(batch),
            follows_work=self._had_work,
            masks=batch.masks,
        )
        self._in_flight.append(launched)

    # --- process ---

    def _process_in_flight(self, output: StepOutput, *, keep: int) -> None:
        """Waits for batches in flight, all but the last `keep`, and takes in their results."""
        self._fill_masks(output)
        while len(self._in_flight) > keep:
            batch = self._in_flight.popleft()
            result = batch.pending.result()
            self._residents.step_done(batch.number)
            self._take_result(batch, result, output)
            self.counters.batch_tokens = batch.num_tokens
            self.counters.step_time = result.duration
            self.counters.busy += result.duration
            num_decode = batch.num_tokens - batch.num_prefill_tokens
            self._policy.pace.observe(
                num_decode, batch.num_prefill_tokens, result.duration, batch.prefill_position
            )
            bubble = result.idle if batch.follows_work else 0.0
            self.counters.bubble += bubble
            output.steps.append(
                StepTimes(
                    batch.number, result.duration, bubble, batch.num_prefill_tokens, num_decode
                )
            )
            self._fill_masks(output)

    def _fill_masks(self, output: StepOutput) -> None:
        """Lets the oldest batch in flight sample: the ids that its masks depend on are known."""
        if not self._in_flight:
            return
        batch = self._in_flight[0]
        if batch.masks is None or batch.masks.filled:
            return
        for request, error in fill_masks(batch.masks, batch.requests):
            output.rejected.append((request.handle, error))
            self._let_go(request)
        batch.masks.set_filled()

    def _take_result(self, batch: InFlight, result: StepResult, output: StepOutput) -> None:
        token_ids: list[int] = result.token_ids.tolist()
        before = len(output.tokens)
        for row, request in enumerate(batch.requests):
            if request.state is State.ENDED:
                continue  # a row too many, of a request that ended a step before
            end = batch.ends[row]
            if end <= request.num_prefill:
                self._take_chunk(request, end, result, row, output)
            if batch.sampled[row]:
                token_id = token_ids[row]
                request.output_ids.append(token_id)
                if request.matcher is not None:
                    request.matcher.advance(token_id)
                output.tokens.append((request.handle, token_id))
                if result.logprobs and row in result.logprobs:
                    entries = output.logprobs.setdefault(request.handle, [])
                    entries.append(result.logprobs[row])
            elif end < request.num_prefill:
                continue  # a chunk in the middle of a prompt
            reason = request.ending()
            if reason is not None:
                self._end(request, reason, output)
        self.counters.num_output_tokens += len(output.tokens) - before

    def _take_chunk(
        self, request: Request, end: int, result: StepResult, row: int, output: StepOutput
    ) -> None:
        """Takes in that a prompt is computed up to `end`."""
        self._residents.store_prefix(request, end)
        if request.prompt_logprobs is not None:
            self._take_prompt_logprobs(request, end, result, row, output)
        if end < request.num_prefill:
            output.prefilled.append((request.handle, end))

    def _take_prompt_logprobs(
        self, request: Request, end: int, result: StepResult, row: int, output: StepOutput
    ) -> None:
        """Collects a chunk's share; the whole goes out when `end` has passed the prompt."""
        entries = request.prompt_logprobs
        assert entries is not None
        entries += result.prompt_logprobs.get(row, ())
        if end >= len(request.prompt_ids):
            output.prompt_logprobs[request.handle] = entries
            request.prompt_logprobs = None

    def _end(self, request: Request, reason: FinishReason, output: StepOutput) -> None:
        """Answers for a request and lets it go."""
        stop_id = request.output_ids[-1] if reason is FinishReason.STOP else None
        num_output = len(request.output_ids)
        output.finished.append(FinishedRequest(request.handle, reason, stop_id, num_output))
        self._let_go(request)

    def _let_go(self, request: Request) -> None:
        """Forgets a request that has been answered."""
        del self._requests[request.handle]
        if request.state is State.WAITING:
            self._waiting.remove(request)
            request.state = State.ENDED
            return
        self._residents.leave(request)
        if self._last_finish is not None:
            interval = self._now - self._last_finish
            self._finish_interval += 0.1 * (interval - self._finish_interval)
        self._last_finish = self._now

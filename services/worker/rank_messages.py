"""Between the messages of protos/engine.proto and the scheduler's own types."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from protos import common_pb2, engine_pb2, worker_pb2
from services import __version__
from services.common.wire import error_to_proto
from services.worker.config import WorkerConfig
from services.worker.core import EngineInfo, Grammar, SamplingParams, TokenLogprobs
from services.worker.scheduler.request import Commands, StepOutput, Submission
from services.worker.scheduler.scheduler import Scheduler
from services.worker.scheduler.stats import GrammarStats


def commands_from_proto(messages: Iterable[engine_pb2.EngineCommand]) -> Commands:
    """Every command of some messages, in order."""
    messages = list(messages)
    return Commands(
        [submission_from_proto(submit) for message in messages for submit in message.submits],
        [handle for message in messages for handle in message.aborts],
        sum(message.flush_cache for message in messages),
    )


def submission_from_proto(submit: worker_pb2.Submit) -> Submission:
    """A submission; its ids are as wide as the wire's, so that none turns into another."""
    return Submission(
        handle=submit.handle,
        prompt_ids=np.array(submit.prompt_ids, np.int64),
        resume_ids=np.array(submit.resume_ids, np.int64),
        sampling=sampling_from_proto(submit.sampling),
        timeout=submit.deadline_ms / 1000 if submit.HasField("deadline_ms") else None,
        priority=submit.priority,
        cache_salt=submit.cache_salt,
    )


def sampling_from_proto(sampling: common_pb2.SamplingParams) -> SamplingParams:
    """Sampling parameters, every default filled in."""
    given = {field.name: value for field, value in sampling.ListFields()}
    given["stop_token_ids"] = frozenset(sampling.stop_token_ids)
    given["logit_bias"] = dict(sampling.logit_bias)
    given["grammar"] = _grammar(sampling.grammar)
    given["top_k"] = max(sampling.top_k, 0) if sampling.top_k >= -1 else sampling.top_k
    return SamplingParams(**given)


def _grammar(grammar: common_pb2.Grammar) -> Grammar | None:
    kind = grammar.WhichOneof("constraint")
    if kind is None:
        return None
    value = tuple(grammar.choices.texts) if kind == "choices" else getattr(grammar, kind)
    return Grammar(kind, value)


def info_to_proto(info: EngineInfo, config: WorkerConfig, epoch: int) -> worker_pb2.WorkerInfo:
    """What the worker is, once its engine is loaded."""
    return worker_pb2.WorkerInfo(
        epoch=epoch,
        model=info.model,
        fingerprint=info.fingerprint,
        max_model_len=info.max_model_len,
        vocab_size=info.vocab_size,
        eos_token_ids=sorted(info.eos_token_ids),
        page_size=info.page_size,
        num_pages=info.num_pages,
        max_running_requests=config.max_running_requests,
        tensor_parallel_size=config.tp,
        engine=config.engine,
        version=__version__,
        quantization=config.quantization,
    )


def load_to_proto(scheduler: Scheduler) -> worker_pb2.Load:
    """How busy the engine is, without the digest."""
    gauges = scheduler.gauges()
    return worker_pb2.Load(
        num_running=gauges.num_running,
        num_waiting=gauges.num_waiting,
        num_free_pages=gauges.num_free_pages,
        num_evictable_pages=gauges.num_evictable_pages,
        num_pages=gauges.num_pages,
        num_preempted=scheduler.counters.num_preempted,
    )


def stats_to_proto(scheduler: Scheduler, grammars: GrammarStats) -> engine_pb2.EngineStats:
    """Counters and gauges for the agent's metrics."""
    gauges, counters = scheduler.gauges(), scheduler.counters
    return engine_pb2.EngineStats(
        num_prefill_tokens=counters.num_prefill_tokens,
        num_output_tokens=counters.num_output_tokens,
        num_prefix_query_tokens=counters.num_prefix_query_tokens,
        num_prefix_hit_tokens=counters.num_prefix_hit_tokens,
        num_locked_pages=gauges.num_locked_pages,
        num_inflight_pages=gauges.num_in_flight_pages,
        batch_tokens=counters.batch_tokens,
        step_us=round(counters.step_time * 1e6),
        bubble_us=round(counters.bubble * 1e6),
        num_requests=gauges.num_requests,
        num_steps=counters.num_steps,
        num_late=counters.num_late,
        busy_us=round(counters.busy * 1e6),
        num_grammars_compiled=grammars.num_compiled,
        num_grammars_failed=grammars.num_failed,
        num_grammar_hits=grammars.num_hits,
        grammar_compile_us=round(grammars.compile_time * 1e6),
        num_grammar_requests=gauges.num_grammar_requests,
    )


class StepMerger:
    """Steps that have not been sent, merged: one row a handle, whose tokens keep their order."""

    def __init__(self) -> None:
        self._frame = worker_pb2.StepFrame()
        self._tokens: dict[int, list[int]] = {}
        self._logprobs: dict[int, worker_pb2.RowLogprobs] = {}
        self._flushed_pages = self._num_flushes = 0

    def add(self, output: StepOutput) -> None:
        """Appends the news of a step."""
        self._frame.accepted.extend(output.accepted)
        for handle, error in output.rejected:
            self._frame.rejected.add(handle=handle, error=error_to_proto(error))
        for handle, cached_tokens in output.started:
            self._frame.started.add(handle=handle, cached_tokens=cached_tokens)
        for handle, num_tokens in output.prefilled:
            self._frame.prefilled.add(handle=handle, num_tokens=num_tokens)
        for handle, token in output.tokens:
            self._tokens.setdefault(handle, []).append(token)
        for handle, prompt_entries in output.prompt_logprobs.items():
            self._row(handle).prompt_tokens.extend(map(_logprobs_to_proto, prompt_entries))
        for handle, entries in output.logprobs.items():
            self._row(handle).tokens.extend(map(_logprobs_to_proto, entries))
        for ended in output.finished:
            finished = self._frame.finished.add(
                handle=ended.handle,
                reason=common_pb2.FinishReason.ValueType(int(ended.reason)),
                num_output_tokens=ended.num_output_tokens,
            )
            if ended.stop_token_id is not None:
                finished.stop_token_id = ended.stop_token_id
        self._flushed_pages += output.flushed_pages
        self._num_flushes += output.num_flushes

    def add_compiling(self, handles: Iterable[int]) -> None:
        """Tells that requests have come whose grammar is not there yet."""
        self._frame.compiling.extend(handles)

    def take(self) -> engine_pb2.EngineEvent:
        """The merged news as an event, to which load and counters are added; starts anew."""
        event = engine_pb2.EngineEvent(step=self._frame)
        if self._num_flushes:
            event.flushed_pages, event.num_flushes = self._flushed_pages, self._num_flushes
        event.step.handles.extend(self._tokens)
        event.step.counts.extend(map(len, self._tokens.values()))
        for tokens in self._tokens.values():
            event.step.token_ids.extend(tokens)
        event.step.logprobs.extend(self._logprobs.values())
        self._frame = worker_pb2.StepFrame()
        self._tokens, self._logprobs = {}, {}
        self._flushed_pages = self._num_flushes = 0
        return event

    def _row(self, handle: int) -> worker_pb2.RowLogprobs:
        return self._logprobs.setdefault(handle, worker_pb2.RowLogprobs(handle=handle))


def _logprobs_to_proto(entry: TokenLogprobs) -> common_pb2.TokenLogprobs:
    return common_pb2.TokenLogprobs(
        token_id=entry.token_id,
        logprob=entry.logprob,
        top_token_ids=entry.top_token_ids,
        top_logprobs=entry.top_logprobs,
    )

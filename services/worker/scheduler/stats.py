"""Counters and gauges of the scheduler, as plain numbers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """What has happened since the start, and the size of the last step.

    `busy` is how long the engine computed and `bubble` how long it had nothing to run
    although requests were there, each in seconds, in all.
    """

    num_steps: int = 0
    num_prefill_tokens: int = 0
    num_output_tokens: int = 0
    num_prefix_query_tokens: int = 0
    num_prefix_hit_tokens: int = 0
    num_preempted: int = 0
    num_late: int = 0  # dropped from the queue, as their deadline could not be met
    batch_tokens: int = 0
    step_time: float = 0.0
    busy: float = 0.0
    bubble: float = 0.0


@dataclass(frozen=True, slots=True)
class StepTimes:
    """What one step computed, and for how long, in seconds; `bubble` is as in `Counters`."""

    number: int
    duration: float
    bubble: float
    num_prefill_tokens: int
    num_decode_tokens: int


@dataclass(frozen=True, slots=True)
class Gauges:
    """How busy the engine is now."""

    num_running: int
    num_waiting: int
    num_requests: int
    num_pages: int
    num_free_pages: int
    num_evictable_pages: int
    num_locked_pages: int
    num_in_flight_pages: int
    num_grammar_requests: int


@dataclass(slots=True)
class GrammarStats:
    """What has become of grammars since the start; `compile_time` in seconds, trial included."""

    num_compiled: int = 0
    num_failed: int = 0
    num_hits: int = 0
    compile_time: float = 0.0

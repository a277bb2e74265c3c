"""The nouns that the scheduler and the engine share.

The scheduler decides a `Batch`; an `Engine` computes it and answers a
`StepResult`. A Batch holds no live object but its masks: the engine may read it on
another thread, or in another process, while the scheduler goes on.

A request that runs owns a *slot*, a small integer. Whatever an engine keeps per
request (sampling parameters, penalty counts, the last token) it keeps per slot;
`Batch.admissions` says when a slot changes hands.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]
BoolArray = npt.NDArray[np.bool_]


class FinishReason(enum.IntEnum):
    """Why a request ended; the numbers are those of `shoal.v1.FinishReason`."""

    STOP = 1
    LENGTH = 2
    ABORT = 3


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an output must match, as it came in (`shoal.v1.Grammar`): a JSON schema, a regular
    expression or a Lark grammar as text, or strings to choose from."""

    kind: Literal["json_schema", "regex", "choices", "lark"]
    value: str | tuple[str, ...]


class Matcher(Protocol):
    """How far one output has come in its grammar."""

    def advance(self, token_id: int) -> None:
        """Takes in the next token of the output."""
        ...

    def fill(self, mask: IntArray) -> None:
        """Writes which ids may come next: bit i % 32 of word i // 32 for id i; # [words]

        Where the grammar accepts, the end-of-sequence ids are among them, and at least one id
        always is. Raises InvalidRequest if the grammar became too complex to follow.
        """
        ...


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose a request's tokens, every default filled in.

    `logprobs` is the number of likeliest alternatives to report beside the chosen
    token, or None for no report; `prompt_logprobs` the same for the prompt.
    """

    temperature: float = 1.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    max_tokens: int = 1 << 30
    min_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None

    @property
    def greedy(self) -> bool:
        return self.temperature < 1e-5

    @property
    def penalized(self) -> bool:
        return (
            self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.repetition_penalty != 1.0
        )


@dataclass(frozen=True, slots=True)
class Admission:
    """A request takes a slot; its last holder's state there is void.

    `output_ids` are those sampled before a preemption or on another worker. The ids
    in `banned_ids` may not be sampled while fewer than `sampling.min_tokens` outputs
    exist: the request's end-of-sequence and stop ids.
    """

    slot: int
    prompt_ids: IntArray  # [prompt]
    output_ids: IntArray  # [output]
    sampling: SamplingParams
    banned_ids: tuple[int, ...] = ()


class TokenMasks:
    """Which ids some rows of a batch may sample; the scheduler fills them in after the launch.

    A row's mask depends on the token that the batch before samples for it. So the engine
    runs the batch's forward at once, and waits here right before it samples.
    """

    def __init__(self, rows: Sequence[int], vocab_size: int) -> None:
        self.rows: IntArray = np.array(rows, np.int32)  # [masked], rows of the batch, ascending
        # [masked, words], packed as `Matcher.fill` says; all ids to begin with
        self.words: IntArray = np.full((len(rows), -(-vocab_size // 32)), -1, np.int32)
        self._filled = threading.Event()

    @property
    def filled(self) -> bool:
        return self._filled.is_set()

    def set_filled(self) -> None:
        """Lets the engine go on; called once the words are final."""
        self._filled.set()

    def wait(self) -> IntArray:
        """Blocks until the masks are final; # [masked, words]"""
        self._filled.wait()
        return self.words


def unpack_mask(words: IntArray, vocab_size: int) -> BoolArray:
    """Packed masks as one bool an id; [..., words] -> [..., vocab]"""
    bits = np.unpackbits(words.view(np.uint8), axis=-1, count=vocab_size, bitorder="little")
    return bits.view(np.bool_)


@dataclass(frozen=True, slots=True)
class Batch:
    """What one step computes.

    Row r computes the tokens at positions start[r] .. start[r] + query_len[r] - 1 of
    the request in slot[r], attending to all positions before. Its ids are the next
    query_len[r] of `input_ids`; -1 stands for the token most recently sampled for
    that slot, which the host may not know yet. Decode rows have query_len 1.
    """

    step: int
    slots: IntArray  # [rows]
    start: IntArray  # [rows]
    query_lens: IntArray  # [rows]
    input_ids: IntArray  # [tokens]
    page_tables: IntArray  # [rows, pages]; unused entries hold the dummy page
    sample: BoolArray  # [rows]; the logits of the row's last token are sampled
    output_positions: IntArray  # [rows]; index among the outputs of the sampled token
    admissions: tuple[Admission, ...] = ()
    masks: TokenMasks | None = None  # of the rows that sample under a grammar, if there are any

    @property
    def num_rows(self) -> int:
        return len(self.slots)

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities of one token, of the raw distribution before any filter."""

    token_id: int
    logprob: float
    top_token_ids: Sequence[int] = ()
    top_logprobs: Sequence[float] = ()


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step computed.

    `prompt_logprobs` maps a row to one entry for each of the row's tokens whose
    successor is a prompt token: the log-probability of that successor.
    """

    token_ids: IntArray  # [rows]; -1 where nothing was sampled
    logprobs: Mapping[int, TokenLogprobs] = field(default_factory=dict)  # row -> sampled token
    prompt_logprobs: Mapping[int, Sequence[TokenLogprobs]] = field(default_factory=dict)
    duration: float = 0.0  # seconds the device was busy with it
    idle: float = 0.0  # seconds the device had nothing to run before it


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What an engine turned out to be, once loaded."""

    model: str
    fingerprint: str
    vocab_size: int
    max_model_len: int
    page_size: int
    num_pages: int  # without the dummy page, whose id is num_pages
    max_prefill_tokens: int
    eos_token_ids: frozenset[int]


class PendingStep(Protocol):
    """A step that was launched."""

    def result(self) -> StepResult:
        """Blocks until the step is done. Raises what the step raised."""
        ...


class Engine(Protocol):
    """Computes batches in the order in which they are launched."""

    @property
    def info(self) -> EngineInfo: ...

    def launch(self, batch: Batch) -> PendingStep:
        """Starts a step and returns at once, without waiting for earlier ones."""
        ...

    def check(self) -> None:
        """Raises if no step can be made any more; called now and then while there are none."""
        ...

    def close(self) -> None:
        """Waits for launched steps and frees the device."""
        ...

"""What the fake engine must answer, computed from the prompt's ids alone.

The arithmetic of `services.worker.engine.fake` in plain integers, which is quick enough for
thousands of streams, and what Shoal's contract makes of it: stop strings, end of sequence,
usage. A test holds the tokens against `fake_tokens`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from services.common.model_metadata import BYTE_EOS

_MASK = (1 << 64) - 1
_A = 0x9E3779B97F4A7C15
_C = 0xD1342543DE82EF95
_START = 0x2545F4914F6CDD1D
_STRIDE = 16
_FIRST, _NUM_ALLOWED = 32, 95  # printable bytes


@dataclass(frozen=True, slots=True)
class Expected:
    """One choice as an undisturbed fleet answers it."""

    ids: list[int]
    text: str
    finish_reason: str
    stop_reason: str | None
    logprobs: list[float]  # of the ids


def tokens_and_scores(prompt_ids: Sequence[int], num_tokens: int) -> tuple[list[int], list[int]]:
    """The ids that follow a prompt, and the hash from which each was made."""
    state, sums = _START, [0] * _STRIDE
    tokens: list[int] = []
    scores: list[int] = []
    num_prompt = len(prompt_ids)
    for position in range(num_prompt + num_tokens - 1):
        token = prompt_ids[position] if position < num_prompt else tokens[position - num_prompt]
        state = (state * _A + (token + 1) * _C) & _MASK
        lane = position % _STRIDE
        sums[lane] = (sums[lane] + state) & _MASK
        if position >= num_prompt - 1:
            score = _finalise(sums[lane] + position & _MASK)
            scores.append(score)
            tokens.append(_FIRST + score % _NUM_ALLOWED)
    return tokens, scores


def expect(
    prompt_ids: Sequence[int],
    max_tokens: int,
    *,
    stop: Sequence[str] = (),
    include_stop: bool = False,
    eos_after: int | None = None,
) -> Expected:
    """The answer to a prompt. With `eos_after`, a logit bias forces the end after so many ids."""
    ids, scores = tokens_and_scores(prompt_ids, max_tokens)
    text = "".join(map(chr, ids))
    logprobs = [-float(score >> 44) / (1 << 20) for score in scores]
    finish_reason, stop_reason = "length", None
    if eos_after is not None and eos_after < max_tokens:
        ids = [*ids[:eos_after], BYTE_EOS]
        text, finish_reason = text[:eos_after], "stop"
    matches = [(text.index(string), string) for string in stop if string in text]
    if matches:
        start, string = min(matches)
        end = start + len(string)
        ids, finish_reason, stop_reason = ids[:end], "stop", string
        text = text[: end if include_stop else start]
    return Expected(ids, text, finish_reason, stop_reason, logprobs[: len(ids)])


def _finalise(value: int) -> int:
    """The output function of SplitMix64 (Steele, Lea and Flood, 2014)."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)

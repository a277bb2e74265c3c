"""Which submissions can be served at all, decided before they are queued.

The gateway has checked what its users send; a worker's own clients may send anything,
and nothing they send may stop the engine.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from services.common.errors import ContextLengthExceeded, InvalidRequest
from services.worker.core import EngineInfo, SamplingParams
from services.worker.scheduler.request import Submission, TokenIds

_MAX_LOGPROBS = 20


def check(submission: Submission, info: EngineInfo) -> SamplingParams:
    """The request's sampling parameters, max_tokens and with it min_tokens clamped to the context.

    Raises InvalidRequest, or ContextLengthExceeded if the prompt leaves no room.
    """
    prompt_ids = submission.prompt_ids
    if len(prompt_ids) == 0:
        raise InvalidRequest("The prompt has no tokens.", param="prompt")
    if len(prompt_ids) >= info.max_model_len:
        raise ContextLengthExceeded.of(len(prompt_ids), info.max_model_len, param="prompt")
    _check_ids(prompt_ids, info.vocab_size, "prompt")
    _check_ids(submission.resume_ids, info.vocab_size, "resume_ids")
    _check_ids(list(submission.sampling.logit_bias), info.vocab_size, "logit_bias")
    _check_sampling(submission.sampling)
    sampling = submission.sampling
    max_tokens = min(sampling.max_tokens, info.max_model_len - len(prompt_ids))
    # The wire takes a min_tokens that no array of the engine could hold.
    min_tokens = min(sampling.min_tokens, max_tokens)
    return dataclasses.replace(sampling, max_tokens=max_tokens, min_tokens=min_tokens)


def _check_ids(token_ids: TokenIds, vocab_size: int, param: str) -> None:
    ids = np.array(token_ids, np.int64)
    wrong = ids[(ids < 0) | (ids >= vocab_size)]
    if len(wrong):
        raise InvalidRequest(
            f"Token id {wrong[0]} is out of range: this model has ids 0 to {vocab_size - 1}.",
            param=param,
        )


def _check_sampling(sampling: SamplingParams) -> None:
    """Refuses what an engine cannot compute; written so that NaN fails too."""
    limits: list[tuple[str, bool, str]] = [
        ("temperature", 0 <= sampling.temperature <= 2, "from 0 to 2"),
        ("top_p", 0 < sampling.top_p <= 1, "above 0 and at most 1"),
        ("top_k", sampling.top_k >= -1, "at least -1"),
        ("min_p", 0 <= sampling.min_p <= 1, "from 0 to 1"),
        ("presence_penalty", -2 <= sampling.presence_penalty <= 2, "from -2 to 2"),
        ("frequency_penalty", -2 <= sampling.frequency_penalty <= 2, "from -2 to 2"),
        ("repetition_penalty", 0 < sampling.repetition_penalty < float("inf"), "above 0"),
        ("logit_bias", all(abs(b) <= 1e6 for b in sampling.logit_bias.values()), "finite"),
        ("max_tokens", sampling.max_tokens >= 0, "at least 0"),
        ("min_tokens", sampling.min_tokens >= 0, "at least 0"),
        ("logprobs", 0 <= (sampling.logprobs or 0) <= _MAX_LOGPROBS, "from 0 to 20"),
        ("prompt_logprobs", 0 <= (sampling.prompt_logprobs or 0) <= _MAX_LOGPROBS, "from 0 to 20"),
    ]
    for name, good, rule in limits:
        if not good:
            raise InvalidRequest(f"{name} must be {rule}.", param=name)

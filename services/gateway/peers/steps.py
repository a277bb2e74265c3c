"""What a worker's step frame says of each request, and who is to hear it.

Knows the structure-of-arrays frame; nothing here knows of sessions or handles' owners.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from protos import common_pb2, worker_pb2
from services.common.errors import PeerLost, ShoalError
from services.gateway.domain import FinishReason, TokenLogprobs

_REASONS: dict[int, FinishReason] = {
    common_pb2.FINISH_REASON_STOP: "stop",
    common_pb2.FINISH_REASON_LENGTH: "length",
    common_pb2.FINISH_REASON_ABORT: "abort",
}


@dataclass(frozen=True, slots=True)
class Finished:
    """How a worker ended a request."""

    reason: FinishReason
    stop_token_id: int | None


class TokenSink(Protocol):
    """Whoever submitted a request to a worker. No call may block."""

    def on_accepted(self) -> None: ...

    def on_rejected(self, error: ShoalError) -> None:
        """Refused, or failed after it was accepted; nothing follows."""
        ...

    def on_started(self, cached_tokens: int) -> None:
        """Its prompt is being computed; that many of the tokens were cached."""
        ...

    def on_prefilled(self, num_tokens: int) -> None:
        """A part of its prompt has been computed, up to there from the start."""
        ...

    def on_prompt_logprobs(self, logprobs: Sequence[TokenLogprobs]) -> None: ...

    def on_tokens(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprobs] | None,
        finished: Finished | None,
    ) -> None:
        """The next tokens; with `finished` nothing follows."""
        ...

    def on_worker_lost(self, error: PeerLost) -> None: ...

    def on_moved(self) -> None:
        """The worker hands the request back, after the tokens so far."""
        ...

    def on_worker_draining(self) -> None:
        """The worker will finish what it has and then go."""
        ...


def finished_of(row: worker_pb2.Finished) -> Finished:
    """How a request ended, from a message; a reason that is not known here is an abort."""
    stop_id = row.stop_token_id if row.HasField("stop_token_id") else None
    return Finished(_REASONS.get(row.reason, "abort"), stop_id)


def rows_of(step: worker_pb2.StepFrame) -> dict[int, list[int]]:
    """Token ids by handle; a merged frame may hold several rows of one handle."""
    handles, counts, token_ids = step.handles, step.counts, list(step.token_ids)
    if (
        list(counts).count(1) == len(counts) == len(handles) == len(token_ids)
    ):  # one each, as good as always
        rows = {h: [token_id] for h, token_id in zip(handles, token_ids, strict=True)}
        if len(rows) == len(token_ids):
            return rows
    rows = {}
    end = 0
    for handle, count in zip(handles, counts, strict=True):
        start, end = end, end + count
        if handle in rows:
            rows[handle] += token_ids[start:end]
        else:
            rows[handle] = token_ids[start:end]
    return rows


def token_logprobs(token: common_pb2.TokenLogprobs) -> TokenLogprobs:
    """One token's, from a message."""
    top = tuple(zip(token.top_token_ids, token.top_logprobs, strict=True))
    return TokenLogprobs(token.token_id, token.logprob, top)

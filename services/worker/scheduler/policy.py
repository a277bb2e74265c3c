"""What a batch is made of: decode rows, prompt tokens, or both (`--schedule`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from services.worker.scheduler.pace import Pace

_DECODE_RUN = 16  # decode-first: decode batches before waiting prompts get one
_MIXED_RUN = 16  # mixed: batches with prompts before one decodes alone, which measures it
# mixed: of a decode step's time, which a chunk may add to it. With all of it the longest of many
# gaps, which steps of uneven length decide, would be more than twice as long as before.
_PREFILL_SHARE = 0.75
_LEAST_SHARE = 0.3  # of it in any case, so that no prompt starves
_LEAST_CHUNK = 4  # fewer tokens than this cost nearly as much: a chunk fetches all keys before it
# mixed: of each request but one that waits for its first token, a stream's being 1. Steps with few
# rows waste the engine: a burst is over sooner for all when it fills the batch soon.
_PROMPT_WEIGHT = 12.0


@dataclass(frozen=True, slots=True)
class Quota:
    """What may go into the next batch."""

    decode: bool
    prefill_tokens: int


class Policy:
    """The quota of each batch in turn.

    prefill-first   prompts while there are any, then decode: best throughput, but a long
                    prompt stalls the streams
    decode-first    decode while there is any; prompts get one batch in 17
    mixed           all decode rows, and of the prompts what takes less than a decode step by
                    itself: beside one prompt streams keep more than half the speed they had
                    before it came, and it gets up to three sevenths of the engine. Of several
                    that may come in each but one counts as twelve streams: where that is more
                    than the streams there are, steps are long until the batch is full. Until
                    the engine's pace is known, prompts get the rest of the token budget, at
                    least a quarter.
    """

    def __init__(
        self, name: Literal["prefill-first", "decode-first", "mixed"], max_prefill_tokens: int
    ) -> None:
        self._name = name
        self._budget = max_prefill_tokens
        self._decode_run = self._mixed_run = 0
        self._calm_rows, self._calm_time = 0, 0.0  # of decode steps before the prompt
        self.pace = Pace()

    def quota(
        self, num_decode: int, num_prefill: int, *, position: int = 0, begins: bool = False
    ) -> Quota:
        """`num_decode` requests could decode, and prompts of `num_prefill` be computed, of which
        the first goes on at a position, or begins there."""
        if not num_prefill or not num_decode:
            self._decode_run = self._mixed_run = 0
            self._note_calm(num_decode)
            return Quota(num_decode > 0, self._budget)
        if begins:
            self._note_calm(num_decode)
        if self._name == "mixed":
            return Quota(True, self._mixed_prefill(num_decode, num_prefill, position))
        if self._name == "decode-first" and self._decode_run < _DECODE_RUN:
            self._decode_run += 1
            return Quota(True, 0)
        self._decode_run = 0
        return Quota(False, self._budget)

    def _mixed_prefill(self, num_decode: int, num_prefill: int, position: int) -> int:
        """The prompt tokens that go along with decode rows."""
        most = max(self._budget - num_decode, self._budget // 4, 1)
        decode = self.pace.decode_time_of(num_decode)
        if decode is None:
            return most
        burst = _PROMPT_WEIGHT * (num_prefill - 1) / num_decode
        share = max(self._calm_share(num_decode, decode), burst)
        fitting = self.pace.tokens_in(share * decode, position)
        if fitting is None:
            return most
        self._mixed_run += 1
        if self._mixed_run > _MIXED_RUN or self.pace.unsure:
            self._mixed_run = 0
            return 0
        return min(max(fitting, _LEAST_CHUNK), most)

    def _note_calm(self, num_decode: int) -> None:
        self._calm_rows, self._calm_time = num_decode, self.pace.decode_time_of(num_decode) or 0.0

    def _calm_share(self, num_decode: int, decode: float) -> float:
        """Of a decode step's time, what prompts may add to it.

        Steps grow with what the streams have to read. A long prompt does not add to that: a
        step stays as long as it may be for the streams there were before it.
        """
        if num_decode > self._calm_rows or not self._calm_time:
            return _PREFILL_SHARE
        left = (1 + _PREFILL_SHARE) * self._calm_time / decode - 1
        return min(max(left, _LEAST_SHARE), _PREFILL_SHARE)

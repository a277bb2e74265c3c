"""What a batch is made of: decode rows, prompt tokens, or both (`--schedule`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

_DECODE_RUN = 16  # decode-first: decode batches before waiting prompts get one


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
    mixed           all decode rows, and prompts for the rest of the token budget, of which
                    a quarter is theirs however many rows decode
    """

    def __init__(
        self, name: Literal["prefill-first", "decode-first", "mixed"], max_prefill_tokens: int
    ) -> None:
        self._name = name
        self._budget = max_prefill_tokens
        self._decode_run = 0

    def quota(self, num_decode: int, *, prefill_waits: bool) -> Quota:
        """`num_decode` rows could decode; `prefill_waits` if prompts could be computed."""
        if not prefill_waits or not num_decode:
            self._decode_run = 0
            return Quota(num_decode > 0, self._budget)
        if self._name == "mixed":
            return Quota(True, max(self._budget - num_decode, self._budget // 4, 1))
        if self._name == "decode-first" and self._decode_run < _DECODE_RUN:
            self._decode_run += 1
            return Quota(True, 0)
        self._decode_run = 0
        return Quota(False, self._budget)

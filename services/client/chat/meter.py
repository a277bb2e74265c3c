"""How fast answers came: of one answer, and of all since the shell was opened."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from services.client.chat.client import Piece


@dataclass(slots=True)
class Stopwatch:
    """Times one answer. `tokens` are the server's count, or the pieces that came."""

    clock: Callable[[], float] = time.perf_counter
    started_at: float = 0.0
    first_at: float = 0.0
    last_at: float = 0.0
    pieces: int = 0
    prompt_tokens: int | None = None
    output_tokens: int | None = None

    def start(self) -> None:
        self.started_at = self.clock()

    def take(self, piece: Piece) -> None:
        if piece.text or piece.thought:
            self.last_at = self.clock()
            self.first_at = self.first_at or self.last_at
            self.pieces += 1
        if piece.prompt_tokens is not None:
            self.prompt_tokens = piece.prompt_tokens
        if piece.output_tokens is not None:
            self.output_tokens = piece.output_tokens

    @property
    def tokens(self) -> int:
        return self.pieces if self.output_tokens is None else self.output_tokens

    @property
    def ttft(self) -> float | None:
        """Seconds to the first text."""
        return self.first_at - self.started_at if self.pieces else None

    @property
    def decode_seconds(self) -> float:
        """From the first text to the last."""
        return self.last_at - self.first_at

    def __str__(self) -> str:
        if self.ttft is None:
            return "no text"
        parts = [f"TTFT {self.ttft * 1000:.0f} ms"]
        if self.tokens > 1 and self.decode_seconds > 0:
            parts.append(f"{(self.tokens - 1) / self.decode_seconds:.1f} tokens/s")
        parts.append(_count(self.tokens, "token"))
        if self.prompt_tokens is not None:
            parts.append(f"prompt {self.prompt_tokens}")
        return ", ".join(parts)


@dataclass(slots=True)
class Meter:
    """All answers so far."""

    answers: list[Stopwatch] = field(default_factory=list)

    def __str__(self) -> str:
        timed = [answer for answer in self.answers if answer.ttft is not None]
        if not timed:
            return "no answer yet"
        ttfts = [answer.ttft or 0.0 for answer in timed]
        tokens = sum(answer.tokens for answer in timed)
        seconds = sum(answer.decode_seconds for answer in timed)
        parts = [_count(len(timed), "answer"), _count(tokens, "token")]
        parts.append(f"TTFT median {statistics.median(ttfts) * 1000:.0f} ms")
        parts.append(f"slowest {max(ttfts) * 1000:.0f} ms")
        if seconds > 0:
            parts.append(f"{(tokens - len(timed)) / seconds:.1f} tokens/s")
        prompts = [one.prompt_tokens for one in timed if one.prompt_tokens is not None]
        if prompts:  # a stopped answer has told none
            some = f" in {len(prompts)} of them" if len(prompts) < len(timed) else ""
            parts.append(f"prompts {_count(sum(prompts), 'token')}{some}")
        return ", ".join(parts)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"

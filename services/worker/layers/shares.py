"""How a model is divided over tensor-parallel ranks; who computes with the parts is not known."""

from __future__ import annotations

from dataclasses import dataclass

from services.common.errors import StartupError


@dataclass(frozen=True, slots=True)
class Shares:
    """What falls to one rank among `size`."""

    rank: int = 0
    size: int = 1

    def share(self, total: int, what: str) -> int:
        """A rank's share of `total` things. Raises StartupError if they do not divide."""
        if total % self.size:
            raise StartupError(
                f"the model has {total} {what}, which cannot be divided over --tp {self.size}"
            )
        return total // self.size

    def span(self, total: int, what: str) -> tuple[int, int]:
        """(start, length) of a rank's share."""
        length = self.share(total, what)
        return self.rank * length, length

    def kv_span(self, num_kv_heads: int) -> tuple[int, int]:
        """(first head, heads) of the KV heads a rank holds.

        With fewer heads than ranks each head is held by several neighbouring ranks.
        """
        if num_kv_heads >= self.size:
            return self.span(num_kv_heads, "KV heads")
        if self.size % num_kv_heads:
            raise StartupError(
                f"the model has {num_kv_heads} KV heads, which cannot be replicated evenly over"
                f" --tp {self.size}"
            )
        return self.rank * num_kv_heads // self.size, 1

    def padded_rows(self, vocab_size: int) -> int:
        """Rows of the embedding and of the LM head that each rank holds; the last has padding."""
        return -(-vocab_size // self.size)

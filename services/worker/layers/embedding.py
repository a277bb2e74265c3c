"""The token embedding and the LM head, cut over ranks along the vocabulary.

The last rank's part is padded with zero rows where the vocabulary does not divide.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from services.worker.layers.linear import Linear
from services.worker.layers.loadable import Loadable, Shard, empty_parameter
from services.worker.layers.parallel import Parallel


class VocabSpan:
    """The ids a rank holds: `start` onwards, `length` real ones in `padded` rows."""

    def __init__(self, vocab_size: int, parallel: Parallel) -> None:
        self.padded = parallel.padded_rows(vocab_size)
        self.start = min(parallel.rank * self.padded, vocab_size)
        self.length = min(self.padded, vocab_size - self.start)


class VocabEmbedding(Loadable):
    """Token ids to vectors."""

    def __init__(
        self, name: str, vocab_size: int, hidden_size: int, dtype: torch.dtype, parallel: Parallel
    ) -> None:
        super().__init__()
        self._name = name
        self._shape = (vocab_size, hidden_size)
        self._span = VocabSpan(vocab_size, parallel)
        self._parallel = parallel
        self.weight = empty_parameter(self._span.padded, hidden_size, dtype=dtype)

    def shards(self) -> Iterator[Shard]:
        yield Shard(
            f"{self._name}.weight", self._shape, "weight", self._span.start, self._span.length
        )

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """ids: [tokens] -> [tokens, hidden]"""
        if self._parallel.size == 1:
            return F.embedding(ids, self.weight)
        local = ids - self._span.start
        outside = (local < 0) | (local >= self._span.length)
        vectors = F.embedding(local.masked_fill(outside, 0), self.weight)
        return self._parallel.all_reduce(vectors.masked_fill_(outside[:, None], 0))


class LmHead(Linear):
    """Vectors to logits; shares the embedding's weight where the model ties them."""

    def __init__(
        self, name: str, vocab_size: int, hidden_size: int, dtype: torch.dtype, parallel: Parallel
    ) -> None:
        span = VocabSpan(vocab_size, parallel)
        super().__init__(hidden_size, span.padded, bias=False, dtype=dtype)
        self._name = name
        self._span = span
        self._shape = (vocab_size, hidden_size)
        self._parallel = parallel
        self._tied: VocabEmbedding | None = None

    def tie(self, embedding: VocabEmbedding) -> None:
        """Takes the embedding's weight for its own; the embedding must be prepared first."""
        # Past nn.Module, so that the embedding is not registered as a submodule twice.
        object.__setattr__(self, "_tied", embedding)

    def shards(self) -> Iterator[Shard]:
        if self._tied is None:
            yield Shard(
                f"{self._name}.weight", self._shape, "weight", self._span.start, self._span.length
            )

    def prepare(self) -> None:
        if self._tied is not None:
            self.weight = self._tied.weight
        super().prepare()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [rows, hidden] -> this rank's logits, [rows, padded part of the vocabulary]"""
        return super().forward(x)

    def logits(self, x: torch.Tensor) -> torch.Tensor | None:
        """x: [rows, hidden] -> [rows, vocab] on rank 0, None on the others."""
        whole = self._parallel.gather_columns(self.forward(x))
        return None if whole is None else whole[:, : self._shape[0]]

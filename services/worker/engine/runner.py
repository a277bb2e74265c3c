"""One forward pass of a batch on one rank: ids from the token pool, the model, the logits.

It samples nothing: rank 0's sampler does, and `store` writes what it chose.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from services.worker.attention.base import AttentionBackend, AttentionMetadata
from services.worker.core import Batch
from services.worker.engine.graphs import DecodeGraphs
from services.worker.layers.transfer import to_device
from services.worker.models.decoder import Decoder

Indices = npt.NDArray[np.int64]
Logits = Callable[[Indices], torch.Tensor | None]


class ModelRunner:
    """Owns the token pool: the last token sampled for each slot, [slots]."""

    def __init__(
        self,
        model: Decoder,
        backend: AttentionBackend,
        num_slots: int,
        device: torch.device,
        graphs: DecodeGraphs | None = None,
    ) -> None:
        self._model = model
        self._backend = backend
        self._device = device
        self._graphs = graphs
        self._token_pool = torch.zeros(num_slots, dtype=torch.int64, device=device)

    def forward(self, batch: Batch) -> Logits:
        """Computes a batch; returns what computes the logits of its tokens at some indices.

        Those are [len(index), vocab], float32, on rank 0 and None on the others; all ranks
        must ask for the same ones in the same order, before the next batch.
        """
        metadata = AttentionMetadata.of(batch)
        if self._graphs is not None and self._graphs.fits(batch):
            whole = self._graphs.run(batch, self._input_ids(batch, metadata))
            return lambda index: None if whole is None else self._rows(whole, index).float()
        plan = self._backend.plan(metadata)
        positions = to_device(metadata.positions, self._device)
        hidden: torch.Tensor = self._model(self._input_ids(batch, metadata), positions, plan)

        def logits(index: Indices) -> torch.Tensor | None:
            if not len(index):
                return hidden.new_empty(0, 0)
            rows = self._model.logits(self._rows(hidden, index))
            return None if rows is None else rows.float()

        return logits

    def store(self, batch: Batch, tokens: torch.Tensor) -> None:
        """Puts the sampled tokens of the rows that sample into the token pool; tokens: [rows]"""
        slots = to_device(batch.slots[batch.sample].astype(np.int64), self._device)
        self._token_pool.index_copy_(0, slots, tokens)

    def empty_tokens(self, count: int) -> torch.Tensor:
        """Room for the tokens that rank 0 sampled, [count]"""
        return self._token_pool.new_empty(count)

    def _rows(self, x: torch.Tensor, index: Indices) -> torch.Tensor:
        return x.index_select(0, to_device(index, self._device))

    def _input_ids(self, batch: Batch, metadata: AttentionMetadata) -> torch.Tensor:
        ids = to_device(batch.input_ids.astype(np.int64), self._device)
        unknown = np.flatnonzero(batch.input_ids < 0)
        if len(unknown):
            slots = batch.slots[metadata.token_rows[unknown]].astype(np.int64)
            places = to_device(unknown, self._device)
            ids.index_copy_(0, places, self._token_pool[to_device(slots, self._device)])
        return ids


def last_tokens(batch: Batch) -> Indices:
    """The index of each sampling row's last token in the batch, [rows that sample]"""
    ends = np.cumsum(batch.query_lens, dtype=np.int64) - 1
    return ends[batch.sample]

"""A batch as bytes, for the ranks that follow: a header, then the arrays as they are.

The admissions stay on rank 0, which alone samples.
"""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.worker.core import Batch, IntArray
from services.worker.engine.runner import Indices

# step, rows, tokens, pages a row, logit rows, log level
_HEADER = struct.Struct("<qIIIII")


@dataclass(frozen=True, slots=True)
class Announcement:
    """What rank 0 tells of a step before it runs it."""

    batch: Batch
    logit_index: Indices
    log_level: int  # of rank 0, as `logging` counts; the others follow it

    def to_bytes(self) -> bytes:
        """The message; native to little-endian machines, which a group's are."""
        batch = self.batch
        width = batch.page_tables.shape[1]
        header = _HEADER.pack(
            batch.step,
            batch.num_rows,
            batch.num_tokens,
            width,
            len(self.logit_index),
            self.log_level,
        )
        arrays: tuple[npt.NDArray[np.generic], ...] = (
            batch.slots,
            batch.start,
            batch.query_lens,
            batch.input_ids,
            batch.page_tables,
            batch.sample,
            batch.output_positions,
            self.logit_index,
        )
        return header + b"".join(np.asarray(array, np.int32).tobytes() for array in arrays)


def receive(connection: socket.socket) -> Announcement | None:
    """Blocks for the next announcement; None when rank 0 has closed the connection."""
    first = _read(connection, _HEADER.size)
    if first is None:
        return None
    step, rows, tokens, width, logit_rows, log_level = _HEADER.unpack(first)
    sizes = (rows, rows, rows, tokens, rows * width, rows, rows, logit_rows)
    body = _read(connection, 4 * sum(sizes))
    if body is None:
        return None
    values = np.frombuffer(body, dtype=np.int32)
    parts: list[IntArray] = np.split(values, np.cumsum(sizes)[:-1])
    slots, start, query_lens, input_ids, pages, sample, positions, logit_index = parts
    batch = Batch(
        step=step,
        slots=slots,
        start=start,
        query_lens=query_lens,
        input_ids=input_ids,
        page_tables=pages.reshape(rows, width),
        sample=sample.astype(np.bool_),
        output_positions=positions,
    )
    return Announcement(batch, logit_index.astype(np.int64), log_level)


def _read(connection: socket.socket, size: int) -> bytearray | None:
    """Exactly `size` bytes; None if the other side closed first."""
    data = bytearray(size)
    view = memoryview(data)
    while view:
        try:
            count = connection.recv_into(view)
        except ConnectionResetError:
            return None
        if count == 0:
            return None
        view = view[count:]
    return data

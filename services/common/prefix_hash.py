"""How a prefix of token ids is named in routing digests: one hash for each block of 64 ids.

The hash of a block covers all ids before it and the cache salt, so that equal hashes mean
equal prefixes. Workers announce the hashes they hold, whatever their page size, and
gateways look for those of a prompt.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

BLOCK_TOKENS = 64


def prefix_hashes(token_ids: Sequence[int] | npt.NDArray[np.int32], salt: str = "") -> list[int]:
    """The hashes of the whole blocks of a prompt, shortest prefix first (64 bits each)."""
    return extend_hashes(salt_hash(salt), token_ids)


def salt_hash(salt: str) -> int:
    """What stands before the first block."""
    return _digest(salt.encode("utf-8", "surrogatepass"))


def extend_hashes(parent: int, token_ids: Sequence[int] | npt.NDArray[np.int32]) -> list[int]:
    """The hashes of the whole blocks that follow a prefix whose last block hashed to `parent`."""
    ids = np.asarray(token_ids, dtype="<i4")
    hashes: list[int] = []
    for start in range(0, len(ids) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        block = ids[start : start + BLOCK_TOKENS].tobytes()
        parent = _digest(parent.to_bytes(8, "little") + block)
        hashes.append(parent)
    return hashes


def _digest(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")

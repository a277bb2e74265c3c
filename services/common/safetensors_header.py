"""The header of a safetensors file: names, types and shapes of its tensors, without torch.

The format: eight bytes with the header's length, little-endian, the header as a JSON object,
and the tensors' bytes, of which the header tells the places.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from services.common.errors import StartupError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_MAX_HEADER = 100 << 20


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as the file has it."""

    dtype: str  # of the format: F32, BF16, ...
    shape: tuple[int, ...]
    num_bytes: int


def weight_files(directory: Path) -> list[Path]:
    """The files of a model's weights, some of which may be missing; empty if there are none.

    Raises StartupError if the index cannot be read.
    """
    index = directory / INDEX
    if index.exists():
        try:
            names = set(json.loads(index.read_text("utf-8"))["weight_map"].values())
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise StartupError(f"cannot read {index}: {error}") from error
        return [directory / name for name in sorted(names)]
    return [directory / SINGLE] if (directory / SINGLE).exists() else []


def read_header(path: Path) -> dict[str, StoredTensor]:
    """A file's tensors by name.

    Raises StartupError if it cannot be read or is shorter than its header says.
    """
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > _MAX_HEADER:
                raise StartupError(f"{path} is not a safetensors file")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        tensors = {
            name: StoredTensor(entry["dtype"], tuple(entry["shape"]), end - start)
            for name, entry in header.items()
            for start, end in (entry["data_offsets"],)
        }
        size = path.stat().st_size
    except OSError as error:
        raise StartupError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StartupError(f"{path} is not a safetensors file") from error
    whole = 8 + length + sum(tensor.num_bytes for tensor in tensors.values())
    if size < whole:
        raise StartupError(f"{path} is cut short: {size} of {whole} bytes; fetch it again")
    return tensors

"""The header of a GGUF file: metadata values and tensor shapes, nothing else.

`gguf.GGUFReader` makes an array of every string of the vocabulary, which takes
seconds; this walks over arrays and decodes one only when it is asked for. It knows
the container format (ggml's docs/gguf.md, versions 2 and 3, little-endian) and no
meaning of any key. Tensor data is left to the `gguf` package.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.common.errors import StartupError

_MAGIC = b"GGUF"
_STRING, _ARRAY = 8, 9
_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_UINT64 = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class _Array:
    """Where an array lies in the file; its values are decoded on demand."""

    item_type: int
    count: int
    offset: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """Metadata and tensor shapes of one file, held in memory as the header's bytes."""

    path: Path
    tensor_shapes: dict[str, tuple[int, ...]]  # innermost axis first, as GGUF has them
    tensor_places: dict[str, tuple[int, int]]  # ggml's number of the type, offset in the file
    _values: dict[str, Any]
    _bytes: bytes

    def get(self, key: str, default: Any = None) -> Any:
        """A scalar or string; `default` if absent. Arrays are read with `array`."""
        value = self._values.get(key, default)
        return default if isinstance(value, _Array) else value

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def array(self, key: str) -> Sequence[Any]:
        """An array's values; empty if absent.

        Raises StartupError on text that is not UTF-8.
        """
        value = self._values.get(key)
        if not isinstance(value, _Array):
            return ()
        if value.item_type != _STRING:
            form = f"<{value.count}{_SCALARS[value.item_type]}"
            return struct.unpack_from(form, self._bytes, value.offset)
        try:
            return _strings(self._bytes, value.offset, value.count)
        except UnicodeDecodeError as error:
            raise StartupError(f"{self.path}: {key} holds text that is not UTF-8") from error


def read_header(path: Path) -> GgufHeader:
    """Reads a file's header, in milliseconds.

    Raises StartupError if the file cannot be read or is not GGUF.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _parse(path, data)
    except OSError as error:
        raise StartupError(f"cannot read {path}: {error.strerror}") from error
    except (struct.error, KeyError, UnicodeDecodeError, ValueError) as error:
        raise StartupError(f"{path} is not a readable GGUF file") from error


def check_whole(path: Path) -> None:
    """Raises StartupError if the file is not GGUF, or ends before its last tensor does."""
    header = read_header(path)
    size = path.stat().st_size
    end = max((_tensor_end(header, name) for name in header.tensor_places), default=0)
    if size < end:
        raise StartupError(
            f"{path} is cut short: {size} bytes, and its tensors end at {end}; fetch it again"
        )


def _tensor_end(header: GgufHeader, name: str) -> int:
    """Where a tensor's data ends in the file; of a type that `gguf` does not know, where it
    begins."""
    from gguf import GGML_QUANT_SIZES  # slow to import, and of all that is here this alone needs it

    kind, begin = header.tensor_places[name]
    block: int
    block_bytes: int
    block, block_bytes = GGML_QUANT_SIZES.get(kind, (1, 0))
    count = math.prod(header.tensor_shapes[name])
    return begin + count // block * block_bytes


def _parse(path: Path, data: mmap.mmap) -> GgufHeader:
    magic, version, num_tensors, num_values = struct.unpack_from("<4sIQQ", data, 0)
    if magic != _MAGIC:
        raise StartupError(f"{path} is not a GGUF file")
    if version not in (2, 3):
        raise StartupError(f"{path} has GGUF version {version}; 2 and 3 are supported")
    offset = 24
    values: dict[str, Any] = {}
    for _ in range(num_values):
        key, offset = _string(data, offset)
        (kind,) = struct.unpack_from("<I", data, offset)
        values[key], offset = _value(data, offset + 4, kind)
    shapes: dict[str, tuple[int, ...]] = {}
    places: dict[str, tuple[int, int]] = {}
    for _ in range(num_tensors):
        name, offset = _string(data, offset)
        (num_axes,) = struct.unpack_from("<I", data, offset)
        shapes[name] = struct.unpack_from(f"<{num_axes}Q", data, offset + 4)
        offset += 4 + 8 * num_axes
        places[name] = struct.unpack_from("<IQ", data, offset)
        offset += 12
    alignment = values.get("general.alignment", 32)
    begin = -(-offset // alignment) * alignment  # of the tensors' data
    places = {name: (kind, begin + place) for name, (kind, place) in places.items()}
    return GgufHeader(path, shapes, places, values, data[:offset])


def _value(data: mmap.mmap, offset: int, kind: int) -> tuple[Any, int]:
    if kind == _STRING:
        return _string(data, offset)
    if kind != _ARRAY:
        form = struct.Struct("<" + _SCALARS[kind])
        return form.unpack_from(data, offset)[0], offset + form.size
    item_type, count = struct.unpack_from("<IQ", data, offset)
    offset += 12
    if item_type != _STRING:
        size = struct.calcsize("<" + _SCALARS[item_type])
        return _Array(item_type, count, offset), offset + count * size
    end = offset
    length_at = _UINT64.unpack_from
    for _ in range(count):
        end += 8 + length_at(data, end)[0]
    return _Array(item_type, count, offset), end


def _string(data: mmap.mmap, offset: int) -> tuple[str, int]:
    (length,) = _UINT64.unpack_from(data, offset)
    end = offset + 8 + length
    if end > len(data):
        raise ValueError("string past the end of the file")
    return data[offset + 8 : end].decode(), end


def _strings(data: bytes, offset: int, count: int) -> list[str]:
    length_at = _UINT64.unpack_from
    strings = []
    for _ in range(count):
        start = offset + 8
        offset = start + length_at(data, offset)[0]
        strings.append(data[start:offset].decode())
    return strings

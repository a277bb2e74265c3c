"""Weights from a directory of safetensors files, one or sharded by an index."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from services.common.errors import StartupError
from services.common.safetensors_header import INDEX, SINGLE


class SafetensorsSource:
    """Files are mapped when first needed, and only the pages of what is read are touched.

    Raises StartupError if a file is missing or broken, naming it.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._open: dict[str, Any] = {}
        self._files = self._weight_map()

    def names(self) -> frozenset[str]:
        return frozenset(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def read(self, name: str, axis: int, start: int, length: int) -> torch.Tensor:
        index = (slice(None),) * axis + (slice(start, start + length),)
        tensor: torch.Tensor = self._slice(name)[index]
        return tensor

    def identity(self) -> bytes:
        digest = hashlib.sha256()
        for name in sorted(set(self._files.values())):
            path = self._directory / name
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                digest.update(f"{name} {path.stat().st_size} ".encode())
                digest.update(file.read(length))
                # Headers of fine-tuned siblings are alike; the first weights are not.
                digest.update(file.read(4096))
        return digest.digest()

    def _weight_map(self) -> dict[str, str]:
        """Tensor name -> file name."""
        index = self._directory / INDEX
        if index.exists():
            weight_map: dict[str, str] = json.loads(index.read_text("utf-8"))["weight_map"]
            missing = sorted(
                name for name in set(weight_map.values()) if not (self._directory / name).exists()
            )
            if missing:
                raise StartupError(
                    f"{index} names {', '.join(missing)}, missing from {self._directory}"
                )
            return weight_map
        if not (self._directory / SINGLE).exists():
            raise StartupError(f"{self._directory} holds neither {SINGLE} nor {INDEX}")
        return dict.fromkeys(self._file(SINGLE).keys(), SINGLE)

    def _slice(self, name: str) -> Any:
        file = self._file(self._files[name])
        try:
            return file.get_slice(name)
        except SafetensorError as error:
            raise StartupError(f"{self._directory / self._files[name]}: {error}") from error

    def _file(self, name: str) -> Any:
        if name not in self._open:
            try:
                self._open[name] = safe_open(self._directory / name, framework="pt")
            except (OSError, SafetensorError) as error:
                raise StartupError(f"cannot read {self._directory / name}: {error}") from error
        return self._open[name]

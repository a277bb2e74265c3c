"""What each rank reads of a checkpoint."""

from __future__ import annotations

import math
from collections import defaultdict
from pathlib import Path

import pytest
import torch

from services.common.model_files import resolve
from services.worker.engine.loading import open_source, read_model_config
from services.worker.layers.parallel import Parallel
from services.worker.models.decoder import Decoder
from services.worker.weights.loader import load_weights
from services.worker.weights.source import WeightSource
from tests.worker.models.checkpoints import save_tiny

CPU = torch.device("cpu")
RANKS = 2


class Recorder:
    """A `WeightSource` that counts the elements it gives out, by tensor."""

    def __init__(self, source: WeightSource) -> None:
        self._source = source
        self.read_of: dict[str, int] = defaultdict(int)

    def names(self) -> frozenset[str]:
        return self._source.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._source.shape(name)

    def read(self, name: str, axis: int, start: int, length: int) -> torch.Tensor:
        piece = self._source.read(name, axis, start, length)
        self.read_of[name] += piece.numel()
        return piece

    def identity(self) -> bytes:
        return self._source.identity()


def read_by(model: Path, rank: int) -> tuple[Recorder, int]:
    """What a rank reads, and the elements of its weights."""
    files = resolve(str(model))
    shape = read_model_config(files)
    with torch.device("meta"):
        decoder = Decoder(shape, torch.float32, CPU, Parallel(rank, RANKS))
    size = sum(parameter.numel() for parameter in decoder.parameters())
    source = Recorder(open_source(files, shape))
    with torch.inference_mode():
        load_weights(decoder, source, CPU, lambda *_: None)
    return source, size


@pytest.mark.parametrize("family", ["llama-bias", "qwen3", "qwen3_moe"])
def test_a_rank_reads_its_part_and_no_more(tmp_path: Path, family: str) -> None:
    save_tiny(tmp_path, family, shard="60KB")
    reads = [read_by(tmp_path, rank) for rank in range(RANKS)]
    first = reads[0][0]
    # Held whole by each: norms, biases of what is summed, and the router.
    whole = {
        name
        for name in first.names()
        if "norm" in name
        or name.endswith(("o_proj.bias", "down_proj.bias"))
        or name.endswith("mlp.gate.weight")
    }
    for name in first.names():
        total = math.prod(first.shape(name))
        counts = [source.read_of[name] for source, _ in reads]
        if name in whole:
            assert counts == [total] * RANKS
        else:
            assert sum(counts) == total
            assert max(counts) <= (total / RANKS) * 1.02  # the vocabulary does not divide evenly
    for source, size in reads:
        padding = 2 * 64  # a row of the embedding and of the head, on the last rank
        assert size - padding <= sum(source.read_of.values()) <= size

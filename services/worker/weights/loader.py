"""Fills a model from a checkpoint, tensor by tensor, each rank its own part.

It knows layers only as `Loadable`, and checkpoints only as `WeightSource`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn

from services.common.errors import StartupError
from services.worker.layers.loadable import Loadable, Shard
from services.worker.weights.source import WeightSource

# Written by some converters, and computed here.
_IGNORED_SUFFIXES = (".rotary_emb.inv_freq",)


def load_weights(
    model: nn.Module,
    source: WeightSource,
    device: torch.device,
    progress: Callable[[str, int, int], None],
    *,
    ignored: Iterable[str] = (),
) -> None:
    """Materialises and fills the layers of a model that was built on the meta device.

    `ignored` are tensors that may be in the checkpoint and are not read. Raises
    StartupError if tensors are missing, left over, or of another shape.
    """
    layers = [module for module in model.modules() if isinstance(module, Loadable)]
    plans = [(layer, list(layer.shards())) for layer in layers]
    shards = [shard for _, shards in plans for shard in shards]
    _check_names(shards, source, frozenset(ignored))
    done = 0
    for layer, wanted in plans:
        # Layers are packed as they come, so that a weight is never held twice for long.
        layer.to_empty(device=device, recurse=False)
        for shard in wanted:
            _fill(layer, shard, source)
            done += 1
            progress("loading weights", done, len(shards))
        layer.prepare()


def _fill(layer: Loadable, shard: Shard, source: WeightSource) -> None:
    shape = source.shape(shard.source)
    if shape != shard.shape:
        raise StartupError(
            f"tensor {shard.source} has shape {list(shape)}, but the model's configuration makes"
            f" it {list(shard.shape)}"
        )
    parameter = layer.get_parameter(shard.parameter)
    piece = source.read(shard.source, shard.axis, shard.start, shard.length)
    rows = piece.shape[0]
    parameter[shard.offset : shard.offset + rows].copy_(piece)
    if shard.axis == 0 and shard.offset == 0 and rows < parameter.shape[0]:
        # Padding of the last rank's vocabulary; a fused layer's other parts follow.
        parameter[rows:].zero_()


def _check_names(shards: Sequence[Shard], source: WeightSource, ignored: frozenset[str]) -> None:
    names, wanted = source.names(), {shard.source for shard in shards}
    if missing := sorted(wanted - names):
        raise StartupError(f"the checkpoint lacks {_listed(missing)}")
    extra = sorted(
        name for name in names - wanted - ignored if not name.endswith(_IGNORED_SUFFIXES)
    )
    if extra:
        raise StartupError(
            f"the checkpoint has {_listed(extra)}, which a model of its configuration does not use"
        )


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more tensors"

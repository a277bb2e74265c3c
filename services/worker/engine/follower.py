"""A tensor-parallel rank other than 0: computes the batches it is told of, decides nothing."""

from __future__ import annotations

import logging

import torch

from services.worker.config import WorkerConfig
from services.worker.engine import batch_wire
from services.worker.engine.group import connect_to_leader, join_group
from services.worker.engine.loading import load_model
from services.worker.engine.runner import ModelRunner
from services.worker.engine.torch_engine import set_threads
from services.worker.layers.parallel import Parallel

log = logging.getLogger(__name__)


def run(config: WorkerConfig) -> None:
    """Follows rank 0 until it closes the connection.

    Raises StartupError if the model cannot be served as configured; rank 0 says the same.
    """
    set_threads(config)
    with join_group(config.tp) as parallel:
        loaded = load_model(config, parallel, _no_progress)
        with connect_to_leader(parallel) as connection:
            log.info("rank %d follows", parallel.rank)
            while (announcement := batch_wire.receive(connection)) is not None:
                _follow(loaded.runner, parallel, announcement)


@torch.inference_mode()
def _follow(runner: ModelRunner, parallel: Parallel, announcement: batch_wire.Announcement) -> None:
    batch = announcement.batch
    runner.forward(batch, announcement.logit_index)
    if batch.sample.any():
        tokens = runner.empty_tokens(int(batch.sample.sum()))
        runner.store(batch, parallel.broadcast(tokens))


def _no_progress(phase: str, done: int, total: int) -> None:
    """Rank 0 reports for all."""

"""A tensor-parallel rank other than 0: computes the batches it is told of, decides nothing."""

from __future__ import annotations

import logging

from services.common import logs
from services.worker.config import WorkerConfig
from services.worker.engine import batch_wire
from services.worker.engine.devices import choose_device, on_stream
from services.worker.engine.group import connect_to_leader, join_group
from services.worker.engine.loading import load_model
from services.worker.engine.steps import follow
from services.worker.engine.torch_engine import set_threads

log = logging.getLogger(__name__)


def run(config: WorkerConfig) -> None:
    """Follows rank 0 until it closes the connection.

    Raises StartupError if the model cannot be served as configured; rank 0 says the same.
    """
    logs.adopt("torch")
    set_threads(config)
    device = choose_device(config)
    with (
        on_stream(device),
        join_group(config.tp, device=device, ordered=config.deterministic) as parallel,
    ):
        loaded = load_model(config, parallel, _no_progress, device)
        with connect_to_leader(parallel) as connection:
            log.info("rank %d follows", parallel.rank)
            while (announcement := batch_wire.receive(connection)) is not None:
                logs.follow_level(announcement.log_level)
                follow(loaded.runner, parallel, announcement.batch, announcement.logit_index)


def _no_progress(phase: str, done: int, total: int) -> None:
    """Rank 0 reports for all."""

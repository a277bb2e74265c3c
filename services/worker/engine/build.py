"""Which engine a worker runs."""

from __future__ import annotations

from services.common.model_files import Progress
from services.worker.config import WorkerConfig
from services.worker.core import Engine
from services.worker.engine import fake


def build(config: WorkerConfig, progress: Progress) -> Engine:
    """Builds and loads the engine that the configuration names.

    Raises StartupError if the model cannot be served; torch is imported only if used.
    """
    if config.engine == "fake":
        return fake.load(config, progress)
    from services.worker.engine.torch_engine import load

    return load(config, progress)

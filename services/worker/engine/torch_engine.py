"""The engine that runs the model, as rank 0 sees it: steps in order on an engine thread.

With tensor parallelism, each step is first told to the other ranks, which follow.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import ExitStack

import numpy as np
import torch

from services.common import logs
from services.worker.config import WorkerConfig, num_threads
from services.worker.core import Batch, Engine, EngineInfo, PendingStep
from services.worker.engine.cuda_engine import CudaEngine
from services.worker.engine.devices import choose_device, on_stream
from services.worker.engine.group import Leader, join_group
from services.worker.engine.loading import LoadedModel, load_model
from services.worker.engine.sampler import Sampler
from services.worker.engine.steps import StepRunner
from services.worker.engine.thread import EngineThread
from services.worker.layers.parallel import Parallel
from services.worker.native.kernels import Kernels

log = logging.getLogger(__name__)


def load(config: WorkerConfig, progress: Callable[[str, int, int], None]) -> Engine:
    """Loads the model and makes a warm-up step. With --tp, blocks until every rank has joined.

    Raises StartupError if the model cannot be served as configured.
    """
    logs.adopt("torch")
    thread = EngineThread("torch-engine")
    try:
        return thread.call(lambda: _load_on(thread, config, progress))
    except BaseException:
        thread.close()
        raise


def _load_on(
    thread: EngineThread, config: WorkerConfig, progress: Callable[[str, int, int], None]
) -> Engine:
    """Loads, on the engine thread."""
    device = choose_device(config)
    with ExitStack() as resources, on_stream(device) as stream:
        loaded, steps, leader = _load(config, progress, device, resources)
        if stream is None:
            return TorchEngine(loaded.info, steps, thread, leader, resources.pop_all())
        return CudaEngine(loaded.info, steps.launch, thread, stream, leader, resources.pop_all())


def _load(
    config: WorkerConfig,
    progress: Callable[[str, int, int], None],
    device: torch.device,
    resources: ExitStack,
) -> tuple[LoadedModel, StepRunner, Leader]:
    """Loads onto a device; what is to be closed in the end goes to `resources`."""
    set_threads(config)
    parallel, leader = Parallel(), Leader([])
    if config.tp > 1:
        parallel = resources.enter_context(
            join_group(config.tp, device=device, ordered=config.deterministic)
        )
    loaded = load_model(config, parallel, progress, device)
    if config.tp > 1:
        leader = resources.enter_context(Leader.accept(parallel))
    sampler = Sampler(
        config.max_running_requests,
        loaded.info.vocab_size,
        device=device,
        alone=config.deterministic,
        kernels=Kernels.load() if device.type == "cpu" else None,
    )
    announce = leader.announce if config.tp > 1 else None
    steps = StepRunner(loaded.runner, sampler, parallel, announce)
    progress("warming up", 0, 1)
    started = time.perf_counter()
    steps.launch(_warm_up_batch(loaded.info)).to_host()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    log.info("first step took %.0f ms", (time.perf_counter() - started) * 1000)
    progress("warming up", 1, 1)
    return loaded, steps, leader


class TorchEngine:
    """`services.worker.core.Engine` on this machine's processor."""

    def __init__(
        self,
        info: EngineInfo,
        steps: StepRunner,
        thread: EngineThread,
        leader: Leader,
        resources: ExitStack,
    ) -> None:
        self._info = info
        self._leader = leader
        self._steps = steps
        self._thread = thread
        self._resources = resources

    @property
    def info(self) -> EngineInfo:
        return self._info

    def launch(self, batch: Batch) -> PendingStep:
        return self._thread.launch(self._steps.step, batch)

    def check(self) -> None:
        self._leader.check()

    def close(self) -> None:
        """Waits for launched steps, then lets the other ranks go."""
        self._thread.close()
        self._resources.close()


def set_threads(config: WorkerConfig) -> None:
    """Gives this rank its share of the cores."""
    torch.set_num_threads(num_threads(config))


def _warm_up_batch(info: EngineInfo) -> Batch:
    """One decode row on the dummy page, so that it leaves nothing behind that is read."""
    return Batch(
        step=0,
        slots=np.zeros(1, dtype=np.int32),
        start=np.zeros(1, dtype=np.int32),
        query_lens=np.ones(1, dtype=np.int32),
        input_ids=np.zeros(1, dtype=np.int32),
        page_tables=np.full((1, 1), info.num_pages, dtype=np.int32),
        sample=np.ones(1, dtype=np.bool_),
        output_positions=np.zeros(1, dtype=np.int32),
    )

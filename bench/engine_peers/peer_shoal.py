"""Shoal's own engine and scheduler, as a peer. Arguments: model, threads, quantization."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from protocol import answer

from bench.engine_load import submission
from services.worker.config import WorkerConfig
from services.worker.engine import torch_engine
from services.worker.scheduler.request import Commands
from services.worker.scheduler.scheduler import Scheduler

model, threads, quantization = sys.argv[1:4]
config = WorkerConfig(
    model=model,
    quantization=quantization,  # type: ignore[arg-type]
    num_pages=2000,
    max_running_requests=64,
    num_threads=int(threads),
)
engine = torch_engine.load(config, lambda *_: None)


def generate(prompts: Sequence[Sequence[int]], max_new: int) -> list[list[int]]:
    """Everything at once, without the prefix cache."""
    scheduler = Scheduler(engine, max_running_requests=64, cache="none")
    outputs: list[list[int]] = [[] for _ in prompts]
    submits = [submission(n, prompt, max_new) for n, prompt in enumerate(prompts)]
    commands = Commands(submits)
    while True:
        for handle, token in scheduler.step(commands, 0.0).tokens:
            outputs[handle].append(token)
        if scheduler.idle:
            return outputs
        commands = Commands()


answer(generate)

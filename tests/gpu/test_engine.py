"""The engine on a GPU: graphs, overlap, aborts, preemption and two ranks, on random weights."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bench.gpu_checks import Generated, compare, generate
from bench.gpu_engine import SMALL, random_engine
from services.worker.config import WorkerConfig
from services.worker.core import SamplingParams
from services.worker.scheduler.request import Commands, Submission
from services.worker.scheduler.scheduler import Scheduler
from tests.worker.engine import tp_rank
from tests.worker.models.checkpoints import save_tiny

ROOT = Path(__file__).parents[2]


def prompts(count: int, longest: int = 300) -> list[list[int]]:
    rng = np.random.default_rng(11)
    return [rng.integers(3, 30000, int(n)).tolist() for n in rng.integers(2, longest, count)]


def run(count: int = 8, *, overlap: bool = True, **options: Any) -> Generated:
    values = {"num_pages": 2000, "max_running_requests": 16, **options}
    with random_engine(SMALL, lambda *_: None, **values) as engine:
        return generate(engine, prompts(count), 48, overlap=overlap)


@pytest.fixture(scope="module")
def plain() -> Generated:
    """What the rest is compared with: every kernel launched anew, one step after the other."""
    return run(disable_cuda_graph=True, overlap=False)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"overlap": False},
        {"disable_cuda_graph": True},
        {"page_size": 1, "num_pages": 30000},
        {"max_prefill_tokens": 64},
        {"attention_backend": "torch_reference"},
        {"num_pages": 120},  # preempts
    ],
    ids=str,
)
def test_greedy_text_is_that_of_plain_steps(plain: Generated, options: dict[str, Any]) -> None:
    assert compare(plain, run(**options)).fine


def test_sampled_text_is_the_same_again() -> None:
    def sampled() -> list[list[int]]:
        with random_engine(
            SMALL, lambda *_: None, num_pages=2000, max_running_requests=16
        ) as engine:
            scheduler = Scheduler(engine, cache="none", max_running_requests=16)
            rows = [(1.0, 0, 1.0), (0.8, 40, 1.0), (0.9, 0, 0.9), (0.7, 900, 0.95)]
            submits = [
                Submission(
                    handle,
                    [5 + handle, 6, 7],
                    SamplingParams(
                        temperature=t, top_k=k, top_p=p, seed=handle, max_tokens=20, ignore_eos=True
                    ),
                )
                for handle, (t, k, p) in enumerate(rows)
            ]
            tokens: list[list[int]] = [[] for _ in rows]
            commands, clock = Commands(submits), 0.0
            while True:
                output = scheduler.step(commands, clock)
                commands, clock = Commands(), clock + 1
                for handle, token in output.tokens:
                    tokens[handle].append(token)
                if scheduler.idle:
                    return tokens

    first = sampled()
    assert [len(tokens) for tokens in first] == [20] * 4
    assert sampled() == first


def test_aborts_leave_no_page_behind() -> None:
    with random_engine(SMALL, lambda *_: None, num_pages=400, max_running_requests=16) as engine:
        scheduler = Scheduler(engine, max_running_requests=16)
        rng = np.random.default_rng(3)
        live: list[int] = []
        sampling = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
        for step in range(200):
            submits = [Submission(step, prompts(1)[0], sampling)] if step < 150 else []
            live += [submission.handle for submission in submits]
            aborts = [live.pop(int(rng.integers(len(live))))] if live and rng.random() < 0.7 else []
            scheduler.step(Commands(submits, aborts), float(step))
        scheduler.step(Commands((), live), 1000.0)
        while not scheduler.idle:
            scheduler.step(Commands(), 1001.0)
        scheduler.check_integrity()
        assert scheduler.gauges().num_locked_pages == 0


def test_two_gpus_begin_as_one_does(tmp_path: Path) -> None:
    """Sums over ranks run in another order, so only the first tokens must be the same."""
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU only")
    model, output = tmp_path / "model", tmp_path / "out"
    save_tiny(model, head_dim=64, num_attention_heads=8, num_key_value_heads=2)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", "-m", "tests.worker.engine.tp_rank"]
    done = subprocess.run(
        [*command, str(model), "2", str(output), "plain"],
        cwd=ROOT,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    together = json.loads(output.read_text())["tokens"]
    config = WorkerConfig(model=str(model), device="cuda", num_pages=32, max_running_requests=4)
    alone = tp_rank.generate(config)["tokens"]
    assert [row[0] for row in together] == [row[0] for row in alone]  # type: ignore[index]

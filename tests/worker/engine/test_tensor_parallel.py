"""Ranks under torchrun on gloo, against one rank."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from services.common.errors import StartupError
from services.worker.config import WorkerConfig
from services.worker.core import Batch
from services.worker.engine import torch_engine
from services.worker.engine.batch_wire import Announcement, receive
from services.worker.layers.parallel import Parallel
from tests.worker.engine.tp_rank import generate
from tests.worker.models.checkpoints import save_tiny


def run_ranks(model: Path, tp: int, output: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(tp), "-m", "tests.worker.engine.tp_rank"]
    return subprocess.run(
        [*command, str(model), str(tp), str(output)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "tp"), [("llama-bias", 2), ("qwen3", 4), ("qwen3_moe", 2), ("llama", 4)]
)
def test_ranks_together_equal_one_rank(tmp_path: Path, family: str, tp: int) -> None:
    """With tp 4 the two KV heads are replicated; the vocabulary of 131 never divides."""
    model = tmp_path / "model"
    tied: dict[str, Any] = {"tie_word_embeddings": True} if family == "llama" else {}
    save_tiny(model, family, **tied)
    done = run_ranks(model, tp, tmp_path / "out")
    assert done.returncode == 0, done.stderr
    alone = WorkerConfig(model=str(model), num_pages=32, max_running_requests=4, num_threads=1)
    assert json.loads((tmp_path / "out").read_text()) == generate(alone)


@pytest.mark.slow
def test_kv_heads_that_do_not_divide_are_refused_with_both_numbers(tmp_path: Path) -> None:
    model = tmp_path / "model"
    save_tiny(model, hidden_size=96, num_attention_heads=6, num_key_value_heads=3)
    done = run_ranks(model, 2, tmp_path / "out")
    assert done.returncode != 0
    errors = [path.read_text() for path in tmp_path.glob("out.error*")]
    assert errors
    assert all("3 KV heads" in error and "--tp 2" in error for error in errors)


@pytest.mark.parametrize(("kv_heads", "ranks"), [(3, 2), (2, 3), (3, 4)])
def test_kv_span_refuses_uneven_heads(kv_heads: int, ranks: int) -> None:
    with pytest.raises(StartupError, match=rf"{kv_heads} KV heads.*--tp {ranks}"):
        Parallel(0, ranks).kv_span(kv_heads)


def test_kv_span_replicates_heads_to_neighbours() -> None:
    assert [Parallel(rank, 4).kv_span(2) for rank in range(4)] == [(0, 1), (0, 1), (1, 1), (1, 1)]
    assert [Parallel(rank, 2).kv_span(4) for rank in range(2)] == [(0, 2), (2, 2)]


def test_tp_without_torchrun_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(StartupError, match="torchrun"):
        torch_engine.load(WorkerConfig(tp=2), lambda *_: None)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(StartupError, match="3 ranks"):
        torch_engine.load(WorkerConfig(tp=2), lambda *_: None)


def test_a_batch_survives_the_wire() -> None:
    def ints(*values: int) -> Any:
        return np.array(values, np.int32)

    batch = Batch(
        step=1 << 40,
        slots=ints(3, 1),
        start=ints(0, 7),
        query_lens=ints(2, 1),
        input_ids=ints(5, 6, -1),
        page_tables=np.array([[0, 9], [4, 2]], np.int32),
        sample=np.array([False, True]),
        output_positions=ints(0, 4),
    )
    sender, receiver = socket.socketpair()
    with receiver:
        with sender:
            for _ in range(2):
                sender.sendall(Announcement(batch, np.array([2])).to_bytes())
            for _ in range(2):
                got = receive(receiver)
                assert got is not None
                for name in Batch.__slots__:
                    np.testing.assert_array_equal(getattr(got.batch, name), getattr(batch, name))
                assert got.logit_index.tolist() == [2]
            sender.sendall(Announcement(batch, np.array([2])).to_bytes()[:-1])
        assert receive(receiver) is None  # cut inside a message: rank 0 is gone


def test_one_rank_needs_no_process_group() -> None:
    assert not torch.distributed.is_initialized()

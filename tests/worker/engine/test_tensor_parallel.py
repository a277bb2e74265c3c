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
from services.common.model_files import resolve
from services.worker.config import WorkerConfig
from services.worker.core import Batch
from services.worker.engine import torch_engine
from services.worker.engine.batch_wire import Announcement, receive
from services.worker.engine.group import Leader
from services.worker.engine.loading import read_model_config
from services.worker.engine.rank_check import compare_ranks
from services.worker.layers.parallel import Parallel
from services.worker.models.decoder import Decoder
from tests.worker.engine.tp_rank import generate
from tests.worker.models.checkpoints import save_tiny


def run_ranks(
    model: Path, tp: int, output: Path, *, deterministic: bool = False
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(tp), "-m", "tests.worker.engine.tp_rank"]
    return subprocess.run(
        [*command, str(model), str(tp), str(output), "deterministic" * deterministic],
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize(("family", "tp"), [("qwen3_moe", 2), ("llama-bias", 4)])
def test_ranks_together_equal_one_rank(tmp_path: Path, family: str, tp: int) -> None:
    """With tp 4 the two KV heads are replicated; the vocabulary of 131 never divides."""
    model = tmp_path / "model"
    tied: dict[str, Any] = {"tie_word_embeddings": True} if tp == 4 else {}
    save_tiny(model, family, **tied)
    deterministic = tp == 4
    done = run_ranks(model, tp, tmp_path / "out", deterministic=deterministic)
    assert done.returncode == 0, done.stderr
    config = WorkerConfig(model=str(model), num_pages=32, max_running_requests=4, num_threads=1)
    answer = json.loads((tmp_path / "out").read_text())
    assert answer["tokens"] == generate(config)["tokens"]
    if deterministic:  # the sum over the ranks does not depend on the batch either
        assert answer["in company"] == answer["alone"]


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
                sender.sendall(Announcement(batch, np.array([2]), 10).to_bytes())
            for _ in range(2):
                got = receive(receiver)
                assert got is not None
                for name in Batch.__slots__:
                    np.testing.assert_array_equal(getattr(got.batch, name), getattr(batch, name))
                assert got.logit_index.tolist() == [2]
                assert got.log_level == 10
            sender.sendall(Announcement(batch, np.array([2]), 10).to_bytes()[:-1])
        assert receive(receiver) is None  # cut inside a message: rank 0 is gone


@pytest.mark.parametrize("tp", [2, 4])
def test_the_embedded_model_s_nine_heads_refuse_two_and_four_ranks(tp: int) -> None:
    shape = read_model_config(resolve(""))
    with torch.device("meta"), pytest.raises(StartupError, match=f"9 attention heads.*--tp {tp}"):
        Decoder(shape, torch.float32, torch.device("cpu"), Parallel(0, tp))
    with torch.device("meta"):
        Decoder(shape, torch.float32, torch.device("cpu"), Parallel(0, 3))


def test_an_idle_leader_finds_that_a_rank_is_gone() -> None:
    ours, theirs = socket.socketpair()
    with ours:
        leader = Leader([ours])
        leader.check()
        theirs.close()
        with pytest.raises(ConnectionError, match="a rank of the group is gone"):
            leader.check()


class _Differing(Parallel):
    def extremes(self, value: int) -> tuple[int, int]:
        return value, value + 1


def test_ranks_that_compute_different_states_are_found() -> None:
    model, x = torch.nn.Linear(2, 2), torch.ones(1, 2)
    compare_ranks(model, Parallel())
    model(x)
    compare_ranks(model, _Differing())
    with pytest.raises(RuntimeError, match="different states"):
        model(x)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"tp": 2, "nnodes": 3, "rendezvous": "h:1"}, "cannot be shared by --nnodes 3"),
        ({"tp": 2, "nnodes": 2, "node_rank": 2, "rendezvous": "h:1"}, "--node-rank 2"),
        ({"tp": 2, "nnodes": 2}, "--rendezvous host:port"),
    ],
)
def test_hosts_that_do_not_fit_are_refused(flags: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        WorkerConfig(**flags)


def test_one_rank_needs_no_process_group() -> None:
    assert not torch.distributed.is_initialized()

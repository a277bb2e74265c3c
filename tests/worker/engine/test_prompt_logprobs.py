"""Prompt log-probabilities are computed in pieces, which change nothing of what is told."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from services.worker.config import WorkerConfig
from services.worker.core import SamplingParams, StepResult
from services.worker.engine import steps, torch_engine
from services.worker.models.decoder import Decoder
from tests.worker.engine.driver import Driver, Request
from tests.worker.models.checkpoints import VOCAB_SIZE, save_tiny


def report(model: Path) -> StepResult:
    """One step over a decode row and two prompts that want different reports."""
    config = WorkerConfig(model=str(model), num_pages=64, max_running_requests=4, num_threads=1)
    engine = torch_engine.load(config, lambda *_: None)
    driver = Driver(engine)
    rng = np.random.default_rng(3)
    plain, one, other = (
        Request(
            rng.integers(3, VOCAB_SIZE, size).tolist(),
            SamplingParams(temperature=0, prompt_logprobs=count),
        )
        for size, count in ((4, None), (9, 2), (6, 0))
    )
    driver.step([(plain, 4)])
    result = driver.step([(plain, 1), (one, 7), (other, 6)])
    engine.close()
    return result


def test_pieces_do_not_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny(tmp_path)
    whole = report(tmp_path)
    sizes: list[int] = []
    logits = Decoder.logits

    def counted(self: Decoder, hidden: torch.Tensor) -> torch.Tensor | None:
        sizes.append(len(hidden))
        return logits(self, hidden)

    monkeypatch.setattr(Decoder, "logits", counted)
    monkeypatch.setattr(steps, "_LOGIT_ROWS", 3)
    pieces = report(tmp_path)
    assert max(sizes) == 3
    assert pieces.token_ids.tolist() == whole.token_ids.tolist()
    assert {row: len(entries) for row, entries in pieces.prompt_logprobs.items()} == {1: 7, 2: 5}
    for row, entries in pieces.prompt_logprobs.items():
        for entry, other in zip(entries, whole.prompt_logprobs[row], strict=True):
            assert (entry.token_id, entry.top_token_ids) == (other.token_id, other.top_token_ids)
            assert entry.logprob == pytest.approx(other.logprob, abs=1e-5)
            assert len(entry.top_token_ids) == (2 if row == 1 else 0)

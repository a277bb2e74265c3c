"""The embedded GGUF model against transformers' reading of the same file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from services.common.errors import StartupError
from services.common.gguf_header import read_header
from services.common.model_files import resolve
from services.worker.config import WorkerConfig
from services.worker.core import Engine
from services.worker.engine import torch_engine
from services.worker.engine.loading import open_source, read_model_config
from tests.full import in_full_only
from tests.worker.engine.driver import Driver, Request

CAPITAL_OF_FRANCE = [
    *(1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411),
    *(407, 19712, 8182, 2, 198, 1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198),
    *(1, 520, 9531, 198),
]
PROMPTS = [
    CAPITAL_OF_FRANCE,
    [504, 3575, 282],
    np.random.default_rng(4).integers(3, 49152, 600).tolist(),
]


@pytest.fixture(scope="module")
def hf_model() -> Any:
    from transformers import AutoModelForCausalLM

    path = resolve("").path
    return AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    ).eval()


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    engine = torch_engine.load(WorkerConfig(num_pages=400, max_running_requests=8), ignore)
    yield engine
    engine.close()


def ignore(phase: str, done: int, total: int) -> None:
    """No progress display."""


@pytest.mark.slow
def test_tensors_equal_transformers(hf_model: Any) -> None:
    files = resolve("")
    source = open_source(files, read_model_config(files))
    expected = {k: v for k, v in hf_model.state_dict().items() if k != "lm_head.weight"}
    assert source.names() == set(expected)
    for name, tensor in expected.items():
        assert source.shape(name) == tuple(tensor.shape)
        assert torch.equal(source.read(name, 0, 0, tensor.shape[0]), tensor), name


@in_full_only  # tests/integration/test_exactness.py checks more
def test_greedy_tokens_equal_transformers(hf_model: Any, engine: Engine) -> None:
    outputs = Driver(engine).generate([Request(prompt) for prompt in PROMPTS], 12)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        ids = torch.tensor([prompt])
        expected = hf_model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=12,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert output == expected[0, len(prompt) :].tolist()


@pytest.mark.slow
def test_capital_of_france_at_full_speed_ends_with_eos(engine: Engine) -> None:
    (tokens,) = Driver(engine).generate([Request(CAPITAL_OF_FRANCE)], 8)
    assert tokens == [504, 3575, 282, 4649, 314, 7042, 30, 2]
    assert engine.info.eos_token_ids == {2}


def test_broken_gguf_is_refused(tmp_path: Any) -> None:
    header = read_header(resolve("").path)
    cut = tmp_path / "cut.gguf"
    with header.path.open("rb") as file:
        cut.write_bytes(file.read(4 << 20))
    with pytest.raises(StartupError, match="cannot dequantize tensor"):
        torch_engine.load(WorkerConfig(model=str(cut), num_pages=4), ignore)

"""Eight-bit weights in whole models: near to float32, its own fingerprint, and who is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from services.common.errors import StartupError
from services.worker.config import WorkerConfig
from services.worker.native.kernels import Kernels
from services.worker.rank_messages import info_to_proto
from tests.worker.engine.driver import Driver, Request
from tests.worker.models.checkpoints import save_tiny
from tests.worker.models.test_decoder import PROMPT, hf_logprobs, load, prompt_logprobs


@pytest.fixture(autouse=True)
def _compiler() -> None:
    if Kernels.load() is None:
        pytest.skip("no C++ compiler")


@pytest.mark.parametrize("family", ["llama-bias", "qwen3", "qwen3_moe"])
def test_int8_is_near_float32_and_layers_alone_equal_layers_together(
    tmp_path: Path, family: str
) -> None:
    model = save_tiny(tmp_path, family)
    fused = load(tmp_path, quantization="int8")
    apart = load(tmp_path, quantization="int8", attention_backend="torch_reference")
    near, expected = prompt_logprobs(fused, PROMPT), hf_logprobs(model, PROMPT)
    error = (near - expected).exp().sub(1).abs()
    assert error.median() < 0.1
    assert error.median() > 1e-4  # or the weights were not rounded at all
    # Sums in another order may round an activation the other way.
    torch.testing.assert_close(near, prompt_logprobs(apart, PROMPT), atol=0.3, rtol=0)
    for engine in (fused, apart):
        engine.close()


def test_int8_is_deterministic_in_company(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    engine = load(tmp_path, quantization="int8", deterministic=True)
    prompts = [PROMPT, PROMPT[5:19], PROMPT[::-1]]
    together = Driver(engine).generate([Request(list(prompt)) for prompt in prompts], 12)
    alone = [Driver(engine).generate([Request(list(prompt))], 12)[0] for prompt in prompts]
    engine.close()
    assert together == alone


def test_a_precision_has_its_own_fingerprint_and_is_told(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    prints = set()
    for quantization in ("none", "int8"):
        engine = load(tmp_path, quantization=quantization)
        config = WorkerConfig(quantization=quantization)
        assert info_to_proto(engine.info, config, 1).quantization == quantization
        prints.add(engine.info.fingerprint)
        engine.close()
    assert len(prints) == 2


def test_what_int8_cannot_do_is_refused(tmp_path: Path) -> None:
    save_tiny(tmp_path, intermediate_size=72)
    with pytest.raises(StartupError, match=r"groups of 32.*has 72"):
        load(tmp_path, quantization="int8")
    with pytest.raises(StartupError, match="--dtype float32"):
        load(tmp_path, quantization="int8", dtype="bfloat16")
    with pytest.raises(ValueError, match="--quantization is for --device cpu"):
        WorkerConfig(device="cuda", quantization="int8")

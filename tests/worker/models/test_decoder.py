"""Each family against transformers, float32."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from services.common.errors import StartupError
from services.worker.config import WorkerConfig
from services.worker.core import Engine, SamplingParams
from services.worker.engine import torch_engine
from services.worker.engine.loading import load_model
from services.worker.layers.parallel import Parallel
from tests.worker.engine.driver import Driver, Request
from tests.worker.models.checkpoints import FAMILIES, VOCAB_SIZE, save_tiny

PROMPT = np.random.default_rng(3).integers(3, VOCAB_SIZE, 40).tolist()


def load(path: Path, **options: Any) -> Engine:
    values = {"num_pages": 64, "max_running_requests": 8, "num_threads": 1, **options}
    return torch_engine.load(WorkerConfig(model=str(path), **values), lambda *_: None)


def hf_greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    ids = list(prompt)
    with torch.inference_mode():
        for _ in range(count):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def prompt_logprobs(engine: Engine, prompt: list[int]) -> torch.Tensor:
    """The log-probabilities of all tokens after each prompt token but the last."""
    params = SamplingParams(temperature=0, prompt_logprobs=VOCAB_SIZE)
    request = Request(list(prompt), params)
    result = Driver(engine).step([(request, len(prompt))])
    rows = torch.empty(len(prompt) - 1, VOCAB_SIZE)
    for row, entry in zip(rows, result.prompt_logprobs[0], strict=True):
        row[torch.tensor(entry.top_token_ids)] = torch.tensor(entry.top_logprobs)
    return rows


def hf_logprobs(model: Any, prompt: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([prompt])).logits[0, :-1]
    return logits.log_softmax(-1)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("backend", ["cpu", "torch_reference"])
def test_family_equals_transformers(tmp_path: Path, family: str, backend: str) -> None:
    model = save_tiny(tmp_path, family)
    engine = load(tmp_path, attention_backend=backend)
    torch.testing.assert_close(
        prompt_logprobs(engine, PROMPT), hf_logprobs(model, PROMPT), atol=1e-4, rtol=0
    )
    (tokens,) = Driver(engine).generate([Request(PROMPT)], 12)
    engine.close()
    assert tokens == hf_greedy(model, PROMPT, 12)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen3", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
        ("mistral", {"tie_word_embeddings": True, "head_dim": 32}),
        ("qwen3_moe", {"norm_topk_prob": False, "mlp_only_layers": [], "decoder_sparse_step": 2}),
    ],
)
def test_variants_of_families_equal_transformers(
    tmp_path: Path, family: str, changes: dict[str, Any]
) -> None:
    model = save_tiny(tmp_path, family, **changes)
    engine = load(tmp_path)
    torch.testing.assert_close(
        prompt_logprobs(engine, PROMPT), hf_logprobs(model, PROMPT), atol=1e-4, rtol=0
    )
    (tokens,) = Driver(engine).generate([Request(PROMPT)], 8)
    engine.close()
    assert tokens == hf_greedy(model, PROMPT, 8)


@pytest.mark.parametrize("with_head", [False, True])
def test_tied_checkpoint_loads_with_and_without_a_head(tmp_path: Path, with_head: bool) -> None:
    model = save_tiny(tmp_path, tie_word_embeddings=True)
    if with_head:
        edit_tensors(tmp_path, add={"lm_head.weight": model.lm_head.weight.detach().clone()})
    engine = load(tmp_path)
    (tokens,) = Driver(engine).generate([Request(PROMPT)], 8)
    engine.close()
    assert tokens == hf_greedy(model, PROMPT, 8)


def test_sharded_checkpoint_loads_and_a_missing_shard_is_named(tmp_path: Path) -> None:
    model = save_tiny(tmp_path, shard="100KB")
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 1
    engine = load(tmp_path)
    (tokens,) = Driver(engine).generate([Request(PROMPT)], 8)
    engine.close()
    assert tokens == hf_greedy(model, PROMPT, 8)
    shards[1].unlink()
    with pytest.raises(StartupError, match=shards[1].name):
        load(tmp_path)


@pytest.mark.parametrize(
    ("removed", "added", "said"),
    [
        ("lm_head.weight", None, "lacks lm_head.weight"),
        ("model.layers.1.mlp.up_proj.weight", None, "layers.1.mlp.up_proj.weight"),
        (None, "model.layers.9.odd.weight", "has model.layers.9.odd.weight"),
    ],
)
def test_wrong_set_of_tensors_is_refused_by_name(
    tmp_path: Path, removed: str | None, added: str | None, said: str
) -> None:
    save_tiny(tmp_path)
    edit_tensors(tmp_path, remove=removed, add={added: torch.zeros(2)} if added else {})
    with pytest.raises(StartupError, match=said):
        load(tmp_path)


def test_wrong_shape_is_refused_by_name(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    edit_tensors(tmp_path, add={"model.norm.weight": torch.zeros(7)})
    with pytest.raises(StartupError, match=r"model.norm.weight has shape \[7\]"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"architectures": ["GemmaForCausalLM"]}, "GemmaForCausalLM"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"rope_parameters": None, "rope_scaling": {"type": "spiral", "factor": 2.0}}, "spiral"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "longrope"),
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ],
)
def test_what_cannot_be_computed_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    save_tiny(tmp_path)
    edit_config(tmp_path, changes)
    with pytest.raises(StartupError, match=said):
        load(tmp_path)


def test_sliding_window_caps_the_context(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_tiny(tmp_path, "mistral", sliding_window=96)
    with caplog.at_level("INFO"):
        engine = load(tmp_path)
    engine.close()
    assert engine.info.max_model_len == 96
    assert "sliding window" in caplog.text


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, 512),
        ({"max_model_len": 100}, 100),
        ({"num_pages": 3}, 48),
        ({"max_model_len": 999}, 512),
    ],
)
def test_effective_context(tmp_path: Path, options: dict[str, int], expected: int) -> None:
    save_tiny(tmp_path)
    engine = load(tmp_path, **options)
    engine.close()
    assert engine.info.max_model_len == expected
    assert engine.info.eos_token_ids == {2}


ROPES: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 4.0},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
]


@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: str(rope["rope_type"]))
@pytest.mark.parametrize("legacy_key", [False, True])
def test_rope_scaling_equals_transformers_beyond_the_original_context(
    tmp_path: Path, rope: dict[str, Any], legacy_key: bool
) -> None:
    model = save_tiny(
        tmp_path, rope_parameters={**rope, "rope_theta": 10000.0}, max_position_embeddings=256
    )
    if legacy_key:
        section = {("type" if k == "rope_type" else k): v for k, v in rope.items()}
        changes = {"rope_parameters": None, "rope_scaling": section, "rope_theta": 10000.0}
        edit_config(tmp_path, changes)
    prompt = np.random.default_rng(5).integers(3, VOCAB_SIZE, 200).tolist()
    engine = load(tmp_path)
    ours = prompt_logprobs(engine, prompt)
    engine.close()
    torch.testing.assert_close(ours, hf_logprobs(model, prompt), atol=1e-4, rtol=0)


def test_chunked_prefill_equals_whole(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    prompt = np.random.default_rng(5).integers(3, VOCAB_SIZE, 100).tolist()
    engine = load(tmp_path)
    logprobs = SamplingParams(temperature=0, logprobs=5)
    whole, chunked = Request(prompt, logprobs), Request(prompt, logprobs)
    driver = Driver(engine)
    driver.generate([whole], 1)
    for count in (1, 16, 33, 50):
        driver.step([(chunked, count)])
    engine.close()
    expected, got = whole.results[-1].logprobs[0], chunked.results[-1].logprobs[0]
    assert got.top_token_ids == expected.top_token_ids
    np.testing.assert_allclose(got.top_logprobs, expected.top_logprobs, atol=1e-4)


def test_rows_are_independent_in_mixed_batches(tmp_path: Path) -> None:
    save_tiny(tmp_path, "qwen3")
    rng = np.random.default_rng(8)
    prompts = [rng.integers(3, VOCAB_SIZE, int(n)).tolist() for n in (1, 7, 30, 64, 65)]
    engine = load(tmp_path, page_size=4, num_pages=200, max_running_requests=16)
    alone = [Driver(engine).generate([Request(prompt)], 10)[0] for prompt in prompts]
    driver, requests = Driver(engine), [Request(prompt) for prompt in prompts]
    while any(len(request.outputs) < 10 for request in requests):
        rows = []
        for request in requests:
            left = len(request.prompt) + len(request.outputs) - request.computed
            if len(request.outputs) < 10:
                rows.append((request, min(left, 13)))
        driver.step(rows, pooled=True)
    engine.close()
    assert [request.outputs for request in requests] == alone


def test_fingerprint_tells_models_and_dtypes_apart(
    tmp_path: Path,
) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    save_tiny(first)
    save_tiny(second, intermediate_size=64)
    prints = set()
    for path, dtype in ((first, "float32"), (second, "float32"), (first, "bfloat16")):
        engine = load(path, dtype=dtype)
        prints.add(engine.info.fingerprint)
        assert len(Driver(engine).generate([Request(PROMPT)], 3)[0]) == 3
        engine.close()
    assert len(prints) == 3


def test_progress_counts_every_tensor(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    seen: list[tuple[str, int, int]] = []
    config = WorkerConfig(model=str(tmp_path), num_pages=4)
    loaded = load_model(config, Parallel(), lambda *report: seen.append(report))
    loading = [(done, total) for phase, done, total in seen if phase == "loading weights"]
    assert loading[-1] == (len(loading), len(loading))
    assert loaded.info.num_pages == 4


def edit_config(directory: Path, changes: dict[str, Any]) -> None:
    path = directory / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    config = {key: value for key, value in config.items() if value is not None}
    path.write_text(json.dumps(config))


def edit_tensors(
    directory: Path, *, remove: str | None = None, add: dict[str, torch.Tensor] | None = None
) -> None:
    from safetensors.torch import load_file, save_file

    path = directory / "model.safetensors"
    tensors = {name: tensor for name, tensor in load_file(path).items() if name != remove}
    save_file({**tensors, **(add or {})}, path)

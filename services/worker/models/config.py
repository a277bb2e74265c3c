"""A model's shape, read from config.json or GGUF metadata; one type for every family.

It does not know tensors. Whatever Shoal cannot compute is refused here, by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from services.common.errors import StartupError
from services.common.gguf_header import GgufHeader, read_header
from services.common.model_files import ModelFiles
from services.common.model_metadata import read_json
from services.worker.layers.rope_config import ROPE_TYPES, RopeConfig, RopeType

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
}
GGUF_ARCHITECTURES = ("llama", "qwen2", "qwen3")
_OPTIONAL_ROPE = (
    "low_freq_factor",
    "high_freq_factor",
    "beta_fast",
    "beta_slow",
    "attention_factor",
    "mscale",
    "mscale_all_dim",
)


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """The sparse feed-forward of a mixture of experts."""

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    normalize: bool  # the chosen experts' weights are made to sum to one


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The decoder's shape."""

    family: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    rms_norm_eps: float
    rope: RopeConfig
    tied: bool  # the LM head is the embedding
    dtype: str = "float32"
    sliding_window: int | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    moe: MoeConfig | None = None
    dense_layers: frozenset[int] = frozenset()  # of a mixture of experts: those without experts


def read(files: ModelFiles) -> ModelConfig:
    """The shape that a model's files tell. Raises StartupError on what Shoal cannot compute."""
    if files.kind == "byte":
        raise StartupError("the model 'byte' has no weights; run it with --engine fake")
    if files.kind == "hf":
        return from_hf(read_json(files.path / "config.json"))
    return from_gguf(read_header(files.path))


def from_hf(raw: Mapping[str, Any]) -> ModelConfig:
    """Reads a config.json. Raises StartupError on what Shoal cannot compute."""
    try:
        return _from_hf(raw)
    except KeyError as error:
        raise StartupError(f"config.json does not say {error.args[0]}") from error


def _from_hf(raw: Mapping[str, Any]) -> ModelConfig:
    architecture = (raw.get("architectures") or [raw.get("model_type", "none named")])[0]
    family = ARCHITECTURES.get(architecture)
    if family is None:
        known = ", ".join(ARCHITECTURES)
        raise StartupError(f"architecture {architecture!r} is not supported; Shoal knows {known}")
    if (activation := raw.get("hidden_act", "silu")) != "silu":
        raise StartupError(f"hidden_act {activation!r} is not supported; Shoal knows silu")
    if quantization := raw.get("quantization_config"):
        method = quantization.get("quant_method", "unnamed")
        raise StartupError(f"quantization_config {method!r} is not supported for safetensors")
    hidden, heads = int(raw["hidden_size"]), int(raw["num_attention_heads"])
    layers = int(raw["num_hidden_layers"])
    attention_bias = bool(raw.get("attention_bias", False))
    return ModelConfig(
        family=family,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=int(raw.get("num_key_value_heads") or heads),
        head_dim=int(raw.get("head_dim") or hidden // heads),
        intermediate_size=int(raw["intermediate_size"]),
        vocab_size=int(raw["vocab_size"]),
        rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope=_rope_from_hf(raw),
        tied=bool(raw.get("tie_word_embeddings", False)),
        dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "float32"),
        sliding_window=_sliding_window(raw, family),
        qkv_bias=family == "qwen2" or attention_bias,
        output_bias=family != "qwen2" and attention_bias,
        mlp_bias=bool(raw.get("mlp_bias", False)),
        qk_norm=family in ("qwen3", "qwen3_moe"),
        moe=_moe_from_hf(raw) if family == "qwen3_moe" else None,
        dense_layers=_dense_layers(raw, layers) if family == "qwen3_moe" else frozenset(),
    )


def from_gguf(header: GgufHeader) -> ModelConfig:
    """Reads a GGUF file's header.

    Raises StartupError on what Shoal cannot compute.
    """
    family, shapes = str(header.get("general.architecture", "none named")), header.tensor_shapes
    if family not in GGUF_ARCHITECTURES:
        known = ", ".join(GGUF_ARCHITECTURES)
        raise StartupError(f"GGUF architecture {family!r} is not supported; Shoal knows {known}")

    def value(key: str, default: Any = None) -> Any:
        found = header.get(f"{family}.{key}", default)
        if found is None:
            raise StartupError(f"the GGUF file has no {family}.{key}")
        return found

    if int(header.get(f"{family}.expert_count", 0)):
        raise StartupError("a mixture of experts in a GGUF file is not supported")
    hidden, heads = int(value("embedding_length")), int(value("attention.head_count"))
    head_dim = int(value("attention.key_length", hidden // heads))
    if (rotary := int(value("rope.dimension_count", head_dim))) != head_dim:
        raise StartupError(f"RoPE over {rotary} of {head_dim} head dimensions is not supported")
    return ModelConfig(
        family=family,
        hidden_size=hidden,
        num_layers=int(value("block_count")),
        num_heads=heads,
        num_kv_heads=int(value("attention.head_count_kv", heads)),
        head_dim=head_dim,
        intermediate_size=int(value("feed_forward_length")),
        vocab_size=shapes["token_embd.weight"][-1],
        rms_norm_eps=float(value("attention.layer_norm_rms_epsilon", 1e-6)),
        rope=_rope_from_gguf(header, family),
        tied="output.weight" not in shapes,
        qkv_bias="blk.0.attn_q.bias" in shapes,
        output_bias="blk.0.attn_output.bias" in shapes,
        qk_norm="blk.0.attn_q_norm.weight" in shapes,
    )


def _rope_from_hf(raw: Mapping[str, Any]) -> RopeConfig:
    """The rope section under any of its names: rope_parameters, rope_scaling, type, rope_type."""
    section = dict(raw.get("rope_scaling") or {})
    section.update(raw.get("rope_parameters") or {})
    kind = _rope_type(section.get("rope_type") or section.get("type") or "default")
    if (partial := section.get("partial_rotary_factor", raw.get("partial_rotary_factor"))) not in (
        None,
        1,
    ):
        raise StartupError(f"partial_rotary_factor {partial} is not supported")
    context = int(raw.get("max_position_embeddings", 2048))
    original = section.get("original_max_position_embeddings") or context
    factor = section.get("factor")
    if factor is None:
        if kind in ("linear", "llama3"):
            raise StartupError(f"the {kind} RoPE scaling names no factor")
        factor = context / original
    optional: dict[str, Any] = {
        name: float(section[name]) for name in _OPTIONAL_ROPE if section.get(name) is not None
    }
    return RopeConfig(
        rope_type=kind,
        theta=float(section.get("rope_theta") or raw.get("rope_theta") or 10000.0),
        factor=float(factor),
        original_context=int(original),
        truncate=bool(section.get("truncate", True)),
        **optional,
    )


def _rope_from_gguf(header: GgufHeader, family: str) -> RopeConfig:
    prefix = f"{family}.rope."
    named = str(header.get(prefix + "scaling.type", "none"))
    kind = _rope_type("default" if named == "none" else named)
    context = int(header.get(f"{family}.context_length", 0))
    return RopeConfig(
        rope_type=kind,
        theta=float(header.get(prefix + "freq_base", 10000.0)),
        factor=float(header.get(prefix + "scaling.factor", 1.0)),
        original_context=int(header.get(prefix + "scaling.original_context_length", context)),
    )


def _rope_type(name: str) -> RopeType:
    if name not in ROPE_TYPES:
        known = ", ".join(ROPE_TYPES)
        raise StartupError(f"RoPE type {name!r} is not supported; Shoal knows {known}")
    return cast(RopeType, name)


def _sliding_window(raw: Mapping[str, Any], family: str) -> int | None:
    window = raw.get("sliding_window")
    if family == "llama" or (family != "mistral" and not raw.get("use_sliding_window", False)):
        return None
    return int(window) if window else None


def _moe_from_hf(raw: Mapping[str, Any]) -> MoeConfig:
    return MoeConfig(
        # transformers 5 writes the second name.
        num_experts=int(raw.get("num_experts") or raw["num_local_experts"]),
        experts_per_token=int(raw["num_experts_per_tok"]),
        intermediate_size=int(raw["moe_intermediate_size"]),
        normalize=bool(raw.get("norm_topk_prob", False)),
    )


def _dense_layers(raw: Mapping[str, Any], layers: int) -> frozenset[int]:
    step = int(raw.get("decoder_sparse_step", 1))
    named = set(raw.get("mlp_only_layers") or ())
    return frozenset(i for i in range(layers) if i in named or (i + 1) % step)

"""Tiny random checkpoints of each family, written by transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

VOCAB_SIZE = 131  # prime: it divides over no number of ranks

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "tie_word_embeddings": False,
    "initializer_range": 0.2,  # large, so that greedy choices are far apart
}
_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-bias": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {}),
    "qwen3_moe": (
        "Qwen3Moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
    ),
}
FAMILIES = tuple(_FAMILIES)


def save_tiny(directory: Path, family: str = "llama", *, shard: str = "1GB", **changes: Any) -> Any:
    """Writes a random model of a family, and returns the Hugging Face model."""
    import transformers

    name, own = _FAMILIES[family]
    torch.manual_seed(11)
    config = getattr(transformers, f"{name}Config")(**{**_SHAPE, **own, **changes})
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("bias") or "norm" in parameter_name:
                parameter.normal_(mean=float("norm" in parameter_name), std=0.2)
    model.save_pretrained(directory, max_shard_size=shard)
    return model

"""The decoder-only transformer, once for every family; `ModelConfig` says what differs."""

from __future__ import annotations

from typing import cast

import torch
from torch import nn

from services.worker.attention.base import AttentionPlan
from services.worker.attention.native import NativePlan
from services.worker.layers.activation import SiluMul
from services.worker.layers.embedding import LmHead, VocabEmbedding
from services.worker.layers.linear import ColumnParallelLinear, Linear, Part, RowParallelLinear
from services.worker.layers.norm import RmsNorm
from services.worker.layers.parallel import Parallel
from services.worker.layers.rope import Rope, rotate
from services.worker.models.config import ModelConfig
from services.worker.models.fused import FusedLayers, LayerParts
from services.worker.models.moe import SparseMlp
from services.worker.native.kernels import Kernels


class Decoder(nn.Module):
    """Embedding, layers, last norm and LM head of one rank. Build it on the meta device."""

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, device: torch.device, parallel: Parallel
    ) -> None:
        super().__init__()
        self._dtype = dtype
        self._parallel = parallel
        self._num_heads, self._eps = config.num_heads, config.rms_norm_eps
        self._fused: FusedLayers | None = None
        # Not meta: computed from the configuration, not loaded.
        with torch.device(device):
            self._rope = Rope(config.rope, config.head_dim, device)
        vocabulary = (config.vocab_size, config.hidden_size, dtype, parallel)
        self.embed_tokens = VocabEmbedding("model.embed_tokens", *vocabulary)
        self.layers = nn.ModuleList(
            DecoderLayer(f"model.layers.{i}", i, config, dtype, parallel)
            for i in range(config.num_layers)
        )
        self.norm = RmsNorm("model.norm", config.hidden_size, config.rms_norm_eps, dtype)
        self.lm_head = LmHead("lm_head", *vocabulary)
        if config.tied:
            self.lm_head.tie(self.embed_tokens)

    def compute_with(self, kernels: Kernels, *, linear: bool, int8: bool = False) -> None:
        """Uses native kernels, for products too with `linear`, or for those that can be in eight
        bits with `int8`; called before it is filled."""
        # A router's choices are all or nothing, so its scores stay exact.
        exact = {id(m.router) for m in self.modules() if isinstance(m, SparseMlp)}
        for module in self.modules():
            if isinstance(module, RmsNorm | SiluMul):
                module.kernels = kernels
            elif isinstance(module, Linear):
                module.int8 = int8 and id(module) not in exact
                if linear or module.int8:
                    module.kernels = kernels

    def fuse(self, kernels: Kernels) -> None:
        """Runs all layers in one native call from now on, if it can; called once it is filled."""
        parts = [cast(DecoderLayer, layer).parts() for layer in self.layers]
        dense = [part for part in parts if part is not None and part.packed]
        if self._parallel.size == 1 and len(dense) == len(parts):
            self._fused = FusedLayers(kernels, dense, self._num_heads, self._eps)

    def stack_experts(self) -> None:
        """Lets experts be computed together, as is quick on CUDA; called once all are filled."""
        for module in self.modules():
            if isinstance(module, SparseMlp):
                module.stack()

    @property
    def capturable(self) -> bool:
        """Whether a forward pass on CUDA never waits for the device, as graphs need."""
        return all(m.capturable for m in self.modules() if isinstance(m, SparseMlp))

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, plan: AttentionPlan
    ) -> torch.Tensor:
        """token_ids and positions: [tokens] -> last hidden states, [tokens, hidden]"""
        angles = self._rope.angles(positions, self._dtype)
        hidden: torch.Tensor = self.embed_tokens(token_ids)
        if self._fused is not None and isinstance(plan, NativePlan):
            self._fused.run(hidden, angles, plan.rows)
            return hidden
        for layer in self.layers:
            hidden = cast(torch.Tensor, layer(hidden, angles, plan))
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """hidden: [rows, hidden] -> [rows, vocab] on rank 0, None on the others."""
        logits: torch.Tensor | None = self.lm_head.logits(self.norm(hidden))
        return logits


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each on the normalised input and added to it."""

    def __init__(
        self, name: str, index: int, config: ModelConfig, dtype: torch.dtype, parallel: Parallel
    ) -> None:
        super().__init__()
        norm = (config.hidden_size, config.rms_norm_eps, dtype)
        self.input_norm = RmsNorm(f"{name}.input_layernorm", *norm)
        self.attention = Attention(f"{name}.self_attn", index, config, dtype, parallel)
        self.post_attention_norm = RmsNorm(f"{name}.post_attention_layernorm", *norm)
        self.mlp: nn.Module
        if config.moe is not None and index not in config.dense_layers:
            self.mlp = SparseMlp(f"{name}.mlp", config.hidden_size, config.moe, dtype, parallel)
        else:
            self.mlp = Mlp(f"{name}.mlp", config, dtype, parallel)

    def forward(
        self, x: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor], plan: AttentionPlan
    ) -> torch.Tensor:
        """x: [tokens, hidden] -> the same"""
        x = x + self.attention(self.input_norm(x), angles, plan)
        return cast(torch.Tensor, x + self.mlp(self.post_attention_norm(x)))

    def parts(self) -> LayerParts | None:
        """What it is made of; None for a mixture of experts."""
        if not isinstance(self.mlp, Mlp):
            return None
        return LayerParts(
            self.input_norm,
            self.attention.qkv,
            self.attention.q_norm,
            self.attention.k_norm,
            self.attention.output,
            self.post_attention_norm,
            self.mlp.gate_up,
            self.mlp.down,
        )


class Attention(nn.Module):
    """Grouped-query attention: fused projection, q/k norm where the family has it, RoPE."""

    def __init__(
        self, name: str, index: int, config: ModelConfig, dtype: torch.dtype, parallel: Parallel
    ) -> None:
        super().__init__()
        self._index = index
        self._head_dim = dim = config.head_dim
        first, self._heads = parallel.span(config.num_heads, "attention heads")
        first_kv, self._kv_heads = parallel.kv_span(config.num_kv_heads)
        query = Part(f"{name}.q_proj", config.num_heads * dim, first * dim, self._heads * dim)
        kv = (config.num_kv_heads * dim, first_kv * dim, self._kv_heads * dim)
        self.qkv = ColumnParallelLinear(
            config.hidden_size,
            [query, Part(f"{name}.k_proj", *kv), Part(f"{name}.v_proj", *kv)],
            bias=config.qkv_bias,
            dtype=dtype,
        )
        self.output = RowParallelLinear(
            f"{name}.o_proj",
            config.num_heads * dim,
            config.hidden_size,
            bias=config.output_bias,
            dtype=dtype,
            parallel=parallel,
        )
        self.q_norm: RmsNorm | None = None
        self.k_norm: RmsNorm | None = None
        if config.qk_norm:
            self.q_norm = RmsNorm(f"{name}.q_norm", dim, config.rms_norm_eps, dtype)
            self.k_norm = RmsNorm(f"{name}.k_norm", dim, config.rms_norm_eps, dtype)

    def forward(
        self, x: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor], plan: AttentionPlan
    ) -> torch.Tensor:
        """x: [tokens, hidden] -> the same"""
        heads, both = self._heads, self._heads + self._kv_heads
        qkv = self.qkv(x).view(x.shape[0], -1, self._head_dim)  # [tokens, q + k + v, head_dim]
        qk, v = qkv[:, :both], qkv[:, both:]
        if self.q_norm is not None and self.k_norm is not None:
            qk = torch.cat((self.q_norm(qk[:, :heads]), self.k_norm(qk[:, heads:])), dim=1)
        qk = rotate(qk, *angles)
        attended = plan.forward(qk[:, :heads], qk[:, heads:], v, self._index)
        out: torch.Tensor = self.output(attended.reshape(x.shape[0], -1))
        return out


class Mlp(nn.Module):
    """down(silu(gate(x)) * up(x)), gate and up fused."""

    def __init__(
        self, name: str, config: ModelConfig, dtype: torch.dtype, parallel: Parallel
    ) -> None:
        super().__init__()
        size = config.intermediate_size
        span = parallel.span(size, "feed-forward channels")
        self.gate_up = ColumnParallelLinear(
            config.hidden_size,
            [Part(f"{name}.gate_proj", size, *span), Part(f"{name}.up_proj", size, *span)],
            bias=config.mlp_bias,
            dtype=dtype,
        )
        self.down = RowParallelLinear(
            f"{name}.down_proj",
            size,
            config.hidden_size,
            bias=config.mlp_bias,
            dtype=dtype,
            parallel=parallel,
        )
        self.activation = SiluMul()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [tokens, hidden] -> the same"""
        out: torch.Tensor = self.down(self.activation(self.gate_up(x)))
        return out

"""A Llama-family decoder over flat tokens.

Knows layers and weights; nothing of requests, of which sequence a token belongs to (the kernels' batch does), or
of sampling. Pre-norm residual layers with rotary grouped-query attention and a gated feed-forward
(Touvron et al., Llama 2, 2023).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from services.engine.kernels.base import AttentionBatch, Kernels, Linear
from services.engine.model.config import ModelConfig
from services.engine.model.rope import rotation_tables
from services.engine.model.weights import WeightReader


@dataclass(frozen=True, slots=True)
class _Layer:
    input_norm: torch.Tensor
    qkv: Linear
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    output: Linear
    post_norm: torch.Tensor
    gate_up: Linear
    down: Linear


class Decoder:
    """Token ids in, hidden states and logits out; keys and values go to the pool that it is given."""

    def __init__(
        self, config: ModelConfig, reader: WeightReader, kernels: Kernels, dtype: torch.dtype, length: int
    ) -> None:
        """Read and pack every weight; ``length`` is the longest sequence that will be computed."""
        self._config = reader.shard.of(config)
        self._kernels = kernels
        self._shard = reader.shard
        self.weight_bytes = 0
        self._embedding = self._counted(reader.read("model.embed_tokens.weight"))
        self._layers = [self._load_layer(reader, index) for index in range(config.layer_count)]
        self._norm = self._counted(reader.read("model.norm.weight"))
        # The head is packed apart from the embedding even when both are one tensor on disk.
        head = self._counted(reader.read_head(self._embedding, tied=config.tied_embeddings))
        self._head = self._shard.gathered(kernels.linear(head, None), config.vocab_size)
        cos, sin = rotation_tables(config.rope, config.head_dim, length, dtype)
        self._cos, self._sin = cos.to(reader.device), sin.to(reader.device)

    @torch.inference_mode()
    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        kv: list[torch.Tensor],
        batch: AttentionBatch,
    ) -> torch.Tensor:
        """Compute T tokens through every layer.

        Args:
            token_ids: [T] int32.
            positions: [T] int32, each below the length given at construction.
            slots: [T] int64, where keys and values are written.
            kv: one [N, B, 2, Hkv, W] pool a layer, written in place.
            batch: the kernels' own view of the plan.

        Returns:
            [T, hidden] in the engine's dtype, for ``logits``.
        """
        hidden = functional.embedding(token_ids, self._embedding)  # [T, hidden]
        cos = self._cos.index_select(0, positions)  # [T, 1, D]
        sin = self._sin.index_select(0, positions)
        for layer, layer_kv in zip(self._layers, kv, strict=True):
            self._attend(layer, hidden, cos, sin, slots, layer_kv, batch)
            self._feed_forward(layer, hidden)
        return hidden

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """[L, vocabulary] logits of the given [L] int64 rows of what ``forward`` returned."""
        wanted = hidden.index_select(0, rows)
        return self._head(self._kernels.rms_norm(wanted, self._norm, self._config.rms_norm_eps))

    def _attend(
        self,
        layer: _Layer,
        hidden: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        slots: torch.Tensor,
        layer_kv: torch.Tensor,
        batch: AttentionBatch,
    ) -> None:
        config, kernels = self._config, self._kernels
        heads, kv_heads, dim = config.head_count, config.kv_head_count, config.head_dim
        normed = kernels.rms_norm(hidden, layer.input_norm, config.rms_norm_eps)
        qkv = layer.qkv(normed).view(-1, heads + 2 * kv_heads, dim)
        if layer.q_norm is not None and layer.k_norm is not None:
            keys = slice(heads, heads + kv_heads)
            qkv[:, :heads] = kernels.rms_norm(qkv[:, :heads], layer.q_norm, config.rms_norm_eps)
            qkv[:, keys] = kernels.rms_norm(qkv[:, keys], layer.k_norm, config.rms_norm_eps)
        kernels.rotate_and_store(qkv, cos, sin, layer_kv, slots)
        hidden += layer.output(kernels.attention(qkv[:, :heads], layer_kv, batch))

    def _feed_forward(self, layer: _Layer, hidden: torch.Tensor) -> None:
        kernels = self._kernels
        normed = kernels.rms_norm(hidden, layer.post_norm, self._config.rms_norm_eps)
        hidden += layer.down(kernels.silu_mul(layer.gate_up(normed)))

    def _load_layer(self, reader: WeightReader, index: int) -> _Layer:
        config, linear, counted, summed = self._config, self._kernels.linear, self._counted, self._shard.summed
        prefix = f"model.layers.{index}."
        attention = prefix + "self_attn."
        projections = [attention + name for name in ("q_proj", "k_proj", "v_proj")]
        qkv_bias = reader.join(*(p + ".bias" for p in projections)) if config.qkv_bias else None
        output_bias = reader.read(attention + "o_proj.bias") if config.output_bias else None
        gates = [prefix + "mlp.gate_proj.weight", prefix + "mlp.up_proj.weight"]
        norms = config.family.qk_norm
        return _Layer(
            input_norm=counted(reader.read(prefix + "input_layernorm.weight")),
            qkv=linear(counted(reader.join(*(p + ".weight" for p in projections))), qkv_bias),
            q_norm=counted(reader.read(attention + "q_norm.weight")) if norms else None,
            k_norm=counted(reader.read(attention + "k_norm.weight")) if norms else None,
            output=summed(linear(counted(reader.read(attention + "o_proj.weight")), output_bias)),
            post_norm=counted(reader.read(prefix + "post_attention_layernorm.weight")),
            gate_up=linear(counted(reader.join(*gates)), None),
            down=summed(linear(counted(reader.read(prefix + "mlp.down_proj.weight")), None)),
        )

    def _counted(self, tensor: torch.Tensor) -> torch.Tensor:
        self.weight_bytes += tensor.nbytes
        return tensor

"""The decoder as one call a step: every layer, and the head, inside the C++ extension of ``kernels.native``.

The same face as ``Decoder``, in bfloat16 only, its weights as bytes if wanted. Between layers the hidden states stay in
float32.
"""

from __future__ import annotations

from typing import Any

import torch

from services.engine.kernels.native import NativeBatch
from services.engine.model.config import ModelConfig
from services.engine.model.rope import inverse_frequencies
from services.engine.model.weights import WeightReader


class NativeDecoder:
    """Token ids in, hidden states and logits out; keys and values go to the pool that it is given."""

    def __init__(self, config: ModelConfig, reader: WeightReader, length: int, *, quantised: bool = False) -> None:
        """Read and pack every weight, as bytes if ``quantised``; ``length`` is that of the longest sequence."""
        self._config = config
        half = torch.outer(torch.arange(length, dtype=torch.float32), inverse_frequencies(config.rope, config.head_dim))
        shape = [config.hidden_size, config.head_count, config.kv_head_count, config.head_dim]
        shape += [config.intermediate_size, config.vocab_size, config.layer_count]
        tied = config.tied_embeddings
        tables = half.cos(), half.sin()
        self._stack = torch.classes.headrace.Stack(shape, config.rms_norm_eps, *tables, tied, quantised)
        for index in range(config.layer_count):
            self._add_layer(reader, index)
        embedding = reader.read("model.embed_tokens.weight")
        final_norm = reader.read("model.norm.weight")
        if tied:  # the packed head serves as the embedding too
            self._stack.add_ends(embedding, None, final_norm)
        else:
            self._stack.add_ends(reader.read("lm_head.weight"), embedding, final_norm)
        self.weight_bytes: int = self._stack.weight_bytes()

    @torch.inference_mode()
    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        kv: list[torch.Tensor],
        batch: NativeBatch,
    ) -> torch.Tensor:
        """Compute T tokens through every layer.

        Args:
            token_ids: [T] int32.
            positions: [T] int32, each below the length given at construction.
            slots: [T], where keys and values are written.
            kv: one [N, B, 2, Hkv, W] pool a layer, bfloat16 or int8, written in place.
            batch: what ``NativeKernels.prepare`` made of the plan.

        Returns:
            [T, hidden] float32, for ``logits``.
        """
        result: torch.Tensor = torch.ops.headrace.forward(
            self._stack,
            token_ids,
            positions,
            slots.int(),
            batch.query_starts,
            batch.context_lens,
            batch.block_tables,
            kv,
        )
        return result

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """[L, vocabulary] float32 logits of the given [L] int64 rows of what ``forward`` returned."""
        result: torch.Tensor = torch.ops.headrace.logits(self._stack, hidden, rows)
        return result

    def _add_layer(self, reader: WeightReader, index: int) -> None:
        config = self._config
        prefix = f"model.layers.{index}."
        attention = prefix + "self_attn."
        projections = [attention + name for name in ("q_proj", "k_proj", "v_proj")]

        def maybe(name: str, *, there: bool) -> Any:
            return reader.read(attention + name) if there else None

        self._stack.add_layer(
            reader.join(*(name + ".weight" for name in projections)),
            reader.join(*(name + ".bias" for name in projections)) if config.qkv_bias else None,
            maybe("q_norm.weight", there=config.family.qk_norm),
            maybe("k_norm.weight", there=config.family.qk_norm),
            reader.read(attention + "o_proj.weight"),
            maybe("o_proj.bias", there=config.output_bias),
            reader.join(prefix + "mlp.gate_proj.weight", prefix + "mlp.up_proj.weight"),
            reader.read(prefix + "mlp.down_proj.weight"),
            reader.read(prefix + "input_layernorm.weight"),
            reader.read(prefix + "post_attention_layernorm.weight"),
        )

"""The model families that can be imported and served, one row each. Knows no tensors and no files.

The store, the GGUF import and the engine read this one table. Adding a family is a row here when it differs
from the others only in these ways.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Family:
    """What a Hugging Face architecture name means to the decoder and to the GGUF import."""

    architecture: str
    """``architectures[0]`` of config.json."""
    gguf: str
    """``general.architecture`` of a GGUF file. Where rows share one, a file that states a sliding window is the
    family that has one, any other file is the first row's."""
    gguf_permuted: bool = False
    """The rows of query and key projections lie in a GGUF file as pairs of the rotation, not as halves."""
    qkv_bias: bool = False
    """Query, key and value projections have biases whatever the configuration says."""
    config_bias: bool = False
    """``attention_bias`` of the configuration gives all four attention projections a bias."""
    qk_norm: bool = False
    """Queries and keys are normalised a head before rotation."""
    sliding_window: bool = False
    """``sliding_window`` applies when it is set; within one window it changes nothing, so the context is
    cut to it."""

    @property
    def model_type(self) -> str:
        """``model_type`` of config.json."""
        return self.architecture.removesuffix("ForCausalLM").lower()


FAMILIES: dict[str, Family] = {
    family.architecture: family
    for family in (
        Family("LlamaForCausalLM", gguf="llama", gguf_permuted=True, config_bias=True),
        Family("MistralForCausalLM", gguf="llama", gguf_permuted=True, sliding_window=True),
        Family("Qwen2ForCausalLM", gguf="qwen2", qkv_bias=True),
        Family("Qwen3ForCausalLM", gguf="qwen3", config_bias=True, qk_norm=True),
    )
}

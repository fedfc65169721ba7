"""How the supported families differ. Adding one is a row here, when it differs only in these ways."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Family:
    """One row: what a Hugging Face architecture name means to the decoder."""

    architecture: str
    """``architectures[0]`` of config.json."""
    qkv_bias: bool = False
    """Query, key and value projections have biases whatever the configuration says."""
    config_bias: bool = False
    """``attention_bias`` of the configuration gives all four attention projections a bias."""
    qk_norm: bool = False
    """Queries and keys are normalised a head before rotation."""
    sliding_window: bool = False
    """``sliding_window`` applies when it is set; within one window it changes nothing, so the context is
    cut to it."""


FAMILIES: dict[str, Family] = {
    family.architecture: family
    for family in (
        Family("LlamaForCausalLM", config_bias=True),
        Family("MistralForCausalLM", sliding_window=True),
        Family("Qwen2ForCausalLM", qkv_bias=True),
        Family("Qwen3ForCausalLM", config_bias=True, qk_norm=True),
    )
}

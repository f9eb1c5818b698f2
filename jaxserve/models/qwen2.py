"""Qwen2 and Qwen2.5: Llama with biases on q, k and v, and sliding windows on some layers where switched on."""

from collections.abc import Mapping
from typing import Any

from jaxserve.models.base import ModelConfig, decoder_config, need
from jaxserve.models.layers import Decoder


def sliding_windows(hf: Mapping[str, Any]) -> tuple[int | None, ...]:
    """The window of each layer. `layer_types` wins; without it the first max_window_layers layers see everything."""
    layers = need(hf, "num_hidden_layers")
    window = hf.get("sliding_window", 4096) if hf.get("use_sliding_window", False) else None
    if window is None:
        return (None,) * layers
    if types := hf.get("layer_types"):
        return tuple(window if kind == "sliding_attention" else None for kind in types)
    first = hf.get("max_window_layers", 28)
    return tuple(window if i >= first else None for i in range(layers))


class Qwen2(Decoder):
    architectures = ("Qwen2ForCausalLM",)

    @classmethod
    def config_from_hf(cls, hf: Mapping[str, Any]) -> ModelConfig:
        return decoder_config(hf, kv_heads=32, qkv_bias=True, sliding_windows=sliding_windows(hf))

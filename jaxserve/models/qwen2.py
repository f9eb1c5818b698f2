"""Qwen2 and Qwen2.5: Llama with biases on q, k and v, and sliding windows on some layers where switched on."""

from collections.abc import Mapping
from typing import Any

from jaxserve.errors import ConfigError
from jaxserve.models.base import ModelConfig, decoder_config, num_layers, sliding_window
from jaxserve.models.layers import Decoder
from jaxserve.settings import flag, names, whole


def sliding_windows(hf: Mapping[str, Any]) -> tuple[int | None, ...]:
    """The window of each layer. `layer_types` wins; without it the first max_window_layers layers see everything."""
    layers = num_layers(hf)
    window = sliding_window(hf) if flag(hf, "use_sliding_window") else None
    if window is None:
        return (None,) * layers
    if types := names(hf, "layer_types"):
        if len(types) != layers:
            raise ConfigError(f"config.json of the model: layer_types has {len(types)} entries for {layers} layers")
        return tuple(window if kind == "sliding_attention" else None for kind in types)
    first = whole(hf, "max_window_layers", 28, ge=0)
    return tuple(window if i >= first else None for i in range(layers))


class Qwen2(Decoder):
    architectures = ("Qwen2ForCausalLM",)

    @classmethod
    def config_from_hf(cls, hf: Mapping[str, Any]) -> ModelConfig:
        return decoder_config(hf, kv_heads=32, qkv_bias=True, sliding_windows=sliding_windows(hf))

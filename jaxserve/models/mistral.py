"""Mistral 7B and its kin: Llama with a sliding window on every layer."""

from collections.abc import Mapping
from typing import Any

from jaxserve.models.base import ModelConfig, decoder_config, need
from jaxserve.models.layers import Decoder


class Mistral(Decoder):
    architectures = ("MistralForCausalLM",)

    @classmethod
    def config_from_hf(cls, hf: Mapping[str, Any]) -> ModelConfig:
        window = hf.get("sliding_window", 4096)  # absent means 4096, null means none
        return decoder_config(hf, kv_heads=8, sliding_windows=(window,) * need(hf, "num_hidden_layers"))

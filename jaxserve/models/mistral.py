"""Mistral 7B and its kin: Llama with a sliding window on every layer."""

from collections.abc import Mapping
from typing import Any

from jaxserve.models.base import ModelConfig, decoder_config, num_layers, sliding_window
from jaxserve.models.layers import Decoder


class Mistral(Decoder):
    architectures = ("MistralForCausalLM",)

    @classmethod
    def config_from_hf(cls, hf: Mapping[str, Any]) -> ModelConfig:
        return decoder_config(hf, kv_heads=8, sliding_windows=(sliding_window(hf),) * num_layers(hf))

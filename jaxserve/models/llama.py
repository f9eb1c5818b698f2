"""Llama 1 to 3.x, and what is built like it (SmolLM, TinyLlama, ...)."""

from collections.abc import Mapping
from typing import Any

from jaxserve.models.base import ModelConfig, decoder_config
from jaxserve.models.layers import Decoder
from jaxserve.settings import flag


class Llama(Decoder):
    architectures = ("LlamaForCausalLM",)

    @classmethod
    def config_from_hf(cls, hf: Mapping[str, Any]) -> ModelConfig:
        bias = flag(hf, "attention_bias")
        return decoder_config(hf, qkv_bias=bias, o_bias=bias, mlp_bias=flag(hf, "mlp_bias"))

"""Qwen3 (dense): no biases unless asked for, RMSNorm on each head of q and k, heads of 128 whatever D / N is."""

from collections.abc import Mapping
from typing import Any

from jaxserve.models.base import ModelConfig, decoder_config
from jaxserve.models.layers import Decoder
from jaxserve.models.qwen2 import sliding_windows
from jaxserve.settings import flag


class Qwen3(Decoder):
    architectures = ("Qwen3ForCausalLM",)

    @classmethod
    def config_from_hf(cls, hf: Mapping[str, Any]) -> ModelConfig:
        bias = flag(hf, "attention_bias")
        return decoder_config(
            hf, kv_heads=32, head_dim=128, qkv_bias=bias, o_bias=bias, qk_norm=True, sliding_windows=sliding_windows(hf)
        )

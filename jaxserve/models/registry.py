"""Architectures by the name that config.json gives. A new family is one file and one line here."""

from collections.abc import Mapping
from typing import Any

from jaxserve.errors import ConfigError
from jaxserve.models.base import ModelConfig
from jaxserve.models.layers import Decoder
from jaxserve.models.llama import Llama
from jaxserve.models.mistral import Mistral
from jaxserve.models.qwen2 import Qwen2
from jaxserve.models.qwen3 import Qwen3
from jaxserve.settings import names

FAMILIES: tuple[type[Decoder], ...] = (Llama, Mistral, Qwen2, Qwen3)

ARCHITECTURES: dict[str, type[Decoder]] = {name: family for family in FAMILIES for name in family.architectures}


def resolve(config: Mapping[str, Any]) -> tuple[ModelConfig, type[Decoder]]:
    """Model config and class for a config.json. Raises ConfigError if the architecture is not supported."""
    given = names(config, "architectures")
    for name in given[:1]:
        if name in ARCHITECTURES:
            return ARCHITECTURES[name].config_from_hf(config), ARCHITECTURES[name]
    raise ConfigError(
        f"architecture {', '.join(given) or '(none given)'} is not supported: "
        f"only {', '.join(sorted(ARCHITECTURES))} are"
    )

"""jaxserve serves large language models from JAX. `from jaxserve import LLM, SamplingParams` is the offline API.

Public names are loaded when first asked for: importing this package, or a host-side module in it, never imports jax.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxserve.async_llm import AsyncLLM
    from jaxserve.beam_search import BeamSearchOutput, BeamSearchParams, BeamSearchSequence
    from jaxserve.llm import LLM
    from jaxserve.request import (
        CompletionOutput,
        RequestOutput,
        RequestOutputKind,
        SamplingParams,
        StructuredOutputsParams,
    )

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "CompletionOutput",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
    "__version__",
]

_HOMES = {
    "LLM": "jaxserve.llm",
    "AsyncLLM": "jaxserve.async_llm",
    "BeamSearchOutput": "jaxserve.beam_search",
    "BeamSearchParams": "jaxserve.beam_search",
    "BeamSearchSequence": "jaxserve.beam_search",
    "SamplingParams": "jaxserve.request",
    "StructuredOutputsParams": "jaxserve.request",
    "RequestOutput": "jaxserve.request",
    "RequestOutputKind": "jaxserve.request",
    "CompletionOutput": "jaxserve.request",
}


def __getattr__(name: str) -> Any:
    if home := _HOMES.get(name):
        return getattr(import_module(home), name)
    raise AttributeError(f"module 'jaxserve' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)

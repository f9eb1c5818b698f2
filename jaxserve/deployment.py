"""A model on one kind of device: every choice that decides which programs there are, and their shapes.

Resolved from names alone, so that programs can be compiled for a device that is elsewhere.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jaxserve.config import UNLIMITED, EngineConfig
from jaxserve.errors import ConfigError
from jaxserve.models.base import ModelConfig
from jaxserve.models.quantization import check_device
from jaxserve.models.registry import resolve
from jaxserve.pallas_kernels.ops import Backend, resolve_backend
from jaxserve.shapes import Bucket, Limit, make_buckets, step_limits
from jaxserve.sharding import shard_of

DEFAULTS: dict[str, dict[str, Any]] = {  # of options left open, by platform
    "cpu": {"max_num_seqs": 32, "max_num_batched_tokens": 160},
    "gpu": {"max_num_seqs": 256, "max_num_batched_tokens": 8192},
    "tpu": {"max_num_seqs": 128, "max_num_batched_tokens": 2048},
}
MANY_SEQS = 1024  # where nobody watches a stream: products of more rows are better
WIDE = 4096  # hidden size from which on 512 tokens are enough for a GPU to be busy


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """Options with nothing left open."""

    model: ModelConfig
    dtype: str  # of weights that are not quantized, activations and KV pages
    backend: Backend
    page_size: int
    max_model_len: int  # at most: the pool may hold less
    max_num_seqs: int
    limits: tuple[Limit, ...]  # of steps with prompts in them, see `step_limits`
    buckets: tuple[Bucket, ...]

    @property
    def types(self) -> str:
        """What is computed in, for logs: bfloat16, or bfloat16 and int8."""
        return f"{self.dtype} and {self.model.quantization}" if self.model.quantization else self.dtype


def resolve_deployment(config: EngineConfig, hf: Mapping[str, Any], platform: str, device_kind: str) -> Deployment:
    """What `config` asks for, of a model with this config.json. Raises ConfigError if it cannot be honoured."""
    model, _ = resolve(hf)
    if config.quantization:
        check_device(config.quantization, device_kind)
        model = replace(model, quantization=config.quantization)
    shard = shard_of(model, config.tensor_parallel_size)
    max_model_len = _resolve_max_model_len(config.max_model_len, model.max_model_len)
    dtype, max_num_seqs, budget, mixed = _resolve_choices(config, platform, model.hidden_size)
    backend = resolve_backend(
        config.attention_backend,
        platform,
        device_kind,
        dtype=dtype,
        head_dim=model.head_dim,
        group=shard.num_heads // shard.num_kv_heads,
    )
    page_size = config.page_size or backend.default_page_size
    if page_size not in backend.page_sizes:
        raise ConfigError(
            f"--page-size must be one of {', '.join(map(str, backend.page_sizes))} for the {backend.name} backend, "
            f"got {page_size}",
            param="page_size",
        )
    # XLA's CPU products of one row in 16 bits are 6 times as slow as those of two, in 8 bits 10 times.
    fewest_rows = 2 if platform == "cpu" and (config.quantization or dtype != "float32") else 1
    return Deployment(
        model=model,
        dtype=dtype,
        backend=backend,
        page_size=page_size,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        limits=step_limits(max_num_seqs, budget, mixed),
        buckets=make_buckets(max_num_seqs, budget, mixed, platform=platform, fewest_rows=fewest_rows),
    )


def _resolve_choices(config: EngineConfig, platform: str, hidden_size: int) -> tuple[str, int, int, int]:
    """dtype, max_num_seqs, max_num_batched_tokens and max_num_mixed_tokens, filled in for the platform.

    Raises ConfigError if they contradict each other.
    """
    defaults = DEFAULTS.get(platform, DEFAULTS["gpu"])
    dtype = config.dtype
    if dtype == "auto":
        dtype = "bfloat16" if platform != "cpu" or _cpu_computes_bfloat16() else "float32"
    max_num_seqs = config.max_num_seqs or defaults["max_num_seqs"]
    budget = config.max_num_batched_tokens or max(defaults["max_num_batched_tokens"], max_num_seqs + 128)
    unwatched = platform == "gpu" and config.max_num_mixed_tokens == UNLIMITED
    if not config.max_num_seqs and unwatched and budget >= 2 * MANY_SEQS:
        max_num_seqs = MANY_SEQS
    mixed = config.max_num_mixed_tokens or budget
    if not config.max_num_mixed_tokens and platform == "gpu":
        # Products of fewer tokens leave multiprocessors idle where the model is narrow.
        mixed = min(max(1024 if hidden_size >= WIDE else 2048, 2 * max_num_seqs), budget)
    for name, limit in (("max_num_batched_tokens", budget), ("max_num_mixed_tokens", mixed)):
        if limit < max_num_seqs + 16:
            raise ConfigError(
                f"--{name.replace('_', '-')} must be at least max_num_seqs + 16 = {max_num_seqs + 16}, got {limit}",
                param=name,
            )
    return dtype, max_num_seqs, budget, mixed


def _cpu_computes_bfloat16() -> bool:
    """Whether the CPU has matrix instructions for it (AMX), where Linux tells. Others may emulate it, slowly."""
    try:
        return "amx_bf16" in Path("/proc/cpuinfo").read_text().split()
    except OSError:
        return False


def _resolve_max_model_len(wanted: int | str | None, longest: int) -> int:
    """Raises ConfigError before any weights are loaded if the model was not made for so many tokens."""
    if not isinstance(wanted, int):
        return longest
    if wanted > longest:
        raise ConfigError(
            f"--max-model-len must be at most the model's {longest} tokens, got {wanted}", param="max_model_len"
        )
    return wanted

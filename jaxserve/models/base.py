"""What every model family agrees on: the config of a decoder, and how a checkpoint's tensors become its parameters.

A family (llama.py, qwen3.py, ...) turns a Hugging Face config.json into a `ModelConfig` and names its tensors as
`Piece`s. The decoder itself is written once, in layers.py. Nothing here imports jax.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from jaxserve.errors import ConfigError
from jaxserve.request import short
from jaxserve.settings import flag, mapping, names, need, real, whole
from jaxserve.shapes import ceil_div

MAX_LAYERS, MAX_HEAD_DIM = 4096, 4096


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """One decoder, fully resolved: no defaults of any family are left to fill in. Hashable, static under jit."""

    architecture: str
    vocab_size: int  # V
    num_layers: int  # L
    hidden_size: int  # D
    ffn_size: int  # F
    num_heads: int  # N
    num_kv_heads: int  # K
    head_dim: int  # H
    max_model_len: int  # positions the model was made for
    norm_eps: float
    rope_frequencies: tuple[float, ...]  # [H // 2] radians per position
    rope_magnitude: float = 1.0  # factor on cos and sin (yarn)
    sliding_windows: tuple[int | None, ...]  # [L]; a window of w sees the token itself and the w - 1 before it
    tied_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # RMSNorm over H of q and k, before rope
    quantization: str | None = None  # a name in quantization.FORMATS: how matrices are kept and multiplied
    shards: int = 1  # more than 1: this is one of so many shards, and N, K and F are its own (sharding.py)

    @property
    def vocab_rows(self) -> int:
        """Rows of the embedding and of the head: V, or a shard's part of it."""
        return ceil_div(self.vocab_size, self.shards)

    @property
    def qkv_size(self) -> int:
        """Columns of the merged q/k/v matrix: (N + 2K) * H."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    @property
    def attention_scale(self) -> float:
        return self.head_dim**-0.5

    def kv_bytes_per_token(self, itemsize: int) -> int:
        """Bytes of K and V that one token holds over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * itemsize


class Piece(NamedTuple):
    """Where one checkpoint tensor goes. Pieces with the same `param` are joined in the order of `part`.

    layer None: parts are joined on the output axis, the first.
    layer i:    the tensor is row i (columns joined by `part`) of an array stacked over layers.
    """

    param: str
    shape: tuple[int, ...]  # as the checkpoint has it
    part: int = 0
    layer: int | None = None


def decoder_config(
    hf: Mapping[str, Any],
    *,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    sliding_windows: tuple[int | None, ...] | None = None,
    **family: Any,
) -> ModelConfig:
    """ModelConfig from a config.json that uses the Llama names. `kv_heads` and `head_dim` are the family's defaults
    where the file is silent (None: as many as heads, and D / N); `family` sets further fields.

    Raises ConfigError naming what is missing or not supported.
    """
    _refuse_unsupported(hf)
    heads, hidden = whole(hf, "num_attention_heads"), whole(hf, "hidden_size")
    layers = num_layers(hf)
    resolved_head_dim = whole(hf, "head_dim", head_dim or hidden // heads, le=MAX_HEAD_DIM)
    if resolved_head_dim % 2:
        raise ConfigError(f"head_dim must be even, got {resolved_head_dim}")
    kv = whole(hf, "num_key_value_heads", kv_heads or heads)
    if heads % kv:
        raise ConfigError(f"num_attention_heads ({heads}) is not a multiple of num_key_value_heads ({kv})")
    max_len = whole(hf, "max_position_embeddings", 2048)
    frequencies, magnitude = rope_frequencies(hf, resolved_head_dim, max_len)
    return ModelConfig(
        architecture=names(hf, "architectures")[0],
        vocab_size=whole(hf, "vocab_size"),
        num_layers=layers,
        hidden_size=hidden,
        ffn_size=whole(hf, "intermediate_size"),
        num_heads=heads,
        num_kv_heads=kv,
        head_dim=resolved_head_dim,
        max_model_len=max_len,
        norm_eps=real(hf, "rms_norm_eps", 1e-6, ge=0),
        rope_frequencies=frequencies,
        rope_magnitude=magnitude,
        sliding_windows=sliding_windows or (None,) * layers,
        tied_embeddings=flag(hf, "tie_word_embeddings"),
        **family,
    )


def num_layers(hf: Mapping[str, Any]) -> int:
    return whole(hf, "num_hidden_layers", le=MAX_LAYERS)


def sliding_window(hf: Mapping[str, Any]) -> int | None:
    """Absent means 4096, null means none."""
    return None if hf.get("sliding_window", 4096) is None else whole(hf, "sliding_window", 4096)


def _refuse_unsupported(hf: Mapping[str, Any]) -> None:
    act = hf.get("hidden_act", "silu")
    if act not in ("silu", "swish"):
        raise ConfigError(f"hidden_act {act!r} is not supported: only silu is")
    if quant := hf.get("quantization_config"):
        method = quant.get("quant_method", "unknown") if isinstance(quant, Mapping) else quant
        raise ConfigError(f"quantized weights ({method!r}) are not supported: use unquantized ones or a GGUF file")
    if hf.get("partial_rotary_factor", 1.0) != 1.0 or _rope_parameters(hf).get("partial_rotary_factor", 1.0) != 1.0:
        raise ConfigError("partial_rotary_factor other than 1 is not supported")


# ---- rotary embedding: all kinds of scaling end as one vector of frequencies and one magnitude


def _rope_parameters(hf: Mapping[str, Any]) -> dict[str, Any]:
    """rope_scaling (transformers 4) or rope_parameters (5), as one dict with rope_type and rope_theta."""
    rope = mapping(hf, "rope_scaling") | mapping(hf, "rope_parameters")
    rope.setdefault("rope_type", rope.get("type") or "default")
    rope["rope_theta"] = real(rope, "rope_theta", real(hf, "rope_theta", 10000.0, gt=1), gt=1)
    return rope


def rope_frequencies(hf: Mapping[str, Any], head_dim: int, max_len: int) -> tuple[tuple[float, ...], float]:
    """(frequencies [H // 2] in radians per position, magnitude of cos and sin) of a config.json.

    Raises ConfigError for a rope type that is not in the table below.
    """
    rope = _rope_parameters(hf)
    base = 1.0 / rope["rope_theta"] ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    kind = rope["rope_type"]
    if not isinstance(kind, str) or kind not in _ROPE_TYPES:
        raise ConfigError(f"rope type {short(kind)} is not supported: only {', '.join(_ROPE_TYPES)} are")
    frequencies, magnitude = _ROPE_TYPES[kind](base, rope, head_dim, max_len)
    with np.errstate(over="ignore"):
        frequencies = frequencies.astype(np.float32)
    if not np.isfinite(frequencies).all() or not math.isfinite(magnitude):
        raise ConfigError(f"the rope settings give frequencies that are not finite: {short(rope)}")
    return tuple(float(f) for f in frequencies), float(magnitude)


def _default(base: np.ndarray, rope: dict, head_dim: int, max_len: int) -> tuple[np.ndarray, float]:
    return base, 1.0


def _linear(base: np.ndarray, rope: dict, head_dim: int, max_len: int) -> tuple[np.ndarray, float]:
    return base / real(rope, "factor"), 1.0


def _factors(base: np.ndarray, rope: dict, head_dim: int, max_len: int) -> tuple[np.ndarray, float]:
    """One divisor per frequency: what GGUF files carry as rope_freqs."""
    factors = need(rope, "factors")
    good = isinstance(factors, list) and len(factors) == len(base)
    if not good or any(isinstance(f, bool) or not isinstance(f, int | float) or not 0 < f < math.inf for f in factors):
        raise ConfigError(f"rope factors must be {len(base)} numbers greater than 0, got {short(factors)}")
    return base / np.asarray(factors, np.float64), 1.0


def _llama3(base: np.ndarray, rope: dict, head_dim: int, max_len: int) -> tuple[np.ndarray, float]:
    """Llama 3.1: long waves are slowed by `factor`, short ones kept, those between blended."""
    factor, old_len = real(rope, "factor"), whole(rope, "original_max_position_embeddings")
    low, high = real(rope, "low_freq_factor"), real(rope, "high_freq_factor")
    if low >= high:
        raise ConfigError(f"low_freq_factor ({low}) must be less than high_freq_factor ({high})")
    waves = old_len * base / (2 * math.pi)  # full turns within the original context
    blend = np.clip((waves - low) / (high - low), 0.0, 1.0)
    return base * blend + base / factor * (1 - blend), 1.0


def _yarn(base: np.ndarray, rope: dict, head_dim: int, max_len: int) -> tuple[np.ndarray, float]:
    """YaRN (arXiv:2309.00071), as transformers computes it: ramp between kept and interpolated frequencies."""
    old_len = whole(rope, "original_max_position_embeddings", max_len)
    factor = real(rope, "factor", max_len / old_len)

    def dimension(turns: float) -> float:
        """Index of the frequency that makes `turns` full turns within the original context."""
        return head_dim * math.log(old_len / (turns * 2 * math.pi)) / (2 * math.log(rope["rope_theta"]))

    low, high = dimension(real(rope, "beta_fast", 32)), dimension(real(rope, "beta_slow", 1))
    if flag(rope, "truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = np.clip((np.arange(head_dim // 2) - low) / max(high - low, 0.001), 0, 1)
    return base / factor * ramp + base * (1 - ramp), _yarn_magnitude(rope, factor)


def _yarn_magnitude(rope: dict, factor: float) -> float:
    def magnitude(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    if rope.get("attention_factor") is not None:
        return real(rope, "attention_factor")
    scale, scale_all = real(rope, "mscale", 0, ge=0), real(rope, "mscale_all_dim", 0, ge=0)
    if scale and scale_all:
        return magnitude(scale) / magnitude(scale_all)
    return magnitude(1.0)


_ROPE_TYPES = {"default": _default, "linear": _linear, "llama3": _llama3, "yarn": _yarn, "factors": _factors}

"""Products in 8 bits: matrices that are quantized as they are loaded, and activations as they are multiplied.

    weights      [out, in]   symmetric, one float32 scale for each row of `out`
    activations  [T, in]     symmetric, one float32 scale for each token, found anew in each step
    product      int8 x int8 -> int32, or fp8 (e4m3) x fp8 -> float32; times both scales

A token's scale depends on that token alone, and sums of int32 are exact: a row says the same in any batch. Of a matrix
whose `in` is split over devices (o, down), each device finds the scale of its own part of a token, which costs no
message and is the finer one. So several devices differ from one, by less than quantization does; weights are the same
on any number, with scales of whole rows.

To add a format: one entry in `FORMATS`, and its name in config.py's choices.
"""

import re
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Num

from jaxserve.errors import ConfigError
from jaxserve.sharding import largest

TINIEST = 1e-30  # what the largest magnitude of a row is taken for at least: it may be 0

# jax's Device.device_kind, by what the matrix units multiply.
_AMPERE = r"NVIDIA (?:A(?:2|10|10G|10M|16|30|40|100|800)|RTX A\d+|GeForce RTX 30\d0)\b"  # compute capability 8.0, 8.6
_FROM_ADA_ON = (  # 8.9, 9.0, 10.x and 12.x
    r"NVIDIA (?:L(?:2|4|20|40|40S)|.*Ada|GeForce RTX [45]0\d0|G?H(?:20|100|200|800)|G?B\d+|.*Blackwell)\b"
)


@dataclass(frozen=True)
class Format:
    """How the numbers of a product are kept, and what multiplies them."""

    dtype: Any
    sum_dtype: Any
    largest: float  # magnitude
    kinds: str  # of devices whose matrix units have it, or that are right without: a pattern
    needs: str  # the same, in words


FORMATS = {
    "int8": Format(
        jnp.int8, jnp.int32, 127.0,
        rf"cpu|TPU ?(?:v4|v5e|v5 ?lite|v5p?|v6e|v6 ?lite)$|{_AMPERE}|{_FROM_ADA_ON}",
        "a TPU v4, v5e, v5p or v6e, an NVIDIA GPU from Ampere on (compute capability 8.0), or a CPU",
    ),
    "fp8": Format(
        jnp.float8_e4m3fn, jnp.float32, 448.0,
        rf"TPU ?v?7x?$|{_FROM_ADA_ON}",
        "a TPU 7x, or an NVIDIA GPU from Ada on (compute capability 8.9)",
    ),
}  # fmt: skip


def check_device(quantization: str, device_kind: str) -> None:
    """Raises ConfigError, with what would work, if products of that format are nothing for this kind of device."""
    if re.match(FORMATS[quantization].kinds, device_kind):
        return
    others = [name for name, format in FORMATS.items() if re.match(format.kinds, device_kind)]
    instead = f"--quantization {others[0]}, or leave it out" if others else "leave it out"
    raise ConfigError(
        f"--quantization {quantization} needs {FORMATS[quantization].needs}, and this is {device_kind}: {instead}",
        param="quantization",
    )


def format_of(dtype: Any) -> Format | None:
    """The format of which a matrix of this dtype is; None: it is not quantized."""
    return next((format for format in FORMATS.values() if format.dtype == dtype), None)


def quantize(
    x: Num[Array, "rows in"], format: Format, *, shards: int = 1
) -> tuple[Num[Array, "rows in"], Float[Array, " rows"]]:
    """x as numbers of the format, and the scales: x is about numbers * scales[:, None]. A NaN makes the scale one.

    shards: more than 1 if `in` is split over so many devices; scales are then those of the whole rows.
    """
    x32 = x.astype(jnp.float32)
    most = jnp.maximum(largest(jnp.max(jnp.abs(x32), axis=1), shards), TINIEST)  # which keeps a NaN
    numbers = x32 * (format.largest / most)[:, None]
    if jnp.issubdtype(format.dtype, jnp.integer):
        numbers = jnp.round(numbers)
    return numbers.astype(format.dtype), most * (1 / format.largest)

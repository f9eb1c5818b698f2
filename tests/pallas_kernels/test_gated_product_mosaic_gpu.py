"""The gated product in the GPU interpreter, the order of its tiles, and its lowering for CUDA from a host without a GPU."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxserve.pallas_kernels import gated_product_mosaic_gpu as kernel
from jaxserve.pallas_kernels.gated_product_mosaic_gpu import Tuning

LOWERED = Tuning(), Tuning(pair=False), Tuning(columns=112), Tuning(columns=96, pair=False), Tuning(columns=80)


def operands(tokens: int, size: int, columns: int, dtype: str):
    rng = np.random.default_rng(tokens)
    x, w = rng.normal(size=(tokens, size)), rng.normal(size=(2 * columns, size)) * size**-0.5
    return jnp.asarray(x, dtype), jnp.asarray(w, dtype)


def expected(x, w) -> np.ndarray:
    gate, up = np.split(np.asarray(x, np.float32) @ np.asarray(w, np.float32).T, 2, axis=-1)
    return gate / (1 + np.exp(-gate)) * up


# Two or three CTAs, so that each has several tiles.
@pytest.mark.parametrize(
    ("tokens", "size", "columns", "dtype", "tuning"),
    [
        (200, 256, 320, "bfloat16", Tuning(pair=False, multiprocessors=3)),
        (300, 192, 320, "bfloat16", Tuning(multiprocessors=2, group=1)),
        (21, 128, 512, "float16", Tuning(columns=112, multiprocessors=2)),
        (385, 320, 192, "float16", Tuning(columns=80, stages=3, multiprocessors=4)),
    ],
)
def test_interpreted_kernel_equals_float32(tokens, size, columns, dtype, tuning):
    x, w = operands(tokens, size, columns, dtype)
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
        got = kernel.multiply(x, w, tuning)
    assert got.dtype == x.dtype
    rounding = {"bfloat16": 2**-8, "float16": 2**-11}[dtype]
    np.testing.assert_allclose(np.asarray(got, np.float32), expected(x, w), rtol=rounding, atol=1e-5)


def export_for_cuda(fn, *args) -> str:
    checks = [jax.export.DisabledSafetyCheck.custom_call("mosaic_gpu_v2")]
    return jax.export.export(jax.jit(fn), platforms=["cuda"], disabled_checks=checks)(*args).mlir_module()


@pytest.mark.parametrize("tuning", LOWERED, ids=str)
def test_kernel_lowers_for_cuda_from_a_cpu_host(tuning):
    def layers(x, w):
        return [kernel.multiply(x, w, tuning) for _ in range(3)]

    shapes = (jax.ShapeDtypeStruct((576, 1536), "bfloat16"), jax.ShapeDtypeStruct((2 * 8960, 1536), "bfloat16"))
    assert len(re.findall(r'kernel_hash = "([^"]*)"', export_for_cuda(layers, *shapes))) == 1


@pytest.mark.parametrize("num_tiles", [(1, 5), (7, 3), (8, 1), (20, 9)])
@pytest.mark.parametrize("group", [1, 4, 8])
def test_tiles_are_taken_once_each_in_groups_of_token_tiles(num_tiles, group):
    tiles = jnp.arange(num_tiles[0] * num_tiles[1])
    tokens, columns = (np.asarray(a).tolist() for a in jax.vmap(lambda i: kernel._ordered(i, num_tiles, group))(tiles))
    assert sorted(zip(tokens, columns, strict=True)) == list(np.ndindex(*num_tiles))
    groups = [token // group for token in tokens]
    assert groups == sorted(groups)


@pytest.mark.parametrize("columns", [136, 72, 0])
def test_tunings_that_cannot_work_are_refused(columns):
    with pytest.raises(ValueError, match="Tuning"):
        Tuning(columns=columns)


@pytest.mark.parametrize("tokens", [256, 257, 512, 576, 1024, 8192])
@pytest.mark.parametrize("columns", [14336, 8960, 4864, 18944, 27648])
def test_waves_are_about_as_full_as_they_can_be(tokens, columns):
    full = kernel.tuning_for(tokens, columns).fill(tokens, columns)
    best = max(Tuning(wide, pair).fill(tokens, columns) for wide in range(80, 129, 16) for pair in (True, False))
    assert best - 0.04 <= full <= 1


def test_few_tokens_are_left_to_xla():
    for tokens, kernels in ((kernel.LEAST_TOKENS - 1, 0), (kernel.LEAST_TOKENS, 1)):
        shapes = jax.ShapeDtypeStruct((tokens, 128), "bfloat16"), jax.ShapeDtypeStruct((256, 128), "bfloat16")
        assert export_for_cuda(kernel.gated_product, *shapes).count("@mosaic_gpu_v2") == kernels


@pytest.mark.parametrize(
    ("size", "columns", "dtype"), [(256, 128, "float32"), (200, 128, "bfloat16"), (256, 96, "float16")]
)
def test_shapes_that_it_does_not_take_are_refused(size, columns, dtype):
    assert not kernel.supports(8, size, columns, dtype)
    with pytest.raises(ValueError, match="cannot multiply"):
        kernel.multiply(*operands(8, size, columns, dtype), Tuning())

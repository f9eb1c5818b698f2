"""The residual sum with its norm in the GPU interpreter, and its lowering for CUDA from a host without a GPU."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxserve.pallas_kernels import add_norm_mosaic_gpu as kernel
from jaxserve.pallas_kernels import reference


def operands(rows: int, size: int, dtype: str = "bfloat16"):
    rng = np.random.default_rng(rows)
    x, delta = (jnp.asarray(rng.normal(size=(rows, size)) * scale).astype(dtype) for scale in (1, 5))
    return x, delta, jnp.asarray(1 + rng.normal(size=size)).astype(dtype)


@pytest.mark.parametrize(
    ("rows", "size", "dtype"), [(1, 4096, "bfloat16"), (3, 1536, "bfloat16"), (2, 768, "float16"), (2, 3584, "float16")]
)
def test_the_interpreted_kernel_equals_the_reference(rows, size, dtype):
    x, delta, weight = operands(rows, size, dtype)
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
        total, norm = jax.jit(lambda *a: kernel.add_norm(*a, 1e-5))(x, delta, weight)
    want = reference.add_norm(x, delta, weight, 1e-5)
    assert total.dtype == norm.dtype == x.dtype
    np.testing.assert_array_equal(np.asarray(total, np.float32), np.asarray(want[0], np.float32))
    # once rounded: the sums of squares are added in another order
    np.testing.assert_allclose(np.asarray(norm, np.float32), np.asarray(want[1], np.float32), rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize("parts", [2, 8])
def test_parts_of_a_product_are_added_up(parts):
    x, delta, weight = operands(3, 1536)
    split = jnp.asarray(np.random.default_rng(parts).dirichlet(np.ones(parts), size=(3, 1536)), jnp.float32)
    split = jnp.moveaxis(split * delta.astype(jnp.float32)[..., None], -1, 0)
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
        total, norm = jax.jit(lambda *a: kernel.add_norm(*a, 1e-5))(x, split, weight)
    want = reference.add_norm(x, split, weight, 1e-5)
    for a, b in zip((total, norm), want, strict=True):  # parts are added in another order
        np.testing.assert_allclose(np.asarray(a, np.float32), np.asarray(b, np.float32), rtol=2**-6, atol=2**-6)


@pytest.mark.parametrize("rows", [1, 8, 64, 128, 256])
@pytest.mark.parametrize(("out", "size"), [(4096, 14336), (1536, 8960), (896, 4864), (576, 1536), (4096, 4096)])
def test_parts_are_whole_tiles_and_only_where_the_kernel_adds_them(rows, out, size):
    parts = kernel.parts(rows, out, size)
    assert 1 <= parts <= kernel.MOST_PARTS and size % parts == 0 and size // parts % 64 == 0
    assert parts == 1 or kernel.vector_of(out) and rows <= kernel.MOST_ROWS
    assert rows < 256 or parts == 1


def export_for_cuda(fn, *args) -> str:
    checks = [jax.export.DisabledSafetyCheck.custom_call("mosaic_gpu_v2")]
    return jax.export.export(jax.jit(fn), platforms=["cuda"], disabled_checks=checks)(*args).mlir_module()


@pytest.mark.parametrize(("rows", "size"), [(1, 4096), (64, 1536), (256, 2048), (8, 8192), (4, 896 * 2)])
def test_norms_of_all_layers_share_one_kernel_for_cuda(rows, size):
    def layers(x, delta, weight):
        for _ in range(3):
            x, delta = kernel.add_norm(x, delta, weight, 1e-6)
        return x, delta

    module = export_for_cuda(layers, *operands(rows, size))
    assert len(re.findall(r'kernel_hash = "([^"]*)"', module)) == 1


@pytest.mark.parametrize(
    ("rows", "size", "delta"), [(kernel.MOST_ROWS + 1, 256, True), (4, 576, True), (4, 256, False)]
)
def test_what_the_kernel_leaves_to_xla(rows, size, delta):
    x, added, weight = operands(rows, size)
    module = export_for_cuda(lambda *a: kernel.add_norm(a[0], a[1] if delta else None, a[2], 1e-6), x, added, weight)
    assert "@mosaic_gpu_v2" not in module

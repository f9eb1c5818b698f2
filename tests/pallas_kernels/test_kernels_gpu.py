"""The kernels on a real GPU, over the full matrix. Those of mosaic_gpu need a Hopper one."""

import math
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_cases import GPU_MATRIX, TOLERANCE, Case, error_of, make_step, narrowed, widened
from rope_cases import RopeCase, make_rope_step, qkv_error

from jaxserve.pallas_kernels import add_norm_mosaic_gpu, gated_product_mosaic_gpu, paged_attention_mosaic_gpu, reference
from jaxserve.pallas_kernels.ops import resolve_backend

pytestmark = pytest.mark.gpu

_LENGTHS = (63, 0, 64, 65, 1, 700, 129, 512)
QKV_MATRIX = (
    [
        RopeCase(Case(decode=_LENGTHS, page_size=page, head_dim=h, group=g, kv_heads=k, dtype=dtype, **how), bias, norm)
        for page, h, g, k, dtype, bias, norm, how in [
            (64, 128, 4, 8, "bfloat16", False, False, {}),
            (64, 128, 6, 2, "bfloat16", True, False, {}),
            (16, 128, 1, 4, "float16", True, True, {"sliding_window": 70}),
            (128, 256, 8, 1, "bfloat16", False, True, {"softcap": 20.0}),
            (64, 128, 10, 2, "bfloat16", False, False, {}),
            (64, 128, 8, 2, "bfloat16", False, True, {"sliding_window": 128, "sinks": True}),
            (64, 64, 8, 8, "bfloat16", True, False, {"sliding_window": 128, "sinks": True}),
            (16, 80, 3, 1, "bfloat16", True, True, {"sinks": True}),
            (64, 96, 1, 8, "float16", False, False, {"sliding_window": 70}),
        ]
    ]
    + [
        RopeCase(
            Case(decode=_LENGTHS, page_size=64, head_dim=(64, 128, 256)[group % 3], group=group, dtype="bfloat16"),
            bias=group % 2 == 0,
            norm=group % 4 < 2,
        )
        for group in range(1, 17)
    ]
    + [
        RopeCase(Case(decode=tuple(range(1, 257)), page_size=64, head_dim=128, group=4, kv_heads=8, dtype="bfloat16")),
        RopeCase(Case(decode=(9000,), page_size=64, head_dim=128, group=6, kv_heads=2, dtype="bfloat16"), bias=True),
        RopeCase(
            Case(decode=(9000, 100), page_size=64, head_dim=128, group=3, kv_heads=2, dtype="bfloat16", sinks=True),
            bias=True,
        ),
    ]
)


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
@pytest.mark.parametrize("name", ["mosaic_gpu", "triton", "reference"])
@pytest.mark.parametrize("case", GPU_MATRIX, ids=str)
def test_attention_equals_the_oracle(case, name):
    device, shapes = jax.devices()[0], {"dtype": case.dtype, "head_dim": case.head_dim, "group": case.group}
    backend, step = resolve_backend(name, device.platform, device.device_kind, **shapes), make_step(case)
    run = jax.jit(lambda q, kv, meta: backend.halves[1](q, kv, backend.prepare(meta, case.page_size), **case.options))
    kv = widened(step.kv, backend.stored_head_dim(case.head_dim))
    assert error_of(run(step.q, kv, step.meta), step) < TOLERANCE[case.dtype]


@pytest.mark.parametrize("rope_case", QKV_MATRIX, ids=str)
def test_decode_from_the_projection_equals_the_reference(rope_case):
    case, step = rope_case.case, make_rope_step(rope_case)
    attend = partial(paged_attention_mosaic_gpu.attend, **{"sinks": None} | case.options)

    @partial(jax.jit, donate_argnums=1)
    def run(qkv, kv, meta, cos, sin, weights):
        meta = paged_attention_mosaic_gpu.prepare(meta, case.page_size)
        return attend(qkv, kv, meta, cos, sin, **weights, **step.options)

    kv = widened(step.kv, paged_attention_mosaic_gpu.stored_head_dim(case.head_dim))
    kv = jax.tree.map(lambda x: x.copy(), kv)  # it is donated
    out, kv = run(step.qkv, kv, step.meta, *step.arguments[3:])
    assert qkv_error(out, narrowed(kv, case.head_dim), step, case) < TOLERANCE[case.dtype]


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
@pytest.mark.parametrize("name", ["mosaic_gpu", "triton"])
@pytest.mark.parametrize("prefill", [(), ((70, 150), (64, 64))], ids=["decode", "mixed"])
def test_pages_beyond_two_to_the_31_elements_are_as_good_as_any(name, prefill):
    """A layer's pool of more than 4 GiB has them."""
    case = Case(decode=_LENGTHS, prefill=prefill, page_size=64, group=4, kv_heads=8, head_dim=128, dtype="bfloat16")
    step, device = make_rope_step(RopeCase(case)), jax.devices()[0]
    backend = resolve_backend(name, device.platform, device.device_kind, dtype="bfloat16", head_dim=128, group=4)

    @partial(jax.jit, donate_argnums=1)
    def run(qkv, kv, meta, cos, sin):
        meta = backend.prepare(meta, case.page_size)
        return backend.attend(qkv, kv, meta, cos, sin, **step.options, **{"sinks": None} | case.options)

    first = 2**31 // math.prod(step.kv.shape[1:]) + 8
    far = jnp.zeros((first + step.kv.shape[0], *step.kv.shape[1:]), step.kv.dtype).at[first:].set(step.kv)
    table = step.meta.page_table
    wanted = run(step.qkv, step.kv.copy(), step.meta, step.cos, step.sin)
    got, far = run(step.qkv, far, replace(step.meta, page_table=table + first), step.cos, step.sin)
    for a, b in zip((got, far[first + 1 :]), (wanted[0], wanted[1][1:]), strict=True):
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


@pytest.mark.parametrize("parts", [None, 4])
@pytest.mark.parametrize(("rows", "size"), [(1, 4096), (8, 1536), (64, 4096), (256, 8192), (3, 768), (512, 3584)])
def test_residual_and_norm_equal_the_reference(rows, size, parts):
    rng = np.random.default_rng(rows)
    x, delta, weight = (jnp.asarray(rng.normal(size=s), "bfloat16") for s in ((rows, size), (rows, size), size))
    if parts:
        delta = jnp.asarray(rng.normal(size=(parts, rows, size)), "float32")
    got = jax.jit(lambda *a: add_norm_mosaic_gpu.add_norm(*a, 1e-5))(x, delta, weight)
    for a, b in zip(got, reference.add_norm(x, delta, weight, 1e-5), strict=True):
        np.testing.assert_allclose(
            np.asarray(a, np.float32), np.asarray(b, np.float32), rtol=2**-7, atol=2**-6 if parts else 1e-6
        )


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("how", [{}, {"pair": False}, {"columns": 112}, {"columns": 80}], ids=str)
@pytest.mark.parametrize(("rows", "size", "columns"), [(21, 128, 64), (256, 1536, 8960), (577, 896, 4864)])
def test_gated_product_equals_float32(rows, size, columns, how, dtype):
    rng = np.random.default_rng(rows)
    x = jnp.asarray(rng.normal(size=(rows, size)), dtype)
    w = jnp.asarray(rng.normal(size=(2 * columns, size)) * size**-0.5, dtype)
    tuning = gated_product_mosaic_gpu.Tuning(**how)
    got = jax.jit(partial(gated_product_mosaic_gpu.multiply, tuning=tuning))(x, w)
    gate, up = np.split(np.asarray(x, np.float32) @ np.asarray(w, np.float32).T, 2, axis=-1)
    rounding = {"bfloat16": 2**-8, "float16": 2**-11}[dtype]
    np.testing.assert_allclose(np.asarray(got, np.float32), gate / (1 + np.exp(-gate)) * up, rtol=rounding, atol=1e-4)

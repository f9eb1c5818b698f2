"""The fused rope and KV write in the GPU interpreter, its cuts, and its lowering for CUDA from a host without a GPU."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from kernel_cases import Case, narrowed, widened
from rope_cases import ROPE_MATRIX, RopeCase, make_rope_step, worst

from jaxserve.pallas_kernels import reference
from jaxserve.pallas_kernels import rope_write_mosaic_gpu as kernel

SPREAD, TOGETHER, IN_PAIRS = kernel.RopeTuning(), kernel.RopeTuning(0, 100), kernel.RopeTuning(0, 2)


def call(rope_and_write, step, **how):
    """The function of a step's arguments alone."""

    def run(qkv, kv, meta, cos, sin, weights):
        return rope_and_write(qkv, kv, meta, cos, sin, **weights, **step.options, **how)

    return run


@pytest.mark.parametrize("case", ROPE_MATRIX, ids=str)
def test_the_reference_equals_the_oracle(case):
    step = make_rope_step(case)
    assert worst(jax.jit(call(reference.rope_and_write, step))(*step.arguments), step, case.case.dtype) < 1


@pytest.mark.parametrize("case", ROPE_MATRIX, ids=str)
def test_the_interpreted_kernel_equals_the_oracle(case):
    step = make_rope_step(case)
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
        got = jax.jit(call(kernel.rope_and_write, step))(*step.arguments)
    assert worst(got, step, case.case.dtype) < 1


@pytest.mark.parametrize("tuning", [TOGETHER, IN_PAIRS], ids=str)
def test_how_pieces_are_spread_does_not_change_a_bit(tuning):
    step = make_rope_step(ROPE_MATRIX[7])
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
        got, want = (jax.jit(call(kernel.rope_and_write, step, tuning=t))(*step.arguments) for t in (tuning, SPREAD))
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):  # numpy knows no NaN of bfloat16
        np.testing.assert_array_equal(np.asarray(x.astype(jnp.float32)), np.asarray(y.astype(jnp.float32)))


def test_nothing_is_written_beyond_a_head_in_wider_pages():
    step = make_rope_step(ROPE_MATRIX[-1])
    wide = widened(step.kv, 128)
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
        q, kv = jax.jit(call(kernel.rope_and_write, step))(step.qkv, wide, *step.arguments[2:])
    assert not np.asarray(kv[..., 80:].astype(jnp.float32)).any()
    assert worst((q, narrowed(kv, 80)), step, "bfloat16") < 1


def test_prepared_slots_are_used():
    step = make_rope_step(ROPE_MATRIX[1])
    meta = reference.prepare(step.meta, 64)
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
        got = jax.jit(call(kernel.rope_and_write, step))(step.qkv, step.kv, meta, *step.arguments[3:])
    assert worst(got, step, "float32") < 1


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("head_dim", range(16, 257, 16))
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (12, 2), (32, 8), (28, 4), (9, 3), (71, 5)])
def test_pieces_cover_each_head_once(heads, kv_heads, head_dim, itemsize):
    pieces = kernel.make_pieces(heads, kv_heads, head_dim, itemsize)
    got = [(p.part, p.first + i) for p in pieces for i in range(p.heads)]
    assert got == [("q", i) for i in range(heads)] + [(part, i) for part in "kv" for i in range(kv_heads)]
    for piece in pieces:
        layout = kernel.layout_of(piece.heads, head_dim // 2).to_mgpu()  # checks the threads, warps and lanes
        assert layout.vector_length * itemsize <= kernel.VECTOR_BYTES
        layout.reduce((1,))
    for tokens in (1, 10_000):
        groups = kernel.make_groups(pieces, tokens, kernel.RopeTuning())
        assert sum(groups, []) == pieces
        assert max(map(len, groups)) <= (1 if tokens == 1 else 4)


def export_for_cuda(fn, *args) -> str:
    checks = [jax.export.DisabledSafetyCheck.custom_call("mosaic_gpu_v2")]
    donating = jax.jit(fn, donate_argnums=1)
    return jax.export.export(donating, platforms=["cuda"], disabled_checks=checks)(*args).mlir_module()


def hashes(module: str) -> list[str]:
    return re.findall(r'kernel_hash = "([^"]*)"', module)


@pytest.mark.parametrize("tuning", [SPREAD, TOGETHER, IN_PAIRS], ids=["spread", "together", "pairs"])
@pytest.mark.parametrize("case", ROPE_MATRIX[::2], ids=str)
def test_the_kernel_lowers_for_cuda_and_writes_in_place(case, tuning):
    step = make_rope_step(case)
    module = export_for_cuda(call(kernel.rope_and_write, step, tuning=tuning), *step.arguments)
    assert module.count("@mosaic_gpu_v2") == 1
    aliases = re.findall(r"output_operand_alias<output_tuple_indices = \[(\d)\]", module)
    assert aliases == ["1"], "the pool that the kernel returns is its operand"
    assert re.findall(r"tf.aliasing_output = (\d)", module) == ["1"], "and the caller's"


def layers(step, count):
    """Each layer has its own pool, as in a step."""

    def run(qkv, kvs, meta, cos, sin, weights):
        done = [call(kernel.rope_and_write, step)(qkv + i, kv, meta, cos, sin, weights) for i, kv in enumerate(kvs)]
        return [q for q, _ in done], [kv for _, kv in done]

    return run, (step.qkv, [step.kv] * count, *step.arguments[2:])


def test_all_layers_share_one_kernel():
    fn, arguments = layers(make_rope_step(ROPE_MATRIX[5]), 3)
    module = export_for_cuda(fn, *arguments)
    assert len(hashes(module)) == 1
    assert module.count("tf.aliasing_output") == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [({"dtype": "float64"}, "dtype is float64"), ({"head_dim": 72}, "model's is 72"), ({"head_dim": 272}, "is 272")],
)
def test_models_that_the_kernel_does_not_take(change, message):
    assert message in (kernel.unsupported(**{"dtype": "bfloat16", "head_dim": 64, **change}) or "")
    assert kernel.unsupported(dtype=None, head_dim=None) is None


def test_shapes_that_do_not_fit_raise():
    step = make_rope_step(RopeCase(Case(decode=(5,), head_dim=72, dtype="bfloat16")))
    with pytest.raises(ValueError, match="model's is 72"):
        call(kernel.rope_and_write, step)(*step.arguments)
    step = make_rope_step(RopeCase(Case(decode=(5,), head_dim=80, dtype="bfloat16")))
    with pytest.raises(ValueError, match="pages of head dim 80 must be at least as wide, got 64"):
        call(kernel.rope_and_write, step)(step.qkv, narrowed(step.kv, 64), *step.arguments[2:])
    step = make_rope_step(ROPE_MATRIX[0])
    with pytest.raises(ValueError, match=r"qkv must be \[T, 192\]"):
        call(kernel.rope_and_write, step)(step.qkv[:, 1:], *step.arguments[1:])
    with pytest.raises(ValueError, match=r"cos and sin must be \[1, 32\]"):
        call(kernel.rope_and_write, step)(step.qkv, step.kv, step.meta, step.cos[:, None], step.sin, step.weights)
    with pytest.raises(ValueError, match="pieces_per_cta must be at least 1, got 0"):
        kernel.RopeTuning(pieces_per_cta=0)


def test_float32_keeps_all_its_digits():
    step = make_rope_step(ROPE_MATRIX[6])
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
        got = jax.jit(call(kernel.rope_and_write, step))(*step.arguments)
    want = jax.jit(call(reference.rope_and_write, step))(*step.arguments)
    real = jnp.asarray(step.meta.token_rows) < step.meta.page_table.shape[0]
    np.testing.assert_allclose(got[0][real], want[0][real], rtol=2e-6, atol=2e-6)

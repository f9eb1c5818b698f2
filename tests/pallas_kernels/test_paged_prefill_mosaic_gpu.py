"""The prefill kernel in the GPU interpreter, its tiles, and its lowering for CUDA from a host without a GPU."""

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from kernel_cases import PREFILL_MATRIX, TOLERANCE, Case, make_step

from jaxserve.pallas_kernels import paged_prefill_mosaic_gpu as kernel

# The interpreter runs no wgmma that takes an operand from registers; but for that, this is the kernel of the card.
INTERPRETED = kernel.PrefillTuning(p_in_registers=False)
DEFAULT = kernel.PrefillTuning()

# Seconds per case, so each holds many conditions; a real GPU runs the whole matrix.
CASES = [
    Case(prefill=((3, 200), (150, 300)), prefill_padding=7, page_size=16, group=2, kv_heads=1, dtype="bfloat16"),
    Case(prefill=((140, 140), (0, 0), (1, 77)), prefill_padding=3, page_size=256, head_dim=128, group=1, kv_heads=1,
         dtype="bfloat16", sliding_window=33, softcap=20.0),
    Case(decode=(3,) * 8, prefill=((77, 300), (5, 100)), page_size=64, head_dim=256, group=1, kv_heads=1,
         dtype="float16", sliding_window=100),
    Case(prefill=((9, 9),), prefill_padding=130, page_size=32, head_dim=64, group=1, kv_heads=2, dtype="float16"),
    Case(prefill=((5, 70),), page_size=64, head_dim=64, group=5, kv_heads=2, dtype="bfloat16"),
    Case(prefill=((77, 200), (0, 0), (3, 3)), prefill_padding=3, page_size=64, head_dim=64, group=2, kv_heads=1,
         dtype="bfloat16", sliding_window=100, sinks=True),
]  # fmt: skip


def attend(case, tuning=DEFAULT):
    """Attention of a case's prefill region, from the queries of the whole step."""

    def run(q, kv, meta):
        split = len(case.decode)
        return kernel.prefill_attention(q, kv, meta, first_token=split, tuning=tuning, **case.options)[split:]

    return run


def error_of(got, step) -> float:
    return float(np.abs(np.asarray(got.astype(jnp.float32)) - step.expected()[len(step.case.decode) :]).max())


@pytest.mark.parametrize("case", CASES, ids=str)
def test_interpreted_kernel_equals_the_oracle(case):
    step = make_step(case)
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
        got = jax.jit(attend(case, INTERPRETED))(step.q, step.kv, step.meta)
    assert error_of(got, step) < TOLERANCE[case.dtype]


@pytest.mark.parametrize("tuning", [replace(INTERPRETED, take_turns=False), replace(INTERPRETED, kv_tile=64, stages=1)])
def test_tunings_give_the_same(tuning):
    step = make_step(Case(prefill=((70, 200),), page_size=64, group=1, kv_heads=1, dtype="bfloat16"))
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
        got = jax.jit(attend(step.case, tuning))(step.q, step.kv, step.meta)
    assert error_of(got, step) < TOLERANCE["bfloat16"]


@pytest.mark.gpu
@pytest.mark.parametrize("case", PREFILL_MATRIX, ids=str)
def test_kernel_on_the_card_equals_the_oracle(case):
    step = make_step(case)
    got = jax.jit(attend(case))(step.q, step.kv, kernel.prepare(step.meta, case.page_size))
    assert error_of(got, step) < TOLERANCE[case.dtype]


def export_for_cuda(fn, *args) -> str:
    checks = [jax.export.DisabledSafetyCheck.custom_call("mosaic_gpu_v2")]
    return jax.export.export(jax.jit(fn), platforms=["cuda"], disabled_checks=checks)(*args).mlir_module()


@pytest.mark.parametrize(
    ("page_size", "head_dim"), [(page, 128) for page in kernel.PAGE_SIZES] + [(16, 64), (64, 64), (16, 256), (64, 256)]
)
def test_kernel_lowers_for_cuda_from_a_cpu_host(page_size, head_dim):
    group = {64: 3, 128: 6, 256: 8}[head_dim]
    how = {"sliding_window": 64, "softcap": 30.0} if page_size > 32 else {"sinks": True}
    step = make_step(
        Case(prefill=((70, 100), (9, 9)), page_size=page_size, head_dim=head_dim, group=group, dtype="bfloat16", **how)
    )
    module = export_for_cuda(attend(step.case), step.q, step.kv, step.meta)
    assert module.count("@mosaic_gpu_v2") == 1


def hashes(module: str) -> list[str]:
    return re.findall(r'kernel_hash = "([^"]*)"', module)


def layers(case, count):
    def run(q, kv, meta):
        meta = kernel.prepare(meta, case.page_size)
        for _ in range(count):
            q = attend(case)(q, kv, meta)
        return q

    return run


def test_all_layers_share_one_kernel():
    step = make_step(Case(prefill=((70, 70), (3, 8)), page_size=64, dtype="bfloat16"))
    assert len(hashes(export_for_cuda(layers(step.case, 3), step.q, step.kv, step.meta))) == 1


@pytest.mark.parametrize("sliding_window", [None, 1, 100])
@pytest.mark.parametrize("num_rows", [1, 3, 40])
def test_tiles_cover_each_token_once(num_rows, sliding_window):
    rng = np.random.default_rng(num_rows)
    for longest in (1, 130, 1000):
        chunks = rng.integers(0, longest, num_rows, endpoint=True)
        chunks[-1] = longest
        contexts = rng.integers(0, 5000, num_rows) * (rng.random(num_rows) < 0.5)
        padding = int(rng.integers(0, 300)) * (longest > 8)
        cu = np.concatenate([[0], np.cumsum(chunks)])
        tokens = int(cu[-1]) + padding
        lens = np.append(5, np.where(chunks > 0, chunks + contexts, 0))  # behind one decode row
        meta = kernel.AttentionInput(
            page_table=jnp.zeros((num_rows + 1, 1), jnp.int32), kv_lens=jnp.asarray(lens, jnp.int32),
            positions=jnp.zeros(tokens + 1, jnp.int32), token_rows=jnp.zeros(tokens + 1, jnp.int32),
            cu_q_lens=jnp.asarray(cu, jnp.int32), num_decode_rows=1,
        )  # fmt: skip
        tiles = np.asarray(jax.jit(kernel.make_work, static_argnums=1)(meta, sliding_window).tiles)
        assert len(tiles) == kernel.max_tiles(tokens, num_rows)
        seen, weights = np.zeros(tokens, int), []
        for row, first, count, position in tiles:
            weights.append(min(position + count, count + (sliding_window or 10**6)) if count else -1)
            assert first % kernel.ALIGN + count <= kernel.QUERY_TILE
            seen[first : first + count] += 1
            if count and first < cu[-1]:
                chunk = row - 1
                assert cu[chunk] <= first and first + count <= cu[chunk + 1]
                assert position == contexts[chunk] + first - cu[chunk]
            elif count:
                assert position + count == 0, "padding sees no key"
        assert (seen == 1).all()
        assert weights == sorted(weights, reverse=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [({"dtype": "float32"}, "dtype is float32"), ({"head_dim": 80}, "model's is 80"), ({"page_size": 8}, "got 8")],
)
def test_shapes_that_the_kernel_does_not_take_raise(change, message):
    case = Case(**{"prefill": ((5, 5),), "dtype": "bfloat16", **change})
    step = make_step(case)
    with pytest.raises(ValueError, match=message):
        attend(case)(step.q, step.kv, step.meta)


def test_decode_rows_that_break_the_alignment_raise():
    step = make_step(Case(decode=(3,), prefill=((5, 5),), dtype="bfloat16"))
    with pytest.raises(ValueError, match="multiple of 8"):
        kernel.prefill_attention(step.q, step.kv, step.meta, scale=1.0, first_token=1)

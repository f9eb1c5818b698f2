"""Both kernels of Hopper GPUs behind `Backend.attend`: head dims that are stored in wider pages, and attention sinks."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from kernel_cases import TOLERANCE, Case, narrowed, widened
from rope_cases import RopeCase, make_rope_step, qkv_error

from jaxserve.pallas_kernels import paged_attention_mosaic_gpu as kernel
from jaxserve.pallas_kernels.paged_decode_mosaic_gpu import DecodeTuning, decode_attention
from jaxserve.pallas_kernels.reference import AttentionInput
from jaxserve.state import KVPages

SMALL = DecodeTuning(ctas_each=1, min_tiles=1, multiprocessors=4)  # the interpreter runs a whole card's workers in turn
DECODE = [
    RopeCase(Case(decode=(65, 0, 17), head_dim=80, group=3, kv_heads=1, dtype="bfloat16", sinks=True), bias=True),
    RopeCase(Case(decode=(130, 64), page_size=64, head_dim=96, group=2, kv_heads=1, dtype="float16",
                  sliding_window=70), norm=True),
]  # fmt: skip


def attend(step, case):
    def run(qkv, kv, meta, cos, sin, weights):
        how = {"sinks": None} | case.options
        return kernel.attend(qkv, kv, kernel.prepare(meta, case.page_size), cos, sin, **weights, **step.options, **how)

    return run


@pytest.mark.parametrize("rope_case", DECODE, ids=str)
def test_heads_that_are_narrower_than_pages(rope_case, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(kernel.decode, "decode_attention", partial(decode_attention, tuning=SMALL))
    case, step = rope_case.case, make_rope_step(rope_case)
    kv = widened(step.kv, kernel.stored_head_dim(case.head_dim))
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
        out, kv = jax.jit(attend(step, case))(step.qkv, kv, *step.arguments[2:])
    assert qkv_error(out, narrowed(kv, case.head_dim), step, case) < TOLERANCE[case.dtype]
    assert not np.asarray(kv[..., case.head_dim :].astype(jnp.float32)).any()


ALL = {"sinks": True, "sliding_window": 128, "softcap": 20.0}
CHUNKS = ((5, 5), (70, 100))
TILES = ((5, 5), (130, 260), (1, 129))


@pytest.mark.parametrize(
    ("head_dim", "prefill", "how"),
    [(head_dim, CHUNKS, ALL) for head_dim in (64, 80, 96, 128, 256)] + [(80, (), {}), (96, (), ALL), (128, (), ALL)],
)
def test_every_head_dim_lowers_for_cuda_and_writes_in_place(head_dim, prefill, how):
    case = Case(decode=(7,) * 8, prefill=prefill, page_size=64, head_dim=head_dim, dtype="bfloat16", **how)
    step = make_rope_step(RopeCase(case, norm=True))
    kv = jax.eval_shape(lambda: widened(step.kv, kernel.stored_head_dim(head_dim)))
    checks = [jax.export.DisabledSafetyCheck.custom_call("mosaic_gpu_v2")]
    lower = jax.export.export(jax.jit(attend(step, case), donate_argnums=1), platforms=["cuda"], disabled_checks=checks)
    module = lower(step.qkv, kv, *step.arguments[2:]).mlir_module()
    fused = not prefill and head_dim in (128, 256)
    assert module.count("@mosaic_gpu_v2") == (1 if fused else 3 if prefill else 2)
    assert re.findall(r"tf.aliasing_output = (\d)", module) == ["1"]


@pytest.mark.parametrize(
    "group", [9, 16, *(pytest.param(group, marks=pytest.mark.heavy) for group in range(1, 16) if group != 9)]
)
@pytest.mark.parametrize(("rows", "prefill"), [(8, ()), (8, TILES), (0, TILES)], ids=["decode", "mixed", "prompts"])
def test_every_group_compiles_for_an_h200(rows, prefill, group, h200):
    """XLA takes what is around the kernels, and these fit the shared memory of a multiprocessor, at the widest heads."""
    case = Case((7,) * rows, prefill, 8 * bool(prefill), 64, head_dim=256, group=group, dtype="bfloat16", extra_width=9)
    step, there = make_rope_step(RopeCase(case, norm=True)), jax.sharding.SingleDeviceSharding(h200)

    def attention(q: jax.Array, kv: KVPages, meta: AttentionInput) -> jax.Array:
        return kernel.attention(q, kv, kernel.prepare(meta, case.page_size), **case.options)

    q = jnp.zeros((len(step.qkv), 2 * group, 256), "bfloat16")
    run, arguments = (attention, (q, step.kv, step.meta)) if prefill else (attend(step, case), step.arguments)
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=there), arguments)
    hlo = jax.jit(run).lower(*shapes).compile({"xla_gpu_autotune_level": 0}).as_text()
    assert "mosaic_gpu_v2" in hlo


@pytest.mark.parametrize(
    ("rows", "kv_heads", "longest", "tiles"),
    [(8, 2, 64, 2), (1, 8, 64, 2), (16, 2, 64, 2), (8, 8, 64, 4), (64, 2, 64, 4), (8, 2, 3, 4)],
)
def test_small_batches_are_cut_into_smaller_parts(rows, kv_heads, longest, tiles):
    cuts = DecodeTuning().cuts(rows, kv_heads, 128, longest)
    assert cuts.min_tiles == tiles
    assert cuts.max_splits > 1 or longest < 4

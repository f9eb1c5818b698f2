"""The decode kernel in the GPU interpreter, its work list, and its lowering for CUDA from a host without a GPU."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from kernel_cases import TOLERANCE, Case, error_of, make_step

from jaxserve.pallas_kernels import kernel_hash
from jaxserve.pallas_kernels import paged_decode_mosaic_gpu as kernel

SMALL = kernel.DecodeTuning(target_ctas=8, min_tiles=1)  # few items, so that the interpreter is quick, yet rows split

# The interpreter takes seconds per case, so each holds many conditions; a real GPU runs the whole matrix.
CASES = [
    Case(decode=(63, 0, 65, 320), page_size=64, head_dim=128, group=4, kv_heads=1, dtype="bfloat16"),
    Case(decode=(15, 16, 17, 130), page_size=16, head_dim=64, group=3, dtype="bfloat16", extra_width=0),
    Case(decode=(31, 200), page_size=32, head_dim=64, group=6, kv_heads=1, dtype="float16", sliding_window=70,
         softcap=20.0),
    Case(decode=(1, 129), page_size=128, head_dim=256, group=1, kv_heads=1, dtype="bfloat16"),
]  # fmt: skip


def decode(step, tuning=SMALL):
    return jax.jit(lambda q, kv, table, lens: kernel.decode_attention(
        q, kv, table, lens, tuning=tuning, **step.case.options
    ))  # fmt: skip


def arguments(step):
    return step.q, step.kv, step.meta.page_table, step.meta.kv_lens


@pytest.mark.parametrize("case", CASES, ids=str)
def test_interpreted_kernel_equals_the_oracle(case):
    step = make_step(case)
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
        got = decode(step)(*arguments(step))
    assert error_of(got, step) < TOLERANCE[case.dtype]


def export_for_cuda(fn, *args) -> str:
    checks = [jax.export.DisabledSafetyCheck.custom_call("mosaic_gpu_v2")]
    return jax.export.export(jax.jit(fn), platforms=["cuda"], disabled_checks=checks)(*args).mlir_module()


@pytest.mark.parametrize(
    ("page_size", "head_dim"), [(page, 128) for page in kernel.PAGE_SIZES] + [(64, h) for h in kernel.HEAD_DIMS]
)
def test_kernel_lowers_for_cuda_from_a_cpu_host(page_size, head_dim):
    step = make_step(Case(decode=(70, 3), page_size=page_size, head_dim=head_dim, group=12, dtype="bfloat16",
                          sliding_window=64, softcap=30.0))  # fmt: skip
    module = export_for_cuda(decode(step, kernel.DecodeTuning()), *arguments(step))
    assert module.count("@mosaic_gpu_v2") == 1


def hashes(module: str) -> list[str]:
    return re.findall(r'kernel_hash = "([^"]*)"', module)


def layers(step, count):
    def run(q, kv, table, lens):
        for _ in range(count):
            q = kernel.decode_attention(q, kv, table, lens, tuning=SMALL, **step.case.options)
        return q

    return run


def test_all_layers_share_one_kernel():
    step = make_step(Case(decode=(70, 3), page_size=64, dtype="bfloat16"))
    assert len(hashes(export_for_cuda(layers(step, 3), *arguments(step)))) == 1


def test_kernel_hash_does_not_depend_on_what_was_traced_before():
    assert kernel_hash.make_kernel_hashes_stable()
    found = []
    for rows in ((70, 3), (70, 3, 5), (70, 3)):
        step = make_step(Case(decode=rows, page_size=64, dtype="bfloat16"))
        found.append(hashes(export_for_cuda(layers(step, 1), *arguments(step))))
    assert found[0] == found[2] != found[1]


@pytest.mark.parametrize("sliding_window", [None, 1, 100, 5000])
@pytest.mark.parametrize(("rows", "kv_heads"), [(1, 8), (5, 1), (64, 8), (300, 2)])
def test_work_items_cover_each_needed_tile_once(rows, kv_heads, sliding_window):
    tuning = kernel.DecodeTuning()
    rng = np.random.default_rng(rows)
    make = jax.jit(lambda lens: kernel.make_work(lens, kv_heads, sliding_window, tuning))
    for longest in (1, 64, 700, 30_000):
        lens = rng.integers(0, longest, rows, endpoint=True)
        lens[-1] = longest
        lens[: rows // 4] = 0
        work = jax.tree.map(np.asarray, make(jnp.asarray(lens, jnp.int32)))
        assert len(work.items) == rows + tuning.spare_items(rows, kv_heads)
        assert work.num_items.max() <= tuning.max_splits(rows, kv_heads)
        done = 0
        for row, n in enumerate(lens):
            first = 0 if sliding_window is None else max(0, n - sliding_window) // kernel.KV_TILE
            own = work.items[work.first_items[row] : work.first_items[row] + work.num_items[row]]
            assert (own[:, 0] == row).all() and (own[:, 2] > own[:, 1]).all()
            tiles = [tile for _, begin, end in own for tile in range(begin, end)]
            assert tiles == list(range(first, -(-n // kernel.KV_TILE)))
            done += len(own)
        assert (work.items[done:, 1] == work.items[done:, 2]).all()


def test_small_batches_fill_the_card():
    work = kernel.make_work(jnp.array([8192], jnp.int32), 8, None, kernel.DecodeTuning())
    assert int(work.num_items[0]) * 8 >= 120


@pytest.mark.parametrize(
    ("change", "message"),
    [({"dtype": "float32"}, "dtype is float32"), ({"head_dim": 80}, "model's is 80"), ({"group": 17}, "has 17")],
)
def test_shapes_that_the_kernel_does_not_take_raise(change, message):
    step = make_step(Case(**{"decode": (5,), "dtype": "bfloat16", **change}))
    with pytest.raises(ValueError, match=message):
        decode(step)(*arguments(step))

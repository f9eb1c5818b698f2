"""The decode kernel in the GPU interpreter, its work list, and its lowering for CUDA from a host without a GPU."""

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from kernel_cases import TOLERANCE, Case, error_of, make_step
from rope_cases import RopeCase, make_rope_step, qkv_error

from jaxserve.pallas_kernels import paged_decode_mosaic_gpu as kernel

# Few workers, so that the interpreter is quick, yet rows split.
SMALL = kernel.DecodeTuning(ctas_each=1, min_tiles=1, multiprocessors=4)

# The interpreter takes seconds per case, so each holds many conditions; a real GPU runs the whole matrix. Rows with one
# item and rows that are split, in any order; heads that fill a tile of 8 or 16 and heads that do not.
CASES = [
    Case(decode=(63, 0, 65, 320), page_size=64, head_dim=128, group=4, kv_heads=1, dtype="bfloat16"),
    Case(decode=(15, 16, 17, 130), page_size=16, head_dim=64, group=3, dtype="bfloat16", extra_width=0),
    Case(decode=(31, 200), page_size=32, head_dim=64, group=6, kv_heads=1, dtype="float16", sliding_window=70,
         softcap=20.0),
    Case(decode=(1, 129), page_size=128, head_dim=256, group=1, kv_heads=1, dtype="bfloat16"),
    Case(decode=(0, 700, 64), page_size=64, head_dim=64, group=16, kv_heads=1, dtype="bfloat16"),
    Case(decode=(300, 20), page_size=64, head_dim=64, group=8, kv_heads=1, dtype="float16"),
    Case(decode=(130, 0), page_size=64, head_dim=64, group=7, kv_heads=1, dtype="bfloat16", sliding_window=128),
    Case(decode=(150, 0), page_size=64, head_dim=64, group=11, kv_heads=1, dtype="bfloat16", sinks=True),
    Case(decode=(70,), page_size=64, head_dim=64, group=5, kv_heads=2, dtype="bfloat16"),
    Case(decode=(70,), page_size=16, head_dim=64, group=13, kv_heads=2, dtype="float16"),
    Case(decode=(70,), page_size=64, head_dim=64, group=14, kv_heads=1, dtype="bfloat16"),
    Case(decode=(300, 63, 1), page_size=64, head_dim=64, group=3, kv_heads=2, dtype="bfloat16", sliding_window=128,
         sinks=True),
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


def test_rows_that_nothing_can_split_take_one_kernel():
    case = Case(decode=(64, 0, 1, 40), page_size=64, head_dim=64, group=6, kv_heads=1, dtype="bfloat16", extra_width=0)
    step = make_step(case)
    assert len(hashes(export_for_cuda(decode(step), *arguments(step)))) == 1
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
        got = decode(step)(*arguments(step))
    assert error_of(got, step) < TOLERANCE[case.dtype]


def test_one_worker_takes_rows_and_parts_of_rows_one_after_the_other():
    """More tiles than the ring holds, so that a row begins at any stage."""
    case = Case(decode=(3, 600, 0, 1500, 64, 1), page_size=64, head_dim=64, group=2, kv_heads=1, dtype="bfloat16")
    step, tuning = make_step(case), replace(SMALL, stages=3, multiprocessors=3)
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
        got = decode(step, tuning)(*arguments(step))
    work = make_work(step, tuning)
    assert work.cuts[:, :2].tolist() == [[0, 0], [3, 0], [3, 14], [6, 0]]
    assert work.splits[0].tolist() == [3, 2] and work.num_splits.tolist() == [1]
    assert error_of(got, step) < TOLERANCE[case.dtype]


def make_work(step, tuning):
    _, kv_heads, _, page_size, head_dim = step.kv.shape
    return kernel.decode_work(
        step.meta.kv_lens, step.meta.page_table, kv_heads=kv_heads, head_dim=head_dim, page_size=page_size,
        tuning=tuning,
    )  # fmt: skip


def test_work_may_be_made_once_for_all_layers():
    case = Case(decode=(200, 64), page_size=64, head_dim=64, kv_heads=1, dtype="bfloat16")
    step = make_step(case)
    q, kv, table, lens = arguments(step)
    work = make_work(step, SMALL)
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
        got = jax.jit(lambda work: kernel.decode_attention(q, kv, table, lens, scale=case.scale, tuning=SMALL,
                                                           work=work))(work)  # fmt: skip
    assert error_of(got, step) < TOLERANCE[case.dtype]


def export_for_cuda(fn, *args, donate=()) -> str:
    checks = [jax.export.DisabledSafetyCheck.custom_call("mosaic_gpu_v2")]
    return jax.export.export(jax.jit(fn, donate_argnums=donate), platforms=["cuda"], disabled_checks=checks)(
        *args
    ).mlir_module()


@pytest.mark.parametrize(
    ("page_size", "head_dim", "group"),
    [(16, 128, 12), (32, 64, 1), (64, 256, 16), (64, 128, 6), (128, 128, 8), (256, 64, 9)],
)
def test_kernels_lower_for_cuda_from_a_cpu_host(page_size, head_dim, group):
    step = make_step(Case(decode=(700, 3), page_size=page_size, head_dim=head_dim, group=group, dtype="bfloat16",
                          sliding_window=640, softcap=30.0, sinks=group % 2 == 0))  # fmt: skip
    module = export_for_cuda(decode(step, kernel.DecodeTuning()), *arguments(step))
    assert module.count("@mosaic_gpu_v2") == 2


def hashes(module: str) -> list[str]:
    return re.findall(r'kernel_hash = "([^"]*)"', module)


def layers(step, count):
    def run(q, kv, table, lens):
        for _ in range(count):
            q = kernel.decode_attention(q, kv, table, lens, tuning=SMALL, **step.case.options)
        return q

    return run


def test_all_layers_share_the_kernels():
    step = make_step(Case(decode=(70, 3), page_size=64, dtype="bfloat16"))
    assert len(hashes(export_for_cuda(layers(step, 3), *arguments(step)))) == 2


@pytest.mark.parametrize("sliding_window", [None, 1, 100, 5000])
@pytest.mark.parametrize(("rows", "kv_heads"), [(1, 8), (1, 1), (5, 1), (64, 8), (300, 2), (200, 32)])
def test_workers_cover_each_needed_tile_once(rows, kv_heads, sliding_window):
    rng = np.random.default_rng(rows)
    cuts = kernel.DecodeTuning().cuts(rows, kv_heads, 128, kernel.longest_row(30_000 // 16, 16, sliding_window))
    table = jnp.asarray(rng.integers(1, 2**20, (rows, 30_000 // 16)), jnp.int32)
    make = jax.jit(lambda lens: kernel.make_work(lens, table, 16, sliding_window, cuts))
    for longest in (0, 1, 64, 700, 30_000):
        lens = rng.integers(0, longest, rows, endpoint=True)
        lens[-1] = longest
        lens[: rows // 4] = 0
        work = jax.tree.map(np.asarray, make(jnp.asarray(lens, jnp.int32)))
        tiles = tiles_of(lens, sliding_window)
        found, slots = {}, {}
        check_starts(work, lens, np.asarray(table), sliding_window)
        for _, row, first, last, slot in parts_of(work, tiles):
            assert found.get(row, 0) == first and last <= tiles[row]
            found[row] = last
            if slot != kernel.WHOLE:
                assert first < last
                slots.setdefault(row, []).append(slot)
        assert found == dict(enumerate(tiles))
        used = [slot for own in slots.values() for slot in own]
        assert len(set(used)) == len(used) and max(used, default=0) < len(work.splits) * cuts.slots_per_row
        assert work.splits[: work.num_splits[0]].tolist() == [[row, len(own)] for row, own in slots.items()]
        for nth, own in enumerate(slots.values()):
            assert own == list(range(nth * cuts.slots_per_row, nth * cuts.slots_per_row + len(own)))
            assert 1 < len(own) <= cuts.max_splits


def check_starts(work, lens, table, sliding_window):
    """That each worker finds the length of its first row, and the pages of 16 of its first tile, in its cut."""
    for row, before, _, length, *pages in work.cuts[:-1]:
        if row < len(lens):
            assert length == lens[row]
            column = (begin_of(lens[row], sliding_window) + before) * kernel.KV_TILE // 16
            there = np.minimum(np.arange(column, column + 4), table.shape[1] - 1)
            np.testing.assert_array_equal(pages, table[row, there])


def begin_of(length, sliding_window):
    return 0 if sliding_window is None else np.maximum(length - sliding_window, 0) // kernel.KV_TILE


def tiles_of(lens, sliding_window=None):
    return -(-lens // kernel.KV_TILE) - begin_of(lens, sliding_window)


def parts_of(work, tiles):
    """As the kernel reads it: worker, row, tiles of that row from and to, slot."""
    cuts = work.cuts[:, :3]
    for worker, ((row, before, offset), (last_row, last_before, last_offset)) in enumerate(zip(cuts, cuts[1:])):
        for r in range(row, last_row + (last_before > 0)):
            first, last = before if r == row else 0, last_before if r == last_row else tiles[r]
            part = first > 0 or last < tiles[r]
            slot = worker + (last_offset if r == last_row else offset) if part else kernel.WHOLE
            yield worker, r, int(first), int(last), int(slot)


@pytest.mark.parametrize(
    ("lens", "kv_heads"),
    [([640] * 256, 8), ([640] * 256, 2), ([640] * 64, 8), (range(256, 768, 8), 8), (range(256, 768, 2), 8),
     ([60_000] + [100] * 255, 8), ([60_000] * 2, 4)],
)  # fmt: skip
def test_workers_have_about_the_same_to_do(lens, kv_heads):
    lens = np.array(lens)
    work, tiles = work_of(lens, kv_heads), tiles_of(lens)
    done = np.zeros(len(work.cuts) - 1)
    for worker, _, first, last, _ in parts_of(work, tiles):
        done[worker] += last - first + 1
    assert done.max() <= 1.45 * (tiles + 1).sum() / len(done)


def work_of(lens, kv_heads, width=1024):
    table = jnp.zeros((len(lens), width), jnp.int32)
    make = jax.jit(kernel.decode_work, static_argnames=("kv_heads", "head_dim", "page_size"))
    work = make(jnp.array(lens, jnp.int32), table, kv_heads=kv_heads, head_dim=128, page_size=64)
    return jax.tree.map(np.asarray, work)


@pytest.mark.parametrize("kv_heads", [2, 8])
def test_small_batches_fill_the_card(kv_heads):
    work = work_of([64 * 1024], kv_heads)
    assert work.splits[0, 1] * kv_heads >= 120


@pytest.mark.parametrize(("rows", "kv_heads", "length"), [(256, 8, 2048), (256, 8, 430), (64, 8, 512), (8, 8, 100)])
def test_equal_rows_that_are_short_or_fill_the_card_are_not_split(rows, kv_heads, length):
    assert work_of([length] * rows, kv_heads).num_splits[0] == 0


def test_a_large_batch_of_short_rows_takes_one_kernel():
    case = Case(decode=(70,) * 150, page_size=64, head_dim=128, group=4, kv_heads=8, dtype="bfloat16")
    step = make_step(case)
    assert len(hashes(export_for_cuda(decode(step, kernel.DecodeTuning()), *arguments(step)))) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [({"dtype": "float32"}, "dtype is float32"), ({"head_dim": 80}, "model's is 80"), ({"group": 17}, "has 17")],
)
def test_shapes_that_the_kernel_does_not_take_raise(change, message):
    step = make_step(Case(**{"decode": (5,), "dtype": "bfloat16", **change}))
    with pytest.raises(ValueError, match=message):
        decode(step)(*arguments(step))


# ---- from the merged projection: bias, norm, rope, KV write and attention in one kernel

QKV_CASES = [
    RopeCase(Case(decode=(63, 0, 65, 320, 1, 64), page_size=64, head_dim=128, group=4, kv_heads=2, dtype="bfloat16"),
             bias=True),
    RopeCase(Case(decode=(130, 17), page_size=16, head_dim=128, group=6, kv_heads=2, dtype="float16",
                  sliding_window=70, softcap=20.0, sinks=True), norm=True),
    RopeCase(Case(decode=(129, 1), page_size=64, head_dim=256, group=10, kv_heads=1, dtype="bfloat16"), bias=True,
             norm=True),
]  # fmt: skip


def call_qkv(step, case, tuning=SMALL):
    def run(qkv, kv, meta, cos, sin, weights):
        return kernel.decode_qkv(
            qkv, kv, meta.page_table, meta.kv_lens, cos, sin, tuning=tuning, **weights, **step.options, **case.options
        )

    return run


@pytest.mark.parametrize("rope_case", QKV_CASES, ids=str)
def test_the_interpreted_kernel_takes_the_projection(rope_case):
    case, step = rope_case.case, make_rope_step(rope_case)
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
        out, kv = jax.jit(call_qkv(step, case))(*step.arguments)
    assert qkv_error(out, kv, step, case) < TOLERANCE[case.dtype]


def test_the_projection_lowers_for_cuda_as_one_kernel_that_writes_in_place():
    found = []
    for rope_case in QKV_CASES:
        step = make_rope_step(rope_case)
        tuning = kernel.DecodeTuning(min_tiles=16)  # nothing to split
        module = export_for_cuda(call_qkv(step, rope_case.case, tuning), *step.arguments, donate=1)
        found.append((module.count("@mosaic_gpu_v2"), re.findall(r"tf.aliasing_output = (\d)", module)))
        assert re.findall(r"output_operand_alias<output_tuple_indices = \[(\d)\]", module) == ["1"]
    assert found == [(1, ["1"])] * 3


@pytest.mark.parametrize(("head_dim", "heads", "takes"), [(128, 12, True), (64, 12, False), (128, 22, False)])
def test_which_models_it_takes(head_dim, heads, takes):
    pages = jnp.zeros((1, 2, 2, 16, head_dim), jnp.bfloat16)
    assert kernel.takes_qkv(pages, heads) is takes

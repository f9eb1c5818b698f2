"""The Triton kernels in Pallas' interpreter, their work lists, and their lowering for CUDA from a host without a GPU."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh
from kernel_cases import PREFILL_MATRIX, TOLERANCE, Case, error_of, make_step
from rope_cases import RopeCase, make_rope_step, qkv_error

from jaxserve.pallas_kernels import paged_attention_triton as kernel
from jaxserve.pallas_kernels.rope_write_triton import rope_and_write
from jaxserve.step_cache import OURS

pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")

# Small tiles and few programs, so that the interpreter is quick, yet rows are split and chunks take several tiles.
SMALL = kernel.Tuning(query_tile=32, kv_tile=32, target_programs=8, min_tiles=1, interpret=True)

# Seconds per case, nearly all of it XLA's, so each holds many conditions; a real GPU runs the whole matrix.
CASES = [
    Case(decode=(15, 0, 17, 200), page_size=16, head_dim=64, group=3, kv_heads=2, dtype="bfloat16", sinks=True,
         extra_width=0),
    Case(decode=(63, 64, 65), page_size=64, head_dim=80, group=6, kv_heads=1, dtype="float16", sliding_window=40,
         softcap=20.0),
    Case(decode=(129, 1), page_size=128, head_dim=256, group=17, kv_heads=1, dtype="bfloat16"),
    Case(decode=(90,), page_size=32, head_dim=96, group=1, kv_heads=1, dtype="bfloat16", sliding_window=70),
    Case(prefill=((5, 5), (33, 100), (0, 0), (1, 17)), prefill_padding=40, page_size=16, head_dim=80, group=2,
         kv_heads=1, dtype="bfloat16"),
    Case(prefill=((70, 150), (64, 64)), page_size=256, head_dim=128, group=1, kv_heads=2, dtype="float16",
         sliding_window=33, softcap=20.0),
    Case(decode=(3, 0, 70), prefill=((7, 40), (40, 40)), prefill_padding=2, page_size=64, head_dim=96, group=4,
         kv_heads=1, dtype="bfloat16", sliding_window=50, softcap=20.0, sinks=True),
]  # fmt: skip


def attend(case, tuning=SMALL):
    def run(q, kv, meta):
        meta = kernel.prepare(meta, kv.shape[3], tuning=tuning)
        return kernel.attention(q, kv, meta, tuning=tuning, **case.options)

    return jax.jit(run)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_interpreted_kernels_equal_the_oracle(case):
    step = make_step(case)
    got = attend(case)(step.q, step.kv, step.meta)
    assert got.dtype == step.q.dtype
    assert error_of(got, step) < TOLERANCE[case.dtype]
    padding = np.asarray(step.meta.token_rows) >= len(step.keys)
    assert not np.asarray(got)[padding].any()


def test_groups_that_take_several_programs(monkeypatch):
    monkeypatch.setattr(kernel, "MAX_HEADS", 16)
    case = Case(decode=(20, 75), page_size=64, head_dim=64, group=21, kv_heads=2, dtype="bfloat16")
    step = make_step(case)
    tuning = replace(SMALL, target_programs=9)  # not one that another test has compiled for
    assert error_of(attend(case, tuning)(step.q, step.kv, step.meta), step) < TOLERANCE["bfloat16"]


def test_attention_sees_what_rope_and_write_wrote():
    """Both from one `prepare`, as in a step."""
    case = Case(decode=(16, 0, 40), page_size=16, kv_heads=1, group=4, head_dim=64, dtype="bfloat16")
    step = make_rope_step(RopeCase(case, bias=True))

    @jax.jit
    def run(qkv, kv, meta, cos, sin, weights):
        meta = kernel.prepare(meta, 16, tuning=SMALL)
        q, kv = rope_and_write(qkv, kv, meta, cos, sin, **weights, **step.options, interpret=True)
        return kernel.attention(q, kv, meta, tuning=SMALL, **case.options), kv

    assert qkv_error(*run(*step.arguments), step, case) < TOLERANCE["bfloat16"]


# --------------------------------------------------------------------------------------------------------- work


@pytest.mark.parametrize("sliding_window", [None, 1, 100])
@pytest.mark.parametrize("num_rows", [1, 3, 40, 256])
def test_items_cover_each_tile_once(num_rows, sliding_window):
    rng, tuning, width = np.random.default_rng(num_rows), kernel.Tuning(), 8192
    for longest in (0, 1, 64, 65, 700, 8192):
        lens = rng.integers(0, longest, num_rows, endpoint=True)
        lens[-1] = longest
        longest_tiles = width // 64 if sliding_window is None else min(width // 64, (sliding_window + 63 + 63) // 64)
        cuts = tuning.cuts(num_rows, 8, longest_tiles)
        work = jax.jit(kernel.make_work, static_argnums=(1, 2, 3, 4))(
            jnp.asarray(lens, jnp.int32), sliding_window, 64, tuning.min_tiles, cuts
        )
        items, splits = np.asarray(work.items), np.asarray(work.splits)
        parts = dict.fromkeys(range(num_rows), 0)
        for row, length in enumerate(lens):
            begin = 0 if sliding_window is None else max(0, length - sliding_window) // 64
            own = items[(items[:, 0] == row) & (items[:, 3] != kernel.NOTHING)]
            parts[row] = len(own)
            assert [tile for _, first, end, _ in own for tile in range(first, end)] == list(
                range(begin, -(-length // 64))
            )
            assert (own[:, 3] == (kernel.PART if len(own) > 1 else kernel.WHOLE)).all()
            assert len(own) == 1 or (own[:, 1] < own[:, 2]).all()
        assert max(parts.values()) <= cuts[0]
        listed = {row: (first, count) for row, first, count in splits if count}
        assert set(listed) == {row for row, count in parts.items() if count > 1}
        for row, (first, count) in listed.items():
            assert count == parts[row] and (items[first : first + count, 0] == row).all()


def test_few_rows_are_cut_until_they_fill_the_card():
    tuning = kernel.Tuning()
    assert tuning.cuts(1, 8, longest=1000) == (33, 32)
    assert tuning.cuts(256, 8, longest=1000) == (4, 32)
    assert tuning.cuts(1, 8, longest=7) == (1, 0), "nothing to cut"


@pytest.mark.parametrize("padding", [0, 1, 40, 300])
def test_prefill_tiles_cover_each_token_once(padding):
    step = make_step(Case(decode=(3, 4), prefill=((33, 40), (0, 0), (16, 16), (1, 100)), prefill_padding=padding))
    tiles = np.asarray(jax.jit(lambda meta: kernel.prefill_tiles(meta, SMALL))(step.meta))
    rows, positions = np.asarray(step.meta.token_rows)[2:], np.asarray(step.meta.positions)[2:]
    seen = np.zeros(50 + padding, int)
    for row, first, count, position in tiles:
        assert 0 <= count <= 32
        seen[first : first + count] += 1
        for i in range(count):
            if first < 50:
                assert (rows[first + i], positions[first + i]) == (row, position + i)
            else:
                assert position + count == 0, "padding sees no key"
    assert (seen == 1).all()


# ----------------------------------------------------------------------------------------------------- lowering


def lowered_for_cuda(fn, *arguments) -> str:
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=AbstractDevice("NVIDIA A100", 1, "gpu"))):
        return jax.export.export(fn, platforms=["cuda"], disabled_checks=OURS)(*arguments).mlir_module()


@pytest.mark.parametrize(
    ("head_dim", "page_size"), [(128, page) for page in kernel.PAGE_SIZES] + [(dim, 64) for dim in (64, 80, 96, 256)]
)
def test_kernels_lower_for_cuda_from_a_cpu_host(head_dim, page_size):
    how = {"sliding_window": 64, "softcap": 30.0} if page_size == 32 else {}
    case = Case(
        decode=(20, 3000), prefill=((70, 100), (9, 9)), page_size=page_size, head_dim=head_dim, group=5,
        dtype="bfloat16", **how,
    )  # fmt: skip
    step = make_step(case)
    module = lowered_for_cuda(attend(case, kernel.tuning_of(head_dim)), step.q, step.kv, step.meta)
    assert module.count("@__gpu$xla.gpu.triton") == 2 + (not how), "a window of 64 leaves nothing to split or combine"


# ------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "float32"}, "dtype is float32"),
        ({"head_dim": 100}, "model's is 100"),
        ({"head_dim": 512}, "model's is 512"),
        ({"page_size": 8}, "got 8"),
    ],
)
def test_shapes_that_the_kernels_do_not_take_raise(change, message):
    case = Case(**{"decode": (5,), "dtype": "bfloat16", **change})
    step = make_step(case)
    with pytest.raises(ValueError, match=message):
        attend(case)(step.q, step.kv, step.meta)


@pytest.mark.parametrize(("name", "value"), [("query_tile", 8), ("kv_tile", 48), ("stages", 0), ("min_tiles", 0)])
def test_tuning_names_a_bad_size(name, value):
    with pytest.raises(ValueError, match=rf"Tuning.{name} must be .* got {value}"):
        kernel.Tuning(**{name: value})


# ------------------------------------------------------------------------------------------------------- a card


@pytest.mark.gpu
@pytest.mark.parametrize("case", PREFILL_MATRIX + CASES, ids=str)
def test_kernels_on_the_card_equal_the_oracle(case):
    step, tuning = make_step(case), kernel.tuning_of(case.head_dim)
    assert error_of(attend(case, tuning)(step.q, step.kv, step.meta), step) < TOLERANCE[case.dtype]

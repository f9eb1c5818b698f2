"""The reference against a float64 oracle that takes one token and one head at a time."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_cases import TOLERANCE, Case, error_of, make_step

from jaxserve.pallas_kernels import reference
from jaxserve.pallas_kernels.reference import CPU_TUNING, GPU_TUNING

CASES = [
    Case(decode=(1, 15, 16, 17, 0, 100, 300)),
    Case(decode=(63, 64, 65, 129), page_size=64, group=4, kv_heads=1, head_dim=128),
    Case(decode=(5, 200, 31), sliding_window=20, softcap=5.0, group=6, extra_width=0),
    Case(decode=(130, 0, 17), dtype="bfloat16", group=8),
    Case(prefill=((5, 5), (33, 70), (1, 16), (64, 64), (0, 0)), prefill_padding=7),
    Case(prefill=((32, 32), (17, 160)), page_size=32, sliding_window=40, softcap=5.0),
    Case(prefill=((100, 300),), group=1, head_dim=80, extra_width=0),
    Case(prefill=((0, 0),), prefill_padding=16),
    Case(decode=(20, 0, 131), prefill=((5, 5), (33, 70)), sliding_window=19, dtype="bfloat16", page_size=64),
    Case(decode=(1, 15, 0, 300), prefill=((1, 1), (33, 70)), prefill_padding=3, sinks=True),
    Case(decode=(17, 200), prefill=((40, 100),), sliding_window=20, softcap=5.0, group=4, head_dim=96, sinks=True),
]
# A GPU computes many tiles in one pass; small sizes here, so that several passes and several KV tiles happen
MANY_TILES = dataclasses.replace(GPU_TUNING, query_tile=16, prefill_kv_tile=32, tiles_per_pass=3, decode_kv_tile=32)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_attention_equals_the_oracle(case):
    step = make_step(case)
    got = jax.jit(lambda q, kv, meta: reference.attention(q, kv, reference.prepare(meta, kv.shape[3]), **case.options))(
        step.q, step.kv, step.meta
    )
    assert got.dtype == step.q.dtype
    assert error_of(got, step) < TOLERANCE[case.dtype]
    padding = np.asarray(step.meta.token_rows) >= len(step.keys)
    assert not np.asarray(got)[padding].any()


@pytest.mark.parametrize("case", [CASES[4], CASES[5], CASES[-1]], ids=str)
def test_many_tiles_per_pass_give_the_same(case):
    step = make_step(case)
    got = jax.jit(lambda q, kv, meta: reference.attention(q, kv, meta, tuning=MANY_TILES, **case.options))(
        step.q, step.kv, step.meta
    )
    assert error_of(got, step) < TOLERANCE[case.dtype]


def test_a_chunk_attends_as_the_whole_prompt_does():
    whole = make_step(Case(prefill=((90, 90),)))
    attend = jax.jit(lambda q, kv, meta: reference.attention(q, kv, meta, scale=whole.case.scale))
    expected = attend(whole.q, whole.kv, whole.meta)
    for start, stop in ((0, 45), (45, 90)):
        chunk = dataclasses.replace(
            whole.meta,
            kv_lens=jnp.array([stop], jnp.int32),
            positions=whole.meta.positions[start:stop],
            token_rows=whole.meta.token_rows[start:stop],
            cu_q_lens=jnp.array([0, stop - start], jnp.int32),
        )
        np.testing.assert_allclose(attend(whole.q[start:stop], whole.kv, chunk), expected[start:stop], atol=2e-6)


def test_tiles_cover_each_token_once_and_never_cross_a_row():
    step = make_step(Case(decode=(3, 4), prefill=((33, 40), (0, 0), (16, 16), (1, 100)), prefill_padding=9))
    tiles = jax.tree.map(np.asarray, jax.jit(lambda meta: reference.prefill_tiles(meta, 16))(step.meta))
    rows, positions = np.asarray(step.meta.token_rows), np.asarray(step.meta.positions)
    covered = []
    for row, first, count, position in zip(*tiles, strict=True):
        for i in range(count):
            token = 2 + first + i
            assert rows[token] == row
            assert positions[token] == position + i
            covered.append(first + i)
    assert covered == list(range(50))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_write_kv_puts_tokens_in_their_pages_and_padding_in_page_0(dtype):
    step = make_step(Case(decode=(20, 0, 16), prefill=((5, 5), (33, 70)), prefill_padding=3, dtype=dtype), seed=1)
    k, v = (jnp.asarray(x, jnp.float32) for x in step.new_kv())
    after = jax.jit(reference.write_kv)(jnp.full_like(step.kv, 7), k, v, step.meta)
    table, page_size = np.asarray(step.meta.page_table), step.case.page_size
    where = list(zip(np.asarray(step.meta.token_rows), np.asarray(step.meta.positions), strict=True))
    for i, new in enumerate((k, v)):
        pool = after[:, :, i]
        expected = np.full(pool.shape, 7, np.float32)
        rounded = np.asarray(new.astype(pool.dtype).astype(jnp.float32))
        for token, (row, position) in enumerate(where):
            if row < len(step.keys):
                page = table[row, position // page_size]
                expected[page, :, position % page_size] = rounded[token]
        np.testing.assert_array_equal(np.asarray(pool.astype(jnp.float32))[1:], expected[1:])


def test_attention_reads_what_write_kv_wrote():
    step = make_step(Case(decode=(20, 0, 17), prefill=((5, 5), (33, 70)), prefill_padding=3))
    k, v = (jnp.asarray(x, jnp.float32) for x in step.new_kv())

    @jax.jit
    def layer(q, kv, k, v, meta):
        kv = reference.write_kv(kv, k, v, meta)
        return reference.attention(q, kv, meta, **step.case.options), kv

    broken, erased = layer(step.q, step.kv, k * jnp.nan, v * jnp.nan, step.meta)
    assert np.isnan(error_of(broken, step))
    got, _ = layer(step.q, erased, k, v, step.meta)
    assert error_of(got, step) < TOLERANCE["float32"]


def test_a_step_never_copies_the_pool():
    step = make_step(Case(decode=(20, 17), prefill=((33, 70),)))
    k, v = (jnp.asarray(x, jnp.float32) for x in step.new_kv())

    def two_layers(pools, q, k, v, meta):
        out = []
        for kv in pools:
            kv = reference.write_kv(kv, k, v, meta)
            q = q + reference.attention(q, kv, meta, scale=0.1)
            out.append(kv)
        return out, q

    compiled = jax.jit(two_layers, donate_argnums=0).lower([step.kv, step.kv], step.q, k, v, step.meta).compile()
    shape = "f32[" + ",".join(map(str, step.kv.shape)) + "]"
    copies = [line for line in compiled.as_text().splitlines() if shape in line and "copy(" in line]
    assert shape in compiled.as_text() and not copies


def test_tuning_names_a_bad_size():
    with pytest.raises(ValueError, match="query_tile must be at least 1, got 0"):
        reference.Tuning(query_tile=0)


def test_few_rows_get_larger_kv_tiles():
    assert [CPU_TUNING.decode_kv_tile_of(rows) for rows in (1, 4, 8, 32)] == [128, 128, 64, 64]

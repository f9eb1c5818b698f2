"""The TPU kernels in the TPU interpreter, with its checks on, and compiled by the real TPU compiler on this host."""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from kernel_cases import (
    DECODE_MATRIX,
    GPU_MATRIX,
    PREFILL_MATRIX,
    TOLERANCE,
    Case,
    error_of,
    make_step,
    narrowed,
    widened,
)
from rope_cases import ROPE_MATRIX, make_rope_step, worst

from jaxserve.pallas_kernels import ragged_paged_attention_mosaic_tpu as kernel
from jaxserve.pallas_kernels import rope_write_mosaic_tpu as writer
from jaxserve.pallas_kernels.ops import resolve_backend
from jaxserve.pallas_kernels.reference import AttentionInput
from jaxserve.state import KVPages

MANY_TILES = kernel.Tuning(block_tokens=16, max_kv_tile=32)


@pytest.fixture(autouse=True)
def interpreted(request: pytest.FixtureRequest) -> Iterator[None]:
    """Everything but compilation runs in the interpreter: copies take place as late as they may."""
    if "compile_for_tpu" in request.fixturenames:
        yield
        return
    checks = pltpu.InterpretParams(
        detect_races=True, on_race="raise", out_of_bounds_reads="raise", uninitialized_memory="nan"
    )
    with pltpu.force_tpu_interpret_mode(checks):
        yield
    pltpu.reset_tpu_interpret_mode_state()


def stored(kv: KVPages) -> KVPages:
    """Pages as wide as the backend has them."""
    return widened(kv, kernel.stored_head_dim(kv.shape[4]))


def attend(case: Case, tuning: kernel.Tuning) -> Callable[..., Any]:
    def run(q: jax.Array, kv: KVPages, meta: AttentionInput) -> jax.Array:
        meta = kernel.prepare(meta, case.page_size, tuning=tuning)
        return kernel.attention(q, kv, meta, tuning=tuning, **case.options)

    return run


# Chunks that start and end anywhere in blocks of 16 tokens, share blocks, and are empty; context or none.
CHUNKS = ((5, 5), (33, 70), (0, 0), (3, 3), (16, 64))
CASES = [
    Case(decode=(15, 16, 17, 0, 1, 63, 64, 65, 200), head_dim=128),
    Case(decode=(0, 0, 70), page_size=64, group=1, kv_heads=3),
    Case(decode=(33, 0), page_size=32, group=8, dtype="bfloat16", sliding_window=1),
    Case(decode=(300, 31, 32, 33), page_size=32, group=7, head_dim=96, dtype="bfloat16", sliding_window=40),
    Case(decode=(257, 256), page_size=256, group=4, head_dim=256, kv_heads=1, softcap=20.0),
    Case(decode=(130,), page_size=128, group=6, head_dim=128, dtype="bfloat16", sliding_window=64, softcap=50.0),
    Case(prefill=CHUNKS, prefill_padding=11, head_dim=128, dtype="bfloat16"),
    Case(prefill=CHUNKS, page_size=64, group=4, kv_heads=1, sliding_window=20),
    Case(prefill=((0, 0), (1, 1)), prefill_padding=40, page_size=32, group=1),
    Case(prefill=((40, 300),), page_size=128, group=3, head_dim=256, dtype="bfloat16", softcap=20.0),
    Case(decode=(3, 0, 40), prefill=CHUNKS, prefill_padding=20, group=5, head_dim=96, sliding_window=33, softcap=9.0),
    Case(decode=(100, 7), prefill=((20, 20), (0, 0)), page_size=64, group=2, dtype="bfloat16", extra_width=0),
    Case(decode=(0,), prefill=((0, 0),), prefill_padding=5),
    Case(decode=(33, 0, 300), page_size=32, group=8, dtype="bfloat16", sliding_window=128, sinks=True),
    Case(decode=(3, 40), prefill=CHUNKS, prefill_padding=20, group=5, head_dim=80, softcap=9.0, sinks=True),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_attention_equals_the_oracle(case):
    step = make_step(case)
    got = jax.jit(attend(case, MANY_TILES))(step.q, stored(step.kv), step.meta)
    assert error_of(got, step) < TOLERANCE[case.dtype]


# What GPUs are tested on, with float16, which TPUs do not have, as bfloat16. Minutes in all: -m heavy runs it.
MATRIX = [replace(case, dtype="bfloat16") for case in (*DECODE_MATRIX, *PREFILL_MATRIX, *GPU_MATRIX)]


@pytest.mark.heavy
@pytest.mark.slow
@pytest.mark.parametrize("case", dict.fromkeys(MATRIX), ids=str)
def test_attention_equals_the_oracle_on_the_matrix_of_the_gpu_kernels(case):
    step = make_step(case)
    got = jax.jit(attend(case, kernel.TUNING["v5e"]))(step.q, stored(step.kv), step.meta)
    assert error_of(got, step) < TOLERANCE["bfloat16"]


@pytest.mark.parametrize("tuning", kernel.TUNING.values(), ids=list(kernel.TUNING))
def test_the_tuning_of_each_chip_gives_the_same(tuning):
    step = make_step(Case(decode=(90, 600), prefill=((5, 40), (50, 50)), page_size=64, head_dim=128, dtype="bfloat16"))
    got = jax.jit(attend(step.case, tuning))(step.q, stored(step.kv), step.meta)
    assert error_of(got, step) < TOLERANCE["bfloat16"]


@pytest.mark.parametrize("sliding_window", [None, 40])
def test_no_page_is_read_that_is_not_needed(sliding_window):
    """Neither what lies past a row's last page nor what its window has left behind: there the table is out of bounds,
    which the interpreter does not let pass."""
    case = Case(decode=(100, 0, 49, 80), prefill=((5, 90), (20, 20)), sliding_window=sliding_window)
    step = make_step(case)
    table, chunks = np.array(step.meta.page_table), (1, 1, 1, 1, 5, 20)
    for row, (length, chunk) in enumerate(zip(np.asarray(step.meta.kv_lens), chunks, strict=True)):
        first = 0 if sliding_window is None else max(0, length - chunk - sliding_window + 1) // case.page_size
        table[row, :first] = table[row, -(-length // case.page_size) :] = 2**30
    meta = replace(step.meta, page_table=jnp.asarray(table))
    got = jax.jit(attend(case, MANY_TILES))(step.q, stored(step.kv), meta)
    assert error_of(got, step) < TOLERANCE["float32"]


def in_bfloat16(case: Case) -> Case:
    return case if case.dtype in kernel.DTYPES else replace(case, dtype="bfloat16")


ROPE_CASES = [replace(rope_case, case=in_bfloat16(rope_case.case)) for rope_case in ROPE_MATRIX]


@pytest.mark.parametrize("case", ROPE_CASES, ids=str)
def test_rope_and_write_equals_the_oracle(case):
    step = make_rope_step(case)

    def run(qkv: jax.Array, kv: KVPages, meta: AttentionInput, *rope: jax.Array) -> Any:
        meta = kernel.prepare(meta, case.case.page_size)
        return writer.rope_and_write(qkv, kv, meta, *rope, **step.weights, **step.options)

    q, kv = jax.jit(run)(step.qkv, stored(step.kv), step.meta, step.cos, step.sin)
    assert worst((q, narrowed(kv, case.case.head_dim)), step, case.case.dtype) < 1


@pytest.mark.parametrize("depth", [2, 4])
def test_more_groups_than_the_ring_has_places_are_written(depth):
    case = Case(decode=(5, 0, 17, 48, 33, 64, 1), prefill=((70, 100), (0, 0), (9, 41), (15, 15)), prefill_padding=3)
    step = make_step(case)
    k, v = (jnp.asarray(x, jnp.float32) for x in step.new_kv())
    split, pad = len(case.decode), [(0, 0), (0, 0), (0, 64)]
    # what is to be written is not there yet
    page, offset = (x[np.asarray(step.meta.token_rows) < len(step.keys)] for x in write_slots(step))
    kv = stored(step.kv.at[page, :, :, offset].set(7))

    def run(kv: KVPages, new: jax.Array) -> KVPages:
        writes, how = writer.make_writes(step.meta, case.page_size), writer.WriteTuning(max_depth=depth)
        kv = writer._write(kv, new[:split], writes.decode, single=True, tuning=how)
        return writer._write(kv, new[split:], writes.prefill, single=False, tuning=how)

    new = jnp.stack([k, v], axis=2).reshape(k.shape[0], -1, k.shape[2])
    got = narrowed(jax.jit(run)(kv, jnp.pad(new, pad)), case.head_dim)
    np.testing.assert_array_equal(got[1:], step.kv[1:])


def write_slots(step) -> tuple[np.ndarray, np.ndarray]:
    from jaxserve.pallas_kernels.reference import write_slots

    pages, offsets = write_slots(step.meta, step.case.page_size)
    return np.asarray(pages), np.asarray(offsets)


@pytest.mark.parametrize("block_tokens", [16, 128])
def test_visits_cover_each_token_once(block_tokens):
    rng = np.random.default_rng(0)
    for num_rows in (1, 3, 40):
        chunks = rng.integers(0, 300, num_rows) * (rng.random(num_rows) < 0.7)
        contexts = np.where(chunks > 0, rng.integers(0, 5000, num_rows), 0)
        cu = np.concatenate([[0], np.cumsum(chunks)])
        tokens = int(cu[-1]) + int(rng.integers(1, 300))
        meta = AttentionInput(
            page_table=jnp.zeros((num_rows + 1, 1), jnp.int32), kv_lens=jnp.asarray([5, *(chunks + contexts)], jnp.int32),
            positions=jnp.zeros(tokens + 1, jnp.int32), token_rows=jnp.zeros(tokens + 1, jnp.int32),
            cu_q_lens=jnp.asarray(cu, jnp.int32), num_decode_rows=1,
        )  # fmt: skip
        visits = np.asarray(jax.jit(kernel.prefill_visits, static_argnums=1)(meta, block_tokens))
        seen, blocks = np.zeros(tokens, int), visits[1, :-1]
        assert (np.diff(blocks) >= 0).all() and set(blocks) == set(range(-(-tokens // block_tokens)))
        for i, (row, block, begin, end, position, following) in enumerate(visits[:, :-1].T):
            live = np.flatnonzero(visits[3, i:-1] > visits[2, i:-1])
            assert following == (i + live[0] if len(live) else visits.shape[1] - 1)
            if end > begin:
                first = block * block_tokens + begin
                seen[first : block * block_tokens + end] += 1
                assert cu[row - 1] <= first and block * block_tokens + end <= cu[row]
                assert position + begin == contexts[row - 1] + first - cu[row - 1]
        assert (seen[: cu[-1]] == 1).all() and not seen[cu[-1] :].any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "float16"}, "dtype is float16"),
        ({"head_dim": 320}, "model's is 320"),
        ({"page_size": 8}, "page size must be one of .*, got 8"),
    ],
)
def test_shapes_that_the_kernel_does_not_take_raise(change, message):
    step = make_step(Case(**{"decode": (5,), **change}))
    with pytest.raises(ValueError, match=message):
        attend(step.case, MANY_TILES)(step.q, stored(step.kv), step.meta)


def test_pages_of_another_width_raise():
    step = make_step(Case(decode=(5,)))
    with pytest.raises(ValueError, match="pages of head dim 64 must be 128 wide, got 64"):
        attend(step.case, MANY_TILES)(step.q, step.kv, step.meta)


def test_what_does_not_fit_the_fast_memory_raises():
    kv = jax.ShapeDtypeStruct((4, 64, 2, 256, 256), jnp.float32)
    step = make_step(Case(decode=(5,), head_dim=256))
    q = jax.ShapeDtypeStruct((1, 64, 256), jnp.float32)
    with pytest.raises(ValueError, match=r"needs 72.0 MiB of VMEM and may take 16.0: 64 kv heads, .* pages of 256"):
        jax.eval_shape(partial(kernel.attention, scale=1.0), q, kv, step.meta)


def test_rows_that_do_not_fit_the_scalar_memory_raise():
    step = make_step(Case(decode=(5,), head_dim=128))

    def attend(width: int) -> Any:
        meta = replace(step.meta, page_table=jnp.zeros((1, width), jnp.int32))
        return jax.eval_shape(partial(kernel.attention, scale=1.0), step.q, step.kv, meta)

    attend(64_000)
    with pytest.raises(ValueError, match=r"needs 1028 KiB of scalar memory and .* up to 65536 pages of 16 tokens"):
        attend(65_536)


@pytest.mark.parametrize(("max_depth", "block"), [(3, 32), (0, 32), (2, 17), (2, 8)])
def test_tunings_that_make_no_sense_raise(max_depth, block):
    with pytest.raises(ValueError, match="must be"):
        kernel.Tuning(block_tokens=block)
        writer.WriteTuning(max_depth=max_depth)


# ------------------------------------------------------------------------------------------- the real compiler

# (K, G, H, page, dtype, window of the page table, how): 128k tokens in pages of 16; what models have
SHAPES = {
    "llama-8b": (8, 4, 128, 64, "bfloat16", 2048, {}),
    "llama-8b-128k-page16": (8, 4, 128, 16, "bfloat16", 8192, {}),
    "qwen-1.5b": (2, 6, 128, 64, "bfloat16", 512, {}),
    "smollm-float32": (3, 3, 64, 16, "float32", 128, {}),
    "gemma": (4, 2, 256, 128, "bfloat16", 64, {"sliding_window": 1024, "softcap": 50.0}),
    "phi-3-mini": (32, 1, 96, 64, "bfloat16", 64, {"sliding_window": 2047}),
    "one-kv-head": (1, 8, 128, 256, "bfloat16", 16, {}),
    "llama-405b-part": (1, 16, 128, 32, "float32", 4096, {}),
    "gpt-oss": (8, 8, 64, 64, "bfloat16", 512, {"sliding_window": 128}),
    "head-dim-80": (2, 6, 80, 16, "bfloat16", 512, {}),
}
WITH_SINKS = ("gemma", "gpt-oss")  # gemma: to compile all that the kernel can do on every kind of chip


def layer(backend: Any, how: dict[str, Any], num_heads: int) -> Callable[..., Any]:
    how = {"sliding_window": None, "softcap": None} | how

    def run(qkv: Any, kv: KVPages, meta: AttentionInput, cos: Any, sin: Any, sinks: Any) -> Any:
        meta = backend.prepare(meta, kv.shape[3])
        return backend.attend(qkv, kv, meta, cos, sin, num_heads=num_heads, scale=0.1, sinks=sinks, **how)

    return run


@pytest.mark.tpu_aot
@pytest.mark.parametrize(
    ("generation", "name"),
    [("v5e", name) for name in SHAPES]
    + [(other, name) for other in ("v4", "v5p", "v6e") for name in ("llama-8b-128k-page16", "smollm-float32", "gemma")],
)
def test_a_layer_compiles_and_copies_no_pool(name, generation, compile_for_tpu):
    K, G, H, page, dtype, width, how = SHAPES[name]
    N, decode_rows, prefill_rows, chunk_tokens, pages = K * G, 256, 16, 300, 512
    backend = resolve_backend("auto", "tpu", f"TPU {generation}", dtype=dtype, head_dim=H, group=G)
    rows, tokens = decode_rows + prefill_rows, decode_rows + chunk_tokens

    def array(*shape: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    pool = array(pages, K, 2, page, backend.stored_head_dim(H), dtype=jnp.dtype(dtype))
    meta = AttentionInput(
        array(rows, width), array(rows), array(tokens), array(tokens), array(prefill_rows + 1), decode_rows
    )
    rope = array(tokens, H // 2, dtype=jnp.float32)
    qkv = array(tokens, (N + 2 * K) * H, dtype=jnp.dtype(dtype))
    sinks = array(N, dtype=jnp.dtype(dtype)) if name in WITH_SINKS else None
    compiled = compile_for_tpu(generation, layer(backend, how, N), qkv, pool, meta, rope, rope, sinks, donated=(1,))
    kernels = re.findall(r"%(\w+?)(?:\.\S+)? = .*tpu_custom_call", compiled.as_text())
    sizes = {"ragged_paged_attention_1", f"ragged_paged_attention_{kernel.TUNING[generation].block_tokens}"}
    assert set(kernels) == {"kv_write_decode", "kv_write_prefill"} | sizes
    assert compiled.memory_analysis().alias_size_in_bytes == pool.size * pool.dtype.itemsize
    shape = ",".join(map(str, pool.shape))
    assert not re.search(rf"\[{shape}\]\S* (?:copy|copy-start|fusion|transpose)\(", compiled.as_text())

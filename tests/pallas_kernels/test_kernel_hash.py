"""Compiled kernels are found again: by the hash of a Mosaic GPU kernel, and by the code of a Triton one as part of the
program's. Neither may depend on what was traced before. (tests/test_tracers.py has whole steps in several processes.)
"""

from collections.abc import Callable
from typing import Any

import jax
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh
from kernel_cases import Case, make_step
from rope_cases import RopeCase, RopeStep, make_rope_step

from jaxserve.pallas_kernels import (
    add_norm_mosaic_gpu,
    gated_product_mosaic_gpu,
    kernel_hash,
    paged_attention_triton,
    paged_decode_mosaic_gpu,
    paged_prefill_mosaic_gpu,
    reference,
    rope_write_mosaic_gpu,
    rope_write_triton,
)
from jaxserve.step_cache import trace
from tests.gpu_kernels import MOSAIC_GPU, TRITON, kernels_of

Call = tuple[Callable[..., Any], tuple]  # of a kernel, and its arguments: arrays or shapes, in any tree
Kernels = dict[str, set[str]]

pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")


def rope_step(rows: int) -> RopeStep:
    return make_rope_step(RopeCase(Case(decode=(70,) * rows, page_size=64, dtype="bfloat16"), bias=True))


def array(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, "bfloat16")


def decode(rows: int) -> Call:
    step = make_step(Case(decode=(700,) * rows, page_size=64, dtype="bfloat16"))
    arguments = step.q, step.kv, step.meta.page_table, step.meta.kv_lens
    return lambda *a: paged_decode_mosaic_gpu.decode_attention(*a, **step.case.options), arguments


def decode_qkv(rows: int) -> Call:
    case = Case(decode=(700,) * rows, page_size=64, head_dim=128, dtype="bfloat16")
    step = make_rope_step(RopeCase(case, bias=True))
    arguments = step.qkv, step.kv, step.meta.page_table, step.meta.kv_lens, step.cos, step.sin

    def run(*arguments: Any) -> Any:
        return paged_decode_mosaic_gpu.decode_qkv(*arguments, **step.weights, **step.options, **case.options)

    return run, arguments


def prefill(rows: int) -> Call:
    step = make_step(Case(prefill=((70, 70),) * rows, page_size=64, dtype="bfloat16"))
    return lambda *a: paged_prefill_mosaic_gpu.prefill_attention(*a, **step.case.options), (step.q, step.kv, step.meta)


def rope_write(rows: int) -> Call:
    step = rope_step(rows)
    return lambda *a: rope_write_mosaic_gpu.rope_and_write(*a, **step.weights, **step.options), step.arguments[:-1]


def gated_product(rows: int) -> Call:
    return gated_product_mosaic_gpu.gated_product, (array(128 * rows, 256), array(512, 256))


def add_norm(rows: int) -> Call:
    return lambda *a: add_norm_mosaic_gpu.add_norm(*a, 1e-5), (array(rows, 256), array(rows, 256), array(256))


def triton_attention(case: Case) -> Call:
    step, tuning = make_step(case), paged_attention_triton.tuning_of(case.head_dim)

    def run(q: Any, kv: Any, meta: Any) -> Any:
        meta = paged_attention_triton.prepare(meta, case.page_size, tuning=tuning)
        return paged_attention_triton.attention(q, kv, meta, tuning=tuning, **case.options)

    return run, (step.q, step.kv, step.meta)


def triton_decode(rows: int) -> Call:
    return triton_attention(Case(decode=(700,) * rows, page_size=64, head_dim=128, dtype="bfloat16"))


def triton_prefill(rows: int) -> Call:
    return triton_attention(Case(prefill=((70, 70),) * rows, page_size=64, head_dim=128, dtype="bfloat16"))


def triton_rope(rows: int) -> Call:
    step = rope_step(rows)

    def run(qkv: Any, kv: Any, meta: Any, *rope: Any) -> Any:
        meta = reference.prepare(meta, 64)
        return rope_write_triton.rope_and_write(qkv, kv, meta, *rope, **step.weights, **step.options)

    return run, step.arguments[:-1]


CALLS = {
    decode: {"decode", "combine"}, decode_qkv: {"decode", "combine"}, prefill: {"prefill"}, rope_write: {"rope_write"},
    gated_product: {"gated_product"}, add_norm: {"add_norm"},
    triton_decode: {"paged_decode", "combine_decode"}, triton_prefill: {"paged_prefill"},
    triton_rope: {"rope_and_write"},
}  # fmt: skip


def kernels(call: Callable[[int], Call], rows: int, name: str) -> Kernels:
    """Those of a call, traced for CUDA as programs are."""
    function, arguments = call(rows)
    leaves, tree = jax.tree.flatten(arguments)
    shapes = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]
    kind = AbstractDevice("NVIDIA A100" if CALLS[call] <= TRITON else "NVIDIA H200", 1, "gpu")

    def flat(*leaves: jax.Array) -> list[jax.Array]:
        return jax.tree.leaves(function(*jax.tree.unflatten(tree, leaves)))

    with use_abstract_mesh(AbstractMesh((), (), abstract_device=kind)):
        exported = trace(flat, shapes, donated=range(0), name=f"{name} {call.__name__} {rows}", device=kind)
    return kernels_of(exported.mlir_module())


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[Callable[[int], Call], Kernels]]:
    """All calls: in order, of another size, and in the opposite order by a JAX that has seen none of them."""
    assert kernel_hash.make_kernel_hashes_stable()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAXSERVE_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        found = {name: {call: kernels(call, rows, name) for call in CALLS} for name, rows in (("once", 2), ("more", 3))}
        jax.clear_caches()
        return found | {"again": {call: kernels(call, 2, "again") for call in reversed(CALLS)}}


def test_all_kernels_are_here():
    assert set.union(*CALLS.values()) == MOSAIC_GPU | TRITON


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_a_kernel_is_the_same_whatever_was_traced_before(call: Callable[[int], Call], found):
    once, more, again = (found[name][call] for name in ("once", "more", "again"))
    assert set(once) == CALLS[call]
    assert once == again
    assert all(len(once[name]) == 1 and once[name] != more[name] for name in once)

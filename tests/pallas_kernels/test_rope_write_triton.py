"""The rope and KV write kernel of the Triton backend in Pallas' interpreter, and its lowering for CUDA."""

import jax
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh
from kernel_cases import Case
from rope_cases import ROPE_MATRIX, RopeCase, make_rope_step, worst

from jaxserve.pallas_kernels import reference
from jaxserve.pallas_kernels import rope_write_triton as kernel
from jaxserve.step_cache import OURS

pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")

_ROWS = Case(decode=(64, 0), prefill=((13, 30), (3, 3)), prefill_padding=2, kv_heads=3, dtype="float16", head_dim=80)
OTHERS = [RopeCase(_ROWS, bias=True, norm=True)]  # half a head is no power of 2
QUICK = [ROPE_MATRIX[i] for i in (2, 5, 8)]


def write(step, interpret):
    def run(qkv, kv, meta, cos, sin, weights):
        meta = reference.prepare(meta, kv.shape[3])
        return kernel.rope_and_write(qkv, kv, meta, cos, sin, **weights, **step.options, interpret=interpret)

    return jax.jit(run, donate_argnums=1)


@pytest.mark.parametrize("case", QUICK + OTHERS, ids=str)
def test_interpreted_kernel_equals_the_oracle(case):
    step = make_rope_step(case)
    kv = jax.tree.map(lambda x: x.copy(), step.kv)  # it is donated
    got = write(step, interpret=True)(step.qkv, kv, *step.arguments[2:])
    assert worst(got, step, case.case.dtype) < 1


@pytest.mark.gpu
@pytest.mark.parametrize("case", ROPE_MATRIX + OTHERS, ids=str)
def test_kernel_on_the_card_equals_the_oracle(case):
    step = make_rope_step(case)
    kv = jax.tree.map(lambda x: x.copy(), step.kv)
    got = write(step, interpret=False)(step.qkv, kv, *step.arguments[2:])
    assert worst(jax.device_get(got), step, case.case.dtype) < 1


@pytest.mark.parametrize("case", QUICK + OTHERS, ids=str)
def test_kernel_lowers_for_cuda_and_writes_in_place(case):
    step = make_rope_step(case)
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=AbstractDevice("NVIDIA A100", 1, "gpu"))):
        program = write(step, interpret=False)
        module = jax.export.export(program, platforms=["cuda"], disabled_checks=OURS)(*step.arguments).mlir_module()
    assert module.count("@__gpu$xla.gpu.triton") == 1
    assert module.count("output_tuple_indices") == 1, "the pool is written in place"
    assert module.count("tf.aliasing_output") == 1

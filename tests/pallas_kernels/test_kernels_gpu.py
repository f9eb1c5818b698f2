"""The kernels on a real Hopper GPU, over the full matrix."""

import jax
import pytest
from kernel_cases import GPU_MATRIX, TOLERANCE, error_of, make_step

from jaxserve.pallas_kernels.ops import resolve_backend

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", ["mosaic_gpu", "reference"])
@pytest.mark.parametrize("case", GPU_MATRIX, ids=str)
def test_attention_equals_the_oracle(case, name):
    device = jax.devices()[0]
    backend = resolve_backend(
        name, device.platform, device.device_kind, dtype=case.dtype, head_dim=case.head_dim, group=case.group
    )
    step = make_step(case)
    got = jax.jit(lambda q, kv, meta: backend.attention(q, kv, backend.prepare(meta, kv.k.shape[2]), **case.options))(
        step.q, step.kv, step.meta
    )
    assert error_of(got, step) < TOLERANCE[case.dtype]

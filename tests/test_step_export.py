"""Every bucket's step lowers for CUDA from this CPU host, with the Hopper kernel in it. Nothing runs."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax import export

from jaxserve.models.loading import load_model
from jaxserve.models.registry import resolve
from jaxserve.pallas_kernels.ops import resolve_backend
from jaxserve.pallas_kernels.reference import KVPages
from jaxserve.request import knob_names
from jaxserve.sampling import empty_extras
from jaxserve.shapes import Bucket, make_buckets
from jaxserve.state import DeviceState, PackedLayout
from jaxserve.step import build_step

LAYERS, PAGES, PAGE_SIZE, SLOTS, MAX_LEN = 3, 8, 64, 33, 512
BUCKETS = make_buckets(32, 32 + 256, fine=True)


@pytest.fixture(scope="module")
def model():
    hf = {
        "architectures": ["LlamaForCausalLM"], "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256,
        "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    }  # fmt: skip
    return load_model(None, resolve(hf)[0], jnp.bfloat16, load_format="dummy", progress=False)


@pytest.mark.parametrize("bucket", [BUCKETS[0], BUCKETS[4], *BUCKETS[-2:]], ids=str)
@pytest.mark.parametrize("features", [False, True], ids=["plain", "features"])
def test_the_step_lowers_for_cuda(model, bucket: Bucket, features: bool):
    backend = resolve_backend("mosaic_gpu", "gpu", "NVIDIA H200", dtype="bfloat16", head_dim=64, group=2)
    layout = PackedLayout(bucket, knob_names("f32") + knob_names("i32"), PAGE_SIZE)
    pages = jax.ShapeDtypeStruct((PAGES, 2, PAGE_SIZE, 64), jnp.bfloat16)
    state = jax.eval_shape(
        lambda: DeviceState(
            jnp.zeros(SLOTS, jnp.int32),
            jnp.zeros((SLOTS, MAX_LEN // PAGE_SIZE), jnp.int32),
            empty_extras(SLOTS, MAX_LEN, 512),
        )
    )
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), model.params)
    step = jax.jit(build_step(model.graphdef, layout, backend, features=features), donate_argnums=(1, 2))
    module = export.export(
        step, platforms=["cuda"], disabled_checks=[export.DisabledSafetyCheck.custom_call("mosaic_gpu_v2")]
    )(shapes, [KVPages(pages, pages)] * LAYERS, state, jax.ShapeDtypeStruct((layout.size,), jnp.int32)).mlir_module()
    hashes = re.findall(r'kernel_hash = "([^"]*)"', module)
    # all layers of a bucket share their kernels: rope and KV write; decode and its combine; prefill
    assert len(set(hashes)) <= 1 + 2 * bool(bucket.decode_rows) + bool(bucket.prefill_tokens)
    assert len(hashes) >= 2
    donated = len(re.findall(r"(?:tf.aliasing_output|jax.buffer_donor)", module))
    assert donated >= 2 * LAYERS + 2

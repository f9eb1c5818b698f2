"""An engine's programs on an H200, lowered for CUDA on this CPU host, Hopper kernels and all. Nothing runs."""

import re

import jax.numpy as jnp
import pytest
from jax import export

from jaxserve.config import EngineConfig
from jaxserve.models.loading import load_model
from jaxserve.models.registry import resolve
from jaxserve.pallas_kernels.ops import resolve_backend
from jaxserve.runner import Kind, Runner
from jaxserve.shapes import Bucket, choose_bucket, make_buckets
from jaxserve.step_cache import OURS, jitted

LAYERS, SLOTS = 3, 32
BUCKETS = make_buckets(SLOTS, SLOTS + 256, fine=True)
SOME = [BUCKETS[0], BUCKETS[4], *BUCKETS[-2:]]


@pytest.fixture(scope="module")
def runner() -> Runner:
    hf = {
        "architectures": ["LlamaForCausalLM"], "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256,
        "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
        "max_position_embeddings": 512,
    }  # fmt: skip
    config = resolve(hf)[0]
    backend = resolve_backend("mosaic_gpu", "gpu", "NVIDIA H200", dtype="bfloat16", head_dim=64, group=2)
    loaded = load_model(None, config, jnp.bfloat16, load_format="dummy", progress=False)
    options = EngineConfig(model="m", kv_cache_memory_bytes=2**22, enforce_eager=True)
    return Runner(options, loaded, backend, BUCKETS, backend.default_page_size, SLOTS)


def test_every_bucket_has_its_programs(runner: Runner):
    assert {size for kind, size in runner.program_keys() if kind is Kind.PLAIN} == set(BUCKETS)
    few = {size for kind, size in runner.program_keys() if kind is Kind.FORWARD}
    assert few < set(BUCKETS)
    assert {size for kind, size in runner.program_keys() if kind is Kind.DRAW} == {bucket.rows for bucket in few}
    for bucket in BUCKETS:  # what fits into a plain step fits into one of the few
        choose_bucket(tuple(few), bucket.decode_rows, bucket.prefill_tokens, bucket.prefill_rows)


@pytest.mark.parametrize(
    ("kind", "size"),
    [(kind, bucket) for bucket in SOME for kind in (Kind.PLAIN, Kind.FORWARD)] + [(Kind.DRAW, SOME[-1].rows)],
    ids=str,
)
def test_it_lowers_for_cuda(runner: Runner, kind: Kind, size: Bucket | int):
    function, shapes, donated = runner.flat((kind, size), 8, 512)
    program = jitted(function, tuple(donated))
    module = export.export(program, platforms=["cuda"], disabled_checks=OURS)(*shapes).mlir_module()
    hashes = re.findall(r'kernel_hash = "([^"]*)"', module)
    if isinstance(size, Bucket):
        # All layers of a bucket share their kernels: rope and KV write; decode and its combine; prefill.
        assert len(set(hashes)) <= 1 + 2 * bool(size.decode_rows) + bool(size.prefill_tokens)
        assert len(hashes) >= 2 and len(donated) > 2 * LAYERS
    else:
        assert not hashes
    assert len(re.findall(r"(?:tf.aliasing_output|jax.buffer_donor)", module)) == len(donated)

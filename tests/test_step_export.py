"""An engine's programs on an H200, lowered for CUDA on this CPU host, Hopper kernels and all. Nothing runs."""

import re

import pytest
from jax import export

from jaxserve.config import EngineConfig
from jaxserve.deployment import resolve_deployment
from jaxserve.models.loading import model_shapes
from jaxserve.programs import Kind, Programs
from jaxserve.shapes import Bucket, choose_bucket
from jaxserve.sharding import devices, mesh_of
from jaxserve.step_cache import OURS, jitted

LAYERS, SLOTS = 3, 32
HF = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256,
    "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "max_position_embeddings": 512,
}  # fmt: skip
CONFIG = EngineConfig(max_num_seqs=SLOTS, max_num_batched_tokens=SLOTS + 256, attention_backend="mosaic_gpu")
DEPLOYMENT = resolve_deployment(CONFIG, HF, "gpu", "NVIDIA H200")
BUCKETS = DEPLOYMENT.buckets
SOME = [BUCKETS[0], BUCKETS[4], *BUCKETS[-2:]]


@pytest.fixture(scope="module")
def programs() -> Programs:
    mesh = mesh_of(devices())
    return Programs(model_shapes(DEPLOYMENT.model, DEPLOYMENT.dtype, mesh), DEPLOYMENT, mesh)


def test_every_bucket_has_its_programs(programs: Programs):
    assert {size for kind, size in programs.keys if kind is Kind.PLAIN} == set(BUCKETS)
    few = {size for kind, size in programs.keys if kind is Kind.FORWARD}
    assert few < set(BUCKETS)
    assert {size for kind, size in programs.keys if kind is Kind.DRAW} == {bucket.rows for bucket in few}
    for bucket in BUCKETS:  # what fits into a plain step fits into one of the few
        choose_bucket(tuple(few), bucket.decode_rows, bucket.prefill_tokens, bucket.prefill_rows)


@pytest.mark.parametrize(
    ("kind", "size"),
    [(kind, bucket) for bucket in SOME for kind in (Kind.PLAIN, Kind.FORWARD)] + [(Kind.DRAW, SOME[-1].rows)],
    ids=str,
)
def test_it_lowers_for_cuda(programs: Programs, kind: Kind, size: Bucket | int):
    function, shapes, donated = programs.flat((kind, size), 8, 512)
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

"""An engine's programs on GPUs, lowered for CUDA on this CPU host, kernels and all. Nothing runs."""

import re
import time
from pathlib import Path

import pytest
from jax import export
from jax.sharding import AbstractDevice

from jaxserve.config import EngineConfig
from jaxserve.deployment import resolve_deployment
from jaxserve.models.loading import model_shapes
from jaxserve.pallas_kernels.gated_product_mosaic_gpu import LEAST_TOKENS
from jaxserve.programs import Kind, Programs
from jaxserve.shapes import Bucket, choose_bucket
from jaxserve.sharding import devices, mesh_of

LAYERS, SLOTS = 3, 32
SIZES = {"max_num_seqs": SLOTS, "max_num_batched_tokens": SLOTS + 256}
HF = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256,
    "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "max_position_embeddings": 512,
}  # fmt: skip
# Of A10G JAX knows nothing but its name.
GPUS = {"mosaic_gpu": "NVIDIA H200", "triton": "NVIDIA A10G"}
BUCKETS = resolve_deployment(EngineConfig(**SIZES), HF, "gpu", "NVIDIA H200").buckets
SOME = [BUCKETS[0], BUCKETS[4], *BUCKETS[-2:]]

pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")


@pytest.fixture(scope="module", params=GPUS)
def programs(request: pytest.FixtureRequest) -> Programs:
    mesh, kind = mesh_of(devices()), GPUS[request.param]
    deployment = resolve_deployment(EngineConfig(**SIZES, attention_backend=request.param), HF, "gpu", kind)
    assert deployment.buckets == BUCKETS
    shapes = model_shapes(deployment.model, deployment.dtype, mesh)
    return Programs(shapes, deployment, mesh, AbstractDevice(kind, 1, "gpu"))


def lowered(programs: Programs, kind: Kind, size: Bucket | int, monkeypatch: pytest.MonkeyPatch, folder: Path):
    """(module for CUDA, what is donated): traced as on a first start."""
    monkeypatch.setenv("JAXSERVE_CACHE_DIR", str(folder))
    programs.trace((kind, size), 8, 512)
    exported = export.deserialize(bytearray(programs.path((kind, size), 8, 512).read_bytes()))
    return exported.mlir_module(), programs.flat((kind, size), 8, 512)[2]


@pytest.mark.parametrize("backend", GPUS)
def test_quantized_steps_are_others_and_lower_for_cuda(backend: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """A start never takes a step of another format out of the cache."""
    mesh, kind, paths = mesh_of(devices()), GPUS[backend], set()
    formats = {None: "bf16", "int8": "i8", "fp8": "f8E4M3FN"}
    if backend == "triton":
        del formats["fp8"]  # which an A10G does not have
    key = Kind.PLAIN, SOME[0]
    for quantization, name in formats.items():
        config = EngineConfig(**SIZES, attention_backend=backend, quantization=quantization)
        deployment = resolve_deployment(config, HF, "gpu", kind)
        shapes = model_shapes(deployment.model, deployment.dtype, mesh)
        programs = Programs(shapes, deployment, mesh, AbstractDevice(kind, 1, "gpu"))
        module, _ = lowered(programs, *key, monkeypatch, tmp_path)
        products = re.findall(r"dot_general.*, tensor<\d+x\d+x(\w+)>\) -> tensor<\d+x\d+x(\w+)>", module)
        assert {operand for operand, _ in products} == {name}
        paths.add(programs.path(key, 8, 512))
    assert len(paths) == len(formats)


def test_every_bucket_has_its_programs(programs: Programs):
    assert {size for kind, size in programs.keys if kind is Kind.PLAIN} == set(BUCKETS)
    few = {size for kind, size in programs.keys if kind is Kind.FORWARD}
    assert few < set(BUCKETS)
    assert {size for kind, size in programs.keys if kind is Kind.DRAW} == {bucket.rows for bucket in few}
    for bucket in BUCKETS:  # what fits into a plain step fits into one of the few
        choose_bucket(tuple(few), bucket.decode_rows, bucket.prefill_tokens, bucket.prefill_rows)


def test_a_forward_pass_is_compiled_after_the_plain_step_whose_products_it_shares(
    programs: Programs, monkeypatch: pytest.MonkeyPatch
):
    """By then XLA has tried their kernels out. All others are compiled side by side."""
    monkeypatch.setattr(programs, "lower", lambda *_: None)
    monkeypatch.setattr("os.cpu_count", lambda: len(programs.keys))
    ended: list = []

    def compile(key, _) -> bool:
        ready = key[0] is not Kind.FORWARD or (Kind.PLAIN, key[1]) in ended
        time.sleep(0.05)
        ended.append(key)
        return ready

    assert dict(programs.compile_all(compile, 8, 512)) == dict.fromkeys(programs.keys, True)


@pytest.mark.parametrize(
    ("kind", "size"),
    [(kind, bucket) for bucket in SOME for kind in (Kind.PLAIN, Kind.FORWARD)] + [(Kind.DRAW, SOME[-1].rows)],
    ids=str,
)
def test_it_lowers_for_cuda(
    programs: Programs, kind: Kind, size: Bucket | int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    module, donated = lowered(programs, kind, size, monkeypatch, tmp_path)
    kernels = len(set(re.findall(r'kernel_hash = "([^"]*)"', module))) + module.count("@__gpu$xla.gpu.triton")
    if isinstance(size, Bucket):
        # All layers of a bucket share their kernels: rope and KV write; decode and its combine; prefill; gated product.
        gated = programs.backend.name == "mosaic_gpu" and size.tokens >= LEAST_TOKENS
        assert 2 + gated <= kernels <= 1 + 2 * bool(size.decode_rows) + bool(size.prefill_tokens) + gated
        assert len(donated) > LAYERS
    else:
        assert not kernels
    assert len(re.findall(r"(?:tf.aliasing_output|jax.buffer_donor)", module)) == len(donated)

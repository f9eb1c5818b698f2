"""An engine's programs on GPUs, lowered for CUDA on this CPU host, kernels and all. Nothing runs."""

import re
import time
from pathlib import Path

import pytest
from jax import export
from jax.sharding import AbstractDevice

from jaxserve.config import EngineConfig, offline_config
from jaxserve.deployment import WIDE, resolve_deployment
from jaxserve.models.loading import model_shapes
from jaxserve.pallas_kernels.add_norm_mosaic_gpu import MOST_ROWS
from jaxserve.pallas_kernels.gated_product_mosaic_gpu import LEAST_TOKENS
from jaxserve.programs import LOOP_WEIGHT_BYTES, Key, Kind, Programs
from jaxserve.shapes import Bucket, choose_bucket, coarse
from jaxserve.sharding import devices, mesh_of
from tests.gpu_kernels import kernels_of

LAYERS = 2
# Narrow, but of shapes that every kernel takes.
HF = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 512, "hidden_size": 256, "intermediate_size": 256,
    "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128,
    "max_position_embeddings": 512,
}  # fmt: skip
# Of A10G JAX knows nothing but its name.
GPUS = {"mosaic_gpu": "NVIDIA H200", "triton": "NVIDIA A10G"}
# All that `jaxserve serve` has on a GPU, with no option given.
BUCKETS = resolve_deployment(EngineConfig(), HF, "gpu", "NVIDIA H200").buckets
FEW = coarse(BUCKETS)
KEYS: list[Key] = [(Kind.PLAIN, bucket) for bucket in BUCKETS] + [(Kind.FORWARD, bucket) for bucket in FEW]
KEYS += [(Kind.LOOP, Bucket(0, rows, 0)) for rows in (1, 8, 16, 32, 64)]
KEYS += [(Kind.DRAW, rows) for rows in sorted({bucket.rows for bucket in FEW})]

pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")


@pytest.fixture(scope="module", params=GPUS)
def programs(request: pytest.FixtureRequest) -> Programs:
    mesh, kind = mesh_of(devices()), GPUS[request.param]
    deployment = resolve_deployment(EngineConfig(attention_backend=request.param), HF, "gpu", kind)
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
    key = Kind.PLAIN, BUCKETS[0]
    for quantization, name in formats.items():
        config = EngineConfig(attention_backend=backend, quantization=quantization)
        deployment = resolve_deployment(config, HF, "gpu", kind)
        shapes = model_shapes(deployment.model, deployment.dtype, mesh)
        programs = Programs(shapes, deployment, mesh, AbstractDevice(kind, 1, "gpu"))
        module, _ = lowered(programs, *key, monkeypatch, tmp_path)
        products = re.findall(r"dot_general.*, tensor<(?:\d+x)+(\w+)>\) -> tensor<(?:\d+x)+(\w+)>", module)
        assert {operand for operand, _ in products} == {name}
        paths.add(programs.path(key, 8, 512))
    assert len(paths) == len(formats)


def test_every_bucket_has_its_programs(programs: Programs):
    assert sorted(programs.keys, key=str) == sorted(KEYS, key=str)
    assert set(FEW) < set(BUCKETS)
    for bucket in BUCKETS:  # what fits into a plain step fits into one of the few
        choose_bucket(FEW, bucket.decode_rows, bucket.prefill_tokens, bucket.prefill_rows)


def test_a_large_model_has_no_loops(monkeypatch: pytest.MonkeyPatch):
    """Its steps take the device longer than the host takes to start one."""
    deployment, mesh = resolve_deployment(EngineConfig(), HF, "gpu", "NVIDIA H200"), mesh_of(devices())
    monkeypatch.setattr(Programs, "weight_bytes", LOOP_WEIGHT_BYTES + 1)
    programs = Programs(model_shapes(deployment.model, deployment.dtype, mesh), deployment, mesh)
    assert {kind for kind, _ in programs.keys} == {Kind.PLAIN, Kind.FORWARD, Kind.DRAW}


def test_a_wide_models_server_has_buckets_of_no_other_kind():
    """It has fewer, and other numbers of chunks in some."""
    hf = HF | {"hidden_size": WIDE}
    wide = resolve_deployment(EngineConfig(), hf, "gpu", "NVIDIA H200").buckets
    sizes = {(bucket.decode_rows, bucket.prefill_tokens) for bucket in wide}
    assert sizes < {(bucket.decode_rows, bucket.prefill_tokens) for bucket in BUCKETS}


def test_other_programs_of_a_bucket_are_compiled_after_the_plain_step_whose_products_they_share(
    programs: Programs, monkeypatch: pytest.MonkeyPatch
):
    """By then XLA has tried their kernels out. All others are compiled side by side."""
    lowered: list = []
    monkeypatch.setattr(programs, "lower", lambda key, *_: lowered.append(key))
    monkeypatch.setattr("os.cpu_count", lambda: len(programs.keys))
    ended: list = []

    def compile(key, _) -> bool:
        ready = key[0] in (Kind.PLAIN, Kind.DRAW) or (Kind.PLAIN, key[1]) in ended
        time.sleep(0.05)
        ended.append(key)
        return ready

    assert dict(programs.compile_all(compile, 8, 512)) == dict.fromkeys(programs.keys, True)
    assert lowered == programs.keys, "in a fixed order: that is part of how the compile cache knows a program"


@pytest.mark.parametrize(("kind", "size"), KEYS, ids=str)
def test_it_lowers_for_cuda(
    programs: Programs, kind: Kind, size: Bucket | int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    module, donated = lowered(programs, kind, size, monkeypatch, tmp_path)
    found = {name: len(kernels) for name, kernels in kernels_of(module).items()}
    if not isinstance(size, Bucket):
        assert not found
    elif programs.backend.name == "mosaic_gpu":
        check_mosaic_gpu(found, kind, size)
    else:
        decode = {"paged_decode": 1, "combine_decode": 1} if size.decode_rows else {}
        prefill = {"paged_prefill": 1} if size.prefill_tokens else {}
        assert found == {"rope_and_write": 1} | decode | prefill
    assert len(donated) > LAYERS or not isinstance(size, Bucket)
    assert len(re.findall(r"(?:tf.aliasing_output|jax.buffer_donor)", module)) == len(donated)


@pytest.mark.heavy
@pytest.mark.parametrize("wide", [False, True], ids=["narrow", "wide"])
def test_the_buckets_of_llm_lower_too(wide: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Those that a server's are not among: more rows, and others beside prompts."""
    hf = HF | ({"hidden_size": WIDE, "num_attention_heads": 32, "num_key_value_heads": 8} if wide else {})
    config, mesh = offline_config("LLM", "", {}), mesh_of(devices())
    deployment = resolve_deployment(config, hf, "gpu", GPUS["mosaic_gpu"])
    target = AbstractDevice(GPUS["mosaic_gpu"], 1, "gpu")
    programs = Programs(model_shapes(deployment.model, deployment.dtype, mesh), deployment, mesh, target)
    others = [bucket for bucket in deployment.buckets if wide or bucket not in BUCKETS]
    assert len(others) > 8
    for bucket in others:
        module, _ = lowered(programs, Kind.PLAIN, bucket, monkeypatch, tmp_path)
        kernels = {"decode"} if bucket.decode_rows else set()
        assert set(kernels_of(module)) >= kernels | ({"prefill", "rope_write"} if bucket.prefill_tokens else set())


def check_mosaic_gpu(found: dict[str, int], kind: Kind, bucket: Bucket) -> None:
    """All layers share their kernels. But the last one of a plain step goes on with each row's last token alone: what
    follows attention has two sizes then.
    """
    sizes = {bucket.tokens, bucket.rows} if kind is Kind.PLAIN else {bucket.tokens}
    expected = {"decode": 1, "combine": 1} if bucket.decode_rows else {}
    if bucket.prefill_tokens:
        expected |= {"prefill": 1, "rope_write": 1}
    if gated := sum(size >= LEAST_TOKENS for size in sizes):
        expected["gated_product"] = gated
    # Sums in one, or in parts: of attention's product, and of the MLP's.
    norms, most = found.pop("add_norm", 0), 2 * sum(size <= MOST_ROWS for size in sizes)
    assert found == expected
    assert bool(norms) == bool(most) and norms <= most

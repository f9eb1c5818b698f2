"""Engines on several devices against one on one device, and against Transformers: run by test_sharding.py in a process
of its own that has eight virtual CPU devices.
"""

import json
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest
from jax import export
from jax.sharding import AbstractDevice, PartitionSpec

from jaxserve import LLM, SamplingParams, deployment, step_cache, tracers
from jaxserve.checkpoint import Checkpoint
from jaxserve.config import EngineConfig
from jaxserve.control import Sleep, WakeUp
from jaxserve.deployment import resolve_deployment
from jaxserve.engine import Engine
from jaxserve.errors import ConfigError
from jaxserve.models.loading import load_model, model_shapes
from jaxserve.models.registry import resolve
from jaxserve.pallas_kernels.ops import Backend
from jaxserve.programs import Kind, Programs
from jaxserve.request import NOT_FINITE, StructuredOutputsParams
from jaxserve.sampling import sample_split
from jaxserve.sharding import AXIS, WHOLE, arrays, devices, mesh_of, on_each
from tests.test_engine import FEW_PROGRAMS, GOLDENS, check_every_path, config_of, golden, ids_of, request, run
from tests.test_sampling import S, V, draw, make_rows, random_logits

HEADS_OF_8 = {  # what eight devices can share: fewer kv heads than devices, a vocabulary that is no multiple, biases
    "architectures": ["LlamaForCausalLM"], "vocab_size": 1021, "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 256,
    "attention_bias": True, "mlp_bias": True,
}  # fmt: skip
PROMPTS = [[5], [9, 8, 7], [(7 * i) % 90 + 3 for i in range(70)], [(5 * i) % 80 + 3 for i in range(30)]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(HEADS_OF_8))
    return folder


def llm_of(folder: Path, size: int) -> LLM:
    return LLM(
        str(folder), load_format="dummy", tokenizer=str(GOLDENS / "vocab" / "smollm.gguf"), max_num_seqs=4,
        max_num_batched_tokens=36, kv_cache_memory_bytes=2**19, page_size=16, tensor_parallel_size=size,
        dtype="float32",
    )  # fmt: skip


@pytest.fixture(scope="module")
def one(folder: Path) -> LLM:
    return llm_of(folder, 1)


@pytest.fixture(scope="module", params=[2, 8])  # two kv heads each; half a one
def several(request, folder: Path) -> LLM:
    return llm_of(folder, request.param)


# ---- the same tokens


# What is split in a way of its own: biases, tied and untied embeddings, norms of heads. All cases passed once, with 2 and 4.
@pytest.mark.parametrize(
    ("case", "size"), [("llama3_bias_tied", 2), *((case, 4) for case in ("llama", "qwen2_tied", "qwen3"))]
)
def test_greedy_ids_equal_transformers_on_every_path(case: str, size: int):
    """Two kv heads: one for each of two devices, or one for each two of four."""
    config = config_of(case, pool_tokens=208, dtype="float32", tensor_parallel_size=size, **FEW_PROGRAMS)
    engine = Engine(config, checks=True)
    check_every_path(engine, golden(case), "float32")


KNOBS = [
    {"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.9}, {"temperature": 0.9, "top_k": 5},
    {"temperature": 1.0, "min_p": 0.05, "n": 3}, {"temperature": 0.0, "presence_penalty": 1.0},
    {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.5}, {"temperature": 0.0, "logit_bias": {5: 9.0}},
    {"temperature": 0.0, "allowed_token_ids": [7, 8, 1020]}, {"temperature": 0.0, "logprobs": 3, "prompt_logprobs": 2},
    {"temperature": 1.0, "structured_outputs": StructuredOutputsParams(regex="[A-Z][a-z]{2,9} [0-9]{4}")},
    {"temperature": 0.0, "structured_outputs": StructuredOutputsParams(choice=["yes", "no"])},
]  # fmt: skip


def test_knobs_and_grammars_give_the_same_and_compile_nothing(one: LLM, several: LLM):
    """Together in one batch, twice: the second time after prefix hits."""
    wanted = [SamplingParams(seed=5, max_tokens=24, **knobs) for knobs in KNOBS]
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(len(wanted))]
    for _ in range(2):
        expected, got = (llm.generate(prompts, wanted, use_tqdm=False) for llm in (one, several))
        for knobs, a, b in zip(KNOBS, expected, got, strict=True):
            assert [o.token_ids for o in b.outputs] == [o.token_ids for o in a.outputs], knobs
            assert [o.finish_reason for o in b.outputs] == [o.finish_reason for o in a.outputs]
            assert all(max(o.token_ids) < HEADS_OF_8["vocab_size"] for o in b.outputs)
        for where in (lambda out: out.outputs[0].logprobs, lambda out: out.prompt_logprobs[1:]):
            a, b = where(expected[9]), where(got[9])
            assert [list(tokens) for tokens in a] == [list(tokens) for tokens in b]
            values = [[[one.logprob for one in tokens.values()] for tokens in found] for found in (a, b)]
            np.testing.assert_allclose(values[0], values[1], atol=1e-4)
    assert several.get_metrics().compiles_after_warmup == 0
    assert several.get_metrics().prefix_cache_hit_tokens > 0


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_embeddings_are_the_same(one: LLM, several: LLM, pooling: str):
    expected, got = (llm.embed(PROMPTS, pooling=pooling, use_tqdm=False) for llm in (one, several))
    for a, b in zip(expected, got, strict=True):
        np.testing.assert_allclose(b.outputs.embedding, a.outputs.embedding, atol=1e-5)


@pytest.mark.parametrize("size", [2, 8])
def test_a_draw_of_parts_equals_that_of_the_whole(size: int):
    """Ties between devices, rows of NaN and of nothing, and columns past the end that would win."""
    logits = random_logits(1, vocab=V)
    logits[0, [3, 200, 250]] = 50.0
    logits[1, 299], logits[2, 7], logits[3, [1, 290]] = np.nan, np.nan, [np.inf, -np.inf]
    logits[4], logits[5, 9:] = -np.inf, -np.inf
    rows = make_rows(temperature=np.where(np.arange(S) < 8, 0.0, 0.8))
    columns = -(-V // size)
    parts = np.pad(logits, ((0, 0), (0, columns * size - V)), constant_values=99.0)
    one = partial(sample_split, rows=rows, shards=size, vocab=V)
    split = jax.jit(on_each(one, mesh_of(devices(size)), PartitionSpec(None, AXIS), WHOLE))
    tokens = draw(logits, rows, features=False).token
    np.testing.assert_array_equal(split(parts), tokens)
    assert tokens[0] == 3 and set(tokens[1:5]) == {NOT_FINITE} and len(set(tokens)) > 20


@pytest.mark.parametrize("size", [4])
def test_plain_steps_give_the_same(size: int, monkeypatch):
    """What CPUs do not use: one program for the forward pass and the draw."""
    resolve_backend = deployment.resolve_backend

    def as_on_tpu(*args, **options) -> Backend:
        backend = resolve_backend(*args, **options)
        return replace(backend, platform="tpu")

    monkeypatch.setattr(deployment, "resolve_backend", as_on_tpu)
    engine = Engine(config_of("qwen3_tied", dtype="float32", tensor_parallel_size=size, **FEW_PROGRAMS), checks=True)
    entries = golden("qwen3_tied")
    deltas = run(engine, [request(i, e["prompt_ids"], len(e["ids"])) for i, e in enumerate(entries)])
    for i, entry in enumerate(entries):
        ids = ids_of(deltas[str(i), 0])
        assert ids == entry["ids"] or min(entry["margins"]) < 1e-3
    assert {kind for kind, _ in engine._runner._ready} == {Kind.PLAIN}


# ---- memory


@pytest.mark.parametrize("level", [1, 2])
def test_weights_come_back_to_their_shards_after_sleep(level: int):
    engine = Engine(config_of("qwen2_tied", enforce_eager=False, tensor_parallel_size=4, **FEW_PROGRAMS), checks=True)

    def ids() -> list[int]:
        return ids_of(run(engine, [request("a", range(5, 42), 12, temperature=1.0, seed=7)])["a", 0])

    def places() -> list:
        return [(w.shape, w.sharding.spec, bytes_of_each([w])) for w in engine._runner._weights]

    before, lay = ids(), places()
    engine.control(Sleep(level=level))
    assert all(a.is_deleted() for a in jax.tree.leaves((engine._runner._loaded.params, engine._runner._kv)))
    engine.control(WakeUp())
    assert ids() == before and places() == lay
    assert engine.stats().compiles_after_warmup == 0


def bytes_of_each(found: list[jax.Array]) -> Counter:
    """Bytes by device."""
    sizes: Counter = Counter()
    for array in found:
        for shard in array.addressable_shards:
            sizes[shard.device] += shard.data.nbytes
    return sizes


@pytest.mark.parametrize("how", [{}, {"load_format": "dummy"}], ids=str)
@pytest.mark.parametrize(("case", "size"), [("llama3_bias_tied", 4), ("qwen3", 2)])
def test_each_device_gets_its_share_of_the_weights(case: str, size: int, how: dict):
    checkpoint = Checkpoint.open(EngineConfig(model=str(GOLDENS / case)))
    config = resolve(checkpoint.config)[0]
    alone = load_model(checkpoint, config, "float32", progress=False, **how)
    split = load_model(checkpoint, config, "float32", progress=False, mesh=mesh_of(devices(size)), **how)
    shard, H, F = split.config, config.head_dim, config.ffn_size // size
    assert (shard.num_heads, shard.num_kv_heads, shard.shards) == (4 // size, 1, size)
    q, kv = config.num_heads * H, config.num_kv_heads * H

    def part(array: jax.Array, i: int) -> np.ndarray:
        (found,) = (s for s in array.addressable_shards if s.device == split_devices[i])
        return np.asarray(found.data)

    split_devices = list(split.params["embed"].sharding.mesh.devices)
    for i in range(size):
        heads, head = slice(i * q // size, (i + 1) * q // size), i * config.num_kv_heads // size
        kv_rows = slice(head * H, (head + 1) * H)
        rows = np.r_[heads, q + kv_rows.start : q + kv_rows.stop, q + kv + kv_rows.start : q + kv + kv_rows.stop]
        ffn = slice(i * F, (i + 1) * F)
        ffn_rows = np.r_[ffn, config.ffn_size + i * F : config.ffn_size + (i + 1) * F]
        for layer, whole in zip(split.params["layers"].values(), alone.params["layers"].values(), strict=True):
            whole = {name: np.asarray(array) for name, array in whole.items()}
            np.testing.assert_array_equal(part(layer["qkv"], i), whole["qkv"][rows])
            np.testing.assert_array_equal(part(layer["gate_up"], i), whole["gate_up"][ffn_rows])
            np.testing.assert_array_equal(part(layer["o"], i), whole["o"][:, heads])
            np.testing.assert_array_equal(part(layer["down"], i), whole["down"][:, ffn])
        for name, array in alone.params.items():
            if name == "layers":
                continue
            mine = np.asarray(array)
            if name == "qkv_bias":
                mine = mine[:, rows]
            elif name == "gate_up_bias":
                mine = mine[:, ffn_rows]
            elif name in ("embed", "lm_head"):
                mine = mine[i * 256 // size : (i + 1) * 256 // size]
            np.testing.assert_array_equal(part(split.params[name], i), mine)
    sizes = bytes_of_each(jax.tree.leaves(split.params))
    assert len(sizes) == size and len(set(sizes.values())) == 1
    # All but norms and small biases is split; kv heads are in two places on four devices.
    twice = 2 * kv * config.hidden_size * 4 * config.num_layers * (max(size, 2) // 2 - 1)
    assert sum(sizes.values()) < (alone.nbytes + twice) * 1.1


@pytest.mark.parametrize("how", [{}, {"load_format": "dummy"}], ids=str)
@pytest.mark.parametrize(("case", "size"), [("llama3_bias_tied", 4), ("qwen3", 2)])
def test_quantized_weights_are_those_of_one_device(case: str, size: int, how: dict):
    """Scales of o and down, whose rows are split, are of whole rows, and the same on each device."""
    checkpoint = Checkpoint.open(EngineConfig(model=str(GOLDENS / case)))
    config = replace(resolve(checkpoint.config)[0], quantization="int8")
    alone = load_model(checkpoint, config, "float32", progress=False, **how)
    split = load_model(checkpoint, config, "float32", progress=False, mesh=mesh_of(devices(size)), **how)
    for name in ("o", "down"):
        assert split.params[f"{name}_scale"].sharding.is_fully_replicated
        np.testing.assert_array_equal(split.params[f"{name}_scale"], alone.params[f"{name}_scale"])
        for layer, whole in zip(split.params["layers"].values(), alone.params["layers"].values(), strict=True):
            np.testing.assert_array_equal(layer[name], whole[name])
    for name in ("qkv", "gate_up"):
        for i in range(config.num_layers):
            whole = {tuple(row): s for row, s in zip(np.asarray(alone.params["layers"][i][name]), np.asarray(alone.params[f"{name}_scale"][i]), strict=True)}  # fmt: skip
            rows = zip(
                np.asarray(split.params["layers"][i][name]), np.asarray(split.params[f"{name}_scale"][i]), strict=True
            )
            assert all(whole[tuple(row)] == scale for row, scale in rows)
    if "lm_head" in alone.params:
        np.testing.assert_array_equal(split.params["lm_head_scale"], alone.params["lm_head_scale"])
        assert split.params["lm_head_scale"].sharding.spec == PartitionSpec(AXIS)


@pytest.mark.parametrize("size", [2, 4])
def test_a_quantized_model_on_several_devices_is_as_close_to_float32(size: int):
    """Not the same: each device scales its own part of a token, before o and down."""

    def logprobs(**how) -> np.ndarray:
        engine = Engine(config_of("qwen3", dtype="float32", **FEW_PROGRAMS, **how), checks=True)
        deltas = run(engine, [request(i, e["prompt_ids"], 1, prompt_logprobs=0) for i, e in enumerate(golden("qwen3"))])
        found = [delta.prompt_logprobs for each in deltas.values() for delta in each if delta.prompt_logprobs]
        return np.array([token.logprob for prompt in found for token in prompt if token])

    exact, alone = logprobs(), logprobs(quantization="int8")
    split = logprobs(quantization="int8", tensor_parallel_size=size)
    assert len(exact) > 90
    error, of_one = (np.sqrt(np.mean((found - exact) ** 2)) for found in (split, alone))
    assert 0 < error < 1.1 * of_one
    assert abs(split.mean() / exact.mean() - 1) < 0.01


def test_the_vocabulary_is_filled_up(folder: Path):
    config = resolve(HEADS_OF_8)[0]
    model = load_model(None, config, "float32", load_format="dummy", mesh=mesh_of(devices(8)), progress=False)
    assert (model.config.vocab_size, model.config.vocab_rows) == (1021, 128)
    assert model.params["embed"].shape == model.params["lm_head"].shape == (1024, 64)


def test_pools_are_split_on_kv_heads():
    engine = Engine(config_of("llama", tensor_parallel_size=4))
    runner = engine._runner
    for pages in jax.tree.leaves(runner._kv):
        assert pages.shape[1] == 4 and pages.sharding.spec == PartitionSpec(None, AXIS)
        assert {s.data.shape[1] for s in pages.addressable_shards} == {1}
    page_bytes = {s.data[0].nbytes for s in runner._kv[0].addressable_shards}
    assert page_bytes == {runner.pool.page_bytes // 2}  # of two layers
    assert all(a.sharding.is_fully_replicated for a in jax.tree.leaves(runner._state))


# ---- the start


@pytest.mark.parametrize(
    ("size", "words"),
    [
        (9, r"--tensor-parallel-size must be at most 8, the devices that there are \(cpu\), got 9"),
        (3, r"--tensor-parallel-size must divide the model's 4 query heads .*2 kv heads.*\(1, 2, 4 can be\), got 3"),
    ],
)
def test_a_size_that_cannot_be_is_refused_before_weights_are_read(size: int, words: str, monkeypatch):
    monkeypatch.setattr("jaxserve.models.loading.load_model", lambda *_, **__: pytest.fail("too late"))
    with pytest.raises(ConfigError, match=words) as caught:
        Engine(EngineConfig(model=str(GOLDENS / "llama"), tensor_parallel_size=size))
    assert caught.value.param == "tensor_parallel_size"


def test_traced_steps_are_kept_for_each_number_of_devices(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("JAXSERVE_CACHE_DIR", str(tmp_path))
    for size in (1, 2, 4, 2):
        shapes = [arrays(mesh_of(devices(size)), PartitionSpec(AXIS), jax.ShapeDtypeStruct((8 // size,), "float32"))]
        assert shapes[0].shape == (8,)
        lowered = step_cache.lower(lambda x: [x + 1], shapes, donated=range(0), name="n", device=devices()[0])
        assert lowered.compile().input_shardings[0][0].num_devices == size
    assert len(list((tmp_path / "steps").iterdir())) == 3


def test_other_processes_trace_what_two_devices_run(tmp_path: Path, monkeypatch, caplog):
    monkeypatch.setenv("JAXSERVE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tracers, "how_many", lambda platform, num_programs: 2 if num_programs else 0)
    config = config_of("llama", tensor_parallel_size=2, max_num_seqs=1, max_num_batched_tokens=17, enforce_eager=False)
    with caplog.at_level("INFO", tracers.__name__):
        engine = Engine(config, checks=True)
    said = [record.message for record in caplog.records if record.name == tracers.__name__]
    assert said == [f"2 processes trace {len(engine._runner._programs.keys)} programs"]
    (entry, *_) = golden("llama")
    (deltas,) = run(engine, [request("a", entry["prompt_ids"], 4)]).values()
    assert ids_of(deltas) == entry["ids"][:4]


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
@pytest.mark.parametrize(
    ("backend", "gpu", "call"),
    [("mosaic_gpu", "NVIDIA H200", "mosaic_gpu_v2"), ("triton", "NVIDIA A10G", "__gpu$xla.gpu.triton")],
)
def test_a_step_lowers_for_two_gpus(backend: str, gpu: str, call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Nothing runs. Each device's kernels see one kv head of two; a plain step gathers no logits."""
    monkeypatch.setenv("JAXSERVE_CACHE_DIR", str(tmp_path))
    hf = HEADS_OF_8 | {"hidden_size": 128, "head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = EngineConfig(max_num_seqs=8, max_num_batched_tokens=264, attention_backend=backend, tensor_parallel_size=2)
    made, mesh = resolve_deployment(config, hf, "gpu", gpu), mesh_of(devices(2))
    programs = Programs(model_shapes(made.model, made.dtype, mesh), made, mesh, AbstractDevice(gpu, 1, "gpu"))
    for kind in (Kind.PLAIN, Kind.FORWARD):
        bucket = max(programs.buckets[kind], key=lambda b: b.tokens)
        programs.trace((kind, bucket), 8, 256)
        file = programs.path((kind, bucket), 8, 256)
        module = export.deserialize(bytearray(file.read_bytes())).mlir_module()
        assert call in module and "tensor<8x1x2x64x64xbf16>" in module  # pages of a device
        assert "all_reduce" in module
        assert (f"tensor<{bucket.rows}x1021xf32>" in module) == (kind is Kind.FORWARD)

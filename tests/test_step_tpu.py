"""An engine with the TPU's kernels: interpreted, and its programs compiled by the TPU compiler on this CPU host."""

import json
import re
from dataclasses import replace
from pathlib import Path

import jax
import pytest
from jax.experimental.pallas import tpu as pltpu

from jaxserve import deployment, step_cache
from jaxserve.config import EngineConfig
from jaxserve.deployment import resolve_deployment
from jaxserve.engine import Engine
from jaxserve.models.loading import model_shapes
from jaxserve.pallas_kernels.ops import resolve_backend
from jaxserve.programs import Kind, Programs
from jaxserve.request import Request, SamplingParams
from jaxserve.shapes import Bucket
from jaxserve.sharding import mesh_of

LAYERS, SLOTS, PAGES, MAX_MODEL_LEN = 2, 64, 2048, 131072
DECODE, MIXED = Bucket(0, SLOTS, 0), Bucket(512, SLOTS, 16)
SMALL = {"vocab_size": 4096, "hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8}
LLAMA = {"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((SMALL, 4), id="small on 4 chips"),
        pytest.param((SMALL, 1), id="small on 1 chip", marks=[pytest.mark.heavy, pytest.mark.slow]),
        pytest.param((LLAMA, 1), id="8B on 1 chip", marks=[pytest.mark.heavy, pytest.mark.slow]),
        pytest.param((LLAMA, 4), id="8B on 4 chips", marks=[pytest.mark.heavy, pytest.mark.slow]),
    ],
)
def programs(request, tpu_chips) -> Programs:
    """Of two layers of a small Llama or of Llama 3.1 8B, on one chip or four: shapes without weights."""
    sizes, num_chips = request.param
    hf = sizes | {
        "architectures": ["LlamaForCausalLM"], "num_hidden_layers": LAYERS, "num_key_value_heads": 8, "head_dim": 128,
        "max_position_embeddings": MAX_MODEL_LEN,
    }  # fmt: skip
    chips = tpu_chips("v5e")[:num_chips]
    config = EngineConfig(max_num_seqs=SLOTS, tensor_parallel_size=num_chips)
    made = resolve_deployment(config, hf, chips[0].platform, chips[0].device_kind)
    made = replace(made, buckets=(DECODE, MIXED))
    mesh = mesh_of(chips)
    return Programs(model_shapes(made.model, made.dtype, mesh), made, mesh)


@pytest.mark.tpu_aot
@pytest.mark.parametrize("size", [DECODE, MIXED], ids=str)
@pytest.mark.parametrize("kind", [Kind.PLAIN, Kind.FORWARD])
def test_a_step_compiles_and_copies_no_pool(programs: Programs, kind: Kind, size: Bucket):
    pages = PAGES * programs.mesh.size  # as much memory on each chip
    _, shapes, donated = programs.flat((kind, size), pages, MAX_MODEL_LEN)
    shapes = [jax.ShapeDtypeStruct(s.sharding.shard_shape(s.shape), s.dtype) for s in shapes]  # on each chip
    compiled = programs.lower((kind, size), pages, MAX_MODEL_LEN).compile()
    text, memory = compiled.as_text(), compiled.memory_analysis()
    kernels = re.findall(r"%(\w+?)(?:\.\S+)? = .*tpu_custom_call", text)
    per_layer = {"kv_write_decode", "ragged_paged_attention_1"}
    if size.prefill_tokens:
        per_layer |= {"kv_write_prefill", "ragged_paged_attention_128"}
    assert sorted(kernels) == sorted(LAYERS * [*per_layer])
    pools = [shapes[i] for i in donated if shapes[i].ndim == 5]
    pool_bytes = sum(pool.size * pool.dtype.itemsize for pool in pools)
    assert len(pools) == LAYERS
    assert memory.alias_size_in_bytes >= pool_bytes
    assert memory.temp_size_in_bytes < pool_bytes / len(pools) / 2, "less than one copy of the K of a layer"
    shape = ",".join(map(str, pools[0].shape))
    assert not re.search(rf"\[{shape}\]\S* (?:copy|copy-start|fusion|transpose)\(", text)
    # Sums of the embedding, of attention and of the MLP. The logits of a plain step stay where they are.
    sums, gathers = (re.findall(rf" {name}(?:-start)?\(", text) for name in ("all-reduce", "all-gather"))
    assert bool(sums) == (programs.mesh.size > 1)
    assert bool(gathers) == (programs.mesh.size > 1)


@pytest.mark.tpu_aot
@pytest.mark.parametrize("generation", ["v4", "v5e", "v5p", "v6e"])
def test_products_of_a_quantized_model_are_of_8_bits(generation: str, tpu_chips):
    """And no weight is widened, or moved within HBM."""
    chips = tpu_chips(generation)[:1]
    hf = SMALL | {
        "architectures": ["LlamaForCausalLM"], "num_hidden_layers": LAYERS, "num_key_value_heads": 8, "head_dim": 128,
    }  # fmt: skip
    config = EngineConfig(max_num_seqs=SLOTS, quantization="int8")
    made = resolve_deployment(config, hf, chips[0].platform, chips[0].device_kind)
    mesh = mesh_of(chips)
    programs = Programs(model_shapes(made.model, made.dtype, mesh), replace(made, buckets=(DECODE,)), mesh)
    text = programs.lower((Kind.PLAIN, DECODE), PAGES, 2048).compile().as_text()
    types = dict(re.findall(r"(%[\w.-]+) = (\w+)\[", text))
    products = re.findall(r" = (\w+)\[[\d,]*\]\S* convolution\((%[\w.-]+), (%[\w.-]+)\)", text)
    assert len(products) == 4 * LAYERS + 1
    assert {(total, types[x], types[w]) for total, x, w in products} == {("s32", "s8", "s8")}
    for matrix in jax.tree.leaves(programs._params["layers"]):
        shape = ",".join(map(str, matrix.shape))
        assert f"s8[{shape}]" in text
        assert not re.search(rf"(bf16|f32|s32)\[{shape}\]", text)


@pytest.mark.tpu_aot
def test_a_draw_compiles(programs: Programs):
    _, shapes, donated = programs.flat((Kind.DRAW, SLOTS), PAGES, MAX_MODEL_LEN)
    compiled = programs.lower((Kind.DRAW, SLOTS), PAGES, MAX_MODEL_LEN).compile()
    state_bytes = sum(shapes[i].size * shapes[i].dtype.itemsize for i in donated)
    assert compiled.memory_analysis().alias_size_in_bytes >= state_bytes


@pytest.mark.parametrize("case", ["llama", "qwen2_window_yarn"])
def test_greedy_ids_of_an_engine_with_interpreted_kernels_equal_transformers(case, monkeypatch):
    """Prompts in chunks beside decode rows, with a window and without, in float32."""

    def lower(function, shapes, *, donated, name, device):  # an interpreted kernel calls back, and cannot be exported
        return step_cache.jitted(function, tuple(donated)).lower(*shapes)

    monkeypatch.setattr(step_cache, "lower", lower)
    backend = resolve_backend("mosaic_tpu", "tpu", "TPU v4", dtype="float32")
    monkeypatch.setattr(deployment, "resolve_backend", lambda *_, **__: backend)
    folder = Path(__file__).parent / "goldens" / case
    entries = json.loads((folder / "golden.json").read_text())[:3]
    config = EngineConfig(
        model=str(folder), page_size=16, max_num_seqs=4, max_num_batched_tokens=20, max_model_len=128,
        kv_cache_memory_bytes=2**23, enforce_eager=True,
    )  # fmt: skip
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams()):
        engine = Engine(config, checks=True)
        for i, entry in enumerate(entries):
            params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
            engine.submit(Request(request_id=str(i), prompt_token_ids=entry["prompt_ids"], params=params, max_tokens=4))
        got = {str(i): [] for i in range(len(entries))}
        while engine.has_work():
            for delta in engine.step():
                got[delta.request_id] += delta.token_ids
    pltpu.reset_tpu_interpret_mode_state()
    assert list(got.values()) == [entry["ids"][:4] for entry in entries]

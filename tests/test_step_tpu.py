"""An engine's programs for TPUs, compiled by the real TPU compiler on this CPU host. Nothing runs on a TPU."""

import re

import jax.numpy as jnp
import pytest
from flax import nnx

from jaxserve.config import EngineConfig
from jaxserve.models.loading import LoadedModel
from jaxserve.models.registry import ARCHITECTURES, resolve
from jaxserve.pallas_kernels.ops import resolve_backend
from jaxserve.runner import Kind, Runner
from jaxserve.shapes import Bucket

pytestmark = pytest.mark.tpu_aot

LAYERS, SLOTS, PAGES, MAX_MODEL_LEN = 2, 64, 2048, 131072
DECODE, MIXED = Bucket(0, SLOTS, 0), Bucket(512, SLOTS, 16)


@pytest.fixture(scope="module")
def runner() -> Runner:
    """Of two layers of Llama 3.1 8B: shapes without weights."""
    hf = {
        "architectures": ["LlamaForCausalLM"], "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": LAYERS, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "max_position_embeddings": MAX_MODEL_LEN,
    }  # fmt: skip
    config = resolve(hf)[0]
    backend = resolve_backend("auto", "tpu", "TPU v5e", dtype="bfloat16", head_dim=128, group=4)
    family = ARCHITECTURES[config.architecture]
    graphdef, state = nnx.split(nnx.eval_shape(lambda: family(config, jnp.bfloat16)))
    loaded = LoadedModel(config, graphdef, nnx.to_pure_dict(state))
    # its own pool is on this host, and small
    options = EngineConfig(model="m", kv_cache_memory_bytes=2**22, max_model_len=128, enforce_eager=True)
    return Runner(options, loaded, backend, (DECODE, MIXED), backend.default_page_size, SLOTS)


@pytest.mark.parametrize("size", [DECODE, MIXED], ids=str)
@pytest.mark.parametrize("kind", [Kind.PLAIN, Kind.FORWARD])
def test_a_step_compiles_and_copies_no_pool(runner: Runner, kind: Kind, size: Bucket, compile_for_tpu):
    function, shapes, donated = runner.flat((kind, size), PAGES, MAX_MODEL_LEN)
    compiled = compile_for_tpu("v5e", function, *shapes, donated=tuple(donated))
    text, memory = compiled.as_text(), compiled.memory_analysis()
    kernels = re.findall(r"%(\w+?)(?:\.\d+)? = .*tpu_custom_call", text)
    per_layer = {"kv_write_decode", "ragged_paged_attention_1"}
    if size.prefill_tokens:
        per_layer |= {"kv_write_prefill", "ragged_paged_attention_128"}
    assert sorted(kernels) == sorted(LAYERS * [*per_layer])
    pools = [shapes[i] for i in donated if shapes[i].ndim == 4]
    pool_bytes = sum(pool.size * pool.dtype.itemsize for pool in pools)
    assert len(pools) == 2 * LAYERS
    assert memory.alias_size_in_bytes >= pool_bytes
    assert memory.temp_size_in_bytes < pool_bytes / len(pools), "less than one copy of one pool"
    shape = ",".join(map(str, pools[0].shape))
    assert not re.search(rf"\[{shape}\]\S* (?:copy|copy-start|fusion|transpose)\(", text)


def test_a_draw_compiles(runner: Runner, compile_for_tpu):
    function, shapes, donated = runner.flat((Kind.DRAW, SLOTS), PAGES, MAX_MODEL_LEN)
    compiled = compile_for_tpu("v5e", function, *shapes, donated=tuple(donated))
    state_bytes = sum(shapes[i].size * shapes[i].dtype.itemsize for i in donated)
    assert compiled.memory_analysis().alias_size_in_bytes >= state_bytes

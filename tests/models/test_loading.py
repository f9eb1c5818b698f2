"""Weights from checkpoints and from nothing: places, errors, and programs that never copy a weight."""

import contextlib
import json
import math
import re
import weakref
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.tree_util import Partial

from jaxserve.checkpoint import Checkpoint
from jaxserve.config import EngineConfig
from jaxserve.errors import ConfigError
from jaxserve.models.layers import Operations, matmul
from jaxserve.models.loading import load_model
from jaxserve.models.registry import ARCHITECTURES, resolve
from jaxserve.pallas_kernels.reference import add_norm, gated_product, parts

GOLDENS = Path(__file__).parent.parent / "goldens"
CASES = sorted(path.parent.name for path in GOLDENS.glob("*/config.json"))


class Fake(Checkpoint):
    """A checkpoint in memory: another one's config, and tensors to tamper with."""

    def __init__(self, case: str):
        source = Checkpoint.open(EngineConfig(model=str(GOLDENS / case)))
        self.name, self.config, self.generation_config = "fake", source.config, {}
        self.arrays = {name: read() for name, read in source.tensors()}

    def tensors(self):
        return iter([(name, lambda array=array: array) for name, array in self.arrays.items()])

    def _own_tokenizer(self):
        raise AssertionError("no test loads it")

    def load(self, dtype=jnp.float32, **how):
        return load_model(self, resolve(self.config)[0], dtype, progress=False, **how)


@pytest.mark.parametrize("case", CASES)
def test_every_tensor_is_at_its_place(case):
    fake = Fake(case)
    params = fake.load().params
    c = resolve(fake.config)[0]
    q, kv, F = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim, c.ffn_size
    get = {name: np.asarray(array, np.float32) for name, array in fake.arrays.items()}.__getitem__
    np.testing.assert_array_equal(params["embed"], get("model.embed_tokens.weight"))
    np.testing.assert_array_equal(params["final_norm"], get("model.norm.weight"))
    if not c.tied_embeddings:
        np.testing.assert_array_equal(params["lm_head"], get("lm_head.weight"))
    for i in range(c.num_layers):
        layer, prefix = params["layers"][i], f"model.layers.{i}"
        for name, columns in (("q", slice(0, q)), ("k", slice(q, q + kv)), ("v", slice(q + kv, q + 2 * kv))):
            np.testing.assert_array_equal(layer["qkv"][columns], get(f"{prefix}.self_attn.{name}_proj.weight"))
            if c.qkv_bias:
                np.testing.assert_array_equal(
                    params["qkv_bias"][i][columns], get(f"{prefix}.self_attn.{name}_proj.bias")
                )
        for name, columns in (("gate", slice(0, F)), ("up", slice(F, 2 * F))):
            np.testing.assert_array_equal(layer["gate_up"][columns], get(f"{prefix}.mlp.{name}_proj.weight"))
        np.testing.assert_array_equal(layer["o"], get(f"{prefix}.self_attn.o_proj.weight"))
        np.testing.assert_array_equal(layer["down"], get(f"{prefix}.mlp.down_proj.weight"))
        np.testing.assert_array_equal(params["attn_norm"][i], get(f"{prefix}.input_layernorm.weight"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_weights_are_cast_to_dtype(dtype):
    loaded = Fake("llama3_bias_tied").load(jnp.dtype(dtype))
    assert {str(p.dtype) for p in jax.tree.leaves(loaded.params)} == {dtype}
    assert loaded.nbytes == sum(p.size for p in jax.tree.leaves(loaded.params)) * jnp.dtype(dtype).itemsize


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_the_host_holds_few_tensors_at_a_time(quantization: str | None):
    fake, live, peak = Fake("llama3_bias_tied"), [0], [0]
    config = replace(resolve(fake.config | {"num_hidden_layers": 16})[0], quantization=quantization)
    layer = {name: array for name, array in fake.arrays.items() if ".layers.0." in name}
    for i in range(16):
        fake.arrays |= {name.replace(".0.", f".{i}."): array for name, array in layer.items()}

    def read(array):
        array = array.astype(np.float32)  # to be cast, so that on a CPU no parameter is this very memory
        live[0] += array.nbytes
        peak[0] = max(peak[0], live[0])
        weakref.finalize(array, lambda n=array.nbytes: live.__setitem__(0, live[0] - n))
        return array

    fake.tensors = lambda: ((name, partial(read, array)) for name, array in fake.arrays.items())
    load_model(fake, config, jnp.bfloat16, progress=False)
    sizes = [4 * array.size for array in fake.arrays.values()]
    assert peak[0] <= 4 * max(sizes) < sum(sizes) / 3  # gate waits for up, and one is still on its way


def test_order_in_the_file_does_not_matter():
    fake, reverse = Fake("llama3_bias_tied"), Fake("llama3_bias_tied")
    reverse.arrays = dict(reversed(reverse.arrays.items()))
    jax.tree.map(np.testing.assert_array_equal, fake.load().params, reverse.load().params)


def test_missing_tensors_are_named():
    fake = Fake("qwen3")
    del fake.arrays["model.layers.1.self_attn.k_norm.weight"], fake.arrays["lm_head.weight"]
    with pytest.raises(ConfigError, match=r"fake lacks .*lm_head\.weight") as caught:
        fake.load()
    assert "model.layers.1.self_attn.k_norm.weight" in caught.value.message


def test_a_long_list_of_missing_tensors_is_cut_short():
    fake = Fake("llama")
    fake.arrays = {"model.norm.weight": fake.arrays["model.norm.weight"]}
    with pytest.raises(ConfigError, match=r"and \d+ more") as caught:
        fake.load()
    assert len(caught.value.message) < 400


def test_unexpected_tensors_are_named():
    fake = Fake("llama")
    fake.arrays["model.layers.0.self_attn.q_proj.bias"] = np.zeros(64, np.float32)
    with pytest.raises(ConfigError, match=r"does not use: model\.layers\.0\.self_attn\.q_proj\.bias"):
        fake.load()


def test_names_are_checked_before_anything_is_read():
    fake = Fake("llama")
    names = [*fake.arrays, "extra"]
    fake.tensors = lambda: iter([(name, lambda: pytest.fail("read")) for name in names])
    with pytest.raises(ConfigError, match="extra"):
        fake.load()


def test_a_wrong_shape_is_named_with_both_shapes():
    fake = Fake("llama")
    fake.arrays["model.layers.0.mlp.up_proj.weight"] = np.zeros((64, 32), np.float32)
    with pytest.raises(ConfigError, match=r"mlp\.up_proj\.weight has shape \[64, 32\], the config needs \[64, 64\]"):
        fake.load()


def test_a_repeated_tensor_is_refused():
    fake = Fake("llama")
    pairs = [(n, lambda a=a: a) for n, a in fake.arrays.items()]
    fake.tensors = lambda: iter([*pairs, pairs[0]])
    with pytest.raises(ConfigError, match="more than once"):
        fake.load()


def test_harmless_extras_are_ignored():
    fake = Fake("qwen2_tied")
    fake.arrays["lm_head.weight"] = fake.arrays["model.embed_tokens.weight"]
    fake.arrays["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(8, np.float32)
    assert "lm_head" not in fake.load().params


# ---- dummy weights


@pytest.mark.parametrize("case", CASES)
def test_dummy_weights_have_the_shapes_of_real_ones(case):
    fake = Fake(case)
    config = resolve(fake.config)[0]
    dummy = load_model(None, config, jnp.bfloat16, load_format="dummy", progress=False)
    real = fake.load(jnp.bfloat16)
    shapes = [jax.tree.map(lambda p: (p.shape, p.dtype), m.params) for m in (dummy, real)]
    assert shapes[0] == shapes[1]


def test_dummy_weights_are_random_small_and_reproducible():
    config = resolve(Fake("llama3_bias_tied").config)[0]
    first, again = (load_model(None, config, jnp.float32, load_format="dummy", progress=False).params for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, first, again)
    embed, layers = np.asarray(first["embed"]), first["layers"]
    assert abs(embed.mean()) < 2e-3 and abs(embed.std() - 0.02) < 2e-3
    assert not np.array_equal(layers[0]["qkv"], layers[1]["qkv"])
    assert (np.asarray(first["attn_norm"]) == 1).all() and (np.asarray(first["qkv_bias"]) == 0).all()


def test_a_model_without_checkpoint_needs_dummy():
    with pytest.raises(ConfigError, match="dummy"):
        load_model(None, resolve(Fake("llama").config)[0], jnp.float32, progress=False)


# ---- in a program


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("tokens", [1, 8])
def test_no_weight_is_copied_in_a_step(tokens, tied):
    """x @ w.T with one row copied the whole matrix on every call; so would a badly laid out weight."""
    hf = {"architectures": ["LlamaForCausalLM"], "vocab_size": 512, "hidden_size": 64, "intermediate_size": 96,
          "num_hidden_layers": 2, "num_attention_heads": 4, "tie_word_embeddings": tied}  # fmt: skip
    model = load_model(None, resolve(hf)[0], jnp.float32, load_format="dummy", progress=False)

    def run(params, ids):
        decoder = nnx.merge(model.graphdef, params)
        attend = Partial(lambda qkv, kv_l, rope, **_: (qkv[:, :64], kv_l))
        ops = Operations(attend, Partial(add_norm), Partial(parts), Partial(gated_product))
        hidden, _ = decoder.forward(ids, ids, [None] * 2, ops)
        return decoder.logits(hidden)

    program = jax.jit(run).lower(model.params, jnp.arange(tokens)).compile().as_text()
    assert not re.findall(r"^.* (?:copy|transpose)\(.*$", program, re.MULTILINE)


@pytest.mark.parametrize("parts", [2, 8])
def test_the_parts_of_a_product_add_up_to_it(parts):
    rng = np.random.default_rng(parts)
    x, w = (jnp.asarray(rng.normal(size=s), jnp.bfloat16) for s in ((3, 128), (96, 128)))
    split = matmul(x, w, parts=parts)
    assert split.shape == (parts, 3, 96) and split.dtype == jnp.float32
    np.testing.assert_allclose(split.sum(axis=0), matmul(x, w, out_dtype=jnp.float32), rtol=1e-5, atol=1e-5)


# ---- configs


def config_of(case: str, **changes) -> dict:
    return json.loads((GOLDENS / case / "config.json").read_text()) | changes


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        ("llama", {"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel is not supported: only .*LlamaForCausalLM"),
        ("llama", {"architectures": None}, "none given"),
        ("llama", {"hidden_act": "gelu"}, "'gelu'"),
        ("llama", {"hidden_size": None}, "'hidden_size'"),
        ("llama", {"quantization_config": {"quant_method": "awq"}}, "'awq'"),
        ("llama", {"num_key_value_heads": 3}, "not a multiple"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("llama", {"rope_parameters": {"rope_type": "longrope"}}, "'longrope' is not supported"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic' is not supported"),
        ("llama", {"rope_parameters": None, "rope_scaling": {"type": "mrope"}}, "'mrope' is not supported"),
        ("llama", {"rope_parameters": {"rope_type": "linear"}}, "'factor'"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(case, changes, message):
    with pytest.raises(ConfigError, match=message):
        resolve(config_of(case, **changes))


SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "max_position_embeddings",
)  # fmt: skip
NO_NUMBERS = ["x", "576", [], {}, [1], True, math.nan, math.inf, 10**30, -1]
BAD = {
    **dict.fromkeys(SIZES, [0, 1.5, *NO_NUMBERS]),
    "rms_norm_eps": [bad for bad in NO_NUMBERS if bad != 10**30],
    "rope_theta": [0, *(bad for bad in NO_NUMBERS if bad != 10**30)],
    "sliding_window": [0, 1.5, *NO_NUMBERS],
    "tie_word_embeddings": ["x", 1, []],
    "attention_bias": ["x", 1, []],
    "architectures": [7, "LlamaForCausalLM", [7], {}],
    "rope_scaling": [7, "x", [1], {"rope_type": 7}, {"rope_type": []}],
}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in BAD.items() for value in values])
def test_a_value_that_cannot_be_meant_is_refused_by_its_key(key, value):
    config = config_of("mistral" if key == "sliding_window" else "llama", rope_parameters=None)
    with pytest.raises(ConfigError, match=key.replace("rope_scaling", "rope.(scaling|type)")):
        resolve(config | {key: value})


@pytest.mark.parametrize("value", [None, 0, *NO_NUMBERS])
@pytest.mark.parametrize("case", ["llama", "llama_linear", "llama3_bias_tied", "qwen2_window_yarn", "mistral"])
def test_any_value_of_any_key_resolves_or_is_refused(case, value):
    """Also those of the rope settings. What is not a ConfigError here would be a traceback at the start."""
    config = config_of(case)
    for key in config:
        with contextlib.suppress(ConfigError):
            resolve(config | {key: value})
    for key in (*config["rope_parameters"], "beta_fast", "beta_slow", "attention_factor", "mscale", "truncate"):
        with contextlib.suppress(ConfigError):
            resolved, _ = resolve(config | {"rope_parameters": config["rope_parameters"] | {key: value}})
            assert np.isfinite(resolved.rope_frequencies).all() and math.isfinite(resolved.rope_magnitude)


@pytest.mark.parametrize(
    ("case", "key", "value"),
    [
        ("llama_linear", "factor", 0),
        ("llama_linear", "factor", "2"),
        ("llama3_bias_tied", "low_freq_factor", 4.0),  # as much as the high one
        ("llama3_bias_tied", "original_max_position_embeddings", 0),
        ("qwen2_window_yarn", "beta_fast", -1),
        ("qwen2_window_yarn", "attention_factor", math.nan),
        ("llama", "rope_theta", 1),
    ],
)
def test_bad_rope_settings_are_refused_by_their_key(case, key, value):
    config = config_of(case)
    with pytest.raises(ConfigError, match=key):
        resolve(config | {"rope_parameters": config["rope_parameters"] | {key: value}})


def test_older_and_newer_names_of_rope_settings_mean_the_same():
    new = config_of("llama3_bias_tied")
    rope = new["rope_parameters"]
    old = {k: v for k, v in new.items() if k != "rope_parameters"}
    old |= {"rope_theta": rope["rope_theta"], "rope_scaling": {k: v for k, v in rope.items() if k != "rope_theta"}}
    assert resolve(old) == resolve(new)
    assert resolve(old)[0].rope_frequencies != resolve(config_of("llama"))[0].rope_frequencies


def test_families_fill_in_what_a_config_leaves_out():
    bare = {
        "vocab_size": 10,
        "hidden_size": 64,
        "intermediate_size": 8,
        "num_hidden_layers": 3,
        "num_attention_heads": 32,
    }
    configs = {name: resolve(bare | {"architectures": [name]})[0] for name in ARCHITECTURES}
    assert configs["LlamaForCausalLM"].num_kv_heads == 32
    assert configs["MistralForCausalLM"].num_kv_heads == 8
    assert configs["MistralForCausalLM"].sliding_windows == (4096,) * 3
    assert configs["Qwen3ForCausalLM"].head_dim == 128
    assert configs["Qwen2ForCausalLM"].qkv_bias and not configs["Qwen2ForCausalLM"].o_bias


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({}, (None, 8, 8)),
        ({"use_sliding_window": False}, (None, None, None)),
        ({"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}, (8, None, 8)),
    ],
)
def test_windows_of_qwen(changes, windows):
    config = {k: v for k, v in config_of("qwen2_window_yarn", num_hidden_layers=3).items() if k != "layer_types"}
    assert resolve(config | changes)[0].sliding_windows == windows


def test_kv_bytes_per_token():
    config = resolve(config_of("llama"))[0]
    assert config.kv_bytes_per_token(2) == 2 * 2 * 2 * 16 * 2

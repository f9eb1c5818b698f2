"""GGUF files: the checkpoint that was converted comes back, every quantisation, and what is refused."""

import json
import math
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Q
from gguf.quants import dequantize, quantize

from jaxserve.checkpoint import Checkpoint
from jaxserve.config import EngineConfig
from jaxserve.errors import ConfigError
from jaxserve.gguf_file import GGUFFile, undo_permute
from jaxserve.gguf_tokenizer import tokenizer_from_gguf
from jaxserve.models.registry import resolve
from jaxserve.tokenizer import Tokenizer

GOLDENS = Path(__file__).parent / "goldens"
NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


def gguf_name(hf_name: str) -> str:
    module, kind = hf_name.rsplit(".", 1)
    if module.startswith("model.layers."):
        _, _, i, module = module.split(".", 3)
        return f"blk.{i}.{NAMES[module]}.{kind}"
    return f"{NAMES[module]}.{kind}"


def permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to Llama's q and k."""
    return (
        weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)
    )


def writer_of(path: Path, arch: str, hf: dict) -> gguf.GGUFWriter:
    writer = gguf.GGUFWriter(path, arch)
    writer.add_embedding_length(hf["hidden_size"])
    writer.add_block_count(hf["num_hidden_layers"])
    writer.add_feed_forward_length(hf["intermediate_size"])
    writer.add_context_length(hf["max_position_embeddings"])
    writer.add_head_count(hf["num_attention_heads"])
    writer.add_head_count_kv(hf["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(hf["rms_norm_eps"])
    writer.add_rope_freq_base(hf["rope_parameters"]["rope_theta"])
    if head_dim := hf.get("head_dim"):
        writer.add_key_length(head_dim)
        writer.add_rope_dimension_count(head_dim)
    return writer


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def convert(case: str, path: Path) -> Checkpoint:
    """Writes a golden checkpoint as llama.cpp's converter does; returns the original."""
    original = Checkpoint.open(EngineConfig(model=str(GOLDENS / case)))
    hf, arch = original.config, case[: len("llama")] if case.startswith("llama") else case.split("_")[0]
    writer = writer_of(path, {"mistral": "llama"}.get(arch, arch), hf)
    if rope := (hf["rope_parameters"] if hf["rope_parameters"]["rope_type"] in ("yarn", "linear") else None):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
        if old_len := rope.get("original_max_position_embeddings"):
            writer.add_rope_scaling_orig_ctx_len(old_len)
    if hf.get("sliding_window") and case == "mistral":
        writer.add_sliding_window(hf["sliding_window"])
    if hf["rope_parameters"]["rope_type"] == "llama3":
        scaled = np.array(resolve(hf)[0].rope_frequencies)
        plain = 1.0 / hf["rope_parameters"]["rope_theta"] ** (np.arange(0, 1, 1 / len(scaled)))
        writer.add_tensor("rope_freqs.weight", (plain / scaled).astype(np.float32))
    for name, read in original.tensors():
        array = read().astype(np.float32)
        if arch in ("llama", "mistral") and "q_proj" in name:
            array = permute(array, hf["num_attention_heads"])
        if arch in ("llama", "mistral") and "k_proj" in name:
            array = permute(array, hf["num_key_value_heads"])
        writer.add_tensor(gguf_name(name), np.ascontiguousarray(array))
    finish(writer)
    return original


CONVERTED = ["llama", "llama3_bias_tied", "llama_linear", "mistral", "qwen2_tied", "qwen3", "qwen3_tied"]


@pytest.mark.parametrize("case", CONVERTED)
def test_a_converted_checkpoint_comes_back(tmp_path, case):
    original = convert(case, tmp_path / "m.gguf")
    back = Checkpoint.open(EngineConfig(model=str(tmp_path / "m.gguf")))
    tensors = {name: read() for name, read in back.tensors()}
    wanted = {name: read() for name, read in original.tensors()}
    assert tensors.keys() == wanted.keys()
    for name, array in wanted.items():
        np.testing.assert_array_equal(tensors[name], array.astype(np.float32), err_msg=name)
    ours, theirs = resolve(back.config)[0], resolve(original.config)[0]
    np.testing.assert_allclose(ours.rope_frequencies, theirs.rope_frequencies, rtol=1e-5)
    same = {"rope_frequencies": (), "norm_eps": 0.0}
    assert abs(ours.norm_eps - theirs.norm_eps) < 1e-9
    assert {**vars(ours), **same} == {**vars(theirs), **same}


def test_yarn_settings(tmp_path):
    hf = json.loads((GOLDENS / "qwen2_window_yarn" / "config.json").read_text())
    convert("qwen2_window_yarn", tmp_path / "m.gguf")
    ours, theirs = resolve(GGUFFile(tmp_path / "m.gguf").config)[0], resolve(hf)[0]
    np.testing.assert_allclose(ours.rope_frequencies, theirs.rope_frequencies, rtol=1e-5)
    assert ours.rope_magnitude == pytest.approx(theirs.rope_magnitude) != 1.0


def test_undo_permute_undoes_it():
    weight = np.arange(4 * 8 * 3).reshape(32, 3)
    np.testing.assert_array_equal(undo_permute(permute(weight, 4), 4), weight)
    assert not np.array_equal(permute(weight, 4), weight)
    assert permute(weight, 1)[1, 0] == weight[16, 0]  # GGUF row 1 is the first of the second half


# ---- quantisations

TINY = {"hidden_size": 256, "num_hidden_layers": 1, "intermediate_size": 256, "max_position_embeddings": 8,
        "num_attention_heads": 2, "num_key_value_heads": 2, "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_theta": 1e4}}  # fmt: skip


def one_tensor_file(path: Path, data: np.ndarray, kind: Q) -> GGUFFile:
    writer = writer_of(path, "qwen2", TINY)
    writer.add_tensor("token_embd.weight", data, raw_dtype=kind)
    finish(writer)
    return GGUFFile(path)


# Largest error, relative to the largest value of a block: half a step of the grid, and rounding of the scale;
# the grids of Q4_0 and Q5_0 end one step short of the largest value, on one side.
@pytest.mark.parametrize(
    ("kind", "error"),
    [
        (Q.F32, 0),
        (Q.F16, 1e-3),
        (Q.BF16, 4e-3),
        (Q.Q8_0, 5e-3),
        (Q.Q5_0, 0.065),
        (Q.Q5_1, 0.04),
        (Q.Q4_0, 0.13),
        (Q.Q4_1, 0.07),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_what_was_quantised_comes_back(tmp_path, kind, error):
    values = np.random.default_rng(0).normal(size=(6, 256)).astype(np.float32)
    data = values.astype(np.float16) if kind == Q.F16 else quantize(values, kind)
    file = one_tensor_file(tmp_path / "m.gguf", data, kind)
    [(name, read)] = file.tensors()
    assert name == "model.embed_tokens.weight"
    assert file.config["vocab_size"] == 6
    blocks = np.abs(values).reshape(-1, 32).max(1, keepdims=True)
    assert (np.abs(read().astype(np.float32) - values).reshape(-1, 32) <= error * blocks).all()


@pytest.mark.parametrize("kind", [Q.Q2_K, Q.Q3_K, Q.Q4_K, Q.Q5_K, Q.Q6_K], ids=lambda kind: kind.name)
def test_k_quants_are_read_as_the_gguf_package_reads_them(tmp_path, kind):
    _, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    data = np.random.default_rng(0).integers(0, 60, (6, block_bytes), dtype=np.uint8)  # small: scales stay finite
    [(_, read)] = one_tensor_file(tmp_path / "m.gguf", data, kind).tensors()
    expected = dequantize(data, kind)
    assert read().shape == (6, 256) and np.isfinite(expected).all() and np.ptp(expected) > 0
    np.testing.assert_array_equal(read(), expected)


def test_other_quantisations_are_refused_by_name(tmp_path):
    _, block_bytes = gguf.GGML_QUANT_SIZES[Q.IQ4_XS]
    [(_, read)] = one_tensor_file(tmp_path / "m.gguf", np.zeros((2, block_bytes), np.uint8), Q.IQ4_XS).tensors()
    with pytest.raises(ConfigError, match="token_embd.weight is IQ4_XS, which is not supported: only .*Q6_K"):
        read()


# ---- metadata


def test_metadata_is_read_as_the_gguf_package_reads_it():
    path = GOLDENS / "vocab" / "spm.gguf"
    ours, theirs = GGUFFile(path), gguf.GGUFReader(path)
    assert len(theirs.fields) > 10
    for key, field in theirs.fields.items():
        assert ours.get(key) == field.contents(), key


def test_metadata_of_all_kinds(tmp_path):
    writer = writer_of(tmp_path / "m.gguf", "qwen2", TINY)
    writer.add_array("my.strings", ["", "é", "x" * 300])
    writer.add_array("my.bools", [True, False])
    writer.add_array("my.floats", [1.5, -2.0])
    writer.add_array("my.ints", [1, -2])
    writer.add_array("my.lists", [[1, 2], [3]])
    writer.add_uint64("my.number", 2**40)
    writer.add_tensor("token_embd.weight", np.zeros((2, 256), np.float32))
    finish(writer)
    file, theirs = GGUFFile(tmp_path / "m.gguf"), gguf.GGUFReader(tmp_path / "m.gguf")
    assert file.get("my.strings") == ["", "é", "x" * 300]
    for key in ("my.bools", "my.floats", "my.ints", "my.lists", "my.number"):
        assert file.get(key) == theirs.fields[key].contents()
    assert file.get("my.nothing") is None


def test_sampling_defaults_and_end_tokens(tmp_path):
    writer = writer_of(tmp_path / "m.gguf", "qwen2", TINY)
    writer.add_float32("general.sampling.temp", 0.5)
    writer.add_int32("general.sampling.top_k", 20)
    writer.add_eos_token_id(1)
    writer.add_eot_token_id(0)
    writer.add_tensor("token_embd.weight", np.zeros((2, 256), np.float32))
    finish(writer)
    checkpoint = Checkpoint.open(EngineConfig(model=str(tmp_path / "m.gguf")))
    assert checkpoint.generation_config == {"temperature": 0.5, "top_k": 20, "eos_token_id": [1, 0]}


# ---- what is refused


def test_broken_files_are_config_errors(tmp_path):
    whole = (GOLDENS / "vocab" / "gpt-2.gguf").read_bytes()
    path = tmp_path / "m.gguf"
    for broken in (
        b"",
        b"GGUF",
        b"hello world, this is text",
        b"\0" * 64,
        whole[:20],
        whole[:200],
        whole[:9000],
        whole[:-8],
    ):
        path.write_bytes(broken)
        reason = "it may be cut off .* or damaged" if broken[:4] == b"GGUF" else "it does not begin like one"
        with pytest.raises(ConfigError, match=f"cannot be read as a GGUF file: {reason}"):
            GGUFFile(path)


@pytest.mark.parametrize(
    ("arch", "extra", "message"),
    [
        ("gemma", {}, "'gemma' is not supported: only llama"),
        ("llama", {"llama.expert_count": 8}, "mixture-of-experts"),
        ("llama", {"split.count": 3}, "one of 3 parts"),
        ("llama", {"llama.rope.dimension_count": 64}, "part of the head"),
    ],
)
def test_files_of_unsupported_kinds(tmp_path, arch, extra, message):
    writer = writer_of(tmp_path / "m.gguf", arch, TINY)
    for key, value in extra.items():
        writer.add_uint32(key, value)
    writer.add_tensor("token_embd.weight", np.zeros((2, 256), np.float32))
    finish(writer)
    with pytest.raises(ConfigError, match=message):
        _ = GGUFFile(tmp_path / "m.gguf").config


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("llama.embedding_length", "576"), ("llama.embedding_length", 0), ("llama.block_count", True),
        ("llama.attention.head_count", 0), ("llama.attention.head_count", "x"), ("llama.attention.head_count_kv", 0),
        ("llama.attention.key_length", 0), ("llama.context_length", 0), ("llama.rope.freq_base", 0.0),
        ("llama.attention.layer_norm_rms_epsilon", math.nan), ("llama.expert_count", "x"), ("split.count", "x"),
        ("llama.attention.sliding_window", "x"), ("llama.rope.dimension_count", "x"),
        ("tokenizer.ggml.eos_token_id", "x"), ("tokenizer.ggml.eot_token_id", -1),
    ],
)  # fmt: skip
def test_metadata_that_cannot_be_meant_is_refused_by_its_key(tmp_path, key, value):
    writer = writer_of(tmp_path / "m.gguf", "llama", TINY)
    writer.kv_data[0].pop(key, None)
    kinds = {bool: writer.add_bool, int: writer.add_int32, float: writer.add_float32, str: writer.add_string}
    kinds[type(value)](key, value)
    writer.add_tensor("token_embd.weight", np.zeros((2, 256), np.float32))
    finish(writer)
    with pytest.raises(ConfigError, match=key):
        file = GGUFFile(tmp_path / "m.gguf")
        _ = file.config, file.generation_config


def tokenizer_of(path: Path, **metadata) -> Tokenizer:
    """The tokenizer of a file whose metadata is right but for what is given."""
    writer = writer_of(path, "llama", TINY)
    right = {"model": "gpt2", "pre": "gpt-2", "tokens": ["a", "b", "ab"], "merges": ["a b"], "bos_token_id": 0}
    for name, value in (right | metadata).items():
        add = {int: writer.add_int32, str: writer.add_string, list: writer.add_array, bytes: writer.add_string}
        add[type(value)](f"tokenizer.ggml.{name}", value)
    writer.add_tensor("token_embd.weight", np.zeros((2, 256), np.float32))
    finish(writer)
    return tokenizer_from_gguf(GGUFFile(path))


@pytest.mark.parametrize(
    "metadata",
    [
        {"merges": ["a c"]}, {"merges": ["ab"]}, {"merges": [1, 2]}, {"merges": 7}, {"tokens": [1, 2, 3]},
        {"tokens": "abc"}, {"tokens": 7}, {"bos_token_id": 3}, {"bos_token_id": "a"}, {"token_type": [1, 1]},
        {"token_type": "abc"}, {"model": "llama", "merges": [], "scores": [1.0]}, {"model": "llama", "merges": []},
        {"pre": 7}, {"model": 7}, {"model": "llama", "unknown_token_id": 9},
    ],
)  # fmt: skip
def test_a_tokenizer_that_cannot_be_made_is_a_config_error(tmp_path, metadata):
    with pytest.raises(ConfigError, match="tokenizer"):
        tokenizer_of(tmp_path / "m.gguf", **metadata)


def test_text_that_is_not_utf8_is_a_config_error(tmp_path):
    assert tokenizer_of(tmp_path / "m.gguf").vocab_size == 3
    whole = (tmp_path / "m.gguf").read_bytes()
    for text in (b"a b", b"gpt-2"):  # in a list, and alone
        (tmp_path / "n.gguf").write_bytes(whole.replace(text, b"\xff" * len(text)))
        with pytest.raises(ConfigError, match="tokenizer.ggml.* cannot be read"):
            tokenizer_from_gguf(GGUFFile(tmp_path / "n.gguf"))


def test_unknown_tensors_keep_their_names(tmp_path):
    writer = writer_of(tmp_path / "m.gguf", "qwen2", TINY)
    writer.add_tensor("token_embd.weight", np.zeros((2, 256), np.float32))
    writer.add_tensor("blk.0.something.weight", np.zeros(4, np.float32))
    finish(writer)
    assert [name for name, _ in GGUFFile(tmp_path / "m.gguf").tensors()][1] == "blk.0.something.weight"


@pytest.mark.parametrize("rows", [1, 3, 64, 100])
def test_a_tensor_whose_rows_are_not_those_of_the_heads(tmp_path, rows):
    """Whatever its shape, it is read or refused by name; the loader compares shapes after that."""
    hf = json.loads((GOLDENS / "llama" / "config.json").read_text())
    writer = writer_of(tmp_path / "m.gguf", "llama", hf)
    writer.add_tensor("token_embd.weight", np.zeros((4, 4), np.float32))
    writer.add_tensor("blk.0.attn_q.weight", np.zeros((rows, 4), np.float32))
    finish(writer)
    tensors = dict(GGUFFile(tmp_path / "m.gguf").tensors())
    read = tensors["model.layers.0.self_attn.q_proj.weight"]
    if rows % (2 * hf["num_attention_heads"]):
        with pytest.raises(ConfigError, match=r"m\.gguf: blk\.0\.attn_q\.weight cannot be read"):
            read()
    else:
        assert read().shape == (rows, 4)

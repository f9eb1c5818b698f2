"""A .gguf file as a Hugging Face checkpoint: its config.json, and its tensors under HF's names. Never imports jax.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The `gguf` package reads it and dequantises;
what is undone here is what the converter did to the model (names, the row order of Llama's q and k).
"""

import struct
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
from gguf.quants import dequantize

from jaxserve.errors import ConfigError
from jaxserve.settings import real, token_ids, whole

# GGUF architecture -> HF class. Mistral is "llama" in GGUF.
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}

MAGIC = b"GGUF"
_AS_STORED = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}
_DEQUANTISED = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")

_MODULES = ("model.embed_tokens", "model.norm", "lm_head")
_LAYER_MODULES = (
    "input_layernorm", "post_attention_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj",
    "self_attn.o_proj", "self_attn.q_norm", "self_attn.k_norm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
)  # fmt: skip


class GGUFFile:
    """Metadata and tensors of one file. Raises ConfigError if it is not a GGUF file, or of a kind not supported."""

    def __init__(self, path: Path):
        self.path = path
        try:
            self._reader = _Reader(path)
        except (OSError, ValueError, IndexError, KeyError, OverflowError, struct.error) as error:
            raise ConfigError(f"{path} {_why_unreadable(path, error)}") from None
        self._tensors = {t.name: t for t in self._reader.tensors}
        self.architecture = str(self.get("general.architecture", ""))
        if self.architecture not in ARCHITECTURES:
            wrong, known = f"GGUF architecture {self.architecture!r}", ", ".join(ARCHITECTURES)
            raise ConfigError(f"{path.name}: {wrong} is not supported: only {known} are")
        if self._whole("expert_count", 0, ge=0):
            raise ConfigError(f"{path.name}: mixture-of-experts models are not supported in GGUF")
        if (parts := whole({"split.count": self.get("split.count")}, "split.count", 0, ge=0, file=path.name)) > 1:
            raise ConfigError(f"{path.name} is one of {parts} parts: merge them with gguf-split --merge")

    def get(self, key: str, default: Any = None) -> Any:
        """One metadata value, as plain Python."""
        field = self._reader.fields.get(key)
        if field is None:
            return default
        try:
            if field.types[:2] == [gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.STRING]:
                return _strings(field.parts[-1].tobytes())
            return field.contents()
        except (ValueError, IndexError, struct.error) as error:
            raise ConfigError(f"{self.path.name}: {key} cannot be read: {error}") from None

    def _own(self, key: str, default: Any = None) -> Any:
        """A metadata value under the architecture's prefix."""
        return self.get(f"{self.architecture}.{key}", default)

    def _whole(self, key: str, default: int | None = None, *, ge: int = 1) -> int:
        name = f"{self.architecture}.{key}"
        return whole({name: self.get(name)}, name, default, ge=ge, file=self.path.name)

    def _real(self, key: str, default: float | None = None, *, ge: float | None = None) -> float:
        name = f"{self.architecture}.{key}"
        return real({name: self.get(name)}, name, default, ge=ge, file=self.path.name)

    @cached_property
    def config(self) -> dict[str, Any]:
        """The metadata in the shape of HF's config.json."""
        if isinstance(self._own("attention.head_count"), list):
            raise ConfigError(f"{self.path.name}: a head count per layer is not supported")
        heads, hidden = self._whole("attention.head_count"), self._whole("embedding_length")
        head_dim = self._whole("attention.key_length", hidden // heads)
        if self._whole("rope.dimension_count", head_dim) != head_dim:
            raise ConfigError(f"{self.path.name}: rope over a part of the head is not supported")
        if not self._tensors:
            self.check_weights()
        if "token_embd.weight" not in self._tensors:
            raise ConfigError(f"{self.path.name} has no tensor token_embd.weight")
        window = self._own("attention.sliding_window") and self._whole("attention.sliding_window")
        name = ARCHITECTURES[self.architecture]
        return {
            "architectures": ["MistralForCausalLM" if name == "LlamaForCausalLM" and window else name],
            "vocab_size": int(self._tensors["token_embd.weight"].shape[1]),
            "hidden_size": hidden,
            "intermediate_size": self._whole("feed_forward_length"),
            "num_hidden_layers": self._whole("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": self._whole("attention.head_count_kv", heads),
            "head_dim": head_dim,
            "max_position_embeddings": self._whole("context_length"),
            "rms_norm_eps": self._real("attention.layer_norm_rms_epsilon", ge=0),
            "rope_theta": self._real("rope.freq_base", 10000.0),
            "rope_scaling": self._rope_scaling(),
            "sliding_window": window,
            "use_sliding_window": window is not None,
            "max_window_layers": 0,
            "attention_bias": "blk.0.attn_q.bias" in self._tensors,
            "mlp_bias": "blk.0.ffn_gate.bias" in self._tensors,
            "tie_word_embeddings": "output.weight" not in self._tensors,
            "bos_token_id": self.get("tokenizer.ggml.bos_token_id"),
            "eos_token_id": self.get("tokenizer.ggml.eos_token_id"),
        }

    def _rope_scaling(self) -> dict[str, Any] | None:
        if (factors := self._tensors.get("rope_freqs.weight")) is not None:  # Llama 3: one divisor per frequency
            return {"rope_type": "factors", "factors": self._array(factors).tolist()}
        kind = self._own("rope.scaling.type", "none")
        factor = self._own("rope.scaling.factor") or self._own("rope.scale_linear")
        if kind == "none" and factor in (None, 0.0, 1.0):
            return None
        scaling = {
            "rope_type": "linear" if kind == "none" else kind,
            "factor": factor,
            "original_max_position_embeddings": self._own("rope.scaling.original_context_length"),
            "beta_fast": self._own("rope.scaling.yarn_beta_fast"),
            "beta_slow": self._own("rope.scaling.yarn_beta_slow"),
        }
        return {k: v for k, v in scaling.items() if v is not None}

    @property
    def generation_config(self) -> dict[str, Any]:
        """Sampling defaults that the file recommends, and its end tokens, in the shape of generation_config.json."""
        names = {"temperature": "temp", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}
        values = {hf: self.get(f"general.sampling.{name}") for hf, name in names.items()}
        ends = {key: self.get(key) for name in ("eos", "eot", "eom") if (key := f"tokenizer.ggml.{name}_token_id")}
        ids = [i for key in ends for i in token_ids(ends, key, file=self.path.name)]
        values["eos_token_id"] = list(dict.fromkeys(ids)) or None
        return {k: v for k, v in values.items() if v is not None}

    def check_weights(self) -> None:
        """Raises ConfigError for a file of a vocabulary alone: without a single layer."""
        if not any(name.startswith("blk.") for name in self._tensors):
            raise ConfigError(
                f"{self.path} holds no weights: a tokenizer is all that is in it, which --tokenizer takes",
                param="model",
            )

    def tensors(self) -> Iterator[tuple[str, Callable[[], np.ndarray]]]:
        """(HF name, read) of every tensor, in file order; `read()` dequantises. Unknown names stay as they are."""
        names = self._hf_names()
        for name, tensor in self._tensors.items():
            if name == "rope_freqs.weight":  # part of the config
                continue
            base, _, kind = name.rpartition(".")
            hf_name = f"{names[base]}.{kind}" if base in names else name
            yield hf_name, lambda hf_name=hf_name, tensor=tensor: self._read(hf_name, tensor)

    def _hf_names(self) -> dict[str, str]:
        """GGUF name -> HF name, both without .weight or .bias."""
        layers = self.config["num_hidden_layers"]
        arch = next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == self.architecture)
        to_gguf = gguf.get_tensor_name_map(arch, layers)
        modules = [*_MODULES, *(f"model.layers.{i}.{m}" for i in range(layers) for m in _LAYER_MODULES)]
        return {name: module for module in modules if (name := to_gguf.get_name(module))}

    def _read(self, hf_name: str, tensor: gguf.ReaderTensor) -> np.ndarray:
        try:
            return self._in_hf_order(hf_name, self._array(tensor))
        except ConfigError:
            raise
        except ValueError as error:
            raise ConfigError(f"{self.path.name}: {tensor.name} cannot be read: {error}") from None

    def _in_hf_order(self, hf_name: str, array: np.ndarray) -> np.ndarray:
        if self.architecture == "llama" and ".self_attn.q_proj." in hf_name:
            return undo_permute(array, self.config["num_attention_heads"])
        if self.architecture == "llama" and ".self_attn.k_proj." in hf_name:
            return undo_permute(array, self.config["num_key_value_heads"])
        return array

    def _array(self, tensor: gguf.ReaderTensor) -> np.ndarray:
        """The tensor as float32, float16 or bfloat16, in the order of axes that HF has."""
        kind = tensor.tensor_type.name
        shape = tuple(int(n) for n in reversed(tensor.shape))
        if kind in _AS_STORED:
            # A copy: jax may take host memory as it is, and a model must not hang on a file that can be overwritten.
            return np.array(tensor.data).view(_AS_STORED[kind]).reshape(shape)
        if kind not in _DEQUANTISED:
            known = ", ".join((*_AS_STORED, *_DEQUANTISED))
            raise ConfigError(f"{self.path.name}: {tensor.name} is {kind}, which is not supported: only {known} are")
        return dequantize(tensor.data, tensor.tensor_type).reshape(shape)


def _why_unreadable(path: Path, error: Exception) -> str:
    """Says of a file that the reader gave up on what a user can do about it, and what the reader said."""
    if isinstance(error, OSError) and error.strerror:
        return f"cannot be read: {error.strerror}"
    with path.open("rb") as file:
        begins_well = file.read(len(MAGIC)) == MAGIC
    if not begins_well:
        return f"cannot be read as a GGUF file: it does not begin like one ({error})"
    size_mb = path.stat().st_size / 1e6
    return f"cannot be read as a GGUF file: it may be cut off ({size_mb:.1f} MB are there) or damaged ({error})"


def undo_permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of Llama's q or k from GGUF's order (pairs side by side) to HF's (halves), within each head.

    weight: [heads * H, ...].  GGUF row 2i + j of a head is HF row i + j * H/2.
    """
    halves = weight.reshape(heads, -1, 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


class _Reader(gguf.GGUFReader):
    """The package's reader, with each array of metadata read as one part: 128k tokens take 0.1 s, not 10 s."""

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, list, list[int], list]:
        if raw_type != gguf.GGUFValueType.ARRAY or self.byte_order != "I":
            return super()._get_field_parts(orig_offs, raw_type)
        raw_item, count = self._get(orig_offs, np.uint32), self._get(orig_offs + 4, np.uint64)
        item, start = gguf.GGUFValueType(int(raw_item[0])), orig_offs + 12
        if item == gguf.GGUFValueType.STRING:
            part = self.data[start : _end_of_strings(memoryview(self.data), start, int(count[0]))]
        elif item in self.gguf_scalar_to_np:
            part = self._get(start, self.gguf_scalar_to_np[item], int(count[0]))
        else:
            return super()._get_field_parts(orig_offs, raw_type)
        return 12 + int(part.nbytes), [raw_item, count, part], [2], [gguf.GGUFValueType.ARRAY, item]


def _end_of_strings(data: memoryview, offset: int, count: int) -> int:
    """Offset behind `count` strings, each a length of 8 bytes and then its text."""
    length_at = struct.Struct("<Q").unpack_from
    for _ in range(count):
        offset += 8 + length_at(data, offset)[0]
    if offset > len(data):
        raise ValueError("a text is longer than the file")
    return offset


def _strings(data: bytes) -> list[str]:
    """The texts in a whole number of strings."""
    length_at, offset, texts = struct.Struct("<Q").unpack_from, 0, []
    while offset < len(data):
        end = offset + 8 + length_at(data, offset)[0]
        texts.append(data[offset + 8 : end].decode())
        offset = end
    return texts

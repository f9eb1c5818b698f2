"""The decoder of all families, written once: embedding, attention and gated MLP with pre-norm, and the head.

Weights are stored [out, in], as checkpoints have them: nothing is transposed on the way, and XLA's CPU matmul is faster
so. q/k/v are one matrix and gate/up another; norms and biases are stacked over layers into one array each: a step has
few arguments, because each costs dispatch time. Matrices may be quantized (quantization.py): then there are scales of
their rows, stacked likewise. Embeddings are not, nor is a head that is one.
Layers are a Python loop, unrolled under jit: a scan would slice (copy) stacked weights and KV on every step. The layer
itself is one jitted function, so that it is traced once per step and not L times.
Norms, rope and logits are float32; matmuls accumulate in float32.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, Num

from jaxserve.models.base import ModelConfig, Piece
from jaxserve.models.quantization import FORMATS, format_of, quantize
from jaxserve.sharding import add_up, gather_columns, look_up


@runtime_checkable
class Attend(Protocol):
    """From the merged projection to the output of attention; this step's k and v are written into the layer's pages.

    A jax.tree_util.Partial, given by the step: `rope_and_write`, then `attention`, of its backend.
    """

    def __call__(
        self,
        qkv: Float[Array, "T qkv"],
        kv_l: Any,
        rope: tuple[Array, Array],
        *,
        num_heads: int,
        bias: Array | None,
        q_norm: Array | None,
        k_norm: Array | None,
        eps: float,
        scale: float,
        sliding_window: int | None,
        softcap: float | None,
        sinks: Array | None,
    ) -> tuple[Float[Array, "T N H"], Any]: ...


@runtime_checkable
class AddNorm(Protocol):
    """The sum of the residual stream and what a block adds to it (None: nothing), and its RMSNorm (arXiv:1910.07467).
    What it adds may be parts of a product, [n, T, D].

    A jax.tree_util.Partial, given by the step: that of its backend.
    """

    def __call__(
        self, x: Float[Array, "T D"], delta: Float[Array, "*n T D"] | None, weight: Float[Array, " D"], eps: float
    ) -> tuple[Float[Array, "T D"], Float[Array, "T D"]]: ...


class Operations(NamedTuple):
    """What a backend does for a layer, besides most products, and how it wants those that its add_norm takes."""

    attend: Attend
    add_norm: AddNorm
    parts: Callable[[int, int, int], int]  # (T, out, in) -> n; a jax.tree_util.Partial, too
    gated_product: Callable[[Array, Array], Array]  # (x [T, D], w [2F, D]) -> [T, F]; likewise


def matmul(
    x: Float[Array, "T in"], w: Num[Array, "out in"], scale: Float[Array, " out"] | None = None, *,
    out_dtype: Any = None, parts: int = 1,
) -> Float[Array, "*n T out"]:  # fmt: skip
    """x @ w.T; with float32 weights the product is float32 on every device, not TF32.

    With the scales of a quantized w: x @ (w * scale[:, None]).T, of x that is quantized as w is.
    More than one of `parts`: sums over so many parts of `in`, float32, that are still to be added up.
    All backends accumulate in float32 whatever they return; asking for float32 and casting would write it out.
    Not written as `x @ w.T`: XLA's CPU backend then copies the matrix element by element on every call with one row.
    """
    if scale is not None:
        assert parts == 1, "a quantized product has no parts"
        return _quantized_matmul(x, w, scale, out_dtype or x.dtype)
    precision = jax.lax.Precision.HIGHEST if w.dtype == jnp.float32 else None
    contract, dtype = (((1,), (1,)), ((), ())), out_dtype or x.dtype
    if parts > 1:
        x, w = (a.reshape(a.shape[0], parts, -1) for a in (x, w))
        contract, dtype = (((2,), (2,)), ((1,), (1,))), jnp.float32
    return jax.lax.dot_general(x, w, contract, precision=precision, preferred_element_type=dtype)


def _quantized_matmul(
    x: Float[Array, "T in"], w: Num[Array, "out in"], scale: Float[Array, " out"], out_dtype: Any
) -> Float[Array, "T out"]:
    format = format_of(w.dtype)
    assert format is not None, "what has scales is quantized"
    numbers, row_scale = quantize(x, format)
    sums = jax.lax.dot_general(numbers, w, (((1,), (1,)), ((), ())), preferred_element_type=format.sum_dtype)
    return (sums.astype(jnp.float32) * row_scale[:, None] * scale).astype(out_dtype)


def rope_tables(
    config: ModelConfig, positions: Int[Array, " T"]
) -> tuple[Float[Array, "T half_H"], Float[Array, "T half_H"]]:
    """cos and sin of every position (arXiv:2104.09864), float32, once per step for all layers."""
    angles = positions[:, None].astype(jnp.float32) * np.asarray(config.rope_frequencies, np.float32)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    # Without the barrier XLA computes them again in every layer, and compiles that code as often.
    return jax.lax.optimization_barrier((cos * config.rope_magnitude, sin * config.rope_magnitude))


class DecoderLayer(nnx.Module):
    """The four matrices of one layer; its norms and biases are rows of the decoder's stacks."""

    def __init__(self, config: ModelConfig, dtype: Any):
        D, F, N, H = config.hidden_size, config.ffn_size, config.num_heads, config.head_dim
        self.qkv = nnx.Param(jnp.zeros((config.qkv_size, D), dtype))
        self.o = nnx.Param(jnp.zeros((D, N * H), dtype))
        self.gate_up = nnx.Param(jnp.zeros((2 * F, D), dtype))
        self.down = nnx.Param(jnp.zeros((D, F), dtype))


class Decoder(nnx.Module):
    """Decoder-only transformer. A family subclasses it: its `architectures`, `config_from_hf`, and what differs."""

    architectures: ClassVar[tuple[str, ...]] = ()

    def __init__(self, config: ModelConfig, dtype: Any):
        V, D, F, L, H = config.vocab_rows, config.hidden_size, config.ffn_size, config.num_layers, config.head_dim
        self.config = config
        matrix_dtype = FORMATS[config.quantization].dtype if config.quantization else dtype
        self.embed = nnx.Param(jnp.zeros((V, D), dtype))
        self.layers = nnx.List([DecoderLayer(config, matrix_dtype) for _ in range(L)])
        self.attn_norm = nnx.Param(jnp.ones((L, D), dtype))
        self.mlp_norm = nnx.Param(jnp.ones((L, D), dtype))
        self.final_norm = nnx.Param(jnp.ones((D,), dtype))
        if config.qk_norm:
            self.q_norm = nnx.Param(jnp.ones((L, H), dtype))
            self.k_norm = nnx.Param(jnp.ones((L, H), dtype))
        if config.qkv_bias:
            self.qkv_bias = nnx.Param(jnp.zeros((L, config.qkv_size), dtype))
        if config.o_bias:
            self.o_bias = nnx.Param(jnp.zeros((L, D), dtype))
        if config.mlp_bias:
            self.gate_up_bias = nnx.Param(jnp.zeros((L, 2 * F), dtype))
            self.down_bias = nnx.Param(jnp.zeros((L, D), dtype))
        if not config.tied_embeddings:
            self.lm_head = nnx.Param(jnp.zeros((V, D), matrix_dtype))
        if config.quantization:
            for name, rows in (("qkv", config.qkv_size), ("o", D), ("gate_up", 2 * F), ("down", D)):
                setattr(self, f"{name}_scale", nnx.Param(jnp.ones((L, rows), jnp.float32)))
            if not config.tied_embeddings:
                self.lm_head_scale = nnx.Param(jnp.ones((V,), jnp.float32))

    @classmethod
    def config_from_hf(cls, hf: Mapping[str, Any]) -> ModelConfig:
        raise NotImplementedError(f"{cls.__name__} must say how it reads config.json")

    @classmethod
    def pieces(cls, config: ModelConfig) -> dict[str, Piece]:
        """Every tensor that the checkpoint must hold, and its place. These are the names of Llama and its kin."""
        V, D = config.vocab_rows, config.hidden_size
        named = {
            "model.embed_tokens.weight": Piece("embed", (V, D)),
            "model.norm.weight": Piece("final_norm", (D,)),
        }
        if not config.tied_embeddings:
            named["lm_head.weight"] = Piece("lm_head", (V, D))
        for i in range(config.num_layers):
            named |= {f"model.layers.{i}.{name}": piece for name, piece in cls.layer_pieces(config, i).items()}
        return named

    @classmethod
    def layer_pieces(cls, config: ModelConfig, i: int) -> dict[str, Piece]:
        D, F, H = config.hidden_size, config.ffn_size, config.head_dim
        q, kv = config.num_heads * H, config.num_kv_heads * H
        named = {
            "input_layernorm.weight": Piece("attn_norm", (D,), layer=i),
            "post_attention_layernorm.weight": Piece("mlp_norm", (D,), layer=i),
            "self_attn.o_proj.weight": Piece(f"layers.{i}.o", (D, q)),
            "mlp.down_proj.weight": Piece(f"layers.{i}.down", (D, F)),
        }
        for part, (name, size) in enumerate((("q", q), ("k", kv), ("v", kv))):
            named[f"self_attn.{name}_proj.weight"] = Piece(f"layers.{i}.qkv", (size, D), part)
            if config.qkv_bias:
                named[f"self_attn.{name}_proj.bias"] = Piece("qkv_bias", (size,), part, layer=i)
        for part, name in enumerate(("gate", "up")):
            named[f"mlp.{name}_proj.weight"] = Piece(f"layers.{i}.gate_up", (F, D), part)
            if config.mlp_bias:
                named[f"mlp.{name}_proj.bias"] = Piece("gate_up_bias", (F,), part, layer=i)
        if config.qk_norm:
            named["self_attn.q_norm.weight"] = Piece("q_norm", (H,), layer=i)
            named["self_attn.k_norm.weight"] = Piece("k_norm", (H,), layer=i)
        if config.o_bias:
            named["self_attn.o_proj.bias"] = Piece("o_bias", (D,), layer=i)
        if config.mlp_bias:
            named["mlp.down_proj.bias"] = Piece("down_bias", (D,), layer=i)
        return named

    def forward(
        self,
        tokens: Int[Array, " T"],
        positions: Int[Array, " T"],
        kv: list[Any],
        ops: Operations,
        wanted: Int[Array, " S"] | None = None,
    ) -> tuple[Float[Array, "T_or_S D"], list[Any]]:
        """Hidden states after the last norm, and the layers' KV with this step written in.

        wanted: the tokens whose hidden states are needed. Of others the last layer only writes K and V.
        """
        config, rope, last = self.config, rope_tables(self.config, positions), self.config.num_layers - 1
        x, kv = look_up(self.embed[...], tokens, config.shards), list(kv)
        x, h = ops.add_norm(x, None, self.attn_norm[0], config.norm_eps)
        for i, window in enumerate(config.sliding_windows):
            next_norm = self.final_norm[...] if i == last else self.attn_norm[i + 1]
            w, rows = self._layer_weights(i) | {"next_norm": next_norm}, wanted if i == last else None
            x, h, kv[i] = decoder_layer(config, window, w, x, h, rope, kv[i], ops, rows)
        return h, kv

    def logits(self, hidden: Float[Array, "S D"]) -> Float[Array, "S V"]:
        """float32 scores of every vocabulary entry."""
        return gather_columns(self.own_logits(hidden), self.config.shards, self.config.vocab_size)

    def own_logits(self, hidden: Float[Array, "S D"]) -> Float[Array, "S rows"]:
        """float32 scores of the rows of the vocabulary that this device has, any past its end included."""
        if self.config.tied_embeddings:
            return matmul(hidden, self.embed[...], out_dtype=jnp.float32)
        scale = self.lm_head_scale[...] if self.config.quantization else None
        return matmul(hidden, self.lm_head[...], scale, out_dtype=jnp.float32)

    def _layer_weights(self, i: int) -> dict[str, Array]:
        """One layer's matrices, and its rows of the stacks."""
        matrices = {name: getattr(self.layers[i], name)[...] for name in ("qkv", "o", "gate_up", "down")}
        return matrices | {name: getattr(self, name)[i] for name in _STACKED if hasattr(self, name)}


# sinks [L, N]: see `reference.attention`
_STACKED = (
    "mlp_norm", "q_norm", "k_norm", "qkv_bias", "sinks", "o_bias", "gate_up_bias", "down_bias",
    "qkv_scale", "o_scale", "gate_up_scale", "down_scale",
)  # fmt: skip


@partial(jax.jit, static_argnums=(0, 1))
def decoder_layer(
    config: ModelConfig, window: int | None, w: dict[str, Array], x: Float[Array, "T D"], h: Float[Array, "T D"],
    rope: tuple[Array, Array], kv_l: Any, ops: Operations, rows: Int[Array, " S"] | None,
) -> tuple[Float[Array, "T_or_S D"], Float[Array, "T_or_S D"], Any]:  # fmt: skip
    """Attention and MLP with pre-norm and residuals, of these rows alone (None: of all).

    x is the residual stream and h its norm, both before and, for the next layer, after; kv_l comes back with this step
    written in.
    """
    out, kv_l = attention(config, window, w, h, rope, kv_l, ops, rows)
    x, h = ops.add_norm(x if rows is None else x[rows], out, w["mlp_norm"], config.norm_eps)
    x, h = ops.add_norm(x, gated_mlp(config, w, h, ops), w["next_norm"], config.norm_eps)
    return x, h, kv_l


def attention(
    config: ModelConfig, window: int | None, w: dict[str, Array], x: Float[Array, "T D"], rope: tuple[Array, Array],
    kv_l: Any, ops: Operations, rows: Int[Array, " S"] | None,
) -> tuple[Float[Array, "*n T_or_S D"], Any]:  # fmt: skip
    """Grouped-query attention over the pages of each row."""
    out, kv_l = ops.attend(
        matmul(x, w["qkv"], w.get("qkv_scale")), kv_l, rope, num_heads=config.num_heads, bias=w.get("qkv_bias"),
        q_norm=w.get("q_norm"), k_norm=w.get("k_norm"), eps=config.norm_eps, scale=config.attention_scale,
        sliding_window=window, softcap=None, sinks=w.get("sinks"),
    )  # fmt: skip
    out = out.reshape(x.shape[0], -1)
    return block_output(config, w, "o", out if rows is None else out[rows], ops), kv_l


def gated_mlp(
    config: ModelConfig, w: dict[str, Array], x: Float[Array, "T D"], ops: Operations
) -> Float[Array, "*n T D"]:
    """SwiGLU (arXiv:2002.05202)."""
    bias, scale = w.get("gate_up_bias"), w.get("gate_up_scale")
    if bias is None and scale is None:
        return block_output(config, w, "down", ops.gated_product(x, w["gate_up"]), ops)
    both = matmul(x, w["gate_up"], scale)
    gate, up = jnp.split(both if bias is None else both + bias, 2, axis=-1)
    return block_output(config, w, "down", jax.nn.silu(gate) * up, ops)


def block_output(
    config: ModelConfig, w: dict[str, Array], name: str, x: Float[Array, "T in"], ops: Operations
) -> Float[Array, "*n T D"]:
    """What a block adds to the residual stream: its last product, in parts if `ops.add_norm` takes them best so."""
    matrix, bias, scale = w[name], w.get(f"{name}_bias"), w.get(f"{name}_scale")
    in_parts = bias is None and scale is None and config.shards == 1
    parts = ops.parts(x.shape[0], *matrix.shape) if in_parts else 1
    out = add_up(matmul(x, matrix, scale, parts=parts), config.shards)
    return out if bias is None else out + bias

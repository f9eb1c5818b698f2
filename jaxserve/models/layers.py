"""The decoder of all families, written once: embedding, attention and gated MLP with pre-norm, and the head.

Weights are stored [in, out], so that a layer is `x @ W`. q/k/v are one matrix and gate/up another; norms and biases
are stacked over layers into one array each: a step has few arguments, because each costs dispatch time.
Layers are a Python loop, unrolled under jit: a scan would slice (copy) stacked weights and KV on every step.
Norms, rope and logits are float32; matmuls accumulate in float32.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxserve.models.base import ModelConfig, Piece


class Attend(Protocol):
    """Writes k and v of this step into the layer's pages, then attends. Given by the step."""

    def __call__(
        self,
        layer: int,
        q: Float[Array, "T N H"],
        k: Float[Array, "T K H"],
        v: Float[Array, "T K H"],
        kv_l: Any,
        *,
        scale: float,
        sliding_window: int | None,
        softcap: float | None,
    ) -> tuple[Float[Array, "T N H"], Any]: ...


def matmul(
    x: Float[Array, "T in"], w: Float[Array, "in out"], *, out_dtype: Any = None, out_in: bool = False
) -> Float[Array, "T out"]:
    """x @ w, accumulated in float32; `out_in` takes w as [out, in].

    A w.T instead makes XLA's CPU backend copy the matrix element by element on every call with one row: 6x slower.
    With float32 weights the product is float32 on every device, not TF32.
    """
    precision = jax.lax.Precision.HIGHEST if w.dtype == jnp.float32 else None
    contract = (((1,), (1 if out_in else 0,)), ((), ()))
    out = jax.lax.dot_general(x, w, contract, precision=precision, preferred_element_type=jnp.float32)
    return out.astype(out_dtype or x.dtype)


def rms_norm(x: Float[Array, "... D"], weight: Float[Array, " D"], eps: float) -> Float[Array, "... D"]:
    """RMSNorm (arXiv:1910.07467) in float32, returned in the type of x."""
    x32 = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    return (x32 * scale * weight.astype(jnp.float32)).astype(x.dtype)


def rope_tables(
    config: ModelConfig, positions: Int[Array, " T"]
) -> tuple[Float[Array, "T 1 half_H"], Float[Array, "T 1 half_H"]]:
    """cos and sin of every position, float32, once per step for all layers."""
    angles = positions[:, None].astype(jnp.float32) * np.asarray(config.rope_frequencies, np.float32)
    cos, sin = jnp.cos(angles)[:, None, :], jnp.sin(angles)[:, None, :]
    # Without the barrier XLA computes them again in every layer, and compiles that code as often.
    return jax.lax.optimization_barrier((cos * config.rope_magnitude, sin * config.rope_magnitude))


def apply_rope(
    x: Float[Array, "T heads H"], cos: Float[Array, "T 1 half_H"], sin: Float[Array, "T 1 half_H"]
) -> Float[Array, "T heads H"]:
    """Rotates (x[i], x[i + H/2]) by the angle of the position (arXiv:2104.09864, the half-split layout of HF)."""
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


class DecoderLayer(nnx.Module):
    """The four matrices of one layer; its norms and biases are rows of the decoder's stacks."""

    def __init__(self, config: ModelConfig, dtype: Any):
        D, F, N, H = config.hidden_size, config.ffn_size, config.num_heads, config.head_dim
        self.qkv = nnx.Param(jnp.zeros((D, config.qkv_size), dtype))
        self.o = nnx.Param(jnp.zeros((N * H, D), dtype))
        self.gate_up = nnx.Param(jnp.zeros((D, 2 * F), dtype))
        self.down = nnx.Param(jnp.zeros((F, D), dtype))


class Decoder(nnx.Module):
    """Decoder-only transformer. A family subclasses it: its `architectures`, `config_from_hf`, and what differs."""

    architectures: ClassVar[tuple[str, ...]] = ()

    def __init__(self, config: ModelConfig, dtype: Any):
        V, D, F, L, H = config.vocab_size, config.hidden_size, config.ffn_size, config.num_layers, config.head_dim
        self.config = config
        self.embed = nnx.Param(jnp.zeros((V, D), dtype))
        self.layers = nnx.List([DecoderLayer(config, dtype) for _ in range(L)])
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
            self.lm_head = nnx.Param(jnp.zeros((D, V), dtype))

    @classmethod
    def config_from_hf(cls, hf: Mapping[str, Any]) -> ModelConfig:
        raise NotImplementedError(f"{cls.__name__} must say how it reads config.json")

    @classmethod
    def pieces(cls, config: ModelConfig) -> dict[str, Piece]:
        """Every tensor that the checkpoint must hold, and its place. These are the names of Llama and its kin."""
        V, D = config.vocab_size, config.hidden_size
        named = {
            "model.embed_tokens.weight": Piece("embed", (V, D), transpose=False),
            "model.norm.weight": Piece("final_norm", (D,), transpose=False),
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
        self, tokens: Int[Array, " T"], positions: Int[Array, " T"], kv: list[Any], attend: Attend
    ) -> tuple[Float[Array, "T D"], list[Any]]:
        """Hidden states after the last norm, and the layers' KV with this step written in."""
        rope = rope_tables(self.config, positions)
        x, kv = self.embed[...][tokens], list(kv)
        for i in range(self.config.num_layers):
            h = rms_norm(x, self.attn_norm[i], self.config.norm_eps)
            out, kv[i] = self._attention(i, h, rope, kv[i], attend)
            x = x + out
            x = x + self._mlp(i, rms_norm(x, self.mlp_norm[i], self.config.norm_eps))
        return rms_norm(x, self.final_norm[...], self.config.norm_eps), kv

    def logits(self, hidden: Float[Array, "S D"]) -> Float[Array, "S V"]:
        """float32 scores of every vocabulary entry."""
        if self.config.tied_embeddings:
            return matmul(hidden, self.embed[...], out_dtype=jnp.float32, out_in=True)
        return matmul(hidden, self.lm_head[...], out_dtype=jnp.float32)

    def _attention(self, i: int, x: Array, rope: tuple[Array, Array], kv_l: Any, attend: Attend) -> tuple[Array, Any]:
        c, T = self.config, x.shape[0]
        N, K, H = c.num_heads, c.num_kv_heads, c.head_dim
        qkv = matmul(x, self.layers[i].qkv[...])
        if c.qkv_bias:
            qkv = qkv + self.qkv_bias[i]
        q, k, v = jnp.split(qkv.reshape(T, N + 2 * K, H), (N, N + K), axis=1)
        if c.qk_norm:
            q, k = rms_norm(q, self.q_norm[i], c.norm_eps), rms_norm(k, self.k_norm[i], c.norm_eps)
        q, k = apply_rope(q, *rope), apply_rope(k, *rope)
        out, kv_l = attend(i, q, k, v, kv_l, scale=c.attention_scale, sliding_window=c.sliding_windows[i], softcap=None)
        out = matmul(out.reshape(T, N * H), self.layers[i].o[...])
        return (out + self.o_bias[i] if c.o_bias else out), kv_l

    def _mlp(self, i: int, x: Array) -> Array:
        gate_up = matmul(x, self.layers[i].gate_up[...])
        if self.config.mlp_bias:
            gate_up = gate_up + self.gate_up_bias[i]
        gate, up = jnp.split(gate_up, 2, axis=-1)
        out = matmul(jax.nn.silu(gate) * up, self.layers[i].down[...])
        return out + self.down_bias[i] if self.config.mlp_bias else out

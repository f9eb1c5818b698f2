"""The step: one jitted call that embeds, runs all layers, draws the next tokens and updates the device state.

One executable per bucket and variant. `features` is the only variant: without it a row is greedy or has a temperature,
nothing more, and the step holds no code for anything else.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.tree_util import Partial
from jaxtyping import Array, Float, Int32

from jaxserve.pallas_kernels.ops import Backend
from jaxserve.pallas_kernels.reference import AttentionInput, KVPages
from jaxserve.request import knob_names
from jaxserve.sampling import SamplingRows, sample, token_logprobs
from jaxserve.shapes import Bucket
from jaxserve.state import LOGPROB_COLUMNS, DeviceState, PackedLayout, StepOutput

LOGPROB_ROWS = 64  # rows of hidden states turned into logits at once, where a prompt's logprobs are wanted

Step = Callable[[Any, list[KVPages], DeviceState, Int32[Array, " n"]], tuple[list[KVPages], DeviceState, StepOutput]]


def build_step(graphdef: Any, layout: PackedLayout, backend: Backend, *, features: bool) -> Step:
    """The step of one bucket, ready to be jitted with arguments 1 and 2 (KV pages, device state) donated."""
    bucket = layout.bucket

    def attend(
        meta: AttentionInput, qkv: Array, kv_l: KVPages, rope: tuple[Array, Array], *,
        scale: float, sliding_window: int | None, softcap: float | None, **projection: Any,
    ) -> tuple[Array, KVPages]:  # fmt: skip
        q, kv_l = backend.rope_and_write(qkv, kv_l, meta, *rope, **projection)
        return backend.attention(q, kv_l, meta, scale=scale, sliding_window=sliding_window, softcap=softcap), kv_l

    def step(
        params: Any, kv: list[KVPages], state: DeviceState, packed: Int32[Array, " n"]
    ) -> tuple[list[KVPages], DeviceState, StepOutput]:
        """Donates kv and state."""
        model = nnx.merge(graphdef, params)
        parts = layout.views(packed)
        rows = dict(zip(layout.columns, parts["rows"], strict=True))
        state = state._replace(page_table=_write_pages(state.page_table, parts["page_writes"]))
        meta, row_starts = _attention_input(bucket, rows, state.page_table)
        meta = lax.optimization_barrier(
            backend.prepare(meta, layout.page_size)
        )  # once, not fused into every layer again
        tokens = _input_tokens(parts["tokens"], rows["slot"], meta.token_rows, state.last_token)

        hidden, kv = model.forward(tokens, meta.positions, kv, Partial(attend, meta))  # [T, D]
        last = jnp.clip(row_starts + rows["count"] - 1, 0, bucket.tokens - 1)
        drawn = sample(model.logits(hidden[last]), _sampling_rows(rows), state.extras, rows["slot"], features=features)
        state = _remember(state, rows, drawn.token, features)
        output = StepOutput(drawn.token)
        if features:
            output = output._replace(
                logprobs=_pack_logprobs(drawn.logprob, drawn.rank, drawn.top_ids, drawn.top_logprobs)
            )
            if bucket.prefill_tokens:
                output = output._replace(
                    prompt_logprobs=_prompt_logprobs(model, hidden[bucket.decode_rows :], parts["targets"])
                )
        return kv, state, output

    return step


def _write_pages(page_table: Int32[Array, "slots W"], writes: Int32[Array, "3 n"]) -> Int32[Array, "slots W"]:
    slot, column, page = writes
    return page_table.at[slot, column].set(page, mode="drop")


def _attention_input(
    bucket: Bucket, rows: dict[str, Array], page_table: Int32[Array, "slots W"]
) -> tuple[AttentionInput, Int32[Array, " S"]]:
    """Where each token stands: from (start, count) per row. Also the index of each row's first token."""
    num_decode = bucket.decode_rows
    count, start = rows["count"], rows["start"]
    cu_q_lens = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(count[num_decode:], dtype=jnp.int32)])
    decode_rows = jnp.where(count[:num_decode] > 0, jnp.arange(num_decode, dtype=jnp.int32), bucket.rows)
    index = jnp.arange(bucket.prefill_tokens, dtype=jnp.int32)
    # A chunk's row is the number of chunk ends at or before the token; past the last chunk it is padding.
    prefill_rows = num_decode + jnp.searchsorted(cu_q_lens[1:], index, side="right").astype(jnp.int32)
    prefill_rows = jnp.where(index < cu_q_lens[-1], prefill_rows, bucket.rows)
    token_rows = jnp.concatenate([decode_rows, prefill_rows])
    row_starts = jnp.concatenate([jnp.arange(num_decode, dtype=jnp.int32), num_decode + cu_q_lens[:-1]])
    at = jnp.minimum(token_rows, bucket.rows - 1)
    positions = start[at] + jnp.arange(bucket.tokens, dtype=jnp.int32) - row_starts[at]
    positions = jnp.where(token_rows < bucket.rows, positions, 0)
    meta = AttentionInput(
        page_table=page_table[rows["slot"]],
        kv_lens=jnp.where(count > 0, start + count, 0),
        positions=positions,
        token_rows=token_rows,
        cu_q_lens=cu_q_lens,
        num_decode_rows=num_decode,
    )
    return meta, row_starts


def _input_tokens(
    tokens: Int32[Array, " T"],
    slots: Int32[Array, " S"],
    token_rows: Int32[Array, " T"],
    last_token: Int32[Array, " slots"],
) -> Int32[Array, " T"]:
    """The host's ids, and where it does not know them yet the ids that the last step drew."""
    drawn = last_token[slots[jnp.minimum(token_rows, slots.shape[0] - 1)]]
    return jnp.maximum(jnp.where(tokens < 0, drawn, tokens), 0)  # a failed row's -1 must not index anything


def _sampling_rows(rows: dict[str, Array]) -> SamplingRows:
    end = rows["start"] + rows["count"]  # position of the token to be drawn == tokens so far
    knobs = {name: rows[name] for name in knob_names("i32")}
    knobs |= {name: lax.bitcast_convert_type(rows[name], jnp.float32) for name in knob_names("f32")}
    return SamplingRows(
        **knobs,
        seed_lo=lax.bitcast_convert_type(rows["seed_lo"], jnp.uint32),
        seed_hi=lax.bitcast_convert_type(rows["seed_hi"], jnp.uint32),
        sample_index=rows["sample_index"],
        position=end,
        min_tokens_left=jnp.maximum(rows["prompt_len"] + rows["min_tokens"] - end, 0),
        flags=rows["flags"],
        prompt_len=rows["prompt_len"],
        num_tokens=end,
    )


def _remember(state: DeviceState, rows: dict[str, Array], token: Int32[Array, " S"], features: bool) -> DeviceState:
    """Stores what each drawing row drew in its slot; rows that draw nothing write to the trash slot."""
    trash = state.last_token.shape[0] - 1
    slots = jnp.where(rows["draw"] > 0, rows["slot"], trash)
    state = state._replace(last_token=state.last_token.at[slots].set(token))
    if features:
        history = state.extras.history.at[slots, rows["start"] + rows["count"]].set(token, mode="drop")
        state = state._replace(extras=state.extras._replace(history=history))
    return state


def _pack_logprobs(logprob: Array, rank: Array, top_ids: Array, top_logprobs: Array) -> Int32[Array, "R C"]:
    bits = partial(lax.bitcast_convert_type, new_dtype=jnp.int32)
    return jnp.concatenate([bits(logprob)[:, None], rank[:, None], top_ids, bits(top_logprobs)], axis=1)


def _prompt_logprobs(model: Any, hidden: Float[Array, "T_p D"], targets: Int32[Array, " T_p"]) -> Int32[Array, "T_p C"]:
    """Logprobs of each target, block by block so that no [T_p, V] array ever exists; no work if none is wanted."""
    size = min(LOGPROB_ROWS, hidden.shape[0])
    blocks = -(-hidden.shape[0] // size)
    padding = blocks * size - hidden.shape[0]

    def block(part: tuple[Array, Array]) -> Array:
        return _pack_logprobs(*token_logprobs(model.logits(part[0]), part[1]))

    def wanted() -> Array:
        h = jnp.pad(hidden, ((0, padding), (0, 0))).reshape(blocks, size, -1)
        t = jnp.pad(jnp.maximum(targets, 0), (0, padding)).reshape(blocks, size)
        return lax.map(block, (h, t)).reshape(blocks * size, -1)[: hidden.shape[0]]

    def unwanted() -> Array:
        return jnp.zeros((hidden.shape[0], LOGPROB_COLUMNS), jnp.int32)

    return lax.cond(jnp.any(targets >= 0), wanted, unwanted)

"""The step: embed, run all layers, draw the next tokens, update the device state.

plain    rows that are greedy or have a temperature, nothing more: one program per bucket does it all
loop     a few plain steps of the same rows, none of which is at its prompt, in one program
forward  everything else: one program per bucket, as far as the logits ...
draw     ... and one per number of rows that draws from them. Between the two the host learns what the step before
         drew, and makes the masks of rows with a grammar while the device is busy with the forward pass.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.tree_util import Partial
from jaxtyping import Array, Float, Float32, Int32

from jaxserve.models.layers import Operations
from jaxserve.pallas_kernels.ops import Backend
from jaxserve.pallas_kernels.reference import AttentionInput
from jaxserve.request import knob_names
from jaxserve.sampling import SamplingRows, sample, sample_split, token_logprobs
from jaxserve.sampling_inputs import MEAN, POOLED, SlotExtras
from jaxserve.shapes import Bucket
from jaxserve.state import LOGPROB_COLUMNS, Drawn, Forward, KVPages, PackedLayout, row_columns

LOGPROB_ROWS = 64  # rows of hidden states turned into logits at once, where a prompt's logprobs are wanted

Pages = Int32[Array, "slots W"]  # the page table
Slots = Int32[Array, " slots"]


def build_forward(graphdef: Any, layout: PackedLayout, backend: Backend) -> Callable[..., Any]:
    """(params, kv, page_table, last_token, packed) -> (kv, page_table, Forward). Donate kv and page_table."""

    def forward(
        params: Any, kv: list[KVPages], page_table: Pages, last_token: Slots, packed: Int32[Array, " n"]
    ) -> tuple[list[KVPages], Pages, Forward]:
        model, parts = nnx.merge(graphdef, params), layout.views(packed)
        hidden, last, meta, kv, page_table = _run_layers(model, layout, backend, kv, page_table, last_token, parts)
        scored = None
        if layout.bucket.prefill_tokens:
            scored = _prompt_logprobs(model, hidden[layout.bucket.decode_rows :], parts["targets"])
        pooled = _pool(hidden, last, meta, parts["rows"][layout.columns.index("flags")])
        return kv, page_table, Forward(model.logits(hidden[last]), parts["rows"], pooled, scored)

    return forward


def build_draw() -> Callable[..., Any]:
    """(last_token, extras, logits, rows, masks) -> (last_token, extras, Drawn). Donate last_token and extras.

    masks: bit i % 32 of word i // 32 says whether id i may follow; read for rows with a grammar only.
    """
    columns = row_columns()

    def draw(
        last_token: Slots, extras: SlotExtras, logits: Float32[Array, "S V"], packed_rows: Int32[Array, "C S"],
        masks: Int32[Array, "S W"],
    ) -> tuple[Slots, SlotExtras, Drawn]:  # fmt: skip
        rows = dict(zip(columns, packed_rows, strict=True))
        drawn = sample(logits, _sampling_rows(rows), extras, rows["slot"], masks, features=True)
        at = _drawing_slots(last_token, rows), rows["start"] + rows["count"]
        extras = extras._replace(history=extras.history.at[at].set(drawn.token, mode="drop"))
        logprobs = _pack_logprobs(drawn.logprob, drawn.rank, drawn.top_ids, drawn.top_logprobs)
        return _remember(last_token, rows, drawn.token), extras, Drawn(drawn.token, logprobs)

    return draw


def build_plain(graphdef: Any, layout: PackedLayout, backend: Backend) -> Callable[..., Any]:
    """(params, kv, page_table, last_token, packed) -> (kv, page_table, last_token, tokens i32[S]).

    Donate kv, page_table and last_token.
    """

    def plain(
        params: Any, kv: list[KVPages], page_table: Pages, last_token: Slots, packed: Int32[Array, " n"]
    ) -> tuple[list[KVPages], Pages, Slots, Int32[Array, " S"]]:
        model, parts = nnx.merge(graphdef, params), layout.views(packed)
        hidden, *_, kv, page_table = _run_layers(
            model, layout, backend, kv, page_table, last_token, parts, only_last=True
        )
        rows = dict(zip(layout.columns, parts["rows"], strict=True))
        token = _draw_plain(model, hidden, rows)
        return kv, page_table, _remember(last_token, rows, token), token

    return plain


def build_loop(graphdef: Any, layout: PackedLayout, backend: Backend) -> Callable[..., Any]:
    """(params, kv, page_table, last_token, packed i32[k, n]) -> (kv, page_table, last_token, tokens i32[k, S]): k plain
    steps, each with its own input. Donate kv, page_table and last_token.
    """
    plain = build_plain(graphdef, layout, backend)

    def loop(
        params: Any, kv: list[KVPages], page_table: Pages, last_token: Slots, packed: Int32[Array, "k n"]
    ) -> tuple[list[KVPages], Pages, Slots, Int32[Array, "k S"]]:
        def step(state: Any, packed: Int32[Array, " n"]) -> tuple[Any, Int32[Array, " S"]]:
            *state, tokens = plain(params, *state, packed)
            return tuple(state), tokens

        state, tokens = lax.scan(step, (kv, page_table, last_token), packed)
        return *state, tokens

    return loop


def _draw_plain(model: Any, hidden: Float[Array, "S D"], rows: dict[str, Array]) -> Int32[Array, " S"]:
    config, knobs = model.config, _sampling_rows(rows)
    if config.shards == 1:
        return sample(model.logits(hidden), knobs, None, rows["slot"], features=False).token
    return sample_split(model.own_logits(hidden), knobs, shards=config.shards, vocab=config.vocab_size)


def _run_layers(
    model: Any, layout: PackedLayout, backend: Backend, kv: list[KVPages], page_table: Pages, last_token: Slots,
    parts: dict[str, Array], *, only_last: bool = False,
) -> tuple[Float[Array, "T_or_S D"], Int32[Array, " S"], AttentionInput, list[KVPages], Pages]:  # fmt: skip
    """Hidden states after the last norm (`only_last`: of each row's last token), the index of each row's last token,
    what attention knows of the rows; KV and page table with this step written in.
    """
    bucket = layout.bucket
    rows = dict(zip(layout.columns, parts["rows"], strict=True))
    page_table = _write_pages(page_table, parts["page_writes"])
    meta, row_starts = _attention_input(bucket, rows, page_table)
    # Once, not fused into every layer again.
    meta = lax.optimization_barrier(backend.prepare(meta, layout.page_size))
    tokens = _input_tokens(parts["tokens"], rows["slot"], meta.token_rows, last_token)

    def attend(
        meta: AttentionInput, qkv: Array, kv_l: KVPages, rope: tuple[Array, Array], **how: Any
    ) -> tuple[Array, KVPages]:
        return backend.attend(qkv, kv_l, meta, *rope, **how)

    last = jnp.clip(row_starts + rows["count"] - 1, 0, bucket.tokens - 1)
    wanted = last if only_last and bucket.prefill_tokens else None  # without prompts these are all there are, in order
    ops = Operations(
        Partial(attend, meta), Partial(backend.add_norm), Partial(backend.parts), Partial(backend.gated_product)
    )
    hidden, kv = model.forward(tokens, meta.positions, kv, ops, wanted)
    return hidden, last, meta, kv, page_table


def _write_pages(page_table: Int32[Array, "slots W"], writes: Int32[Array, "3 n"]) -> Int32[Array, "slots W"]:
    slot, column, page = writes
    return page_table.at[slot, column].set(page, mode="drop")


def _attention_input(
    bucket: Bucket, rows: dict[str, Array], page_table: Int32[Array, "slots W"]
) -> tuple[AttentionInput, Int32[Array, " S"]]:
    """Where each token stands: from (start, count) per row. Also the index of each row's first token."""
    num_decode = bucket.decode_rows
    count, start = rows["count"], rows["start"]
    cu_q_lens = jnp.zeros(1, jnp.int32)
    if bucket.prefill_rows:  # a sum over none crashes the TPU compiler (libtpu 0.0.50)
        cu_q_lens = jnp.concatenate([cu_q_lens, jnp.cumsum(count[num_decode:], dtype=jnp.int32)])
    decode_rows = jnp.where(count[:num_decode] > 0, jnp.arange(num_decode, dtype=jnp.int32), bucket.rows)
    index = jnp.arange(bucket.prefill_tokens, dtype=jnp.int32)
    # A chunk's row is the number of chunk ends at or before the token; past the last chunk it is padding.
    # All are compared with all: searching is a loop, which the host would run through.
    chunk = jnp.searchsorted(cu_q_lens[1:], index, side="right", method="compare_all")
    prefill_rows = num_decode + chunk.astype(jnp.int32)
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


def _drawing_slots(last_token: Slots, rows: dict[str, Array]) -> Int32[Array, " S"]:
    """The slot of each row that draws, the trash slot of others."""
    return jnp.where(rows["draw"] > 0, rows["slot"], last_token.shape[0] - 1)


def _remember(last_token: Slots, rows: dict[str, Array], token: Int32[Array, " S"]) -> Slots:
    return last_token.at[_drawing_slots(last_token, rows)].set(token)


def _pool(
    hidden: Float[Array, "T D"], last: Int32[Array, " S"], meta: AttentionInput, flags: Int32[Array, " S"]
) -> Float32[Array, "S D"]:
    """Of each row the hidden state of its last token, or the sum over its tokens; no work if no row wants it.

    Rows of one token are their own sum: a copy costs less than asking, since a conditional is updated by the host each
    time that a CUDA graph is launched (3 ms of a decode step's 5).
    """
    num_rows = last.shape[0]
    if num_rows == hidden.shape[0]:
        return hidden.astype(jnp.float32)

    def wanted() -> Array:
        x = hidden.astype(jnp.float32)
        sums = jax.ops.segment_sum(x, meta.token_rows, num_segments=num_rows + 1)[:num_rows]  # padding comes last
        return jnp.where((flags & MEAN != 0)[:, None], sums, x[last])

    return lax.cond(jnp.any(flags & POOLED != 0), wanted, lambda: jnp.zeros((num_rows, hidden.shape[1]), jnp.float32))


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

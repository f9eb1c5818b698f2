"""Logits to token, on the device: one small pure function per knob, on [S, V].

Order (that of vLLM's sampler): grammar, allowed ids, bad words, min_tokens, logit_bias, penalties, then greedy argmax,
or temperature, min_p, top_k, top_p, draw. Returned logprobs and ranks come from the raw logits, before any of this.

Draw. Gumbel-max: token = argmax(logit / temperature + noise), where the noise is a hash of (seed, sample index,
position, column) and of nothing else: not of the batch, the row's place in it, or the path taken below.

Filters without a sort. min_p and top_k are thresholds on the logit. With every drawing row at top_k < NUM_CANDIDATES
only that many candidates per row are looked at, noise included. Otherwise the noise is drawn for all columns and top_p
is checked for the one token that is drawn: it is in the nucleus if the tokens above it weigh less than top_p; if they
do not, it and all below it leave, and the rest is drawn from again. The result equals filtering first, a round costs
two passes, and rounds are few (a token is accepted with probability top_p at least).

Ties. Argmax takes the lowest id. Tokens with the logit of the last one kept by top_k or top_p are kept too.

Diary (2 Xeon cores at 2.6 GHz, jax 0.12.0.1, V = 49152, S = 32, ms; S = 1 in brackets):
    jnp.argmax                   4.7 (0.19)  a reduction of (value, index) pairs is scalar code; with noise fused into
                                             it 27 (1.2). max, then its least index: 1.15 (0.11). By groups: 0.42
    noise for all columns        4.9 (0.23)  the hash is 0.65 of it, the two logarithms the rest
    lax.top_k 20 / 128           1.8 / 3.4   of the whole row; of the best groups of 32: 0.7 / 2.9 (0.11 / 0.17)
    a slice of lax.top_k         +11         XLA makes it a full sort, unless a barrier stands between
    sort                         281 (8.7)   never
    one count or mass pass       0.9 (0.08)  32 of them for a bisection: 29
    sum, max                     0.3 (0.06)  max loses NaN on CPU, sum keeps it
    conditional that changes nothing  0.6    it copies its operand, so all edits share one
Whole sampler, features on, CPU time of both cores together (the machine was busy): greedy 1.8 (0.2), temperature 8.4
(0.6), top_k=50 5.2 (0.3), with top_p=0.9 6.0 (0.3), top_p=0.9 alone 17 (0.6), top_k=500 top_p=0.9 57 (0.9), penalties
+2.6, each mask or bias +0.2, logprobs +5 (0.1). A step of the 135M demo model takes both cores for 137 (25).
On an H200, where it is compiled, nothing sorts more than 4,748 columns of 151,936 (tests/test_step_copies.py).
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32, UInt32

from jaxserve.request import GREEDY_BELOW, MAX_LOGPROBS, NOT_FINITE, NOTHING_ALLOWED
from jaxserve.sampling_inputs import (
    ALLOWED,
    BAD_WORDS,
    BIAS,
    EDITS,
    FILTER,
    GRAMMAR,
    LOGPROBS,
    MIN_TOKENS,
    PENALTIES,
    SamplingRows,
    SlotExtras,
)
from jaxserve.sampling_inputs import empty_extras as empty_extras  # callers of the sampler need these too
from jaxserve.sampling_inputs import pack_extras as pack_extras
from jaxserve.sampling_inputs import request_flags as request_flags
from jaxserve.sampling_inputs import set_slot as set_slot
from jaxserve.sharding import gather, this_shard

MIN_TEMPERATURE = 0.01  # lower ones that are not greedy are raised to it
NUM_CANDIDATES = 128  # per row; a top_k below it is served from them alone
GROUP = 32  # columns per group, where the best of a row are looked for in its best groups
HISTORY_CHUNK = 1024  # tokens of history counted at once
IN_PROMPT = 1 << 30  # bit of a token count: the prompt has it; the bits below count the outputs


class Sampled(NamedTuple):
    token: Int32[Array, " S"]  # or NOT_FINITE, NOTHING_ALLOWED
    logprob: Float32[Array, " S"]
    rank: Int32[Array, " S"]
    top_ids: Int32[Array, "S MAX_LOGPROBS"]
    top_logprobs: Float32[Array, "S MAX_LOGPROBS"]


# ---- the sampler


def sample(
    logits: Float32[Array, "S V"], rows: SamplingRows, extras: SlotExtras | None, slots: Int32[Array, " S"],
    masks: Int32[Array, "S W"] | None = None, *, features: bool,
) -> Sampled:  # fmt: skip
    """Draws one token per row. `masks`: of rows with a grammar, one bit per id (see mask_by_grammar).

    features=False serves rows with `flags == 0` only (greedy or temperature), holds no code for anything else, needs no
    extras, and leaves the logprobs at zero.
    """
    x = logits = logits.astype(jnp.float32)
    if features:
        assert extras is not None
        x = lax.cond(_any(rows, EDITS), lambda: edit_logits(logits, rows, extras, slots, masks), lambda: logits)
        token = draw(x, rows)
    else:
        token = draw_plain(x, rows)
    broken = jnp.isnan(jnp.sum(logits, axis=-1))  # not max: on CPU it loses NaN
    nothing = jnp.where(rows.flags & EDITS != 0, NOTHING_ALLOWED, NOT_FINITE)
    token = jnp.where(broken, NOT_FINITE, jnp.where(_at(x, token) == -jnp.inf, nothing, token))
    if not features:
        return Sampled(token, *_no_logprobs(token.shape[0]))
    return Sampled(
        token,
        *lax.cond(_any(rows, LOGPROBS), lambda: token_logprobs(logits, token), lambda: _no_logprobs(token.shape[0])),
    )


def sample_split(
    x: Float32[Array, "S columns"], rows: SamplingRows, *, shards: int, vocab: int
) -> Int32[Array, " S"]:  # fmt: skip
    """What sample(features=False) draws, where each device has logits of some columns, and offers the best of them."""
    ids = this_shard(shards) * x.shape[1] + _columns(x)
    real = ids < vocab  # the last shards may have columns past the end
    score = jnp.where(real, _score(x, rows, ids), -jnp.inf)
    best = argmax(score)
    offer = jnp.stack([_at(score, best), _at(x, best), jnp.sum(jnp.where(real, x, 0.0), axis=-1)])
    scores, logits, sums = jnp.moveaxis(gather(offer), 1, 0)  # f32[shards, S] each
    winner = jnp.argmax(scores, axis=0)[None]
    token = jnp.take_along_axis(gather(best), winner, axis=0)[0] + winner[0].astype(jnp.int32) * x.shape[1]
    logit = jnp.take_along_axis(logits, winner, axis=0)[0]
    return jnp.where(jnp.isnan(jnp.sum(sums, axis=0)) | (logit == -jnp.inf), NOT_FINITE, token)


def _any(rows: SamplingRows, flags: int) -> Bool[Array, ""]:
    return jnp.any(rows.flags & flags != 0)


def _asks(rows: SamplingRows, flag: int) -> Bool[Array, " S"]:
    return rows.flags & flag != 0


def _greedy(rows: SamplingRows) -> Bool[Array, " S"]:
    return rows.temperature < GREEDY_BELOW


# ---- edits of the logits


def edit_logits(
    logits: Float32[Array, "S V"], rows: SamplingRows, extras: SlotExtras, slots: Int32[Array, " S"],
    masks: Int32[Array, "S W"] | None = None,
) -> Float32[Array, "S V"]:  # fmt: skip
    """Masks, bias and penalties, in the documented order, each only if a row asks for it."""
    if masks is not None:
        logits = lax.cond(_any(rows, GRAMMAR), lambda x: mask_by_grammar(x, rows, masks), lambda x: x, logits)
    for flag, edit in (
        (ALLOWED, mask_not_allowed),
        (BAD_WORDS, mask_bad_words),
        (MIN_TOKENS, mask_stop_ids),
        (BIAS, add_bias),
        (PENALTIES, apply_penalties),
    ):
        logits = lax.cond(_any(rows, flag), lambda x, edit=edit: edit(x, rows, extras, slots), lambda x: x, logits)
    return logits


def mask_by_grammar(x: Float32[Array, "S V"], rows: SamplingRows, masks: Int32[Array, "S W"]) -> Array:
    """Leaves only the ids with which the output can still match the row's grammar."""
    return jnp.where(_bits(masks, x) | ~_asks(rows, GRAMMAR)[:, None], x, -jnp.inf)


def _bits(words: Int32[Array, "S W"] | UInt32[Array, "S W"], x: Float32[Array, "S V"]) -> Bool[Array, "S V"]:
    """Bit i % 32 of word i // 32, for each column i of x."""
    bits = (words[:, :, None] >> jnp.arange(32, dtype=words.dtype)) & 1
    return bits.reshape(x.shape[0], -1)[:, : x.shape[1]] != 0


def mask_not_allowed(x: Float32[Array, "S V"], rows: SamplingRows, extras: SlotExtras, slots: Array) -> Array:
    """Leaves only allowed_token_ids."""
    return jnp.where(_bits(extras.allowed_mask[slots], x) | ~_asks(rows, ALLOWED)[:, None], x, -jnp.inf)


def mask_bad_words(x: Float32[Array, "S V"], rows: SamplingRows, extras: SlotExtras, slots: Array) -> Array:
    """Blocks the last token of each bad word whose other tokens are the last outputs; the prompt does not count."""
    words = extras.bad_words[slots]  # [S, w, t]
    prefix = words[:, :, :-1]
    positions = rows.num_tokens[:, None] + jnp.arange(1 - words.shape[2], 0)  # [S, t - 1], the last outputs
    tail = extras.history[slots[:, None], jnp.maximum(positions, 0)]
    tail = jnp.where(positions >= rows.prompt_len[:, None], tail, -2)  # -2: equals no id and no padding
    matches = jnp.all((prefix == -1) | (prefix == tail[:, None, :]), axis=-1)
    return _block(x, jnp.where(matches & _asks(rows, BAD_WORDS)[:, None], words[:, :, -1], -1))


def mask_stop_ids(x: Float32[Array, "S V"], rows: SamplingRows, extras: SlotExtras, slots: Array) -> Array:
    """Blocks stop ids until min_tokens are there."""
    waits = _asks(rows, MIN_TOKENS) & (rows.min_tokens_left > 0)
    return _block(x, jnp.where(waits[:, None], extras.stop_ids[slots], -1))


def add_bias(x: Float32[Array, "S V"], rows: SamplingRows, extras: SlotExtras, slots: Array) -> Array:
    """Adds logit_bias."""
    ids = jnp.where(_asks(rows, BIAS)[:, None], extras.bias_ids[slots], -1)
    return x.at[_row_index(x), _or_outside(ids, x)].add(extras.bias_values[slots], mode="drop")


def apply_penalties(x: Float32[Array, "S V"], rows: SamplingRows, extras: SlotExtras, slots: Array) -> Array:
    """Repetition penalty over prompt and output, then frequency and presence penalty over output."""
    asks = _asks(rows, PENALTIES)
    counts = _token_counts(x, asks, rows, extras.history, slots)
    repetition = jnp.where(asks, rows.repetition_penalty, 1.0)[:, None]
    x = jnp.where(counts > 0, jnp.where(x > 0, x / repetition, x * repetition), x)
    outputs = (counts & (IN_PROMPT - 1)).astype(jnp.float32)
    x = x - rows.frequency_penalty[:, None] * outputs
    return x - rows.presence_penalty[:, None] * (outputs > 0)


def _token_counts(
    x: Float32[Array, "S V"],
    asks: Bool[Array, " S"],
    rows: SamplingRows,
    history: Int32[Array, "slots L"],
    slots: Array,
) -> Int32[Array, "S V"]:
    """How often each token is in a row's outputs, plus IN_PROMPT if its prompt has it; 0 for rows that do not ask.

    Chunk by chunk, so that the cost follows the longest row and not the longest possible one.
    """
    size = min(HISTORY_CHUNK, history.shape[1])
    lengths = jnp.where(asks, rows.num_tokens, 0)[:, None]
    prompt_len = rows.prompt_len[:, None]

    def count(i: Array, counts: Int32[Array, "S V"]) -> Int32[Array, "S V"]:
        start = jnp.minimum(i * size, history.shape[1] - size)  # the last chunk may overlap the one before
        ids = lax.dynamic_slice_in_dim(history, start, size, axis=1)[slots]
        positions = start + jnp.arange(size)
        valid = (positions < lengths) & (positions >= i * size)
        prompt = jnp.where(valid & (positions < prompt_len), ids, -1)
        output = jnp.where(valid & (positions >= prompt_len), ids, -1)
        # Setting loses no count: a row's prompt comes before its outputs, in the chunk and among chunks.
        counts = counts.at[_row_index(x), _or_outside(prompt, x)].set(IN_PROMPT, mode="drop")
        return counts.at[_row_index(x), _or_outside(output, x)].add(1, mode="drop")

    return lax.fori_loop(0, (jnp.max(lengths) + size - 1) // size, count, jnp.zeros(x.shape, jnp.int32))


def _row_index(x: Float32[Array, "S V"]) -> Int32[Array, "S 1"]:
    return jnp.arange(x.shape[0], dtype=jnp.int32)[:, None]


def _or_outside(ids: Int32[Array, "S n"], x: Float32[Array, "S V"]) -> Int32[Array, "S n"]:
    """Moves the padding -1, which would index the last column, past the end, where a scatter drops it."""
    return jnp.where(ids < 0, x.shape[1], ids)


def _block(x: Float32[Array, "S V"], ids: Int32[Array, "S n"]) -> Float32[Array, "S V"]:
    return x.at[_row_index(x), _or_outside(ids, x)].set(-jnp.inf, mode="drop")


# ---- the draw


def draw(x: Float32[Array, "S V"], rows: SamplingRows) -> Int32[Array, " S"]:
    """Greedy argmax, or temperature, min_p, top_k, top_p and a draw. Skips what no row asks for."""
    filters = jnp.any(_asks(rows, FILTER) & ~_greedy(rows))
    return lax.cond(filters, lambda: draw_filtered(x, rows), lambda: draw_plain(x, rows))


def draw_plain(x: Float32[Array, "S V"], rows: SamplingRows) -> Int32[Array, " S"]:
    """Greedy argmax or a draw with temperature. On CPU no noise is made where all rows are greedy; elsewhere asking
    costs more than making it, because the host waits for the answer."""

    def with_noise(x: Float32[Array, "S V"]) -> Float32[Array, "S V"]:
        return _score(x, rows, _columns(x))

    def ask_first(x: Float32[Array, "S V"]) -> Float32[Array, "S V"]:
        return lax.cond(jnp.all(_greedy(rows)), lambda x: x, with_noise, x)

    return argmax(lax.platform_dependent(x, cpu=ask_first, default=with_noise))


def argmax(x: Float32[Array, "S V"]) -> Int32[Array, " S"]:
    """The lowest id of the largest value."""

    def by_group(x: Float32[Array, "S V"]) -> Int32[Array, " S"]:
        groups = _groups(x)
        best = jnp.max(groups, axis=-1)  # [S, V / GROUP]
        group = _least_best(best, _columns(best))
        column = jnp.arange(GROUP, dtype=jnp.int32)[None, :]
        inside = _least_best(jnp.take_along_axis(groups, group[:, None, None], axis=1, mode="clip")[:, 0], column)
        return jnp.minimum(group * GROUP + inside, x.shape[1] - 1)

    def one_pass(x: Float32[Array, "S V"]) -> Int32[Array, " S"]:
        return jnp.argmax(x, axis=-1).astype(jnp.int32)

    return lax.platform_dependent(x, cpu=by_group, default=one_pass)


def _least_best(score: Float32[Array, "S n"], ids: Int32[Array, "#S n"]) -> Int32[Array, " S"]:
    """The lowest id among those of the largest score; some id for a row with NaN."""
    best = jnp.max(score, axis=-1, keepdims=True)
    last = jnp.max(ids, axis=-1, keepdims=True)
    return jnp.min(jnp.where(score == best, ids, last), axis=-1)


def _groups(x: Float32[Array, "S V"]) -> Float32[Array, "S groups GROUP"]:
    return jnp.pad(x, ((0, 0), (0, -x.shape[1] % GROUP)), constant_values=-jnp.inf).reshape(x.shape[0], -1, GROUP)


def _columns(x: Float32[Array, "S V"]) -> Int32[Array, "1 V"]:
    return jnp.arange(x.shape[1], dtype=jnp.int32)[None, :]


def _at(x: Float32[Array, "S V"], index: Int32[Array, " S"]) -> Float32[Array, " S"]:
    return jnp.take_along_axis(x, index[:, None], axis=1, mode="clip")[:, 0]


def _inverse_temperature(rows: SamplingRows) -> Float32[Array, "S 1"]:
    return 1.0 / jnp.where(_greedy(rows), 1.0, jnp.maximum(rows.temperature, MIN_TEMPERATURE))[:, None]


def _score(x: Float32[Array, "S n"], rows: SamplingRows, ids: Int32[Array, "#S n"]) -> Float32[Array, "S n"]:
    """What the drawn token has most of: logit over temperature, plus noise; in greedy rows the logit alone."""
    return jnp.where(_greedy(rows)[:, None], x, x * _inverse_temperature(rows) + gumbel(rows, ids))


def gumbel(rows: SamplingRows, ids: Int32[Array, "#S n"]) -> Float32[Array, "S n"]:
    """Standard Gumbel noise, a pure function of (seed, sample index, position, id). Between -3.5 and 22.9.

    Two independent 32-bit keys take in the row's words; the column is mixed with the one, then with the other.
    """
    words = (rows.seed_lo, rows.seed_hi, rows.sample_index, rows.position)
    key_a, key_b = jnp.uint32(0x243F6A88), jnp.uint32(0xB7E15162)  # digits of pi and e
    for word in words:
        word = word.astype(jnp.uint32)
        key_a = _mix((key_a ^ word) + jnp.uint32(0x9E3779B9))
        key_b = _mix((key_b + word) ^ jnp.uint32(0x85A308D3))
    bits = _mix(ids.astype(jnp.uint32) * jnp.uint32(0x9E3779B9) + key_a[:, None])
    bits = _mix(bits ^ key_b[:, None])
    # Uniform in (0, 1), finest near 0, where -log(1 - uniform) is smallest and the noise largest.
    uniform = jnp.minimum((bits.astype(jnp.float32) + 0.5) * 2.0**-32, 1 - 2.0**-24)
    series = uniform + uniform * uniform * (0.5 + uniform / 3)  # 1 - uniform would round; cheaper than log1p
    return -jnp.log(jnp.where(uniform < 1e-3, series, -jnp.log(1 - uniform)))


def _mix(x: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """A bijection of 32 bits in which each input bit moves each output bit (multipliers of the "hash prospector")."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x21F0AAAD)
    x = (x ^ (x >> 15)) * jnp.uint32(0xD35A2D97)
    return x ^ (x >> 15)


# ---- min_p, top_k, top_p


class Filters(NamedTuple):
    """The filters of each row, neutral where the row does not ask or is greedy."""

    top_k: Int32[Array, " S"]  # V: off
    top_p: Float32[Array, " S"]
    best: Float32[Array, "S 1"]  # largest logit
    floor: Float32[Array, "S 1"]  # least logit that min_p keeps
    inverse: Float32[Array, "S 1"]  # 1 / temperature

    def weight(self, x: Float32[Array, "S n"]) -> Float32[Array, "S n"]:
        """Probability relative to the likeliest token's."""
        return jnp.exp((x - self.best) * self.inverse)


def _filters(x: Float32[Array, "S V"], rows: SamplingRows) -> Filters:
    asks = _asks(rows, FILTER) & ~_greedy(rows)
    top_k = jnp.where(asks & (rows.top_k > 0), jnp.minimum(rows.top_k, x.shape[1]), x.shape[1])
    best = jnp.max(x, axis=-1, keepdims=True)
    inverse = _inverse_temperature(rows)
    floor = best + jnp.log(jnp.where(asks, rows.min_p, 0.0))[:, None] / inverse
    return Filters(top_k, jnp.where(asks, rows.top_p, 1.0), best, floor, inverse)


def draw_filtered(x: Float32[Array, "S V"], rows: SamplingRows) -> Int32[Array, " S"]:
    """A draw from what min_p, top_k and top_p leave: from the candidates if they surely hold all of it."""
    filters = _filters(x, rows)
    num_rows, vocab = x.shape

    def no_candidates() -> tuple[Int32[Array, " S"], Bool[Array, " S"], Float32[Array, "S 1"]]:
        none = jnp.zeros(num_rows, jnp.int32)
        return none, none != 0, jnp.full((num_rows, 1), -jnp.inf)

    token, sure, kth = lax.cond(
        jnp.any(filters.top_k < vocab), lambda: _draw_candidates(x, rows, filters), no_candidates
    )
    return lax.cond(jnp.all(sure), lambda: token, lambda: _draw_from_all(x, rows, filters, kth))


def _draw_candidates(
    x: Float32[Array, "S V"], rows: SamplingRows, filters: Filters
) -> tuple[Int32[Array, " S"], Bool[Array, " S"], Float32[Array, "S 1"]]:
    """A token per row, whether it is surely the right one, and the top_k-th logit (-inf if out of reach)."""
    size = min(NUM_CANDIDATES, x.shape[1])
    values, ids = top_values(x, size)
    kth = jnp.take_along_axis(values, jnp.minimum(filters.top_k, size)[:, None] - 1, axis=1, mode="clip")
    kth = jnp.where((filters.top_k <= size)[:, None], kth, -jnp.inf)
    kept = values >= jnp.maximum(kth, filters.floor)
    weight = jnp.where(kept, filters.weight(values), 0.0)
    total = jnp.sum(weight, axis=-1, keepdims=True)
    # The weight of all larger values, by comparing all pairs, so that equal values have equal sums.
    larger = values[:, None, :] > values[:, :, None]  # [S, n, n]
    above = jnp.sum(jnp.where(larger, weight[:, None, :], 0.0), axis=-1)
    top_p = filters.top_p[:, None]
    kept &= (above < top_p * total) | (above == 0) | (top_p >= 1)
    token = _least_best(jnp.where(kept, _score(values, rows, ids), -jnp.inf), ids)
    # Not sure: ties of the kth value may lie outside, or another order of summing might decide otherwise.
    inside = (kth[:, 0] > values[:, -1]) | (values[:, -1] == -jnp.inf) | (size == x.shape[1])
    close = jnp.any((jnp.abs(above - top_p * total) < 1e-5 * total) & (top_p < 1), axis=-1)
    return token, _greedy(rows) | (inside & ~close), kth


def _draw_from_all(
    x: Float32[Array, "S V"], rows: SamplingRows, filters: Filters, kth: Float32[Array, "S 1"]
) -> Int32[Array, " S"]:
    """The same from all columns; `kth` holds the thresholds of top_k up to NUM_CANDIDATES."""
    large = ((filters.top_k > NUM_CANDIDATES) & (filters.top_k < x.shape[1]))[:, None]
    kth = lax.cond(jnp.any(large), lambda: jnp.where(large, kth_value(x, filters.top_k)[:, None], kth), lambda: kth)
    kept = x >= jnp.maximum(kth, filters.floor)
    score = jnp.where(kept, _score(x, rows, _columns(x)), -jnp.inf)
    return lax.cond(jnp.any(filters.top_p < 1), lambda: _draw_nucleus(x, score, filters), lambda: argmax(score))


def _draw_nucleus(x: Float32[Array, "S V"], score: Float32[Array, "S V"], filters: Filters) -> Int32[Array, " S"]:
    """The best score among the tokens that top_p keeps: those with less than top_p of all weight above them.

    A score of -inf says that top_k or min_p left the token out.
    """

    def weight_above(low: Float32[Array, " S"]) -> Float32[Array, " S"]:
        return jnp.sum(jnp.where((x > low[:, None]) & (score > -jnp.inf), filters.weight(x), 0.0), axis=-1)

    def again(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        token, low, rejected = state
        new = argmax(jnp.where(x > low[:, None], score, -jnp.inf))
        token = jnp.where(rejected, new, token)
        value = _at(x, token)
        above = weight_above(value)
        # Ends: value grows each time, and nothing is above the largest. False for rows with NaN.
        return token, value, (above >= limit) & (above > 0)

    none = jnp.full(x.shape[0], -jnp.inf)
    limit = jnp.where(filters.top_p < 1, filters.top_p * weight_above(none), jnp.inf)
    start = (jnp.zeros(x.shape[0], jnp.int32), none, jnp.ones(x.shape[0], jnp.bool_))
    return lax.while_loop(lambda state: jnp.any(state[2]), again, start)[0]


def kth_value(x: Float32[Array, "S V"], k: Int32[Array, " S"]) -> Float32[Array, " S"]:
    """A value that exactly the k largest reach, together with all that equal the last of them.

    Bisection on the bits of the floats, which as integers have the order of the floats once those of negative ones
    are flipped. Up to 32 passes; it stops as soon as each row has a value that k reach.
    """
    bits = lax.bitcast_convert_type(x, jnp.int32)
    keys = bits ^ ((bits >> 31) & 0x7FFFFFFF)

    def halve(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        bit, low, count = state
        middle = low + jnp.where(count == k, 0, jnp.left_shift(jnp.int32(1), bit))  # wraps at bit 31, as it should
        reach = jnp.sum(keys >= middle[:, None], axis=-1, dtype=jnp.int32)
        enough = reach >= k
        return bit - 1, jnp.where(enough, middle, low), jnp.where(enough, reach, count)

    rows = x.shape[0]
    start = (jnp.int32(31), jnp.full(rows, -(2**31), jnp.int32), jnp.full(rows, x.shape[1], jnp.int32))
    _, low, _ = lax.while_loop(lambda s: (s[0] >= 0) & jnp.any(s[2] != k), halve, start)
    low = jnp.maximum(low, -0x7F800001)  # the key of -inf: below it are NaNs, which nothing reaches
    return lax.bitcast_convert_type(low ^ ((low >> 31) & 0x7FFFFFFF), jnp.float32)


def top_values(x: Float32[Array, "S V"], k: int) -> tuple[Float32[Array, "S k"], Int32[Array, "S k"]]:
    """The k largest values of each row, largest first, equal ones by id; and their ids.

    The k best columns lie in the k groups with the best maxima: only those are searched.
    """
    num_rows, vocab = x.shape
    if vocab < 4 * k * GROUP:
        return _top_k(x, k)
    groups = _groups(x)
    # In ascending order, so that equal values stay ordered by id.
    best = jnp.sort(_top_k(jnp.max(groups, axis=-1), k)[1], axis=-1)  # [S, k]
    inside = jnp.take_along_axis(groups, best[:, :, None], axis=1, mode="clip").reshape(num_rows, k * GROUP)
    values, index = _top_k(inside, k)
    ids = jnp.take_along_axis(best, index // GROUP, axis=1, mode="clip") * GROUP + index % GROUP
    return values, ids


def _top_k(x: Float32[Array, "S n"], k: int) -> tuple[Float32[Array, "S k"], Int32[Array, "S k"]]:
    """lax.top_k that stays one: behind a barrier no slice of its result can turn it into a full sort (11 ms)."""
    values, index = lax.top_k(x, k)
    # One barrier of both crashes the compiler of jaxlib 0.11.2 for several devices.
    return lax.optimization_barrier(values), lax.optimization_barrier(index)


# ---- logprobs


def token_logprobs(
    logits: Float32[Array, "R V"], targets: Int32[Array, " R"]
) -> tuple[Float32[Array, " R"], Int32[Array, " R"], Int32[Array, "R MAX_LOGPROBS"], Float32[Array, "R MAX_LOGPROBS"]]:
    """Log-probability and rank (1: best; counts values >= the target's) of each target, and the likeliest tokens.

    A target of -1 gives logprob 0 and rank 0. A vocabulary smaller than MAX_LOGPROBS pads with id -1 and -inf.
    """
    x = logits.astype(jnp.float32)
    best = jnp.max(x, axis=-1, keepdims=True)
    log_total = best + jnp.log(jnp.sum(jnp.exp(x - best), axis=-1, keepdims=True))  # [R, 1]
    value = _at(x, jnp.maximum(targets, 0))[:, None]
    rank = jnp.sum(x >= value, axis=-1, dtype=jnp.int32)
    size = min(MAX_LOGPROBS, x.shape[1])
    values, ids = top_values(x, size)
    padding = ((0, 0), (0, MAX_LOGPROBS - size))
    known = targets >= 0
    return (
        jnp.where(known, (value - log_total)[:, 0], 0.0),
        jnp.where(known, rank, 0),
        jnp.pad(ids, padding, constant_values=-1),
        jnp.pad(values - log_total, padding, constant_values=-jnp.inf),
    )


def _no_logprobs(
    num_rows: int,
) -> tuple[Float32[Array, " R"], Int32[Array, " R"], Int32[Array, "R MAX_LOGPROBS"], Float32[Array, "R MAX_LOGPROBS"]]:
    return (
        jnp.zeros(num_rows, jnp.float32),
        jnp.zeros(num_rows, jnp.int32),
        jnp.zeros((num_rows, MAX_LOGPROBS), jnp.int32),
        jnp.zeros((num_rows, MAX_LOGPROBS), jnp.float32),
    )

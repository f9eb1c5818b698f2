"""What the sampler is told: a few numbers per row with every step, larger things once per slot, when it is taken.

Request  ──  request_flags  ──►  SamplingRows.flags    which stages of the sampler the row needs
         ──  pack_extras    ──►  SlotExtras            masks, biases, token history: only such stages read them
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int32, UInt32

from jaxserve.errors import RequestError
from jaxserve.request import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, MAX_LOGIT_BIAS, MAX_STOP_IDS, Request
from jaxserve.shapes import ceil_div

# Bits of SamplingRows.flags: what a row asks for. A stage that no row asks for is skipped.
PENALTIES, ALLOWED, BIAS, BAD_WORDS, MIN_TOKENS, FILTER, LOGPROBS, GRAMMAR, POOLED, MEAN = (1 << i for i in range(10))
SLOT_EDITS = PENALTIES | ALLOWED | BIAS | BAD_WORDS | MIN_TOKENS  # those that change logits by what their slot holds
EDITS = SLOT_EDITS | GRAMMAR  # those that change logits


class SamplingRows(NamedTuple):
    """What the step's rows ask for; a few numbers per row, sent with every step."""

    temperature: Float32[Array, " S"]
    top_p: Float32[Array, " S"]
    top_k: Int32[Array, " S"]  # 0: off
    min_p: Float32[Array, " S"]
    presence_penalty: Float32[Array, " S"]
    frequency_penalty: Float32[Array, " S"]
    repetition_penalty: Float32[Array, " S"]
    seed_lo: UInt32[Array, " S"]
    seed_hi: UInt32[Array, " S"]
    sample_index: Int32[Array, " S"]  # which of the request's n sequences
    position: Int32[Array, " S"]  # of the token to be drawn, in the sequence
    min_tokens_left: Int32[Array, " S"]  # above 0: stop ids are masked
    flags: Int32[Array, " S"]
    prompt_len: Int32[Array, " S"]
    num_tokens: Int32[Array, " S"]  # tokens in the history: prompt and outputs


class SlotExtras(NamedTuple):
    """What is too large to send with every step: kept per slot, read only by stages that a row asks for.

    `pack_extras` makes one slot's rows, without the first axis.
    """

    history: Int32[Array, "slots L"]  # token ids by position
    allowed_mask: UInt32[Array, "slots V/32"]  # bit i % 32 of word i // 32: id i is allowed
    bias_ids: Int32[Array, "slots B"]  # ids are padded with -1
    bias_values: Float32[Array, "slots B"]
    stop_ids: Int32[Array, "slots E"]
    bad_words: Int32[Array, "slots w t"]  # right aligned: the last token is the one to block


def request_flags(request: Request) -> int:
    """The stages that a request needs. Without any of them, `sample(features=False)` serves it."""
    p = request.params
    wanted = {
        PENALTIES: p.presence_penalty != 0 or p.frequency_penalty != 0 or p.repetition_penalty != 1,
        ALLOWED: p.allowed_token_ids is not None,
        BIAS: bool(p.logit_bias),
        BAD_WORDS: bool(request.bad_words_ids),
        MIN_TOKENS: p.min_tokens > 0 and bool(request.stop_ids),
        FILTER: not p.greedy and (p.top_k > 0 or p.top_p < 1 or p.min_p > 0),
        LOGPROBS: p.logprobs is not None,
        GRAMMAR: request.grammar is not None,
        POOLED: request.pooling is not None,
        MEAN: request.pooling == "mean",
    }
    return sum(flag for flag, asked in wanted.items() if asked)


def empty_extras(num_slots: int, max_len: int, vocab: int) -> SlotExtras:
    """Device arrays for `num_slots` slots of at most `max_len` tokens, asking for nothing."""
    return SlotExtras(
        history=jnp.full((num_slots, max_len), -1, jnp.int32),
        allowed_mask=jnp.full((num_slots, ceil_div(vocab, 32)), 0xFFFFFFFF, jnp.uint32),
        bias_ids=jnp.full((num_slots, MAX_LOGIT_BIAS), -1, jnp.int32),
        bias_values=jnp.zeros((num_slots, MAX_LOGIT_BIAS), jnp.float32),
        stop_ids=jnp.full((num_slots, MAX_STOP_IDS), -1, jnp.int32),
        bad_words=jnp.full((num_slots, 2 * MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS), -1, jnp.int32),
    )


def pack_extras(request: Request, vocab: int, max_len: int, token_ids: list[int] | None = None) -> SlotExtras:
    """One slot's rows as numpy arrays. `token_ids`: prompt and outputs so far (a preempted sequence); None: the prompt.

    Raises RequestError if a list is longer than the device keeps.
    """
    p = request.params
    mask = np.full(ceil_div(vocab, 32) * 32, p.allowed_token_ids is None)
    mask[p.allowed_token_ids or []] = True
    bias = p.logit_bias or {}
    bias_values = np.zeros(MAX_LOGIT_BIAS, np.float32)
    bias_values[: len(bias)] = list(bias.values())
    num_words = len(request.bad_words_ids)
    if num_words > 2 * MAX_BAD_WORDS:
        raise RequestError(
            f"bad_words makes at most {2 * MAX_BAD_WORDS} token lists, got {num_words}", param="bad_words"
        )
    bad_words = np.full((2 * MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS), -1, np.int32)
    for i, word in enumerate(request.bad_words_ids):
        bad_words[i] = _padded(word, MAX_BAD_WORD_TOKENS, "bad_words", left=True)
    rows: dict[str, Any] = {
        "history": _padded(request.prompt_token_ids if token_ids is None else token_ids, max_len, "prompt"),
        "allowed_mask": np.packbits(mask, bitorder="little").view("<u4").astype(np.uint32),
        "bias_ids": _padded(list(bias), MAX_LOGIT_BIAS, "logit_bias"),
        "bias_values": bias_values,
        "stop_ids": _padded(request.stop_ids, MAX_STOP_IDS, "stop_token_ids"),
        "bad_words": bad_words,
    }
    return SlotExtras(**rows)


def _padded(ids: list[int], size: int, name: str, left: bool = False) -> np.ndarray:
    """`ids` as i32[size], padded with -1."""
    if len(ids) > size:
        raise RequestError(f"{name} takes at most {size} token ids, got {len(ids)}", param=name)
    out = np.full(size, -1, np.int32)
    out[size - len(ids) if left else 0 :][: len(ids)] = ids
    return out


def set_slot(extras: SlotExtras, slot: Int32[Array, ""], row: SlotExtras) -> SlotExtras:
    """Puts one slot's rows (`pack_extras`) in their place. To be jitted with extras donated."""
    return jax.tree.map(lambda all_slots, one: all_slots.at[slot].set(one), extras, row)

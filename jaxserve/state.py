"""What crosses the edge of the jitted step: its bucket, its one packed input buffer, the state that stays on device.

host  ──  packed i32[n]  ──►  step  ──►  tokens i32[S], logprobs i32[S, C]  ──►  host
                               ▲│
               DeviceState, KV ┘└ donated: the same memory goes in and comes out
"""

from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Float, Float32, Int32

from jaxserve.request import MAX_LOGPROBS, knob_names
from jaxserve.sampling_inputs import SlotExtras
from jaxserve.shapes import Bucket, ceil_div

# Columns of the per-row part of the packed buffer: first what is fixed while a sequence holds its slot ...
FIXED_COLUMNS = ("slot", "flags", "sample_index", "seed_lo", "seed_hi", "prompt_len", "min_tokens")
# ... then what changes each step: position of the row's first token, how many tokens, whether it draws one.
STEP_COLUMNS = ("start", "count", "draw")
KNOBS = {name: kind for kind in ("f32", "i32") for name in knob_names(kind)}  # ... how they travel, between the two
LOGPROB_COLUMNS = 2 + 2 * MAX_LOGPROBS  # logprob, rank, top ids, top logprobs

# The KV pool of one layer; of the axis of two, K comes first, then V. A page lies in one piece, and so does each of its
# heads. `stored` is the head dim, or more: see `Backend.stored_head_dim`. Page 0 is never allocated: padding tokens are
# written there.
KVPages = Float[Array, "P K 2 page stored"]


class DeviceState(NamedTuple):
    """What the device remembers of each slot. The last slot is a trash slot that padding rows point to."""

    last_token: Int32[Array, " slots"]  # the id drawn last: step n+1 starts before the host has seen it
    page_table: Int32[Array, "slots W"]  # page ids by position // page_size
    extras: SlotExtras  # token history, masks, biases: only rows that use such a knob read them


class Forward(NamedTuple):
    """What the forward pass of a step gives: what is drawn from, and what some rows asked for. Stays on the device."""

    logits: Float32[Array, "S V"]
    rows: Int32[Array, "C S"]  # the packed columns of the rows
    pooled: Float32[Array, "S D"]  # of rows that are POOLED: the last token's hidden state, or MEAN: the sum of all
    prompt_logprobs: Int32[Array, "T_p C"] | None  # logprob, rank, top ids, top logprobs


class Drawn(NamedTuple):
    """What a step draws, still on the device. Float columns travel as the bits of int32."""

    tokens: Int32[Array, " S"]  # ids, or NOT_FINITE, NOTHING_ALLOWED
    logprobs: Int32[Array, "S C"] | None  # logprob, rank, top ids, top logprobs


def row_columns() -> tuple[str, ...]:
    """Columns of the per-row part of the packed buffer, in order."""
    return FIXED_COLUMNS + tuple(KNOBS) + STEP_COLUMNS


class PackedLayout:
    """Where each part of a step's input lies in its one int32 buffer. Same code packs (numpy) and unpacks (traced)."""

    def __init__(self, bucket: Bucket, page_size: int):
        self.bucket, self.page_size = bucket, page_size
        self.columns = row_columns()
        # A row needs at most one new page per page_size new tokens, plus one it has just begun.
        self.num_page_writes = bucket.rows + ceil_div(bucket.prefill_tokens, page_size)
        shapes = {
            "rows": (len(self.columns), bucket.rows),
            "tokens": (bucket.tokens,),  # -1: the row's last drawn token, which only the device knows
            "targets": (bucket.prefill_tokens,),  # the next prompt token, where its logprob is wanted; else -1
            "page_writes": (3, self.num_page_writes),  # slot, column, page; padding writes to the trash slot
        }
        self._parts: dict[str, tuple[int, tuple[int, ...]]] = {}
        self.size = 0
        for name, shape in shapes.items():
            self._parts[name] = (self.size, shape)
            self.size += int(np.prod(shape))

    def __str__(self) -> str:
        return f"{self.bucket!r} {self.columns} pages of {self.page_size}"

    def views[A: (np.ndarray, jax.Array)](self, packed: A) -> dict[str, A]:
        """The named parts of a packed buffer: views of a numpy one, slices of a traced one."""
        return {
            name: packed[start : start + int(np.prod(shape))].reshape(shape)
            for name, (start, shape) in self._parts.items()
        }

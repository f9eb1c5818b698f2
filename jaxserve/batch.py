"""Plan -> the one int32 buffer of a step, padded to its bucket. Host side, numpy only.

What is fixed while a sequence holds its slot (knobs, seed, flags) is put into `_fixed[:, slot]` at admission; a step
gathers the columns of its slots and adds where each row starts and how many tokens it has.
"""

from typing import Any

import numpy as np

from jaxserve.plan import Plan, Rows
from jaxserve.sequence import Sequence
from jaxserve.shapes import Bucket
from jaxserve.state import FIXED_COLUMNS, KNOBS, PackedLayout


class Packer:
    """Fills the buffers of one engine's steps."""

    def __init__(self, layouts: dict[Bucket, PackedLayout], num_slots: int):
        self._layouts = layouts
        self._trash_slot = num_slots
        self._fixed = np.zeros((len(FIXED_COLUMNS) + len(KNOBS), num_slots + 1), np.int32)
        self._fixed[0] = np.arange(num_slots + 1)

    def admit(self, seq: Sequence, flags: int) -> None:
        """Notes what the device needs to know of the sequence with every step, under its slot."""
        params, seed = seq.request.params, seq.request.seed or 0
        fixed = (seq.slot, flags, seq.index, _int32(seed), _int32(seed >> 32), seq.prompt_len, params.min_tokens)
        knobs = [_bits(getattr(params, name), kind) for name, kind in KNOBS.items()]
        self._fixed[:, seq.slot] = [*fixed, *knobs]

    def pack(self, plan: Plan, bucket: Bucket) -> np.ndarray:
        """A new buffer every time: on CPU the running step reads this very memory."""
        layout = self._layouts[bucket]
        packed = np.zeros(layout.size, np.int32)
        parts = layout.views(packed)
        rows, tokens = parts["rows"], parts["tokens"]
        rows[0] = self._trash_slot
        self._pack_rows(rows, plan.decode, 0)
        self._pack_rows(rows, plan.prefill, bucket.decode_rows)
        tokens[: len(plan.decode.tokens)] = plan.decode.tokens
        tokens[bucket.decode_rows :][: len(plan.prefill.tokens)] = plan.prefill.tokens
        parts["page_writes"][0] = self._trash_slot
        if plan.page_writes:
            parts["page_writes"][:, : len(plan.page_writes)] = np.array(plan.page_writes, np.int32).T
        self._pack_targets(parts["targets"], plan.prefill)
        return packed

    def _pack_rows(self, rows: np.ndarray, region: Rows, first: int) -> None:
        if not len(region):
            return
        at = slice(first, first + len(region))
        rows[: len(self._fixed), at] = self._fixed[:, region.slots]
        rows[-3:, at] = (region.starts, region.counts, region.samples)

    def _pack_targets(self, targets: np.ndarray, prefill: Rows) -> None:
        """The prompt token after each token of rows that want prompt logprobs; -1 elsewhere."""
        targets[:] = -1
        at = 0
        for seq, start, count in zip(prefill.seqs, prefill.starts, prefill.counts, strict=True):
            if seq.score_prompt:
                following = seq.token_ids[start + 1 : min(start + count + 1, seq.prompt_len)]
                targets[at : at + len(following)] = following
            at += count


def _int32(value: int) -> int:
    """The low 32 bits, as a signed number."""
    return int(np.uint32(value & 0xFFFFFFFF).view(np.int32))


def _bits(value: Any, kind: str) -> int:
    return int(np.float32(value).view(np.int32)) if kind == "f32" else int(value)

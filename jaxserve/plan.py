"""What one step is to compute, and what came of it. Never imports jax.

tokens  [ d0 d1 d2 | p0 p0 p0 p0 | p1 p1 ]
          decode: rows of one token, which draw the next     prefill: rows that are chunks of known tokens
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import NamedTuple

from jaxserve.sequence import Sequence


@dataclass(slots=True)
class Rows:
    """One region of a step, as parallel lists with one entry per row (`tokens`: one per token, in row order)."""

    seqs: list[Sequence] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)  # position of the row's first token: its KV before that is read
    counts: list[int] = field(default_factory=list)
    samples: list[bool] = field(default_factory=list)  # whether the row reaches the end, and draws the next token
    tokens: list[int] = field(default_factory=list)  # input ids; -1: last_token[slot], known to the device only

    def __len__(self) -> int:
        return len(self.seqs)

    def add(self, seq: Sequence, start: int, count: int, sample: bool) -> None:
        self.seqs.append(seq)
        self.slots.append(seq.slot)
        self.starts.append(start)
        self.counts.append(count)
        self.samples.append(sample)

    def remove(self, seq: Sequence) -> tuple[int, int, bool] | None:
        """Takes the sequence's row back: its start, count and sample; None if it has no row here."""
        if seq not in self.seqs:
            return None
        i = self.seqs.index(seq)
        del self.seqs[i], self.slots[i]
        del self.tokens[i : i + 1]  # one per decode row; those of chunks are filled in last, when no row is taken back
        return self.starts.pop(i), self.counts.pop(i), self.samples.pop(i)


@dataclass(slots=True)
class Plan:
    """One step. Rows are numbered decode first, then prefill. Launch it before the next plan() or cancel()."""

    decode: Rows = field(default_factory=Rows)
    prefill: Rows = field(default_factory=Rows)
    admitted: list[Sequence] = field(default_factory=list)  # their slots are to be set up before the launch
    copies: list[tuple[int, int]] = field(default_factory=list)  # (src, dst) pages to copy before the launch
    page_writes: list[tuple[int, int, int]] = field(default_factory=list)  # (slot, column, page) of the page table

    @property
    def num_rows(self) -> int:
        return len(self.decode) + len(self.prefill)

    @property
    def num_tokens(self) -> int:
        return len(self.decode.tokens) + len(self.prefill.tokens)


class Event(NamedTuple):
    """What happened to one sequence: a new token, its end, or both."""

    seq: Sequence
    token: int | None  # None: it ended without a further one
    finish_reason: str | None  # None: goes on; "stop", "length", "abort", "timeout", "error"
    stop_reason: int | None  # the stop id that ended it; None for EOS
    row: int  # of the committed plan, where logprobs are found; -1: it ended outside of commit
    forced: Seq[int] = ()  # tokens after it that the grammar left no choice about
    nothing_allowed: bool = False  # of an "error": the request itself forbids every token

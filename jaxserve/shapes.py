"""The one alphabet of array shapes, and the sizes (buckets) that a step is compiled for.

T packed tokens | S sequences (rows) | N query heads | K kv heads | G = N // K | H head dim | D model | F ffn | V vocab
L layers | P pages in the pool | page = tokens of one page | W width of a page table (pages per row)
"""

from dataclasses import dataclass
from typing import NamedTuple


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


@dataclass(frozen=True, slots=True, order=True)
class Bucket:
    """One size of step, compiled ahead: a region of one-token rows, then a region of prompt chunks.

    tokens  [ d0 d1 d2 .. | chunk of row 0 | chunk of row 1 | .. padding ]
              decode_rows   prefill_tokens, shared by at most prefill_rows chunks
    """

    prefill_tokens: int
    decode_rows: int
    prefill_rows: int

    @property
    def rows(self) -> int:
        return self.decode_rows + self.prefill_rows

    @property
    def tokens(self) -> int:
        return self.decode_rows + self.prefill_tokens

    def holds(self, decode_rows: int, prefill_tokens: int, prefill_rows: int) -> bool:
        return (
            decode_rows <= self.decode_rows
            and prefill_tokens <= self.prefill_tokens
            and prefill_rows <= self.prefill_rows
        )

    def __str__(self) -> str:
        return f"{self.decode_rows} decode rows + {self.prefill_tokens} prefill tokens"


FEW_ROWS, MANY_ROWS = 64, 256  # decode rows


class Limit(NamedTuple):
    """What a step with prompts in it holds."""

    rows: int  # decode rows
    tokens: int  # of prompts


def step_limits(max_num_seqs: int, max_num_batched_tokens: int, max_num_mixed_tokens: int) -> tuple[Limit, ...]:
    """First what a step holds in which no row decodes yet, then what one holds in which some do, fewest rows first.

    Where steps are smaller while rows decode, they are halved once more beside few rows: those cost a step of their
    own almost as much as many do, and next to nothing beside a chunk, so that many small steps are better. (A quarter
    was worse for a burst of requests, and better only in a simulation of a steady stream: docs/benchmarks.md, diary.)
    """
    many, mixed = min(MANY_ROWS, max_num_seqs), min(max_num_mixed_tokens, max_num_batched_tokens)
    limits = [Limit(rows, mixed - rows) for rows in sorted({many, max_num_seqs})]
    most = max_num_batched_tokens - many
    if mixed < max_num_batched_tokens and many > FEW_ROWS and mixed >= 4 * FEW_ROWS:
        limits.insert(0, Limit(FEW_ROWS, min(mixed // 2 - FEW_ROWS, most)))
    return Limit(many, most), *limits


def make_buckets(
    max_num_seqs: int, max_num_batched_tokens: int, max_num_mixed_tokens: int, *, platform: str, fewest_rows: int = 1
) -> tuple[Bucket, ...]:
    """All buckets of an engine, smallest first; the largest holds exactly the token budget.

    On a GPU sizes are spaced closely, because padding costs time there at any size; steps of prompts and decode rows
    have a multiple of 256 tokens, since the tiles of products then leave no gaps. On a TPU memory tiles have 8 rows,
    and up to some 250 tokens a step takes as long as reading the weights does; each program also takes some 50 MB of
    its memory. On a CPU they are few, because compiling is what costs. No bucket has fewer rows than `fewest_rows`.
    """
    limits = step_limits(max_num_seqs, max_num_batched_tokens, max_num_mixed_tokens)
    most = limits[0].tokens
    beside: dict[int, set[int]] = {}  # prompt tokens -> decode rows
    if platform == "gpu":
        rows = [1, 8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512, *range(768, max_num_seqs, 256)]
        sizes, max_chunks, chunk = [64, 256, 512, 1024, 2048, 4096], 64, 8
        pairs = [(64, max_num_seqs), (256, max_num_seqs), (512 - FEW_ROWS, FEW_ROWS)]
        pairs += [(total - max_num_seqs, max_num_seqs) for total in (768, 1024, 2048, 4096)]
    elif platform == "tpu":
        rows = [8, 32, 128, 512, 2048]
        sizes, max_chunks, chunk = [256, 1024, most], 16, 16
        pairs = [(256, max_num_seqs), (1024, max_num_seqs)]
    else:
        rows = [1, 4, 8, 16, 32, *(2**i for i in range(6, 13))]
        sizes, max_chunks, chunk = [32, most], 8, 16  # tokens of a short chunk
        pairs, beside = [], {32: {8}}
    for size, r in pairs:
        if 64 <= size <= limits[-1].tokens:
            beside.setdefault(size, set()).add(r)
    most_chunks = min(max_chunks, max_num_seqs)
    for r, size in limits:
        beside.setdefault(size, set()).add(r)
    rows = {max(r, fewest_rows) for r in rows if r < max_num_seqs} | {max(max_num_seqs, fewest_rows)}
    decode = [Bucket(0, r, 0) for r in sorted(rows)]
    # Prompt chunks alone (a first request should not pay for empty rows), or with room for so many decode rows.
    for size in sizes:
        beside.setdefault(size, set()).add(0)
    mixed = {
        Bucket(size, min(r, max_num_seqs), min(size if (r, size) in limits else max(size // chunk, 1), most_chunks))
        for size, some in beside.items()
        for r in some
        if size <= most
    }
    return tuple(sorted({*decode, *mixed}))


def coarse(buckets: tuple[Bucket, ...]) -> tuple[Bucket, ...]:
    """A few of a fine set that hold all that it holds: for programs that are rarely the whole load."""
    most = max(b.decode_rows for b in buckets)
    mixed = tuple(b for b in buckets if b.prefill_tokens and b.decode_rows)

    def wanted(b: Bucket) -> bool:
        if not b.prefill_tokens:
            return b.decode_rows == most or b.decode_rows >= 8 and b.decode_rows.bit_count() == 1
        if b.decode_rows:
            return True
        above = choose_bucket(mixed, 0, b.prefill_tokens, b.prefill_rows)  # long prompts alone, if that is far larger
        return b.prefill_tokens >= 2048 and above.tokens > 2 * b.tokens

    return tuple(b for b in buckets if wanted(b))


def choose_bucket(buckets: tuple[Bucket, ...], decode_rows: int, prefill_tokens: int, prefill_rows: int) -> Bucket:
    """The cheapest bucket that holds a plan. Raises ValueError if none does: the scheduler's limits are wrong."""
    fitting = [b for b in buckets if b.holds(decode_rows, prefill_tokens, prefill_rows)]
    if not fitting:
        raise ValueError(f"no bucket holds {decode_rows} rows, {prefill_tokens} tokens in {prefill_rows} chunks")
    return min(fitting, key=lambda b: (b.tokens, b.rows))

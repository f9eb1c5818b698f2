"""The one alphabet of array shapes, and the sizes (buckets) that a step is compiled for.

T packed tokens | S sequences (rows) | N query heads | K kv heads | G = N // K | H head dim | D model | F ffn | V vocab
L layers | P pages in the pool | page = tokens of one page | W width of a page table (pages per row)
"""

from dataclasses import dataclass


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


def make_buckets(
    max_num_seqs: int, max_num_batched_tokens: int, *, platform: str, fewest_rows: int = 1
) -> tuple[Bucket, ...]:
    """All buckets of an engine, smallest first; the largest holds exactly the token budget.

    On a GPU sizes are spaced closely, because padding costs time there at any size. On a TPU memory tiles have 8 rows,
    and up to some 250 tokens a step takes as long as reading the weights does; each program also takes some 50 MB of
    its memory. On a CPU they are few, because compiling is what costs. No bucket has fewer rows than `fewest_rows`.
    """
    prefill_budget = max_num_batched_tokens - max_num_seqs
    if platform == "gpu":
        rows = [1, 8, 16, 32, 48, 64, 96, 128, *range(192, max_num_seqs, 64)]
        sizes, max_chunks = [64, 256, 512, 1024, 2048, 4096], 64
        beside = {64: {max_num_seqs}, 512: {max_num_seqs}, 2048: {64, max_num_seqs}}
    elif platform == "tpu":
        rows = [8, 32, 128, 512, 2048]
        sizes, max_chunks = [256, 1024], 16
        beside = {256: {max_num_seqs}, 1024: {max_num_seqs}}
    else:
        rows = [1, 4, 8, 16, 32, *(2**i for i in range(6, 13))]
        sizes, max_chunks = [32], 8
        beside = {32: {8}}
    beside[prefill_budget] = {max_num_seqs}
    rows = {max(r, fewest_rows) for r in rows if r < max_num_seqs} | {max(max_num_seqs, fewest_rows)}
    decode = [Bucket(0, r, 0) for r in sorted(rows)]
    # Prompt chunks alone (a first request should not pay for empty rows), or with room for so many decode rows.
    mixed = [
        Bucket(size, r, min(max(size // 16, 1), max_chunks, max_num_seqs))
        for size in sorted({s for s in sizes if s < prefill_budget} | {prefill_budget})
        for r in {0} | {min(r, max_num_seqs) for r in beside.get(size, ())}
    ]
    return tuple(sorted(decode + mixed))


def coarse(buckets: tuple[Bucket, ...]) -> tuple[Bucket, ...]:
    """A few of a fine set that hold all that it holds: for programs that are rarely the whole load."""
    most = max(b.decode_rows for b in buckets)
    return tuple(
        b
        for b in buckets
        if b.decode_rows == most or not b.prefill_tokens and b.decode_rows >= 8 and b.decode_rows.bit_count() == 1
    )


def choose_bucket(buckets: tuple[Bucket, ...], decode_rows: int, prefill_tokens: int, prefill_rows: int) -> Bucket:
    """The cheapest bucket that holds a plan. Raises ValueError if none does: the scheduler's limits are wrong."""
    fitting = [b for b in buckets if b.holds(decode_rows, prefill_tokens, prefill_rows)]
    if not fitting:
        raise ValueError(f"no bucket holds {decode_rows} rows, {prefill_tokens} tokens in {prefill_rows} chunks")
    return min(fitting, key=lambda b: (b.tokens, b.rows))

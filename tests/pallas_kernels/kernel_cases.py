"""Steps to attend over: random pools with poisoned unused space, and what attention over them must give."""

import itertools
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from jaxserve.pallas_kernels.reference import AttentionInput
from jaxserve.state import KVPages

# Largest difference allowed to the float64 oracle, by the type of q, k and v. Never loosened to make a test pass.
TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2, "float16": 3e-3}


@dataclass(frozen=True)
class Case:
    """One step. `decode`: lengths of decode rows (0: padding); `prefill`: (chunk, length) of prefill rows."""

    decode: tuple[int, ...] = ()
    prefill: tuple[tuple[int, int], ...] = ()
    prefill_padding: int = 0  # tokens after the last chunk
    page_size: int = 16
    kv_heads: int = 2
    group: int = 3
    head_dim: int = 64
    dtype: str = "float32"
    sliding_window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    extra_width: int = 1  # page-table columns that no row uses

    def __str__(self) -> str:
        shown = map(str, self.decode) if len(self.decode) < 10 else (f"{len(self.decode)}rows",)
        parts = [f"d{'-'.join(shown)}"] if self.decode else []
        parts += [f"p{'-'.join(f'{c}of{n}' for c, n in self.prefill)}"] if self.prefill else []
        parts += [f"page{self.page_size}", f"k{self.kv_heads}g{self.group}h{self.head_dim}", self.dtype]
        parts += [f"win{self.sliding_window}"] if self.sliding_window else []
        parts += [f"cap{self.softcap:g}"] if self.softcap else []
        parts += ["sinks"] if self.sinks else []
        return "_".join(parts)

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5

    @property
    def options(self) -> dict:
        how = {"scale": self.scale, "sliding_window": self.sliding_window, "softcap": self.softcap}
        return how | {"sinks": jnp.asarray(self.sink_scores, jnp.float32)} if self.sinks else how

    @property
    def sink_scores(self) -> np.ndarray:
        """f32[N]: from far below what keys score to far above it; the first head has none."""
        scores = np.random.default_rng(1).normal(2, 4, self.kv_heads * self.group).astype(np.float32)
        scores[0] = -np.inf
        return scores


@dataclass
class Step:
    """The arrays of a case. The rows' own K and V are whole (the tokens of this step included)."""

    case: Case
    q: jnp.ndarray  # [T, N, H]
    kv: KVPages
    meta: AttentionInput
    keys: list[np.ndarray]  # per row f64[kv_len, K, H]
    values: list[np.ndarray]

    def new_kv(self) -> tuple[np.ndarray, np.ndarray]:
        """K and V [T, K, H] of this step's tokens; NaN for padding tokens."""
        rows, positions = np.asarray(self.meta.token_rows), np.asarray(self.meta.positions)
        shape = (len(rows), self.case.kv_heads, self.case.head_dim)
        k, v = np.full(shape, np.nan), np.full(shape, np.nan)
        for i, (row, position) in enumerate(zip(rows, positions, strict=True)):
            if row < len(self.keys):
                k[i], v[i] = self.keys[row][position], self.values[row][position]
        return k, v

    def expected(self) -> np.ndarray:
        """f64[T, N, H], one token and one head at a time; 0 for padding tokens."""
        case, rows, positions = self.case, np.asarray(self.meta.token_rows), np.asarray(self.meta.positions)
        q = np.asarray(self.q.astype(jnp.float32), np.float64)
        out = np.zeros_like(q)
        for i, (row, position) in enumerate(zip(rows, positions, strict=True)):
            if row >= len(self.keys):
                continue
            first = 0 if case.sliding_window is None else max(0, position - case.sliding_window + 1)
            for n in range(q.shape[1]):
                k, v = (x[row][first : position + 1, n // case.group] for x in (self.keys, self.values))
                s = k @ q[i, n] * case.scale
                s = s if case.softcap is None else case.softcap * np.tanh(s / case.softcap)
                sink = float(case.sink_scores[n]) if case.sinks else -np.inf
                top = max(s.max(), sink)
                p = np.exp(s - top)
                out[i, n] = (p / (p.sum() + np.exp(sink - top))) @ v
        return out


def make_step(case: Case, *, seed: int = 0) -> Step:
    """Builds a case with permuted pages. What no row owns is NaN: whole pages, the rest of last pages, padding q."""
    rng = np.random.default_rng(seed)
    lens = [*case.decode, *(n for _, n in case.prefill)]
    pages = [-(-n // case.page_size) for n in lens]
    width = max(pages) + case.extra_width
    pool_pages = 1 + sum(pages) + 3
    ids = rng.permutation(np.arange(1, pool_pages))
    dtype = jnp.dtype(case.dtype)
    pool = np.full((pool_pages, case.kv_heads, 2, case.page_size, case.head_dim), np.nan, np.float32)
    table = np.zeros((len(lens), width), np.int32)
    table[:] = ids[-1]  # a poisoned page that no row owns
    keys, values = [], []
    for row, n in enumerate(lens):
        own, ids = ids[: pages[row]], ids[pages[row] :]
        table[row, : len(own)] = own
        kv = rng.normal(size=(2, n, case.kv_heads, case.head_dim)).astype(dtype).astype(np.float32)
        for position in range(n):
            page, place = own[position // case.page_size], position % case.page_size
            pool[page, :, :, place] = kv[:, position].swapaxes(0, 1)
        keys.append(kv[0].astype(np.float64))
        values.append(kv[1].astype(np.float64))
    token_rows, positions, cu = [], [], [0]
    for row, n in enumerate(case.decode):
        token_rows.append(row if n else len(lens))
        positions.append(max(n - 1, 0))
    for i, (chunk, n) in enumerate(case.prefill):
        token_rows += [len(case.decode) + i] * chunk
        positions += range(n - chunk, n)
        cu.append(cu[-1] + chunk)
    token_rows += [len(lens)] * case.prefill_padding
    positions += [0] * case.prefill_padding
    q = rng.normal(size=(len(token_rows), case.kv_heads * case.group, case.head_dim)).astype(np.float32)
    q[np.array(token_rows) == len(lens)] = np.nan
    meta = AttentionInput(
        page_table=jnp.asarray(table),
        kv_lens=jnp.asarray(lens, jnp.int32),
        positions=jnp.asarray(positions, jnp.int32),
        token_rows=jnp.asarray(token_rows, jnp.int32),
        cu_q_lens=jnp.asarray(cu, jnp.int32),
        num_decode_rows=len(case.decode),
    )
    return Step(case, jnp.asarray(q).astype(dtype), jnp.asarray(pool).astype(dtype), meta, keys, values)


def widened(kv: KVPages, width: int) -> KVPages:
    """Pages as a backend has them whose `stored_head_dim` is that."""
    return jnp.pad(kv, [(0, 0)] * 4 + [(0, width - kv.shape[4])])


def narrowed(kv: KVPages, head_dim: int) -> KVPages:
    """What a model has of them."""
    return kv[..., :head_dim]


def error_of(got: jnp.ndarray, step: Step) -> float:
    """Largest difference to the oracle; NaN if anything leaked."""
    return float(np.abs(np.asarray(got.astype(jnp.float32), np.float64) - step.expected()).max())


# What a real GPU is tested on: every page size, group and head dim, lengths around page and tile edges.
_LENGTHS = {page: (page - 1, page, page + 1, 0, 1, 63, 64, 65, 700) for page in (16, 32, 64, 128, 256)}
GPU_MATRIX = [
    Case(decode=_LENGTHS[page], page_size=page, group=group, head_dim=head_dim, dtype="bfloat16")
    for page, (group, head_dim) in itertools.product(_LENGTHS, [(1, 64), (3, 64), (4, 128), (6, 128), (8, 256)])
] + [
    Case(decode=_LENGTHS[page], page_size=page, group=4, head_dim=128, dtype=dtype, **how)
    for page in (16, 64)
    for dtype in ("bfloat16", "float16")
    for how in ({"sliding_window": 70}, {"softcap": 20.0}, {"sliding_window": 128, "softcap": 50.0})
] + [
    Case(decode=(100, 0), prefill=((5, 5), (333, 700)), prefill_padding=6, page_size=64, dtype="bfloat16"),
    Case(decode=tuple(range(1, 200)), page_size=64, head_dim=128, group=4, dtype="bfloat16"),
    Case(decode=(9000,), page_size=64, head_dim=128, group=16, kv_heads=1, dtype="bfloat16"),
    Case(decode=(9000, 0, 70), page_size=64, head_dim=64, group=8, kv_heads=1, dtype="bfloat16", sinks=True),
] + [  # head dims that are stored in wider pages; sinks for each head dim, as in gpt-oss and with all else
    Case(decode=_LENGTHS[page][:-1] + (100,), prefill=((5, 5), (333, 700)), prefill_padding=6, page_size=page,
         head_dim=head_dim, group=group, dtype=dtype, **how)
    for page, head_dim, group, dtype, how in [
        (16, 80, 6, "bfloat16", {}),
        (64, 96, 1, "bfloat16", {"sliding_window": 70}),
        (64, 80, 1, "float16", {"softcap": 20.0, "sinks": True}),
        (128, 96, 3, "bfloat16", {"sinks": True}),
        (64, 64, 8, "bfloat16", {"sliding_window": 128, "sinks": True}),
        (32, 128, 4, "bfloat16", {"softcap": 20.0, "sinks": True}),
        (64, 256, 3, "float16", {"sliding_window": 70, "softcap": 50.0, "sinks": True}),
    ]
] + [  # every group, with decode rows beside prompts
    Case(decode=(63, 0, 64, 65, 1, 700, 129, 16), prefill=((5, 5), (130, 260), (1, 129)), prefill_padding=8,
         page_size=(64, 16)[group % 2], head_dim=(64, 80, 96, 128, 256)[group % 5], group=group,
         dtype=("bfloat16", "float16")[group % 3 // 2], sinks=group % 4 == 3)
    for group in range(1, 17)
]  # fmt: skip

# A quick selection of decode rows: each group and head dim, split and whole rows mixed, batches that fill the card.
DECODE_MATRIX = [
    Case(decode=_LENGTHS[page], page_size=page, group=group, head_dim=head_dim, dtype=dtype, **how)
    for page, group, head_dim, dtype, how in [
        (16, 1, 64, "bfloat16", {}),
        (64, 3, 128, "float16", {}),
        (64, 4, 128, "bfloat16", {}),
        (32, 6, 128, "bfloat16", {"sliding_window": 70}),
        (128, 7, 256, "bfloat16", {}),
        (256, 8, 64, "float16", {"softcap": 20.0}),
        (64, 9, 128, "bfloat16", {}),
        (16, 12, 64, "bfloat16", {"sliding_window": 600, "softcap": 50.0}),
        (64, 16, 256, "bfloat16", {"kv_heads": 1}),
        (64, 8, 64, "bfloat16", {"sliding_window": 128, "sinks": True}),
        (16, 11, 128, "float16", {"softcap": 20.0, "sinks": True}),
    ]
] + [
    Case(decode=(9000,), page_size=64, group=16, head_dim=128, kv_heads=1, dtype="bfloat16"),
    Case(decode=(9000, 0, 300), page_size=16, group=6, head_dim=128, dtype="bfloat16"),
    Case(decode=tuple(range(1, 200)), page_size=64, group=4, head_dim=128, dtype="bfloat16"),
    Case(decode=(5, 0) * 70 + (5000, 64), page_size=64, group=6, head_dim=128, dtype="bfloat16"),
    Case(decode=(64, 1, 0, 200), page_size=64, group=4, head_dim=128, dtype="bfloat16", extra_width=0),
]  # fmt: skip

# The same for prefill: chunks that start anywhere, with and without context, around tile edges, and rows without any.
_CHUNKS = ((5, 5), (333, 700), (1, 129), (0, 0), (64, 64), (130, 131), (7, 260))
PREFILL_MATRIX = [
    Case(prefill=_CHUNKS, prefill_padding=padding, page_size=page, group=group, head_dim=head_dim, dtype=dtype, **how)
    for padding, page, group, head_dim, dtype, how in [
        (6, 64, 4, 128, "bfloat16", {}),
        (0, 16, 6, 128, "bfloat16", {}),
        (140, 64, 1, 64, "float16", {}),
        (9, 16, 8, 64, "bfloat16", {}),
        (4, 64, 3, 256, "bfloat16", {}),
        (4, 16, 7, 256, "float16", {"sliding_window": 200}),
        (6, 32, 4, 128, "float16", {"sliding_window": 70}),
        (6, 128, 4, 128, "bfloat16", {"softcap": 20.0}),
        (6, 256, 2, 64, "float16", {"sliding_window": 128, "softcap": 50.0}),
        (6, 64, 8, 64, "bfloat16", {"sliding_window": 128, "sinks": True}),
        (0, 16, 3, 128, "bfloat16", {"softcap": 20.0, "sinks": True}),
        (3, 64, 2, 256, "float16", {"sinks": True}),
    ]
] + [
    Case(prefill=((1000, 1000),), page_size=64, group=4, head_dim=128, dtype="bfloat16"),
    Case(prefill=((512, 2560), (512, 2000)), page_size=16, group=6, head_dim=128, dtype="bfloat16", kv_heads=1),
    Case(decode=(3,) * 8, prefill=((100, 300), (412, 412)), page_size=64, group=4, head_dim=128, dtype="bfloat16"),
    Case(prefill=((3, 9), (1, 1)), page_size=64, group=4, head_dim=128, dtype="bfloat16"),
]  # fmt: skip

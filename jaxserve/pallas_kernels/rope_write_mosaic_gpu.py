"""Bias, q/k norm, rope and KV write of a layer in one kernel for Hopper GPUs (Mosaic GPU).

What: reads the merged projection [T, (N + 2K) * H] once, as the matmul left it, writes q [T, N, H], and puts k and v
of each token into its place in the pages, which are updated in place.

Why this shape: nothing is computed twice or shared between threads, so there is no shared memory, no barrier and no
TMA; loads go to registers and stores leave from there, and many small CTAs keep the bytes in flight.
  - A token's heads are cut into pieces of 1, 2, 4, .. heads, none across q | k | v, as many heads per piece as threads
    can load 16 bytes each: Llama-8B gives q 16, q 16, k 8, v 8. A piece is two arrays [heads, H/2], one per half of
    the heads, with one layout: the two elements that rope rotates together are in one thread.
  - A head's H/2 columns lie within one warp, so that a norm needs shuffles only. A piece with fewer heads than warps
    is held by several warps, which all store the same values. Where H/2 is no power of 2 (head dim 80 or 96), lanes
    hold that many columns of it as the largest one that divides it, several times: smaller loads.
  - A CTA is one warpgroup with one token and one or all of its pieces: one if there are few tokens (then the card is
    empty, and what counts is how long a thread takes), all if there are many.

    qkv row of a token   | q q q q q q q q | q q q q | k k | v v |      N 12, K 2
    pieces               |        8        |    4    |  2  |  2  |

Float32 inside, rounded once at the end. Padding tokens go to page 0, at the same place: it does not matter who wins.

Diary (H200, jax 0.11.2):
    v1         right in 12 cases on the card; in a step of Qwen-1.5B it replaces bias and rope fusion,
               slice, and two scatters of 2.6 us each: at 8 rows 1.81 ms per step become 1.64. Alone, Llama-8B heads: 8
               tokens 5.3 us, 8,192 55.9 (3.67 TB/s)
"""

# pyright: reportPrivateImportUsage=false, reportAbstractUsage=false

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxserve.pallas_kernels import reference
from jaxserve.pallas_kernels.reference import AttentionInput
from jaxserve.state import KVPages

THREADS, WARP, WARPS = 128, 32, 4  # of a warpgroup
VECTOR_BYTES = 16  # most that a thread loads at once
HEAD_DIM_STEP, MAX_HEAD_DIM = 16, 256
DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True)
class RopeTuning:
    """How heads are spread over CTAs. The defaults: one wave of single pieces; 8 CTAs of 128 threads share an SM."""

    spread_up_to_ctas: int = 132 * 8  # with no more than so many pieces in all, each has a CTA of its own
    pieces_per_cta: int = 4  # at most, otherwise: 16 elements of each piece are in a thread's registers

    def __post_init__(self) -> None:
        if self.spread_up_to_ctas < 0:
            raise ValueError(f"RopeTuning.spread_up_to_ctas must be at least 0, got {self.spread_up_to_ctas}")
        if self.pieces_per_cta < 1:
            raise ValueError(f"RopeTuning.pieces_per_cta must be at least 1, got {self.pieces_per_cta}")


class Piece(NamedTuple):
    """Heads [first, first + heads) of q, k or v. `heads` is a power of 2."""

    part: str  # "q", "k" or "v"
    first: int  # within its part
    heads: int


def make_pieces(num_heads: int, kv_heads: int, head_dim: int, itemsize: int) -> list[Piece]:
    """Cuts the heads of a token, in the order in which they lie in memory."""
    most = THREADS * (VECTOR_BYTES // itemsize) // (head_dim // 2)
    most = 1 << most.bit_length() - 1
    pieces = []
    for part, count in (("q", num_heads), ("k", kv_heads), ("v", kv_heads)):
        first = 0
        while first < count:
            heads = min(most, 1 << (count - first).bit_length() - 1)
            pieces.append(Piece(part, first, heads))
            first += heads
    return pieces


def make_groups(pieces: list[Piece], num_tokens: int, tuning: RopeTuning) -> list[list[Piece]]:
    """The pieces of each of a token's CTAs."""
    size = 1 if num_tokens * len(pieces) <= tuning.spread_up_to_ctas else tuning.pieces_per_cta
    count = -(-len(pieces) // size)
    bounds = [i * len(pieces) // count for i in range(count + 1)]
    return [pieces[begin:end] for begin, end in zip(bounds[:-1], bounds[1:], strict=True)]


def layout_of(heads: int, columns: int) -> Any:
    """Thread layout of a piece's half [heads, columns]: heads over warps, then over the lanes of one.

    Tiled it is [warps, columns / width, rows, width / vector, vector], and each thread has a vector of each width; of
    those dimensions the layout names none that it does not need.
    """
    width = columns & -columns  # the largest power of 2 that divides it
    vector = max(heads * width // THREADS, width // WARP, 1)
    lanes = width // vector  # of a head
    rows = min(heads, WARP // lanes)  # heads of a warp
    warps = heads // rows
    whole = width == columns
    if whole and rows in (1, heads):
        tiles, warp_dim = ((heads, columns), (vector,)), -3
    elif rows == 1:
        tiles, warp_dim = ((heads, columns), (width,), (vector,)), -4
    else:
        tiles, warp_dim = ((heads, columns), (rows, width), (vector,)), -5

    def times(n: int) -> tuple[Any, ...]:
        return (plgpu.Replicated(n),) if n > 1 else ()

    warp_dims = ((warp_dim,) if warps > 1 else ()) + times(WARPS // warps)
    lane_dims = ((-3,) if rows > 1 else ()) + (-2,) + times(WARP // (rows * lanes))
    return plgpu.Layout.TILED(plgpu.Tiling(tiles), warp_dims=warp_dims, lane_dims=lane_dims, vector_dim=-1)


def _load(ref: Any, layout: Any) -> Array:
    """In float32. `optimized` is for shared memory on jax 0.11, and asks for whole cache lines on 0.12."""
    return plgpu.load(ref, layout=layout, optimized=False).astype(jnp.float32)


def _store(ref: Any, value: Array) -> None:
    value = value.astype(ref.dtype)
    if hasattr(plgpu, "store"):  # jax 0.12, where `ref[...] =` asks for whole cache lines
        plgpu.store(ref, value, optimized=False)  # pyright: ignore[reportAttributeAccessIssue]
    else:
        ref[...] = value


def _body(*refs: Any, names: tuple[str, ...], groups: list[list[Piece]], num_heads: int, eps: float):
    """`refs` are, by `names` (the optional ones may be missing):

    qkv [T, N + 2K, H]; cos, sin f32[T, H/2]; pages, offsets i32[T]; bias [N + 2K, H]; q_norm, k_norm [1, H];
    kv [P, K, 2, page, H], written in place; q [T, N, H] out.
    """
    ref = dict(zip(names, refs, strict=True))
    head_dim, kv_heads = ref["qkv"].shape[2], ref["kv"].shape[1]
    half = head_dim // 2
    halves = (pl.ds(0, half), pl.ds(half, half))
    first_of = {"q": 0, "k": num_heads, "v": num_heads + kv_heads}  # head in qkv
    cta, count = lax.axis_index("cta"), jnp.int32(len(groups))
    token, group = lax.div(cta, count), lax.rem(cta, count)

    def load_piece(piece: Piece) -> list[Array]:
        """Both halves, with the bias."""
        layout, heads = layout_of(piece.heads, half), pl.ds(first_of[piece.part] + piece.first, piece.heads)
        parts = [_load(ref["qkv"].at[token, heads, columns], layout) for columns in halves]
        if "bias" in ref:
            parts = [x + _load(ref["bias"].at[heads, i], layout) for x, i in zip(parts, halves, strict=True)]
        return parts

    def turn(a: Array, b: Array, rope: list[Array], weights: list[Array] | None) -> list[Array]:
        """Norm, if there is one, and rope."""
        if weights is not None:
            scale = lax.rsqrt((a * a + b * b).sum(axis=1) * (1.0 / head_dim) + eps)
            scale = lax.broadcast_in_dim(scale, a.shape, [0])
            a, b = a * scale * weights[0], b * scale * weights[1]
        cos, sin = rope
        return [a * cos - b * sin, b * cos + a * sin]

    def run(pieces: list[Piece]) -> None:
        # all loads are on their way before the first store, which the compiler may not move them across
        loaded = [load_piece(piece) for piece in pieces]
        rope, weights = {}, {}  # by heads of a piece, and part: rows f32[heads, H/2] that all heads share
        for n in sorted({piece.heads for piece in pieces if piece.part != "v"}):
            # Pieces of different sizes load the same row into different layouts, and one load, which is what the
            # compiler makes of equal ones, has one layout. The barrier makes them look different.
            own_token, zero = lax.optimization_barrier((token, jnp.int32(0)))

            def load_row(at: Any, n: int = n) -> Array:
                return lax.broadcast_in_dim(_load(at, layout_of(n, half).reduce(0)), (n, half), [1])

            rope[n] = [load_row(ref[name].at[own_token]) for name in ("cos", "sin")]
            for part in ("q", "k"):
                if f"{part}_norm" in ref:
                    weights[part, n] = [load_row(ref[f"{part}_norm"].at[zero, columns]) for columns in halves]
        page, offset = ref["pages"][token], ref["offsets"][token]
        for (part, first, n), parts in zip(pieces, loaded, strict=True):
            parts = parts if part == "v" else turn(*parts, rope[n], weights.get((part, n)))
            heads = pl.ds(first, n)
            for columns, x in zip(halves, parts, strict=True):
                if part == "q":
                    _store(ref["q"].at[token, heads, columns], x)
                else:
                    _store(ref["kv"].at[page, heads, "kv".index(part), offset, columns], x)

    if len(groups) == 1:
        run(groups[0])
        return
    for i, pieces in enumerate(groups):
        pl.when(group == i)(partial(run, pieces))


# One module-level jit, so that every layer of a step shares one traced call, one kernel and one compilation.
@partial(jax.jit, static_argnames=("eps", "tuning"))
def _rope_and_write(
    kv: KVPages, operands: dict[str, Array], *, eps: float, tuning: RopeTuning
) -> tuple[Array, KVPages]:
    """`operands` as `_body` names them, but for kv and q."""
    tokens, heads, head_dim = operands["qkv"].shape
    num_heads, kv_heads, dtype = heads - 2 * kv.shape[1], kv.shape[1], operands["qkv"].dtype
    pieces = make_pieces(num_heads, kv_heads, head_dim, dtype.itemsize)
    groups = make_groups(pieces, tokens, tuning)
    pages = jax.new_ref(kv)
    kernel = plgpu.kernel(
        partial(_body, names=(*operands, "kv", "q"), groups=groups, num_heads=num_heads, eps=eps),
        out_type=jax.ShapeDtypeStruct((tokens, num_heads, head_dim), dtype),
        grid=(tokens * len(groups),),
        grid_names=("cta",),
        kernel_name="rope_write",
        # no thread reads what another wrote, so nobody has to wait
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
    )
    q = kernel(*operands.values(), pages)
    return q, jax.freeze(pages)


def unsupported(*, dtype: str | None, head_dim: int | None) -> str | None:
    """Why the kernel cannot serve a model, or None if it can. What is None is not checked. Any N, K, page will do."""
    if dtype is not None and dtype not in DTYPES:
        return f"it takes {', '.join(DTYPES)}, and the dtype is {dtype}"
    if head_dim is not None and (head_dim % HEAD_DIM_STEP or head_dim > MAX_HEAD_DIM):
        most = f"multiples of {HEAD_DIM_STEP} up to {MAX_HEAD_DIM}"
        return f"it takes head dims that are {most}, and the model's is {head_dim}"
    return None


def rope_and_write(
    qkv: Array,
    kv: KVPages,
    meta: AttentionInput,
    cos: Array,
    sin: Array,
    *,
    num_heads: int,
    bias: Array | None = None,
    q_norm: Array | None = None,
    k_norm: Array | None = None,
    eps: float = 0.0,
    tuning: RopeTuning = RopeTuning(),
) -> tuple[Array, KVPages]:
    """As `reference.rope_and_write`. Donates `kv`. Raises ValueError for shapes that the kernel does not take.

    Pages may be wider than heads; nothing is written beyond those.
    """
    tokens, (_, kv_heads, _, page_size, stored) = qkv.shape[0], kv.shape
    heads, head_dim = num_heads + 2 * kv_heads, 2 * cos.shape[-1]
    name = "rope and KV write on mosaic_gpu"
    for dtype in (qkv.dtype, kv.dtype):
        if reason := unsupported(dtype=str(dtype), head_dim=head_dim):
            raise ValueError(f"{name}: {reason}")
    if qkv.shape[1] != heads * head_dim:
        raise ValueError(f"{name}: qkv must be [T, {heads * head_dim}] for {heads} heads, got {qkv.shape}")
    if stored < head_dim:
        raise ValueError(f"{name}: pages of head dim {head_dim} must be at least as wide, got {stored}")
    if cos.shape != (tokens, head_dim // 2) or sin.shape != cos.shape:
        raise ValueError(f"{name}: cos and sin must be [{tokens}, {head_dim // 2}], got {cos.shape}, {sin.shape}")
    if meta.prepared:
        pages, offsets = meta.prepared.write_pages, meta.prepared.write_offsets
    else:
        pages, offsets = reference.write_slots(meta, page_size)
    operands = {
        "qkv": qkv.reshape(tokens, heads, head_dim),
        "cos": cos, "sin": sin, "pages": pages, "offsets": offsets,
    }  # fmt: skip
    optional = {"bias": (bias, heads), "q_norm": (q_norm, 1), "k_norm": (k_norm, 1)}
    operands |= {key: x.reshape(rows, head_dim) for key, (x, rows) in optional.items() if x is not None}
    return _rope_and_write(kv, operands, eps=eps, tuning=tuning)

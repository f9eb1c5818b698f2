"""What the TPU's attention kernel moves between HBM and the chip, against what it has to: copies are counted in the
interpreter, which runs them as the program orders them."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu
from kernel_cases import TOLERANCE, Case, error_of, make_step

from jaxserve.pallas_kernels import ragged_paged_attention_mosaic_tpu as kernel

MAX_MODEL_LEN = 131072  # whose page table is moved row by row, whatever a row has in it
LENGTHS = (2048, 2049, 2000, 2111)  # whole pages, one token of a page, most of one


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Bytes of each copy that the kernel makes by itself. Pallas moves queries, output and rows of the page table."""
    sizes: list[int] = []

    class Counted(interpret_pallas_call.DMA):
        def execute_read(self) -> None:
            started = self.data is None
            super().execute_read()
            if started:
                sizes.append(self.data_size)

    monkeypatch.setattr(interpret_pallas_call, "DMA", Counted)
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams()):
        yield sizes
    pltpu.reset_tpu_interpret_mode_state()


@pytest.mark.parametrize(
    ("kv_heads", "group", "page", "head_dim", "window"),
    [
        pytest.param(1, 4, 64, 128, None, id="llama-8b on 8 chips"),
        pytest.param(2, 6, 64, 128, None, id="qwen-1.5b"),
        pytest.param(1, 4, 16, 128, None, id="pages of 16"),
        pytest.param(1, 2, 256, 256, None, id="pages of 256"),
        pytest.param(2, 4, 64, 128, 1000, id="window of 1000"),
    ],
)
def test_decode_moves_little_more_than_it_needs(kv_heads, group, page, head_dim, window, copied):
    case = Case(
        decode=LENGTHS, kv_heads=kv_heads, group=group, page_size=page, head_dim=head_dim, dtype="bfloat16",
        sliding_window=window, extra_width=(MAX_MODEL_LEN - max(LENGTHS)) // page,
    )  # fmt: skip
    step, tuning = make_step(case), kernel.TUNING["v5e"]

    def run(q, kv, meta):
        return kernel.attention(q, kv, kernel.prepare(meta, page, tuning=tuning), tuning=tuning, **case.options)

    got = jax.jit(run)(step.q, step.kv, step.meta)
    assert error_of(got, step) < TOLERANCE["bfloat16"]
    visits = 4 * len(kernel.COLUMN) * (len(LENGTHS) + 1)
    table = 2 * 4 * step.meta.page_table.shape[1] * len(LENGTHS)  # a row for its visit, and for the one before
    moved = sum(copied) + step.q.nbytes + got.nbytes + visits + table
    token_bytes = 2 * kv_heads * head_dim * jnp.dtype(case.dtype).itemsize
    needed = sum(min(n, window or n) for n in LENGTHS) * token_bytes + step.q.nbytes + got.nbytes
    pages = sum(-(-n // page) - (max(0, n - window) // page if window else 0) for n in LENGTHS)
    assert copied == [page * token_bytes] * pages  # each page once, K and V of all heads together
    assert 1 < moved / needed < 1.1

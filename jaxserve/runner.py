"""Owns the device: weights, KV pages, per-slot state, and the compiled steps. launch() a plan, collect() its results.

launch(plan) ── packs one int32 buffer, calls the bucket's executable; returns at once
collect(launched) ── waits for the drawn ids (and logprobs, if a row wants them)
"""

import enum
import functools
import logging
import operator
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from jaxserve import step_cache
from jaxserve.batch import Packer
from jaxserve.config import EngineConfig, cache_dir
from jaxserve.models.loading import LoadedModel
from jaxserve.paging.kv_cache import GiB, PoolSize, size_pool
from jaxserve.pallas_kernels.ops import Backend
from jaxserve.pallas_kernels.reference import KVPages
from jaxserve.plan import Plan
from jaxserve.sampling_inputs import (
    GRAMMAR,
    LOGPROBS,
    POOLED,
    SLOT_EDITS,
    empty_extras,
    pack_extras,
    request_flags,
    set_slot,
)
from jaxserve.shapes import Bucket, ceil_div, choose_bucket, coarse
from jaxserve.state import LOGPROB_COLUMNS, DeviceState, Drawn, Forward, PackedLayout, row_columns
from jaxserve.step import build_draw, build_forward, build_plain

log = logging.getLogger(__name__)

COPIES_AT_ONCE = 16  # page copies of one call
PAGE_WRITES_AT_ONCE = 1024  # page-table entries of one call, where a step's own room is too small
CPU_KV_BYTES = 2 * GiB
PROFILE_PAGES = 64  # pool of the program that the largest step's memory is read off
HEADROOM_BYTES = GiB // 2  # for the runtime: autotuning, graphs, fragments
# What may be part of a CUDA graph: XLA's defaults, and loops. A conditional with a loop in it that is not in a graph
# makes the host wait for the device.
GRAPH_PARTS = "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE"
# From so many tokens on products are left to cuBLAS. It won all of them at 256 rows; XLA compiles and times dozens of
# kernels of its own for each before it agrees.
CUBLAS_TOKENS = 512
COMPILE_STACK_BYTES = 64 * 2**20  # XLA recurses deeply on unrolled layers


class Kind(enum.Enum):
    """The programs that steps are made of; see step.py. PLAIN and FORWARD exist per bucket (FORWARD where there is
    PLAIN too: per coarse bucket), DRAW per number of rows.
    """

    PLAIN = "plain"
    FORWARD = "forward"
    DRAW = "draw"


Key = tuple[Kind, Bucket | int]


@dataclass(slots=True)
class Program:
    """A compiled program and the buffers of its input and of small results, which stay at their addresses.

    On a GPU a program is one CUDA graph. If an address differs from the last run's, temporary memory included, XLA
    updates every node before it launches the graph. That took 1 ms of the host's time for Qwen-1.5B at batch 1 and 3 ms
    at 256, and 3 ms more of a Llama-8B one of 64 rows that hands its logits on (jax 0.11.2, H200). So there are two of
    each, which take turns: one runs while the next is launched. Only forward passes with prompts in them have one copy,
    and their results, hundreds of megabytes, are allocated for each run.
    """

    run: Any
    put: Any  # copies what the host sends into `sent`
    sent: jax.Array
    held: list[jax.Array]  # memory of the results; empty: allocated for each run
    outputs: Any  # tree of what it returns: what it updates, results


class Signature(NamedTuple):
    """Shapes of what a program takes. It returns what it updates, in the same memory, and its results."""

    weights: tuple[Any, ...]
    updated: tuple[Any, ...]
    held: tuple[Any, ...]  # memory that results are written to: all of them or, (), none; then there are two programs
    rest: tuple[Any, ...]  # the last one comes from the host
    results: tuple[Any, ...]


@dataclass(slots=True)
class Launched:
    """A step on its way: what was planned, and where its results will appear."""

    plan: Plan
    bucket: Bucket
    asked: int  # flags of all rows
    scored: bool  # some row wants its prompt's logprobs
    forward: Forward | None = None  # None: a plain step
    drawn: Drawn | None = None  # None: draw() is still to be called


@dataclass(slots=True)
class Collected:
    """A step's results on the host, without padding: rows as the plan numbers them."""

    tokens: np.ndarray  # i32[rows]
    logprobs: np.ndarray | None  # i32[rows, C]: logprob, rank, top ids, top logprobs; floats as their bits
    prompt_logprobs: np.ndarray | None  # i32[tokens of the prefill region, C]
    pooled: np.ndarray | None  # f32[rows, D]


class Runner:
    """Everything on the device. Host code never touches device arrays except through this class."""

    def __init__(
        self, config: EngineConfig, loaded: LoadedModel, backend: Backend, buckets: tuple[Bucket, ...], page_size: int,
        max_num_seqs: int,
    ):  # fmt: skip
        self._loaded, self._model, self._backend = loaded, loaded.config, backend
        self._weights = jax.tree.leaves(loaded.params)
        self._dtype = self._weights[0].dtype
        self._num_slots = max_num_seqs + 1  # the last one is the trash slot
        # On a CPU a stage that no row needs costs nothing (lax.cond), so that no row needs a plain step.
        self._buckets = {Kind.FORWARD: buckets}
        if backend.platform != "cpu":
            self._buckets = {Kind.PLAIN: buckets, Kind.FORWARD: coarse(buckets)}
        self._layouts = {b: PackedLayout(b, page_size) for b in buckets}
        self._packer = Packer(self._layouts, max_num_seqs)
        self._programs: dict[Key, list[Program]] = {}  # the last one that ran comes first
        self._compiles = _CompileCounter()
        self._flags = [0] * self._num_slots
        self._page_size = page_size
        self.pool = self._size_pool(config)
        log.info("%s", self.pool)
        self._sizes = (self.pool.num_pages, self.pool.max_model_len)
        if not config.enforce_eager:
            self._warm_up()  # while memory is free: XLA tries kernels out
        self._make_kv = jax.jit(lambda: self._new_kv(self.pool.num_pages)).lower().compile()
        self._kv = self._make_kv()
        self._state = jax.jit(self._new_state, static_argnums=0)(self.pool.max_model_len)
        extras = self._state.extras
        one_slot = jax.tree.map(lambda a: np.zeros(a.shape[1:], a.dtype), extras)
        self._set_slot = _compiled(set_slot, extras, np.int32(0), one_slot)
        self._copy_pages = _compiled(_copy_pages, self._kv, np.zeros((COPIES_AT_ONCE, 2), np.int32))
        self._write_pages = _compiled(
            _write_pages, self._state.page_table, np.zeros((PAGE_WRITES_AT_ONCE, 3), np.int32)
        )

    # ------------------------------------------------------------------------------------------------- memory

    def _size_pool(self, config: EngineConfig) -> PoolSize:
        model = self._model
        wanted = model.max_model_len if config.max_model_len is None else config.max_model_len
        bytes_per_token = model.kv_bytes_per_token(self._dtype.itemsize) // model.head_dim
        return size_pool(
            config.kv_cache_memory_bytes or self._free_bytes(),
            page_size=self._page_size,
            bytes_per_token=bytes_per_token * self._backend.stored_head_dim(model.head_dim),
            max_model_len=wanted if isinstance(wanted, int) else None,
            model_max_len=model.max_model_len,
        )

    def _free_bytes(self) -> int:
        """What weights, slots and the largest step leave of the device's share. On CPU: fixed, or a quarter of RAM."""
        device = jax.local_devices()[0]
        stats = device.memory_stats()
        if device.platform == "cpu" or not stats:
            return min(CPU_KV_BYTES, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4)
        share, weights, step = stats["bytes_limit"], stats["bytes_in_use"], self._profile_step_bytes()
        log.info(
            "device memory: %.2f GiB share, %.2f GiB weights, %.2f GiB slots and largest step",
            share / GiB, weights / GiB, step / GiB,
        )  # fmt: skip
        return share - weights - step - HEADROOM_BYTES

    def _profile_step_bytes(self) -> int:
        """Bytes that the slots and the largest step need: read off its compiled programs."""
        bucket = max(self._buckets[Kind.FORWARD], key=lambda b: b.tokens)
        sizes = PROFILE_PAGES, self._model.max_model_len
        state = jax.eval_shape(lambda: self._new_state(self._model.max_model_len))
        size = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(state))
        for key in ((Kind.FORWARD, bucket), (Kind.DRAW, bucket.rows)):
            memory = self._lower(key, *sizes).compile(self._compiler_options(key)).memory_analysis()
            results = memory.output_size_in_bytes - memory.alias_size_in_bytes
            size += 2 * (memory.temp_size_in_bytes + results)  # while one runs the next one has its memory
        for key in self.program_keys():
            size += 2 * sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(self._signature(key, *sizes).held))
        return size

    def free(self, *, keep_weights: bool) -> None:
        """Frees KV pages and weights on the device; `keep_weights`: they are in host memory then. No step may run."""
        for array in jax.tree.leaves(self._kv):
            array.delete()
        for i, weight in enumerate(self._weights):
            if isinstance(weight, jax.Array):
                self._weights[i] = np.array(weight) if keep_weights else None
                weight.delete()
            elif not keep_weights:
                self._weights[i] = None

    def restore_kv_cache(self) -> None:
        self._kv = self._make_kv()

    def restore_weights(self, load: Callable[[], LoadedModel]) -> None:
        """Weights go back to the device: from host memory or, if they were dropped, what `load` loads."""
        if any(weight is None for weight in self._weights):
            self._loaded = load()
            self._weights = jax.tree.leaves(self._loaded.params)
        else:
            places = [array.sharding for array in jax.tree.leaves(self._loaded.params)]
            self._weights = jax.block_until_ready(jax.device_put(self._weights, places))

    def _new_kv(self, num_pages: int) -> list[KVPages]:
        head_dim = self._backend.stored_head_dim(self._model.head_dim)
        shape = (num_pages, self._model.num_kv_heads, self._page_size, head_dim)
        return [
            KVPages(jnp.zeros(shape, self._dtype), jnp.zeros(shape, self._dtype)) for _ in range(self._model.num_layers)
        ]

    def _new_state(self, max_model_len: int) -> DeviceState:
        return DeviceState(
            last_token=jnp.zeros(self._num_slots, jnp.int32),
            page_table=jnp.zeros((self._num_slots, ceil_div(max_model_len, self._page_size)), jnp.int32),
            extras=empty_extras(self._num_slots, max_model_len, self._model.vocab_size),
        )

    # ------------------------------------------------------------------------------------------------ compile

    def _warm_up(self) -> None:
        """Compiles every program: lowered in a fixed order (stable cache keys), compiled side by side."""
        started = time.monotonic()
        keys = self.program_keys()
        log.info("compiling %d programs: about a minute the first time, then kept in %s", len(keys), cache_dir())
        threading.stack_size(COMPILE_STACK_BYTES)
        with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
            futures = [(key, pool.submit(self._compile, key, self._lower(key, *self._sizes))) for key in keys]
            threading.stack_size(0)
            for key, future in tqdm(futures, desc="compiling steps", unit="program"):
                self._programs[key] = future.result()
        log.info(
            "compiled %d programs of %d sizes in %.1f s", len(keys), len(self._layouts), time.monotonic() - started
        )
        self._compiles.counting = True

    def program_keys(self) -> list[Key]:
        """Every program that a step may need, in a fixed order."""
        keys: list[Key] = [(kind, bucket) for kind, buckets in self._buckets.items() for bucket in buckets]
        return keys + [(Kind.DRAW, rows) for rows in sorted({b.rows for b in self._buckets[Kind.FORWARD]})]

    def _lower(self, key: Key, num_pages: int, max_model_len: int) -> Any:
        function, shapes, donated = self.flat(key, num_pages, max_model_len)
        what = self._layouts[key[1]] if isinstance(key[1], Bucket) else key[1]
        name = f"{self._model} {key[0]} {what} {self._backend.name}"
        return step_cache.lower(function, shapes, donated=donated, name=name)

    def flat(self, key: Key, num_pages: int, max_model_len: int) -> tuple[Callable[..., list[jax.Array]], list, range]:
        """A program as a function of flat arrays, in this order: weights; what it updates and what holds its results
        (both donated, both returned); the rest. Also the shapes of its arguments, and which are donated.
        """
        kind, size = key
        graphdef, backend = self._loaded.graphdef, self._backend
        if isinstance(size, int):
            function = build_draw()
        else:
            build = build_plain if kind is Kind.PLAIN else build_forward
            function = build(graphdef, self._layouts[size], backend)
        weights, updated, held, rest, _ = self._signature(key, num_pages, max_model_len)
        shapes, tree = jax.tree.flatten((weights, updated, held, rest))
        shapes = [jax.ShapeDtypeStruct(s.shape, s.dtype) for s in shapes]

        def flat(*leaves: jax.Array) -> list[jax.Array]:
            weights, updated, _, rest = jax.tree.unflatten(tree, leaves)
            return jax.tree.leaves(function(*weights, *updated, *rest))

        begin = len(jax.tree.leaves(weights))
        return flat, shapes, range(begin, begin + len(jax.tree.leaves((updated, held))))

    def _signature(self, key: Key, num_pages: int, max_model_len: int) -> "Signature":
        kind, size = key
        model, i32, f32 = self._model, jnp.int32, jnp.float32
        state = jax.eval_shape(lambda: self._new_state(max_model_len))
        num_rows = size if isinstance(size, int) else size.rows

        def array(*shape: int, dtype: Any = i32) -> Any:
            return jax.ShapeDtypeStruct(shape, dtype)

        takes_turns = self._backend.platform == "gpu"
        logits, columns = array(num_rows, model.vocab_size, dtype=f32), array(len(row_columns()), num_rows)
        tokens = array(num_rows)
        if isinstance(size, int):
            masks = array(num_rows, ceil_div(model.vocab_size, 32))
            drawn = Drawn(tokens, array(num_rows, LOGPROB_COLUMNS))
            updated = (state.last_token, state.extras)
            return Signature((), updated, (drawn,) if takes_turns else (), (logits, columns, masks), (drawn,))
        weights, packed = (self._loaded.params,), array(self._layouts[size].size)
        kv = jax.eval_shape(lambda: self._new_kv(num_pages))
        if kind is Kind.PLAIN:
            updated = (kv, state.page_table, state.last_token)
            return Signature(weights, updated, (tokens,) if takes_turns else (), (packed,), (tokens,))
        scored = array(size.prefill_tokens, LOGPROB_COLUMNS) if size.prefill_tokens else None
        forward = Forward(logits, columns, array(num_rows, model.hidden_size, dtype=f32), scored)
        held = (forward,) if takes_turns and not size.prefill_tokens else ()
        return Signature(weights, (kv, state.page_table), held, (state.last_token, packed), (forward,))

    def _compile(self, key: Key, lowered: Any) -> list[Program]:
        signature = self._signature(key, *self._sizes)
        sent, held = signature.rest[-1], jax.tree.leaves(signature.held)
        fresh = jax.jit(lambda: [jnp.zeros(s.shape, s.dtype) for s in (sent, *held)])
        put = _compiled(lambda _, new: jnp.copy(new), sent, np.zeros(sent.shape, np.int32))
        outputs = jax.tree.structure((signature.updated, signature.results))
        options = self._compiler_options(key)
        runs = [lowered.compile(options) for _ in range(2 if held else 1)]  # the second: out of the compile cache
        return [Program(run, put, first, others, outputs) for run in runs for first, *others in (fresh(),)]

    def _compiler_options(self, key: Key) -> dict[str, Any]:
        kind, size = key
        options: dict[str, Any] = {}
        if self._backend.platform == "gpu":
            if kind is not Kind.PLAIN:
                options["xla_gpu_enable_command_buffer"] = GRAPH_PARTS
            if isinstance(size, Bucket) and size.tokens >= CUBLAS_TOKENS:
                options["xla_gpu_enable_triton_gemm"] = False
        return options

    def _program(self, kind: Kind, size: Bucket | int) -> Program:
        """The program whose turn it is; compiled now only under --enforce-eager."""
        key = (kind, size)
        if key not in self._programs:
            self._programs[key] = self._compile(key, self._lower(key, *self._sizes))
        self._programs[key].reverse()
        return self._programs[key][0]

    @staticmethod
    def _run(
        program: Program, weights: list[jax.Array], updated: Any, *rest: Any, sent: np.ndarray | None
    ) -> tuple[Any, Any]:
        """Starts a program. Returns what it updated, and its results. sent: None if it will not look at that."""
        if sent is not None:
            program.sent = program.put(program.sent, sent)
        mine = *jax.tree.leaves(updated), *program.held
        returned = program.run(*weights, *mine, *rest, program.sent)
        program.held = returned[len(returned) - len(program.held) :]
        return jax.tree.unflatten(program.outputs, returned)

    @property
    def compiles_after_warmup(self) -> int:
        return self._compiles.count

    # --------------------------------------------------------------------------------------------------- steps

    def launch(self, plan: Plan) -> Launched:
        """Starts a step and returns at once. Collect its results before the launch after the next.

        If a row has a grammar, only the forward pass is started: draw() does the rest.
        """
        with self._compiles:
            self._set_up_slots(plan)
            if plan.copies:
                self._copy(plan.copies)
            slots = plan.decode.slots + plan.prefill.slots
            asked = functools.reduce(operator.or_, (self._flags[slot] for slot in slots))
            scored = any(seq.score_prompt for seq in plan.prefill.seqs)
            kind = Kind.FORWARD if asked or scored or Kind.PLAIN not in self._buckets else Kind.PLAIN
            bucket = choose_bucket(self._buckets[kind], len(plan.decode), len(plan.prefill.tokens), len(plan.prefill))
            room = self._layouts[bucket].num_page_writes
            if len(plan.page_writes) > room:  # long cached prompts were admitted
                self._write_page_table(plan.page_writes[room:])
                plan.page_writes = plan.page_writes[:room]
            launched = Launched(plan, bucket, asked, scored)
            packed = self._packer.pack(plan, bucket)
            if kind is Kind.PLAIN:
                self._launch_plain(launched, packed)
                return launched
            state = self._state
            program, updated = self._program(Kind.FORWARD, bucket), (self._kv, state.page_table)
            updated, (forward,) = self._run(program, self._weights, updated, state.last_token, sent=packed)
            self._kv, self._state = updated[0], state._replace(page_table=updated[1])
        launched.forward = forward
        if asked & POOLED:
            forward.pooled.copy_to_host_async()
        if scored:
            forward.prompt_logprobs.copy_to_host_async()
        if not asked & GRAMMAR:
            self.draw(launched)
        return launched

    def _launch_plain(self, launched: Launched, packed: np.ndarray) -> None:
        program, state = self._program(Kind.PLAIN, launched.bucket), self._state
        updated = (self._kv, state.page_table, state.last_token)
        (self._kv, *updated), (tokens,) = self._run(program, self._weights, updated, sent=packed)
        self._state = state._replace(page_table=updated[0], last_token=updated[1])
        tokens.copy_to_host_async()
        launched.drawn = Drawn(tokens, None)

    def draw(self, launched: Launched, masks: dict[int, np.ndarray] | None = None) -> None:
        """Draws the tokens of a step that launch() has left at the forward pass.

        masks: row of the plan -> i32[V/32], bit i % 32 of word i // 32: id i may follow. Other rows: any. None: no
        row has a grammar.
        """
        forward, bucket = launched.forward, launched.bucket
        assert forward is not None
        with self._compiles:
            program, state, sent = self._program(Kind.DRAW, bucket.rows), self._state, None
            if masks is not None:
                sent = np.full(program.sent.shape, -1, np.int32)
                for row, mask in masks.items():
                    sent[self._device_row(launched, row)] = mask
            updated = (state.last_token, state.extras)
            updated, (drawn,) = self._run(program, [], updated, forward.logits, forward.rows, sent=sent)
            self._state = state._replace(last_token=updated[0], extras=updated[1])
        launched.drawn = Drawn(drawn.tokens, drawn.logprobs if launched.asked & LOGPROBS else None)
        for array in launched.drawn:  # only what some row asked for
            if array is not None:
                array.copy_to_host_async()

    @staticmethod
    def _device_row(launched: Launched, row: int) -> int:
        num_decode = len(launched.plan.decode)
        return row if row < num_decode else launched.bucket.decode_rows + row - num_decode

    def collect(self, launched: Launched) -> Collected:
        """Waits for a step's results."""
        plan, bucket, drawn, forward = launched.plan, launched.bucket, launched.drawn, launched.forward
        assert drawn is not None, "draw() was called"
        at = np.r_[0 : len(plan.decode), bucket.decode_rows : bucket.decode_rows + len(plan.prefill)]
        return Collected(
            np.asarray(drawn.tokens)[at],
            None if drawn.logprobs is None else np.asarray(drawn.logprobs)[at],
            np.asarray(forward.prompt_logprobs) if forward and launched.scored else None,
            np.asarray(forward.pooled)[at] if forward and launched.asked & POOLED else None,
        )

    def _set_up_slots(self, plan: Plan) -> None:
        for seq in plan.admitted:
            flags = self._flags[seq.slot] = request_flags(seq.request)
            self._packer.admit(seq, flags)
            if flags & SLOT_EDITS:
                row = pack_extras(seq.request, self._model.vocab_size, self.pool.max_model_len, seq.token_ids)
                self._state = self._state._replace(extras=self._set_slot(self._state.extras, np.int32(seq.slot), row))

    def _copy(self, copies: list[tuple[int, int]]) -> None:
        """Copies pages, source to destination, in all layers."""
        for at in range(0, len(copies), COPIES_AT_ONCE):
            pairs = np.zeros((COPIES_AT_ONCE, 2), np.int32)  # the rest copies the trash page to itself
            pairs[: len(copies[at : at + COPIES_AT_ONCE])] = copies[at : at + COPIES_AT_ONCE]
            self._kv = self._copy_pages(self._kv, pairs)

    def _write_page_table(self, writes: list[tuple[int, int, int]]) -> None:
        for at in range(0, len(writes), PAGE_WRITES_AT_ONCE):
            block = np.full((PAGE_WRITES_AT_ONCE, 3), (self._num_slots - 1, 0, 0), np.int32)
            block[: len(writes[at : at + PAGE_WRITES_AT_ONCE])] = writes[at : at + PAGE_WRITES_AT_ONCE]
            self._state = self._state._replace(page_table=self._write_pages(self._state.page_table, block))


class _CompileCounter:
    """Counts XLA compilations while a launch is under way, once `counting` is set. A context around launches."""

    def __init__(self) -> None:
        self.counting = False
        self.count = 0
        self._launching = False
        jax.monitoring.register_event_duration_secs_listener(self._on_event)

    def __enter__(self) -> None:
        self._launching = True

    def __exit__(self, *_: object) -> None:
        self._launching = False

    def _on_event(self, event: str, duration_secs: float, **_: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration" and self.counting and self._launching:
            self.count += 1
            log.warning("a program was compiled after warm-up, in %.2f s", duration_secs)


def _compiled(function: Any, donated: Any, *others: Any) -> Any:
    """A small call, compiled ahead for arguments of these shapes: it never compiles again, wherever they lie."""
    return jax.jit(function, donate_argnums=0, keep_unused=True).lower(donated, *others).compile()


def _copy_pages(kv: list[KVPages], pairs: jax.Array) -> list[KVPages]:
    """Donates kv. pairs i32[n, 2]: source, destination."""
    return jax.tree.map(lambda pages: pages.at[pairs[:, 1]].set(pages[pairs[:, 0]]), kv)


def _write_pages(page_table: jax.Array, writes: jax.Array) -> jax.Array:
    """Donates page_table. writes i32[n, 3]: slot, column, page."""
    return page_table.at[writes[:, 0], writes[:, 1]].set(writes[:, 2])

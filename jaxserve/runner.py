"""Owns the device: weights, KV pages, per-slot state, compiled programs. launch() a plan, collect() its results.

launch(plan) ── packs one int32 buffer, calls the bucket's executable; returns at once
collect(launched) ── waits for the drawn ids (and logprobs, if a row wants them)
"""

import contextlib
import functools
import itertools
import logging
import operator
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from tqdm import tqdm

from jaxserve.batch import Packer
from jaxserve.config import EngineConfig, cache_dir, size_text
from jaxserve.device_memory import AFTER_SLEEP, SMALLER_STEPS, room_for, smaller_kv_cache
from jaxserve.models.loading import LoadedModel
from jaxserve.paging.kv_cache import GiB
from jaxserve.plan import Plan
from jaxserve.programs import LOOP_STEPS, Key, Kind, Programs, copies
from jaxserve.sampling_inputs import (
    GRAMMAR,
    LOGPROBS,
    POOLED,
    SLOT_EDITS,
    pack_extras,
    request_flags,
    set_slot,
)
from jaxserve.shapes import Bucket, choose_bucket
from jaxserve.sharding import KV_PAGES, WHOLE, arrays, on_each, place
from jaxserve.state import Drawn, Forward, KVPages
from jaxserve.tracers import Tracers

log = logging.getLogger(__name__)

COPIES_AT_ONCE = 16  # page copies of one call
PAGE_WRITES_AT_ONCE = 1024  # page-table entries of one call, where a step's own room is too small
CPU_KV_BYTES = 2 * GiB
MEMORY_PERIOD_S = 0.1  # devices are asked for their peak at most this often: stats are wanted with every step


@dataclass(slots=True)
class Program:
    """A compiled program and the buffers of its input and of small results, which stay at their addresses.

    On a GPU a program is one CUDA graph, and XLA updates the nodes that see an address other than the last run's
    before it launches that. Results that lay elsewhere each time cost 3 ms of a Llama-8B step of 64 rows that hands
    its logits on (jax 0.11.2, H200). So forward passes and draws have two copies, which take turns: one runs while
    the next is launched. Only forward passes with prompts in them have one, and their results, hundreds of megabytes,
    are allocated for each run. Plain steps, of which three may be on their way, have one graph, three results that
    take turns, and their input wherever it arrives: updating the few nodes that see those takes 0.1 ms of the host's
    time, where copying the input to where it was took 0.3.
    """

    run: Any
    outputs: Any  # tree of what it returns: what it updates, results
    make_buffers: Any  # `sent` and `held`, for allocate()
    put: Any | None  # copies what the host sends into `sent`; None: it need not be there
    sent: Any = None
    held: list[jax.Array] = field(default_factory=list)  # memory of the results; empty: allocated for each run

    def allocate(self) -> None:
        self.sent, self.held = jax.block_until_ready(self.make_buffers())


@dataclass(slots=True)
class Launched:
    """A step on its way, or a loop of steps: what was planned, and where its results will appear."""

    plans: list[Plan]  # of a loop: LOOP_STEPS, all of the same decode rows
    bucket: Bucket
    asked: int  # flags of all rows
    scored: bool  # some row wants its prompt's logprobs
    awaits_masks: bool  # draw() is still to be called
    plain: bool  # one program does it all
    begun: threading.Event = field(default_factory=threading.Event)  # the device's thread is at work, in XLA
    started: Future[None] | None = None  # done when all is on its way: then the results are
    forward: Forward | None = None  # None: a plain step
    drawn: Drawn | None = None

    @property
    def plan(self) -> Plan:
        return self.plans[0]


@dataclass(slots=True)
class Collected:
    """A step's results on the host, without padding: rows as the plan numbers them."""

    tokens: np.ndarray  # i32[plans, rows]
    logprobs: np.ndarray | None  # i32[rows, C]: logprob, rank, top ids, top logprobs; floats as their bits
    prompt_logprobs: np.ndarray | None  # i32[tokens of the prefill region, C]
    pooled: np.ndarray | None  # f32[rows, D]


class Runner:
    """Everything on the device. Host code never touches device arrays except through this class."""

    def __init__(self, config: EngineConfig, loaded: LoadedModel, programs: Programs, tracers: Tracers):
        self._loaded, self._programs, self._model = loaded, programs, programs.model
        self._weights = jax.tree.leaves(loaded.params)
        self._num_slots, mesh = programs.num_slots, programs.mesh
        self._packer = Packer(programs.layouts, self._num_slots - 1)
        self._ready: dict[Key, list[Program]] = {}  # the last one that ran comes last
        self._compiles = _CompileCounter()
        self._device = ThreadPoolExecutor(1, "device")
        self._flags = [0] * self._num_slots
        self._peak_bytes: int | None = None
        self._peak_due_s = 0.0
        with room_for("a step of the most tokens", mesh, SMALLER_STEPS):  # which is compiled, to see what it takes
            self.pool = programs.size_pool(config, lambda: self._free_bytes(config.gpu_memory_utilization))
        log.info("%s%s", self.pool, f", on each of {mesh.size} devices" if mesh.size > 1 else "")
        self._sizes = (self.pool.num_pages, self.pool.max_model_len)
        self._advice = smaller_kv_cache(self.pool.nbytes, programs.share(config))
        if not config.enforce_eager:
            with self._room_for("the programs"):
                self._warm_up(tracers)  # while memory is free: XLA tries kernels out
        new_kv = on_each(lambda: programs.new_kv(self.pool.num_pages), mesh, (), KV_PAGES)
        with self._room_for(f"the KV cache of {size_text(self.pool.nbytes)}"):
            self._make_kv = jax.jit(new_kv, out_shardings=place(mesh, KV_PAGES)).lower().compile()
            self._allocate_kv_cache()
        with self._room_for("the programs' inputs and results"):
            for program in itertools.chain(*self._ready.values()):
                program.allocate()
        with self._room_for(f"the slots of {self._num_slots - 1} sequences"):
            self._make_state()

    def _make_state(self) -> None:
        """What the device knows of each slot, and the calls that change it between steps."""
        programs, mesh = self._programs, self._programs.mesh
        new_state = jax.jit(programs.new_state, static_argnums=0, out_shardings=place(mesh))
        self._state = jax.block_until_ready(new_state(self.pool.max_model_len))
        extras = self._state.extras
        one_slot = jax.tree.map(lambda a: np.zeros(a.shape[1:], a.dtype), extras)
        self._set_slot = _compiled(set_slot, mesh, extras, np.int32(0), one_slot)
        pairs = np.zeros((COPIES_AT_ONCE, 2), np.int32)
        self._copy_pages = _compiled(_copy_pages, mesh, self._kv, pairs, spec=KV_PAGES)
        writes = np.zeros((PAGE_WRITES_AT_ONCE, 3), np.int32)
        self._write_pages = _compiled(_write_pages, mesh, self._state.page_table, writes)

    # ------------------------------------------------------------------------------------------------- memory

    def _room_for(self, what: str) -> contextlib.AbstractContextManager[None]:
        """Around what is allocated for good once the pool has its size. Raises DoesNotFit."""
        return room_for(what, self._programs.mesh, self._advice)

    def _free_bytes(self, share: float) -> int:
        """What is left for KV pages of each device's memory that we may take. On CPU, for all: fixed, or a quarter of
        RAM.
        """
        devices = self._programs.mesh.local_devices
        platform = devices[0].platform
        if platform == "cpu" or not all(device.memory_stats() for device in devices):
            ram = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
            return min(CPU_KV_BYTES, ram // 4) // self._programs.mesh.size
        _ = self._programs.needs  # they may still be measured: nothing of that is to count as in use
        found = [device.memory_stats() for device in devices]
        limit, used = min(stats["bytes_limit"] for stats in found), max(stats["bytes_in_use"] for stats in found)
        # On a GPU the limit is our share: JAX keeps to it.
        return self._programs.free_bytes(int(limit * share) if platform == "tpu" else limit, used)

    def peak_memory_bytes(self) -> int | None:
        """The most bytes of a device's memory that were in use so far, of what JAX allocates; of several devices the
        largest. None where the device does not say.
        """
        if (now := time.monotonic()) >= self._peak_due_s:
            self._peak_due_s = now + MEMORY_PERIOD_S
            found = [device.memory_stats() or {} for device in self._programs.mesh.local_devices]
            self._peak_bytes = max((s["peak_bytes_in_use"] for s in found if "peak_bytes_in_use" in s), default=None)
        return self._peak_bytes

    def _allocate_kv_cache(self) -> None:
        """Allocates the KV pages, and waits: what does not fit is to fail now, not in the first step.

        Only weights may have been allocated before. A small buffer that was made while XLA tried kernels out would lie
        beyond their memory, which is a hole then, and a layer's pages are gigabytes in one piece.
        """
        self._kv = jax.block_until_ready(self._make_kv())

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
        """Allocates KV pages anew, after free(). Raises DoesNotFit; it may be called again then."""
        with room_for(f"the KV cache of {size_text(self.pool.nbytes)}", self._programs.mesh, AFTER_SLEEP):
            self._allocate_kv_cache()

    def restore_weights(self, load: Callable[[], LoadedModel]) -> None:
        """Weights go back to the device: from host memory or, if they were dropped, what `load` loads. Raises
        DoesNotFit; it may be called again then.
        """
        with room_for(f"the {size_text(self._programs.weight_bytes)} of weights", self._programs.mesh, AFTER_SLEEP):
            if any(weight is None for weight in self._weights):
                self._loaded = load()
                self._weights = jax.tree.leaves(self._loaded.params)
            else:
                places = [array.sharding for array in jax.tree.leaves(self._loaded.params)]
                self._weights = jax.block_until_ready(jax.device_put(self._weights, places))

    # ------------------------------------------------------------------------------------------------ compile

    def _warm_up(self, tracers: Tracers) -> None:
        """Compiles every program."""
        started, count = time.monotonic(), len(self._programs.keys)
        log.info(
            "making %d programs ready: compiled the first time (about a minute), after that read from %s",
            count, cache_dir(),
        )  # fmt: skip
        tracers.trace(*self._sizes)
        compiled = self._programs.compile_all(self._compile, *self._sizes, wait=tracers.wait)
        self._ready |= dict(tqdm(compiled, desc="programs ready", unit="program", total=count))
        sizes = len(self._programs.layouts)
        log.info("%d programs of %d sizes are ready after %.1f s", count, sizes, time.monotonic() - started)
        self._compiles.counting = True

    def _compile(self, key: Key, lowered: Any) -> list[Program]:
        signature = self._programs.signature(key, *self._sizes)
        sent, held = signature.rest[-1], jax.tree.leaves(signature.held)
        mesh = self._programs.mesh
        outputs = jax.tree.structure((signature.updated, signature.results))
        options = self._programs.options(key)
        count = copies(key, signature)
        if key[0].complete:
            put, runs = None, [lowered.compile(options)] * count
        else:
            put = _compiled(lambda _, new: jnp.copy(new), mesh, sent, np.zeros(sent.shape, np.int32))
            runs = [lowered.compile(options) for _ in range(count)]  # the second: out of the compile cache

        buffers = (sent if put else None, held)
        zeros = functools.partial(jax.tree.map, lambda s: jnp.zeros(s.shape, s.dtype), buffers)
        make_buffers = jax.jit(zeros, out_shardings=place(mesh)).lower().compile()
        return [Program(run, outputs, make_buffers, put) for run in runs]

    def _program(self, kind: Kind, size: Bucket | int) -> Program:
        """The program whose turn it is; compiled now only under --enforce-eager."""
        key = (kind, size)
        if key not in self._ready:
            with self._room_for(f"the {kind.value} program of {size if isinstance(size, Bucket) else f'{size} rows'}"):
                self._ready[key] = self._compile(key, self._programs.lower(key, *self._sizes))
                for program in self._ready[key]:
                    program.allocate()
        turns = self._ready[key]
        turns.append(turns.pop(0))
        return turns[-1]

    def _run(
        self, launched: Launched, program: Program, weights: list[jax.Array], updated: Any, *rest: Any,
        sent: np.ndarray | None,
    ) -> tuple[Any, Any]:  # fmt: skip
        """Starts a program. Returns what it updated, and its results. sent: None if it will not look at that."""
        if sent is not None:
            program.sent = program.put(program.sent, sent) if program.put else sent
        mine = *jax.tree.leaves(updated), *program.held
        launched.begun.set()  # from here on it needs no Python for a while
        returned = program.run(*weights, *mine, *rest, program.sent)
        program.held = returned[len(returned) - len(program.held) :]
        return jax.tree.unflatten(program.outputs, returned)

    @property
    def compiles_after_warmup(self) -> int:
        return self._compiles.count

    # --------------------------------------------------------------------------------------------------- steps

    def loops(self, plan: Plan) -> int:
        """How many steps with just the rows of this one can be launched as one, this one included; 1: none but this."""
        sizes = self._programs.buckets.get(Kind.LOOP, ())
        if len(plan.prefill) or plan.admitted or not any(size.holds(len(plan.decode), 0, 0) for size in sizes):
            return 1
        return 1 if self._asked(plan) else LOOP_STEPS

    def _asked(self, plan: Plan) -> int:
        """Flags of all rows."""
        return functools.reduce(operator.or_, (self._flags[slot] for slot in plan.decode.slots + plan.prefill.slots))

    def launch(self, plan: Plan, *following: Plan) -> Launched:
        """Starts a step and returns at once. Collect its results before the launch after the next; plain steps may be
        three on their way. `following`: as many as loops() says, of the same rows, are started with it.

        If a row has a grammar, only the forward pass is started: draw() does the rest.
        """
        if following:
            return self._launch_loop([plan, *following])
        with self._compiles:
            edits = self._admit(plan)
            asked = self._asked(plan)
            scored = any(seq.score_prompt for seq in plan.prefill.seqs)
            kind = Kind.FORWARD if asked or scored or Kind.PLAIN not in self._programs.buckets else Kind.PLAIN
            buckets = self._programs.buckets[kind]
            bucket = choose_bucket(buckets, len(plan.decode), len(plan.prefill.tokens), len(plan.prefill))
            room = self._programs.layouts[bucket].num_page_writes
            writes, plan.page_writes = plan.page_writes[room:], plan.page_writes[:room]  # long cached prompts
            launched = Launched(
                [plan], bucket, asked, scored, awaits_masks=bool(asked & GRAMMAR), plain=kind is Kind.PLAIN
            )
            program, packed = self._program(kind, bucket), self._packer.pack(plan, bucket)
            draw = None
            if kind is Kind.FORWARD and not launched.awaits_masks:
                draw = self._program(Kind.DRAW, bucket.rows)

        def start() -> None:
            self._edit_slots(edits)
            self._copy(plan.copies)
            self._write_page_table(writes)
            if kind is Kind.PLAIN:
                self._start_plain(launched, program, packed)
                return
            self._start_forward(launched, program, packed)
            if draw:
                self._start_draw(launched, draw, None)

        self._dispatch(launched, start)
        return launched

    def _launch_loop(self, plans: list[Plan]) -> Launched:
        bucket = choose_bucket(self._programs.buckets[Kind.LOOP], len(plans[0].decode), 0, 0)
        launched = Launched(plans, bucket, asked=0, scored=False, awaits_masks=False, plain=True)
        with self._compiles:
            program = self._program(Kind.LOOP, bucket)
        packed = np.stack([self._packer.pack(plan, bucket) for plan in plans])
        self._dispatch(launched, lambda: self._start_plain(launched, program, packed))
        return launched

    def draw(self, launched: Launched, masks: dict[int, np.ndarray]) -> None:
        """Draws the tokens of a step that launch() has left at the forward pass.

        masks: row of the plan -> i32[V/32], bit i % 32 of word i // 32: id i may follow. Other rows: any.
        """
        with self._compiles:
            program = self._program(Kind.DRAW, launched.bucket.rows)
        sent = np.full(program.sent.shape, -1, np.int32)
        for row, mask in masks.items():
            sent[self._device_row(launched, row)] = mask
        launched.awaits_masks = False
        self._dispatch(launched, lambda: self._start_draw(launched, program, sent))

    def _dispatch(self, launched: Launched, start: Callable[[], None]) -> None:
        """Has `start` done by the thread that talks to the device. Most of the time is spent in XLA, without the GIL:
        meanwhile this thread takes in the step before. Errors come with collect().
        """

        def run() -> None:
            try:
                with self._compiles:
                    start()
            finally:
                launched.begun.set()

        launched.begun.clear()
        launched.started = self._device.submit(run)
        launched.begun.wait()

    def _start_plain(self, launched: Launched, program: Program, packed: np.ndarray) -> None:
        state = self._state
        updated = (self._kv, state.page_table, state.last_token)
        (self._kv, *updated), (tokens,) = self._run(launched, program, self._weights, updated, sent=packed)
        self._state = state._replace(page_table=updated[0], last_token=updated[1])
        tokens.copy_to_host_async()
        launched.drawn = Drawn(tokens, None)

    def _start_forward(self, launched: Launched, program: Program, packed: np.ndarray) -> None:
        state = self._state
        updated, (forward,) = self._run(
            launched, program, self._weights, (self._kv, state.page_table), state.last_token, sent=packed
        )
        self._kv, self._state = updated[0], state._replace(page_table=updated[1])
        launched.forward = forward
        if launched.asked & POOLED:
            forward.pooled.copy_to_host_async()
        if launched.scored:
            forward.prompt_logprobs.copy_to_host_async()

    def _start_draw(self, launched: Launched, program: Program, sent: np.ndarray | None) -> None:
        """sent: the masks; None: no row has a grammar."""
        forward, state = launched.forward, self._state
        assert forward is not None, "the forward pass was started"
        updated = (state.last_token, state.extras)
        updated, (drawn,) = self._run(launched, program, [], updated, forward.logits, forward.rows, sent=sent)
        self._state = state._replace(last_token=updated[0], extras=updated[1])
        launched.drawn = Drawn(drawn.tokens, drawn.logprobs if launched.asked & LOGPROBS else None)
        for array in launched.drawn:  # only what some row asked for
            if array is not None:
                array.copy_to_host_async()

    def wait(self) -> None:
        """Until the device has done all that was launched."""
        self._device.submit(lambda: jax.block_until_ready(self._kv)).result()

    @staticmethod
    def _device_row(launched: Launched, row: int) -> int:
        num_decode = len(launched.plan.decode)
        return row if row < num_decode else launched.bucket.decode_rows + row - num_decode

    def collect(self, launched: Launched) -> Collected:
        """Waits for a step's results. Raises what starting it raised."""
        assert launched.started is not None and not launched.awaits_masks, "draw() was called"
        launched.started.result()
        plan, bucket, drawn, forward = launched.plan, launched.bucket, launched.drawn, launched.forward
        assert drawn is not None
        at = np.r_[0 : len(plan.decode), bucket.decode_rows : bucket.decode_rows + len(plan.prefill)]
        return Collected(
            np.asarray(drawn.tokens).reshape(len(launched.plans), -1)[:, at],
            None if drawn.logprobs is None else np.asarray(drawn.logprobs)[at],
            np.asarray(forward.prompt_logprobs) if forward and launched.scored else None,
            np.asarray(forward.pooled)[at] if forward and launched.asked & POOLED else None,
        )

    def _admit(self, plan: Plan) -> list[tuple[int, Any]]:
        """Notes what the packer has to know of new rows. Returns the slots whose state on the device must change."""
        edits = []
        for seq in plan.admitted:
            flags = self._flags[seq.slot] = request_flags(seq.request)
            self._packer.admit(seq, flags)
            if flags & SLOT_EDITS:
                row = pack_extras(seq.request, self._model.vocab_size, self.pool.max_model_len, seq.token_ids)
                edits.append((seq.slot, row))
        return edits

    def _edit_slots(self, edits: list[tuple[int, Any]]) -> None:
        for slot, row in edits:
            self._state = self._state._replace(extras=self._set_slot(self._state.extras, np.int32(slot), row))

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
    """Counts XLA compilations of threads that are launching, once `counting` is set. A context around launches."""

    def __init__(self) -> None:
        self.counting = False
        self.count = 0
        self._thread = threading.local()
        jax.monitoring.register_event_duration_secs_listener(self._on_event)

    def __enter__(self) -> None:
        self._thread.launching = True

    def __exit__(self, *_: object) -> None:
        self._thread.launching = False

    def _on_event(self, event: str, duration_secs: float, **_: Any) -> None:
        if (
            event == "/jax/core/compile/backend_compile_duration"
            and self.counting
            and getattr(self._thread, "launching", False)
        ):
            self.count += 1
            log.warning("a program was compiled after warm-up, in %.2f s", duration_secs)


def _compiled(function: Any, mesh: Mesh, donated: Any, *others: Any, spec: PartitionSpec = WHOLE) -> Any:
    """A small call, compiled ahead for arguments of these shapes: it never compiles again, wherever they lie.

    spec: how what is donated, and returned, is split.
    """
    split = on_each(function, mesh, (spec, *(WHOLE for _ in others)), spec)
    jitted = jax.jit(split, donate_argnums=0, keep_unused=True, out_shardings=place(mesh, spec))
    return jitted.lower(donated, *arrays(mesh, WHOLE, others)).compile()


def _copy_pages(kv: list[KVPages], pairs: jax.Array) -> list[KVPages]:
    """Donates kv. pairs i32[n, 2]: source, destination."""
    return [pages.at[pairs[:, 1]].set(pages[pairs[:, 0]]) for pages in kv]


def _write_pages(page_table: jax.Array, writes: jax.Array) -> jax.Array:
    """Donates page_table. writes i32[n, 3]: slot, column, page."""
    return page_table.at[writes[:, 0], writes[:, 1]].set(writes[:, 2])

"""Owns the device: weights, KV pages, per-slot state, and the compiled steps. launch() a plan, collect() its results.

launch(plan) ── packs one int32 buffer, calls the bucket's executable; returns at once
collect(launched) ── waits for the drawn ids (and logprobs, if a row wants them)
"""

import functools
import logging
import operator
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from jaxserve import step_cache
from jaxserve.batch import Packer
from jaxserve.config import EngineConfig
from jaxserve.errors import ConfigError
from jaxserve.models.loading import LoadedModel
from jaxserve.paging.kv_cache import GiB, PoolSize, size_pool
from jaxserve.pallas_kernels.ops import Backend
from jaxserve.pallas_kernels.reference import KVPages
from jaxserve.plan import Plan
from jaxserve.request import knob_names
from jaxserve.sampling import EDITS, LOGPROBS, empty_extras, pack_extras, request_flags, set_slot
from jaxserve.shapes import Bucket, ceil_div, choose_bucket
from jaxserve.state import DeviceState, PackedLayout, StepOutput
from jaxserve.step import build_step

log = logging.getLogger(__name__)

COPIES_AT_ONCE = 16  # page copies of one call
PAGE_WRITES_AT_ONCE = 1024  # page-table entries of one call, where a step's own room is too small
CPU_KV_BYTES = 2 * GiB
PROFILE_PAGES = 64  # pool of the program that the largest step's memory is read off
HEADROOM_BYTES = GiB // 2  # for the runtime: autotuning, graphs, fragments
COMPILE_STACK_BYTES = 64 * 2**20  # XLA recurses deeply on unrolled layers


@dataclass(slots=True)
class Step:
    """A compiled step and the buffers of its input and its results, which stay at their addresses.

    On a GPU a step is one CUDA graph. If an address differs from the last run's, temporary memory included, XLA updates
    every node before it launches the graph. That took 1 ms of the host's time for Qwen-1.5B at batch 1 and 3 ms at 256
    (jax 0.11.2, H200). So there are two of each step, which take turns: one runs while the next is launched.
    """

    run: Any
    put: Any  # copies what the host sends into `packed`
    packed: jax.Array
    output: StepOutput


@dataclass(slots=True)
class Launched:
    """A step on its way: what was planned, and where its results will appear."""

    plan: Plan
    bucket: Bucket
    output: StepOutput


@dataclass(slots=True)
class Collected:
    """A step's results on the host, without padding: rows as the plan numbers them."""

    tokens: np.ndarray  # i32[rows]
    logprobs: np.ndarray | None  # i32[rows, C]: logprob, rank, top ids, top logprobs; floats as their bits
    prompt_logprobs: np.ndarray | None  # i32[tokens of the prefill region, C]


class Runner:
    """Everything on the device. Host code never touches device arrays except through this class."""

    def __init__(
        self, config: EngineConfig, loaded: LoadedModel, backend: Backend, buckets: tuple[Bucket, ...], page_size: int,
        max_num_seqs: int,
    ):  # fmt: skip
        self._loaded, self._model, self._backend = loaded, loaded.config, backend
        self._weights = jax.tree.leaves(loaded.params)
        self._dtype = self._weights[0].dtype
        self._buckets, self._num_slots = buckets, max_num_seqs + 1  # the last one is the trash slot
        knobs = {name: kind for kind in ("f32", "i32") for name in knob_names(kind)}
        self._layouts = {b: PackedLayout(b, tuple(knobs), page_size) for b in buckets}
        self._packer = Packer(self._layouts, max_num_seqs, knobs)
        self._steps: dict[tuple[Bucket, bool], list[Step]] = {}  # the last one that ran comes first
        self._compiles = _CompileCounter()
        self._flags = [0] * self._num_slots
        self._page_size = page_size
        self.pool = self._size_pool(config)
        self._sizes = (self.pool.num_pages, self.pool.max_model_len)
        self._kv = jax.jit(self._new_kv, static_argnums=0)(self.pool.num_pages)
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
        wanted = self._model.max_model_len if config.max_model_len is None else config.max_model_len
        if isinstance(wanted, int) and wanted > self._model.max_model_len:
            raise ConfigError(
                f"--max-model-len must be at most the model's {self._model.max_model_len} tokens, got {wanted}",
                param="max_model_len",
            )
        return size_pool(
            config.kv_cache_memory_bytes or self._free_bytes(),
            page_size=self._page_size,
            bytes_per_token=self._model.kv_bytes_per_token(self._dtype.itemsize),
            max_model_len=wanted if isinstance(wanted, int) else None,
            model_max_len=self._model.max_model_len,
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
        """Bytes that the slots and the largest step need: read off its compiled program."""
        bucket = max(self._buckets, key=lambda b: b.tokens)
        memory = self._lower(bucket, True, PROFILE_PAGES, self._model.max_model_len).compile().memory_analysis()
        state = jax.eval_shape(lambda: self._new_state(self._model.max_model_len))
        slots = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(state))
        return slots + memory.temp_size_in_bytes + max(memory.output_size_in_bytes - memory.alias_size_in_bytes, 0)

    def _new_kv(self, num_pages: int) -> list[KVPages]:
        shape = (num_pages, self._model.num_kv_heads, self._page_size, self._model.head_dim)
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

    def warm_up(self) -> None:
        """Compiles every bucket and variant: lowered in a fixed order (stable cache keys), compiled side by side."""
        started = time.monotonic()
        variants = [(b, f) for b in self._buckets for f in self._variants()]
        threading.stack_size(COMPILE_STACK_BYTES)
        with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
            futures = [(v, pool.submit(self._compile, *v, self._lower(*v, *self._sizes))) for v in variants]
            threading.stack_size(0)
            for variant, future in tqdm(futures, desc="compiling steps", unit="step"):
                self._steps[variant] = future.result()
        log.info("compiled %d steps in %.1f s", len(variants), time.monotonic() - started)

    def _variants(self) -> tuple[bool, ...]:
        # On a CPU a stage that no row needs costs nothing (lax.cond), so that one variant serves all rows.
        return (True,) if self._backend.platform == "cpu" else (False, True)

    def _lower(self, bucket: Bucket, features: bool, num_pages: int, max_model_len: int) -> Any:
        """The step of a bucket as a function of flat arrays: weights; KV, state, results (donated); packed."""
        layout = self._layouts[bucket]
        step = build_step(self._loaded.graphdef, layout, self._backend, features=features)

        def flat(*leaves: jax.Array) -> list[jax.Array]:
            params, kv, state, _, packed = jax.tree.unflatten(tree, leaves)
            return jax.tree.leaves(step(params, kv, state, packed))

        donated = jax.eval_shape(
            lambda: (self._new_kv(num_pages), self._new_state(max_model_len), layout.new_output(features))
        )
        packed = jax.ShapeDtypeStruct((layout.size,), jnp.int32)
        shapes, tree = jax.tree.flatten((self._loaded.params, *donated, packed))
        shapes = [jax.ShapeDtypeStruct(s.shape, s.dtype) for s in shapes]
        # On a CPU results are not donated: numpy looks into that very memory, where elsewhere it gets a copy.
        first = len(self._weights)
        count = len(jax.tree.leaves(donated if self._backend.platform != "cpu" else donated[:2]))
        return step_cache.lower(
            flat,
            shapes,
            donated=range(first, first + count),
            name=f"{self._model} {layout} {self._backend.name} {features=}",
        )

    def _compile(self, bucket: Bucket, features: bool, lowered: Any) -> list[Step]:
        layout = self._layouts[bucket]
        fresh = jax.jit(lambda: (jnp.zeros(layout.size, jnp.int32), layout.new_output(features)))
        put = _compiled(lambda _, new: jnp.copy(new), np.zeros(layout.size, np.int32), np.zeros(layout.size, np.int32))
        run = lowered.compile()
        # The second is read from the compile cache. Where no graph remembers addresses, one program does.
        other = lowered.compile() if self._backend.platform == "gpu" else run
        return [Step(r, put, *fresh()) for r in (run, other)]

    def _step(self, bucket: Bucket, features: bool) -> Step:
        """The step whose turn it is; compiled now only under --enforce-eager."""
        variant = (bucket, features or len(self._variants()) == 1)
        if variant not in self._steps:
            self._steps[variant] = self._compile(*variant, self._lower(*variant, *self._sizes))
        self._steps[variant].reverse()
        return self._steps[variant][0]

    def count_compiles(self) -> None:
        """From here on a compile counts as a fault, in `compiles_after_warmup`."""
        self._compiles.counting = True

    @property
    def compiles_after_warmup(self) -> int:
        return self._compiles.count

    # --------------------------------------------------------------------------------------------------- steps

    def launch(self, plan: Plan) -> Launched:
        """Starts a step and returns at once. Collect its results before the launch after the next."""
        with self._compiles:
            self._set_up_slots(plan)
            if plan.copies:
                self._copy(plan.copies)
            bucket = choose_bucket(self._buckets, len(plan.decode), len(plan.prefill.tokens), len(plan.prefill))
            room = self._layouts[bucket].num_page_writes
            if len(plan.page_writes) > room:  # long cached prompts were admitted
                self._write_page_table(plan.page_writes[room:])
                plan.page_writes = plan.page_writes[:room]
            asked = functools.reduce(
                operator.or_, (self._flags[slot] for slot in plan.decode.slots + plan.prefill.slots)
            )
            scored = any(seq.score_prompt for seq in plan.prefill.seqs)
            step = self._step(bucket, bool(asked) or scored)
            step.packed = step.put(step.packed, self._packer.pack(plan, bucket))
            mine, tree = jax.tree.flatten((self._kv, self._state, step.output))
            results = step.run(*self._weights, *mine, step.packed)
            self._kv, self._state, step.output = jax.tree.unflatten(tree, results)
            output = step.output
            # Only what some row asked for is copied to the host.
            wanted = StepOutput(
                output.tokens, output.logprobs if asked & LOGPROBS else None, output.prompt_logprobs if scored else None
            )
            for array in wanted:
                if array is not None:
                    array.copy_to_host_async()
        return Launched(plan, bucket, StepOutput(*wanted))

    def collect(self, launched: Launched) -> Collected:
        """Waits for a step's results."""
        plan, bucket, output = launched.plan, launched.bucket, launched.output
        at = np.r_[0 : len(plan.decode), bucket.decode_rows : bucket.decode_rows + len(plan.prefill)]
        return Collected(
            np.asarray(output.tokens)[at],
            None if output.logprobs is None else np.asarray(output.logprobs)[at],
            None if output.prompt_logprobs is None else np.asarray(output.prompt_logprobs),
        )

    def _set_up_slots(self, plan: Plan) -> None:
        for seq in plan.admitted:
            flags = self._flags[seq.slot] = request_flags(seq.request)
            self._packer.admit(seq, flags)
            if flags & EDITS:
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

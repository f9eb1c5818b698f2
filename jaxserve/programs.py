"""The programs that an engine's steps are made of: which there are, their shapes, how they are compiled.

All of it works from shapes, for a device that may be elsewhere; runner.py gives them memory and runs them.
"""

import contextlib
import enum
import logging
import math
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractDevice, AbstractMesh, Mesh, use_abstract_mesh

from jaxserve import step_cache
from jaxserve.config import EngineConfig
from jaxserve.deployment import Deployment
from jaxserve.models.loading import LoadedModel
from jaxserve.paging.kv_cache import GiB, PoolSize, size_pool
from jaxserve.sampling_inputs import empty_extras
from jaxserve.shapes import Bucket, ceil_div, coarse
from jaxserve.sharding import KV_PAGES, WHOLE, arrays, is_here, on_each, place, seen_as, spec_at
from jaxserve.state import LOGPROB_COLUMNS, DeviceState, Drawn, Forward, KVPages, PackedLayout, row_columns
from jaxserve.step import build_draw, build_forward, build_loop, build_plain

log = logging.getLogger(__name__)

PROFILE_PAGES = 64  # pool of the program that the largest step's memory is read off
HEADROOM_BYTES = GiB // 2  # for the runtime: autotuning, graphs, fragments
# What may be part of a CUDA graph: XLA's defaults, and loops. A conditional with a loop in it that is not in a graph
# makes the host wait for the device.
GRAPH_PARTS = "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE"
# From so many tokens on products are left to cuBLAS. XLA would compile and time dozens of kernels of its own for each,
# with weights that the run before has left in the L2 cache, where in a step they never are: what it chooses is slower.
CUBLAS_TOKENS = 8
# Starting a program takes the host 1 to 1.7 ms on a GPU, longer than a step of a small model takes the device. Decode
# steps of few rows that are sure to be alike are started two at a time there. More would be no faster, and a request
# that comes meanwhile would wait for longer.
LOOP_STEPS, LOOP_ROWS, LOOP_WEIGHT_BYTES = 2, 64, 8 * GiB
COMPILE_STACK_BYTES = 64 * 2**20  # XLA recurses deeply on unrolled layers
_stack_size = threading.Lock()  # one for the whole process


class Kind(enum.Enum):
    """The programs that steps are made of; see step.py. PLAIN and FORWARD exist per bucket (FORWARD where there is
    PLAIN too: per coarse bucket), DRAW per number of rows, LOOP for a few buckets without prompts.
    """

    PLAIN = "plain"
    LOOP = "loop"
    FORWARD = "forward"
    DRAW = "draw"

    @property
    def complete(self) -> bool:
        """Whether it is all of a step, or of several: what it returns is drawn tokens, a few bytes."""
        return self in (Kind.PLAIN, Kind.LOOP)


Key = tuple[Kind, Bucket | int]


class Signature(NamedTuple):
    """Shapes of what a program takes. It returns what it updates, in the same memory, and its results."""

    weights: tuple[Any, ...]
    updated: tuple[Any, ...]
    held: tuple[Any, ...]  # memory that results are written to: all of them or, (), none; see `runner.Program`
    rest: tuple[Any, ...]  # the last one comes from the host
    results: tuple[Any, ...]


class Needs(NamedTuple):
    """Bytes of a device that are neither weights nor KV pages."""

    slots: int
    step: int  # the largest one, twice, and the buffers of all programs
    code: int  # of all programs; counted on TPUs, where it lies in the same memory and unrolled layers make it large


class Programs:
    """Every program of a deployment.

    `loaded` may hold shapes in place of weights. `mesh` is of this host or of a topology that is only compiled for; the
    weights are on it. `model` is what each of its devices runs.
    `target`: the kind of device that programs are traced for, where it is another one than the mesh's.
    """

    def __init__(self, loaded: LoadedModel, deployment: Deployment, mesh: Mesh, target: AbstractDevice | None = None):
        self.deployment, self.model, self.backend = deployment, loaded.config, deployment.backend
        self._graphdef = loaded.graphdef
        self._params = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), loaded.params
        )
        self.mesh, self.target = mesh, target or mesh.devices.flat[0]
        self._traced_for = kind_of(self.target)
        if deployment.backend.lowered_for:
            self._traced_for = replace(self._traced_for, device_kind=deployment.backend.lowered_for)
        self._traced_mesh = mesh if target is None else seen_as(mesh, self._traced_for)
        self._profile: Future[Needs] | None = None
        self._measured: dict[Path, Any] = {}
        self._dtype = jnp.dtype(deployment.dtype)
        self.num_slots = deployment.max_num_seqs + 1  # the last one is the trash slot
        # On a CPU a stage that no row needs costs nothing (lax.cond), so that no row needs a plain step.
        self.buckets = {Kind.FORWARD: deployment.buckets}
        if self.backend.platform != "cpu":
            self.buckets = {Kind.PLAIN: deployment.buckets, Kind.FORWARD: coarse(deployment.buckets)}
        if self.backend.platform == "gpu" and mesh.size == 1 and self.weight_bytes <= LOOP_WEIGHT_BYTES:
            few = (b for b in self.buckets[Kind.FORWARD] if not b.prefill_tokens and b.rows <= LOOP_ROWS)
            self.buckets[Kind.LOOP] = tuple(sorted({deployment.buckets[0], *few}))
        self.layouts = {b: PackedLayout(b, deployment.page_size) for b in deployment.buckets}
        # Every program that a step may need, in a fixed order: first those that compile longest with nothing tried out.
        self.keys: list[Key] = [(Kind.DRAW, rows) for rows in sorted({b.rows for b in self.buckets[Kind.FORWARD]})]
        self.keys += [(kind, bucket) for kind, buckets in self.buckets.items() for bucket in buckets]

    # ----------------------------------------------------------------------------------------------- memory

    def size_pool(self, config: EngineConfig, free_bytes: Callable[[], int]) -> PoolSize:
        """The KV pool that `config` asks for or, where it leaves that open, as large as what is free."""
        model = self.model
        wanted = model.max_model_len if config.max_model_len is None else config.max_model_len
        bytes_per_token = model.kv_bytes_per_token(self._dtype.itemsize) // model.head_dim
        return size_pool(
            config.kv_cache_memory_bytes or free_bytes(),
            page_size=self.deployment.page_size,
            bytes_per_token=bytes_per_token * self.backend.stored_head_dim(model.head_dim),
            max_model_len=wanted if isinstance(wanted, int) else None,
            model_max_len=model.max_model_len,
            option="kv_cache_memory_bytes" if self.share(config) is None else "gpu_memory_utilization",
        )

    def share(self, config: EngineConfig) -> float | None:
        """The share of a device's memory that decides over the size of the KV pool; None: something else does."""
        by_share = config.kv_cache_memory_bytes is None and self.backend.platform != "cpu"
        return config.gpu_memory_utilization if by_share else None

    def free_bytes(self, share_bytes: int, weight_bytes: int) -> int:
        """What weights, slots, the largest step and code leave of a device's memory."""
        needs = self.needs
        log.info(
            "device memory: %.2f GiB share, %.2f GiB weights, %.2f GiB slots, %.2f GiB largest step, %.2f GiB code",
            *(size / GiB for size in (share_bytes, weight_bytes, *needs)),
        )
        return share_bytes - weight_bytes - sum(needs) - HEADROOM_BYTES

    def is_profiled(self) -> bool:
        """Whether an earlier start has traced what `needs` compiles: then it has traced all."""
        return all(self.path(key, *self._profile_sizes()).exists() for key in self._profile_keys())

    def begin_profile(self) -> None:
        """Starts to find `needs` out in a thread: it takes seconds, in which weights can be loaded."""
        with _deep_stacks():
            pool = ThreadPoolExecutor(max_workers=1)
            self._profile = pool.submit(self._measure)
        pool.shutdown(wait=False)

    @property
    def needs(self) -> Needs:
        """What a device's memory must hold beside weights and KV pages: read off some compiled programs."""
        if self._profile is None:
            self.begin_profile()
        assert self._profile is not None
        return self._profile.result()

    def _measure(self) -> Needs:
        keys, sizes = self._profile_keys(), self._profile_sizes()
        step, code = sum(_buffer_bytes(key, self.signature(key, *sizes)) for key in self.keys), 0

        def compile(key: Key, lowered: Any) -> Any:
            # It never runs, so that nothing is tried out for it: that costs seconds, and memory among the weights.
            untried = {"xla_gpu_autotune_level": 0} if self.backend.platform == "gpu" else {}
            return lowered.compile(self.options(key) | untried)

        with ThreadPoolExecutor() as pool, _deep_stacks():
            found = [pool.submit(compile, key, self.lower(key, *sizes)) for key in keys]
        for key, compiled in zip(keys, (future.result() for future in found), strict=True):
            if not is_here(self.mesh.devices.flat[0]):
                self._measured[self.path(key, *sizes)] = compiled
            memory = compiled.memory_analysis()
            if key in keys[:2]:
                results = memory.output_size_in_bytes - memory.alias_size_in_bytes
                step += 2 * (memory.temp_size_in_bytes + results)  # while one runs the next one has its memory
            if self.backend.platform == "tpu":
                code += memory.generated_code_size_in_bytes * sum(_alike(key, other) for other in self.keys)
        return Needs(nbytes(jax.eval_shape(lambda: self.new_state(self.deployment.max_model_len))), step, code)

    def measured(self, key: Key, num_pages: int, max_model_len: int) -> Any | None:
        """A program for a device that is elsewhere, if `needs` has compiled it: JAX's cache does not give it back,
        since it cannot be loaded here. That is a draw, which has no pool in its shapes, and takes a minute.
        """
        return self._measured.get(self.path(key, num_pages, max_model_len))

    def _profile_keys(self) -> list[Key]:
        """A step of the most tokens, its draw and, on TPUs, for the size of its code a step without prompts."""
        forward = self.buckets[Kind.FORWARD]
        most = max(forward, key=lambda b: b.tokens)
        keys: list[Key] = [(Kind.FORWARD, most), (Kind.DRAW, most.rows)]
        if self.backend.platform == "tpu":
            keys.append((Kind.FORWARD, max(b for b in forward if not b.prefill_tokens)))
        return keys

    def _profile_sizes(self) -> tuple[int, int]:
        return PROFILE_PAGES, self.deployment.max_model_len

    @property
    def weight_bytes(self) -> int:
        """Of each device."""
        return nbytes(self._params)

    @property
    def table_bytes(self) -> int:
        """Of the embedding, on each device."""
        return nbytes(self._params["embed"])

    @property
    def matrix_elements(self) -> tuple[int, int]:
        """Of the matrices of all layers, and of the head, on each device."""
        model, embed = self.model, self._params["embed"]
        layers = sum(map(elements, jax.tree.leaves(self._params["layers"])))
        return layers, elements(embed if model.tied_embeddings else self._params["lm_head"])

    def new_kv(self, num_pages: int) -> list[KVPages]:
        head_dim = self.backend.stored_head_dim(self.model.head_dim)
        shape = (num_pages, self.model.num_kv_heads, 2, self.deployment.page_size, head_dim)
        return [jnp.zeros(shape, self._dtype) for _ in range(self.model.num_layers)]

    def new_state(self, max_model_len: int) -> DeviceState:
        return DeviceState(
            last_token=jnp.zeros(self.num_slots, jnp.int32),
            page_table=jnp.zeros((self.num_slots, ceil_div(max_model_len, self.deployment.page_size)), jnp.int32),
            extras=empty_extras(self.num_slots, max_model_len, self.model.vocab_size),
        )

    # ---------------------------------------------------------------------------------------------- compile

    def compile_all[P](
        self,
        compile: Callable[[Key, Any], P],
        num_pages: int,
        max_model_len: int,
        wait: Callable[[Key], None] = lambda key: None,
    ) -> Iterator[tuple[Key, P]]:
        """What `compile(key, lowered)` makes of every program: lowered in a fixed order (stable cache keys), compiled
        side by side. `wait(key)` returns when it is time to lower that one.
        """
        futures: dict[Key, Future[P]] = {}

        def compile_in_turn(key: Key, lowered: Any) -> P:
            if key[0] is not Kind.PLAIN and (alike := futures.get((Kind.PLAIN, key[1]))):
                wait_for([alike])  # it has the same products: XLA tries their kernels out once
            return compile(key, lowered)

        workers = os.cpu_count() or 1
        if self.backend.platform == "gpu":
            workers *= 2  # half of the time they wait for the GPU, on which kernels are tried out one at a time
        with ThreadPoolExecutor(max_workers=workers) as pool:
            with _deep_stacks():
                for key in self.keys:
                    wait(key)
                    lowered = self.lower(key, num_pages, max_model_len)
                    futures[key] = pool.submit(compile_in_turn, key, lowered)
            yield from ((key, future.result()) for key, future in futures.items())

    def lower(self, key: Key, num_pages: int, max_model_len: int) -> Any:
        """A program, to be compiled with `options`."""
        return self._step(step_cache.lower, key, num_pages, max_model_len)

    def trace(self, key: Key, num_pages: int, max_model_len: int) -> None:
        """Sees to it that the step cache has what `lower` lowers."""
        self._step(step_cache.trace, key, num_pages, max_model_len)

    def path(self, key: Key, num_pages: int, max_model_len: int) -> Path:
        """Where the step cache keeps what `lower` lowers."""
        return self._step(step_cache.path, key, num_pages, max_model_len)

    def _step[T](self, call: Callable[..., T], key: Key, num_pages: int, max_model_len: int) -> T:
        function, shapes, donated = self.flat(key, num_pages, max_model_len)
        what = self.layouts[key[1]] if isinstance(key[1], Bucket) else key[1]
        name = f"{self.model} {key[0]} {what} {self.backend.name}"
        with contextlib.nullcontext() if is_here(self.target) else _kernels_see(self._traced_for):
            return call(function, shapes, donated=donated, name=name, device=self.target)

    def options(self, key: Key) -> dict[str, Any]:
        """How XLA is to compile a program."""
        kind, size = key
        options: dict[str, Any] = {}
        if self.backend.platform == "gpu":
            if not kind.complete:
                options["xla_gpu_enable_command_buffer"] = GRAPH_PARTS
            if isinstance(size, Bucket) and size.tokens >= CUBLAS_TOKENS:
                options["xla_gpu_enable_triton_gemm"] = False
        return options

    def flat(self, key: Key, num_pages: int, max_model_len: int) -> tuple[Callable[..., list[jax.Array]], list, range]:
        """A program as a function of flat arrays, in this order: weights; what it updates and what holds its results
        (both donated, both returned); the rest. Also the shapes of its arguments, and which are donated.
        """
        kind, size = key
        if isinstance(size, int):
            function = build_draw()
        else:
            build = {Kind.PLAIN: build_plain, Kind.LOOP: build_loop, Kind.FORWARD: build_forward}[kind]
            function = build(self._graphdef, self.layouts[size], self.backend)
        weights, updated, held, rest, results = self.signature(key, num_pages, max_model_len)
        shapes, tree = jax.tree.flatten((weights, updated, held, rest))

        def flat(*leaves: jax.Array) -> list[jax.Array]:
            weights, updated, _, rest = jax.tree.unflatten(tree, leaves)
            return jax.tree.leaves(function(*weights, *updated, *rest))

        begin, end = (len(jax.tree.leaves(part)) for part in (weights, (weights, updated, held)))
        in_specs = tuple(spec_at(s.sharding) for s in shapes)
        out_specs = [spec_at(s.sharding) for s in jax.tree.leaves((updated, results))]
        return on_each(flat, self._traced_mesh, in_specs, out_specs), shapes, range(begin, end)

    def signature(self, key: Key, num_pages: int, max_model_len: int) -> Signature:
        kind, size = key
        model, i32, f32 = self.model, jnp.int32, jnp.float32
        state = arrays(self.mesh, WHOLE, jax.eval_shape(lambda: self.new_state(max_model_len)))
        num_rows = size if isinstance(size, int) else size.rows

        def array(*shape: int, dtype: Any = i32) -> Any:
            return jax.ShapeDtypeStruct(shape, dtype, sharding=place(self.mesh))

        takes_turns = self.backend.platform == "gpu"
        logits, columns = array(num_rows, model.vocab_size, dtype=f32), array(len(row_columns()), num_rows)
        tokens = array(num_rows)
        if isinstance(size, int):
            masks = array(num_rows, ceil_div(model.vocab_size, 32))
            drawn = Drawn(tokens, array(num_rows, LOGPROB_COLUMNS))
            updated = (state.last_token, state.extras)
            return Signature((), updated, (drawn,) if takes_turns else (), (logits, columns, masks), (drawn,))
        weights, packed = (self._params,), array(self.layouts[size].size)
        kv = arrays(self.mesh, KV_PAGES, jax.eval_shape(lambda: self.new_kv(num_pages)))
        if kind.complete:
            if kind is Kind.LOOP:
                tokens, packed = (array(LOOP_STEPS, *one.shape) for one in (tokens, packed))
            updated = (kv, state.page_table, state.last_token)
            return Signature(weights, updated, (tokens,) if takes_turns else (), (packed,), (tokens,))
        scored = array(size.prefill_tokens, LOGPROB_COLUMNS) if size.prefill_tokens else None
        forward = Forward(logits, columns, array(num_rows, model.hidden_size, dtype=f32), scored)
        held = (forward,) if takes_turns and not size.prefill_tokens else ()
        return Signature(weights, (kv, state.page_table), held, (state.last_token, packed), (forward,))


def copies(key: Key, signature: Signature) -> int:
    """How many of a program take turns, each with its own input and results (`runner.Program` says why)."""
    if key[0].complete:
        return 3
    return 2 if signature.held else 1


def _buffer_bytes(key: Key, signature: Signature) -> int:
    """Of its copies: what the host sends, and what holds results."""
    return copies(key, signature) * nbytes((signature.rest[-1], signature.held))


def _alike(a: Key, b: Key) -> bool:
    """Whether two programs have about as much code: two draws, two steps with prompts or two without."""

    def sort(key: Key) -> bool | None:
        return key[1].prefill_tokens > 0 if isinstance(key[1], Bucket) else None

    return sort(a) == sort(b)


def nbytes(tree: Any) -> int:
    """Bytes of shapes, on each device."""
    return sum(elements(a) * a.dtype.itemsize for a in jax.tree.leaves(tree))


def elements(a: jax.ShapeDtypeStruct) -> int:
    """Of an array, on each device."""
    return math.prod(a.shape if a.sharding is None else a.sharding.shard_shape(a.shape))


@contextlib.contextmanager
def _deep_stacks() -> Iterator[None]:
    """Threads begun here have a stack that XLA can compile on."""
    with _stack_size:
        before = threading.stack_size(COMPILE_STACK_BYTES)
        try:
            yield
        finally:
            threading.stack_size(before)


def kind_of(device: Any) -> AbstractDevice:
    """What tracing may know of a device."""
    return AbstractDevice(device.device_kind, getattr(device, "num_cores", 1), device.platform)


def _kernels_see(kind: AbstractDevice) -> contextlib.AbstractContextManager[Any]:
    """A context in which kernels are traced for this kind of device, and not for one of this host."""
    return use_abstract_mesh(AbstractMesh((), (), abstract_device=kind))

"""Whether a deployment fits TPUs that are elsewhere: its memory, its compiled programs, how fast they can be at best.

Everything is of one chip, compiled by the TPU compiler on this host; nothing runs.
"""

import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax

from jaxserve.config import EngineConfig
from jaxserve.deployment import Deployment, resolve_deployment
from jaxserve.device_memory import is_exhausted
from jaxserve.errors import ConfigError, DoesNotFit
from jaxserve.models.loading import model_shapes
from jaxserve.paging.kv_cache import GiB, PoolSize
from jaxserve.programs import Key, Programs
from jaxserve.shapes import Bucket
from jaxserve.sharding import mesh_of
from jaxserve.tpu_topology import Topology, slices

SHORTEST = 8  # max_num_seqs below which no smaller one is proposed


@dataclass(frozen=True)
class Compiled:
    """A program of one chip."""

    key: Key
    compile_s: float
    hbm_bytes: int  # that are taken while it runs, by others too
    vmem_bytes: int
    flops: float  # as XLA counts; it does not look into our kernels
    touched_bytes: float  # as XLA counts: in any memory, what is copied ahead twice
    best: "Best"


@dataclass(frozen=True)
class Best:
    """The shortest time that a step can take on a chip, whoever computes it. Links between chips cost nothing here."""

    memory_s: float
    compute_s: float

    @property
    def seconds(self) -> float:
        return max(self.memory_s, self.compute_s)

    @property
    def bound(self) -> str:
        return "memory" if self.memory_s > self.compute_s else "compute"


class Fit:
    """A deployment on a slice.

    Raises ConfigError if the options cannot be honoured, DoesNotFit if memory is short: with what there is.
    """

    def __init__(self, config: EngineConfig, hf: Mapping[str, Any], topology: Topology):
        self.config, self.topology = config, topology
        chips, count = topology.devices(), config.tensor_parallel_size
        if count > len(chips):
            raise ConfigError(
                f"--tensor-parallel-size must be at most {len(chips)}, the chips of {topology.name}, got {count}",
                param="tensor_parallel_size",
            )
        self.deployment: Deployment = resolve_deployment(config, hf, chips[0].platform, chips[0].device_kind)
        mesh = mesh_of(chips[:count])
        shapes = model_shapes(self.deployment.model, self.deployment.dtype, mesh)
        self.programs = Programs(shapes, self.deployment, mesh)
        self.share_bytes = int(topology.chip.hbm_bytes * config.gpu_memory_utilization)
        self.weight_bytes = self.programs.weight_bytes

    @property
    def what(self) -> str:
        model = self.deployment
        count = self.config.tensor_parallel_size
        return (
            f"{model.model.architecture} in {model.types}, {model.max_num_seqs} sequences, on {count} "
            f"chip{'' if count == 1 else 's'} of {self.topology}"
        )

    def pool(self) -> PoolSize:
        """The KV pool. Compiles the programs whose memory decides over its size. Raises DoesNotFit."""
        if self.weight_bytes > self.share_bytes:
            raise DoesNotFit(
                f"the weights need {self.weight_bytes / GiB:.2f} GiB of each chip and there are "
                f"{self.share_bytes / GiB:.2f} GiB"
            )
        try:
            pool = self.programs.size_pool(self.config, lambda: self._free_bytes(self.share_bytes))
            asked = self.config.kv_cache_memory_bytes or 0
            free = self._free_bytes(self.topology.chip.hbm_bytes)
        except jax.errors.JaxRuntimeError as error:
            raise _does_not_fit(error) from None
        if asked > free:
            raise DoesNotFit(
                f"--kv-cache-memory-bytes {asked} is more than the {free / GiB:.2f} GiB that the rest leaves of a chip",
                param="kv_cache_memory_bytes",
            )
        return pool

    def _free_bytes(self, of_bytes: int) -> int:
        return self.programs.free_bytes(of_bytes, self.weight_bytes)

    def compile(self, pool: PoolSize, context: int) -> Iterator[Compiled]:
        """Every program, with the best time of a step whose decode rows have so many tokens of context.

        Raises DoesNotFit if the compiler finds that one takes more memory than the chip has.
        """
        needs = self.programs.needs
        others = self.weight_bytes + pool.nbytes + needs.slots + needs.code

        def compile(key: Key, lowered: Any) -> Compiled:
            begin = time.monotonic()
            known = self.programs.measured(key, pool.num_pages, pool.max_model_len)
            compiled = known or lowered.compile(self.programs.options(key))
            seconds, memory, cost = time.monotonic() - begin, compiled.memory_analysis(), compiled.cost_analysis()
            taken = others + memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
            if taken > self.topology.chip.hbm_bytes:  # the compiler does not see what else is there
                size = key[1] if isinstance(key[1], Bucket) else f"{key[1]} rows"
                raise DoesNotFit(
                    f"{key[0].value} of {size} takes {taken / GiB:.2f} GiB of each chip, with what the rest holds, and "
                    f"there are {self.topology.chip.hbm_bytes / GiB:.2f} GiB"
                )
            return Compiled(
                key, seconds, taken, _vmem_bytes(compiled.as_text()), cost["flops"], cost["bytes accessed"],
                self.best(key, pool, context),
            )  # fmt: skip

        try:
            for _, done in self.programs.compile_all(compile, pool.num_pages, pool.max_model_len):
                yield done
        except jax.errors.JaxRuntimeError as error:
            raise _does_not_fit(error) from None

    def best(self, key: Key, pool: PoolSize, context: int) -> Best:
        """What has to be read once and multiplied. Prompts are their own context; a draw reads the logits."""
        size, model, chip = key[1], self.programs.model, self.topology.chip
        if not isinstance(size, Bucket):
            return Best(4 * size * model.vocab_size / chip.hbm_bytes_per_s, 0.0)
        token_bytes = pool.page_bytes / pool.page_size
        looked_up = 0 if model.tied_embeddings else self.programs.table_bytes
        keys = size.decode_rows * context + size.prefill_tokens
        memory = self.weight_bytes - looked_up + (keys + size.tokens) * token_bytes
        pairs = size.decode_rows * context + size.prefill_tokens * min(size.prefill_tokens, context) / 2
        attention = 4 * pairs * model.num_heads * model.head_dim * model.num_layers
        layers, head = (2 * count for count in self.programs.matrix_elements)
        compute_s = attention / chip.bf16_flops_per_s
        compute_s += size.tokens * layers / self._flops_per_s(quantized=True)
        compute_s += size.rows * head / self._flops_per_s(quantized=not model.tied_embeddings)
        return Best(memory / chip.hbm_bytes_per_s, compute_s)

    def _flops_per_s(self, *, quantized: bool) -> float:
        """Of products with matrices that are quantized where anything is, or never."""
        chip = self.topology.chip
        return chip.int8_flops_per_s if quantized and self.programs.model.quantization else chip.bf16_flops_per_s


def nearest(config: EngineConfig, hf: Mapping[str, Any], topology: Topology) -> Iterator[str]:
    """Options with which a deployment fits that does not as it is: fewer sequences or weights in 8 bits on the same
    chips, or more chips.
    """
    fit = Fit(config, hf, topology)
    num_seqs = fit.deployment.max_num_seqs if fit.weight_bytes < fit.share_bytes else 0
    while (num_seqs := num_seqs // 2) >= SHORTEST:
        if _fits(replace(config, max_num_seqs=num_seqs), hf, topology):
            yield f"--max-num-seqs {num_seqs}"
            break
    if not config.quantization and _fits(replace(config, quantization="int8"), hf, topology):
        yield "--quantization int8"
    same = [(topology, count) for count in (2, 4, 8, 16) if count <= topology.num_chips]
    larger = [(slice, slice.num_chips) for slice in slices(topology.chip) if slice.num_chips > topology.num_chips]
    for slice, count in same + larger:
        if count > config.tensor_parallel_size and _fits(replace(config, tensor_parallel_size=count), hf, slice):
            yield f"--topology {slice.name} --tensor-parallel-size {count}"
            break


def _fits(config: EngineConfig, hf: Mapping[str, Any], topology: Topology) -> bool:
    try:
        Fit(config, hf, topology).pool()
    except ConfigError:
        return False
    return True


def _does_not_fit(error: Exception) -> Exception:
    """What the TPU compiler says of a program that takes too much memory; the error itself if it is another one."""
    if not is_exhausted(error):
        return error
    text = str(error)
    said = re.search(r"[Uu]sed [\d.]+\w of [\d.]+\w \w+|[\d.]+\w? exceeds available HBM \([\d.]+\w\)", text)
    return DoesNotFit(f"a step takes more memory than a chip has: {said[0] if said else text.splitlines()[0]}")


def _vmem_bytes(hlo: str) -> int:
    """The most that a kernel or a fusion is given of the fast memory, with what lies before it."""
    found = re.findall(r'"memory_space":"1","offset":"(\d+)","size":"(\d+)"', hlo)
    return max((int(offset) + int(size) for offset, size in found), default=0)

"""Tensor parallelism: one model on all devices of a mesh. What lies where, and where they meet, is decided here alone.

A shard is a smaller decoder (`shard_of`): its share of the query heads with their kv heads, of the ffn and of the rows
of the vocabulary. Each device runs that decoder's program (`jax.shard_map`), on arrays of its own sizes. They meet in

    embedding    each looks up the ids whose rows it has, 0 for others     sum
    attention    its heads @ its columns of o                              sum, per layer
    MLP          its part of the ffn @ its columns of down                 sum, per layer
    logits       scores of its rows of the vocabulary                      gather

and nowhere else. Everything that is not split (norms, page table, device state, what is sent and drawn) each device has
whole, and computes for itself. On all devices together an array is its shards, one after the other:

    qkv [out, in]    | q0 q1 k0 v0 | q2 q3 k1 v1 |    rows       gate_up    | gate up | gate up |    rows
    o   [out, in]    |    0   1    |    2   3    |    columns    pages      |   k0    |   k1    |    kv heads

With fewer kv heads than devices, neighbours hold the same one. A vocabulary is filled up to a multiple with rows of 0.
On a mesh of one device there is no shard_map, and nothing of this is in its programs.

Nothing here says that all devices of a mesh are this host's, but for `devices`.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import (
    AbstractDevice,
    AbstractMesh,
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec,
    Sharding,
    SingleDeviceSharding,
)
from jaxtyping import Array, Float, Int, Shaped

from jaxserve.errors import ConfigError

AXIS = "tensor"
WHOLE = PartitionSpec()  # each device has all of it
KV_PAGES = PartitionSpec(None, AXIS)  # [P, K, 2, page, H]

type Shape = tuple[int, ...]


@runtime_checkable
class Sizes(Protocol):
    """What of a ModelConfig is split."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def vocab_size(self) -> int: ...
    @property
    def ffn_size(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...


# ---- devices


def devices(count: int = 1) -> list[Any]:
    """The devices that an engine of this process runs on. Raises ConfigError if there are not so many."""
    there = jax.local_devices()
    if count > len(there):
        raise ConfigError(
            f"--tensor-parallel-size must be at most {len(there)}, the devices that there are "
            f"({there[0].device_kind}), got {count}",
            param="tensor_parallel_size",
        )
    return there[:count]


def is_here(device: Any) -> bool:
    """Whether this process can run programs on it: those of a topology are only compiled for."""
    return device in jax.local_devices()


def mesh_of(devices: Sequence[Any]) -> Mesh:
    """A mesh of these devices, real ones or those of a topology, in the order of their links."""
    return jax.make_mesh((len(devices),), (AXIS,), axis_types=(AxisType.Auto,), devices=devices)


def seen_as(mesh: Mesh, kind: AbstractDevice) -> AbstractMesh:
    """The mesh as programs are to see it that are traced on its devices for others, of that kind."""
    return mesh.abstract_mesh.update(abstract_device=kind)


# ---- what is split


def shard_of[C: Sizes](config: C, shards: int) -> C:
    """The decoder that each of so many devices runs.

    Raises ConfigError if the model cannot be split so: `shards` must divide query heads and ffn, and the kv heads
    unless it is a multiple of them.
    """
    if shards == 1:
        return config
    if not _divides(config, shards):
        fitting = [n for n in range(1, config.num_heads + 1) if _divides(config, n)]
        raise ConfigError(
            f"--tensor-parallel-size must divide the model's {config.num_heads} query heads and its ffn of "
            f"{config.ffn_size}, and divide its {config.num_kv_heads} kv heads or be a multiple of them "
            f"({', '.join(map(str, fitting))} can be), got {shards}",
            param="tensor_parallel_size",
        )
    return replace(
        config,
        shards=shards,
        num_heads=config.num_heads // shards,
        num_kv_heads=max(config.num_kv_heads // shards, 1),
        ffn_size=config.ffn_size // shards,
    )


def _divides(config: Sizes, shards: int) -> bool:
    heads, kv_heads = config.num_heads, config.num_kv_heads
    kv_heads_split = kv_heads % shards == 0 or shards % kv_heads == 0
    return heads % shards == 0 and config.ffn_size % shards == 0 and kv_heads_split and shards <= config.vocab_size


def spec_of(whole: Shape, shard: Shape) -> PartitionSpec:
    """How an array is split whose shape is `whole` in the model and `shard` in the decoder of a shard."""
    return PartitionSpec(*(AXIS if w != s else None for w, s in zip(whole, shard, strict=True)))


def begin(whole: int, shard: int, shards: int, i: Any) -> Any:
    """Where shard `i` begins on an axis of which it holds `shard` elements; some hold the same if there are too few."""
    same = max(shards * shard // whole, 1)
    return i // same * shard


def cut(array: np.ndarray, shape: Shape, shards: int, i: int) -> np.ndarray:
    """What shard `i` holds of a checkpoint's tensor: `shape` of it, zeros past its end."""
    begins = [begin(whole, size, shards, i) for whole, size in zip(array.shape, shape, strict=True)]
    part = array[tuple(slice(at, at + size) for at, size in zip(begins, shape, strict=True))]
    missing = [(0, size - there) for size, there in zip(shape, part.shape, strict=True)]
    return np.pad(part, missing) if part.shape != shape else part


# ---- arrays on the devices


def place(mesh: Mesh, spec: PartitionSpec = WHOLE) -> Sharding:
    return NamedSharding(mesh, spec) if mesh.size > 1 else SingleDeviceSharding(mesh.devices.flat[0])


def spec_at(sharding: Any) -> PartitionSpec:
    """How an array is split that lies so: the inverse of `place`."""
    return sharding.spec if isinstance(sharding, NamedSharding) else WHOLE


def rows_of(spec: PartitionSpec) -> PartitionSpec:
    """How an array is split that has an element for each row of a matrix that is split so."""
    return PartitionSpec(*tuple(spec)[:1])


def in_is_split(spec: PartitionSpec) -> bool:
    """Whether devices have parts of each row of a matrix [out, in] that is split so."""
    return AXIS in tuple(spec)[1:]


def described(sharding: Any) -> str:
    """How an array is split, and over how many devices; not which ones."""
    return f"{sharding.spec}/{sharding.mesh.size}" if isinstance(sharding, NamedSharding) else ""


def together(mesh: Mesh | AbstractMesh, spec: PartitionSpec, shape: Shape) -> Shape:
    """The shape of all shards together, of an array that is `shape` on each device."""
    split = [name is not None for name in spec] + [False] * len(shape)
    return tuple(size * mesh.size if is_split else size for size, is_split in zip(shape, split, strict=False))


def arrays(mesh: Mesh, spec: PartitionSpec, tree: Any) -> Any:
    """Of arrays as one device sees them, the shapes of all shards together and where they lie."""
    return jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(together(mesh, spec, a.shape), a.dtype, sharding=place(mesh, spec)), tree
    )


def from_shards(sharding: Sharding, shape: Shape, shard: Callable[[int], np.ndarray]) -> jax.Array:
    """An array whose shard `i`, of that shape, is `shard(i)`. It is made for this process's devices only."""
    if not isinstance(sharding, NamedSharding):
        return jax.device_put(shard(0), sharding)
    axis = next((i for i, name in enumerate(sharding.spec) if name is not None), 0)  # 0: each device has all of it

    def at(index: Any) -> np.ndarray:
        return shard((index[axis].start or 0) // shape[axis])

    return jax.make_array_from_callback(together(sharding.mesh, sharding.spec, shape), sharding, at)


# ---- programs on the devices


def on_each[F: Callable[..., Any]](function: F, mesh: Mesh | AbstractMesh, in_specs: Any, out_specs: Any) -> F:
    """`function` on each device's shards of its arguments. `out_specs` WHOLE: it gives the same on all of them."""
    if mesh.size == 1:
        return function
    # What is the same on all devices need not be proven: the draw is too much for that, and kernels say nothing of it.
    return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def this_shard(shards: int) -> Any:
    """Which shard the device that runs this has."""
    return lax.axis_index(AXIS) if shards > 1 else 0


def add_up(x: Float[Array, "..."], shards: int) -> Float[Array, "..."]:
    """The sum over all devices, on each of them."""
    return lax.psum(x, AXIS) if shards > 1 else x


def largest(x: Float[Array, "..."], shards: int) -> Float[Array, "..."]:
    """The largest over all devices, on each of them."""
    return lax.pmax(x, AXIS) if shards > 1 else x


def look_up(table: Float[Array, "rows D"], ids: Int[Array, " T"], shards: int) -> Float[Array, "T D"]:
    """The rows of `ids`, of a table whose rows are split."""
    if shards == 1:
        return table[ids]
    rows = table.shape[0]
    row = ids - this_shard(shards) * rows
    mine = (row >= 0) & (row < rows)
    return add_up(jnp.where(mine[:, None], table[jnp.where(mine, row, 0)], 0), shards)


def gather(x: Shaped[Array, "..."]) -> Shaped[Array, "shards ..."]:
    """What each device has, on each of them."""
    return lax.all_gather(x, AXIS)


def gather_columns(x: Float[Array, "S rows"], shards: int, size: int) -> Float[Array, "S V"]:
    """The columns of all devices side by side, as far as `size`, on each of them."""
    return lax.all_gather(x, AXIS, axis=1, tiled=True)[:, :size] if shards > 1 else x

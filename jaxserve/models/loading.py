"""Weights from a checkpoint (or from nothing) to the devices, one tensor at a time.

Each tensor goes to the devices as the file has it, to each its shard; joining (q/k/v, gate/up), casting and quantizing
happen there. The host therefore holds one tensor at a time, plus the rows of norms and biases that are stacked over
layers.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, PartitionSpec
from tqdm import tqdm

from jaxserve.checkpoint import Checkpoint
from jaxserve.errors import ConfigError
from jaxserve.models.base import ModelConfig, Piece
from jaxserve.models.layers import Decoder
from jaxserve.models.quantization import format_of, quantize
from jaxserve.models.registry import ARCHITECTURES
from jaxserve.sharding import (
    WHOLE,
    begin,
    cut,
    devices,
    from_shards,
    in_is_split,
    mesh_of,
    on_each,
    place,
    rows_of,
    shard_of,
    spec_at,
    spec_of,
    this_shard,
    together,
)

DUMMY_STD = 0.02
_HARMLESS = ("rotary_emb.inv_freq", "masked_bias")  # buffers that old checkpoints saved by mistake

type Shape = tuple[int, ...]


@dataclass(frozen=True)
class LoadedModel:
    """Weights on the devices, and the structure that `nnx.merge(graphdef, params)` makes a model of, inside jit.

    `config` and `graphdef` are those of the decoder that each device runs. `params`, on all devices together, are plain
    nested dicts: jit takes those in a third of the time that it needs for an nnx.State.
    """

    config: ModelConfig
    graphdef: nnx.GraphDef[Decoder]
    params: dict[str, Any]

    @property
    def nbytes(self) -> int:
        """Bytes of weights, all devices together."""
        return sum(p.nbytes for p in jax.tree.leaves(self.params))


def model_shapes(config: ModelConfig, dtype: Any, mesh: Mesh) -> LoadedModel:
    """The model of `config` without its weights: `params` are shapes in `dtype`, with the places where they belong.

    The devices may be those of a topology. Raises ConfigError if the model cannot be split over them.
    """
    family, shard = ARCHITECTURES[config.architecture], shard_of(config, mesh.size)
    graphdef, state = nnx.split(nnx.eval_shape(lambda: family(shard, dtype)))
    whole = state if shard is config else nnx.state(nnx.eval_shape(lambda: family(config, dtype)))

    def placed(whole: Any, shard: Any) -> jax.ShapeDtypeStruct:
        spec = spec_of(whole.shape, shard.shape)
        return jax.ShapeDtypeStruct(together(mesh, spec, shard.shape), shard.dtype, sharding=place(mesh, spec))

    params = jax.tree.map(placed, nnx.to_pure_dict(whole), nnx.to_pure_dict(state))
    return LoadedModel(shard, graphdef, params)


def load_model(
    checkpoint: Checkpoint | None,
    config: ModelConfig,
    dtype: Any,
    *,
    load_format: str = "auto",
    mesh: Mesh | None = None,
    seed: int = 0,
    progress: bool = True,
) -> LoadedModel:
    """The model of `config` with weights in `dtype`: the checkpoint's, or random ones if load_format is "dummy".

    Without a mesh everything goes to the first device. Raises ConfigError naming tensors that are missing, unexpected
    or of the wrong shape, or if the model cannot be split over the mesh.
    """
    mesh = mesh or mesh_of(devices())
    model = model_shapes(config, dtype, mesh)
    leaves, tree = jax.tree_util.tree_flatten_with_path(model.params)
    shapes = {_name(path): shape for path, shape in leaves}
    layout = _Layout(config, model.config, shapes, mesh)
    if load_format == "dummy":
        params = _dummy(layout, seed, progress)
    elif checkpoint is None:
        raise ConfigError("a model without a checkpoint needs --load-format dummy", param="load_format")
    else:
        params = _Loader(layout).load(checkpoint, progress)
    return LoadedModel(model.config, model.graphdef, jax.tree.unflatten(tree, [params[name] for name in shapes]))


def _name(path: tuple) -> str:
    """layers.0.qkv, from the path of a leaf."""
    return ".".join(str(key.key) for key in path)


class _Layout:
    """Which tensors of a checkpoint make each parameter, and what of them each shard holds."""

    def __init__(self, config: ModelConfig, shard: ModelConfig, params: dict[str, jax.ShapeDtypeStruct], mesh: Mesh):
        family = ARCHITECTURES[config.architecture]
        self.params, self.mesh = params, mesh
        self.pieces = family.pieces(config)
        self.shard_shapes = {name: piece.shape for name, piece in family.pieces(shard).items()}
        self.wanted: dict[str, list[str]] = {}  # param -> HF names of its pieces, in order
        for name in sorted(self.pieces, key=lambda name: (self.pieces[name].layer or 0, self.pieces[name].part)):
            self.wanted.setdefault(self.pieces[name].param, []).append(name)

    def shard_of(self, name: str, array: np.ndarray, i: int) -> np.ndarray:
        return cut(array, self.shard_shapes[name], self.mesh.size, i)


class _Loader:
    """Collects the pieces of each parameter until it is whole, then makes it."""

    def __init__(self, layout: _Layout):
        self.layout = layout
        self.params: dict[str, jax.Array] = {}
        self.waiting: dict[str, dict[str, Any]] = {}  # param -> HF name -> part on the devices, or row on the host
        self.in_flight: Any = ()  # the parameter that the devices may still be copying from the host
        self.join = cache(lambda param: _matrix(layout.mesh, list, spec_at(param.sharding), param))

    def load(self, checkpoint: Checkpoint, progress: bool) -> dict[str, jax.Array]:
        self._check_names(checkpoint)
        pieces = self.layout.pieces
        with tqdm(total=len(pieces), desc="Loading weights", unit="tensor", disable=not progress) as bar:
            for name, read in checkpoint.tensors():
                if name in pieces:
                    self._add(name, read())
                    bar.update()
        return jax.block_until_ready(_with_stacked_scales(self.params, self.layout))

    def _check_names(self, checkpoint: Checkpoint) -> None:
        """Raises ConfigError before anything is read, which may take minutes."""
        names, pieces = Counter(name for name, _ in checkpoint.tensors()), self.layout.pieces
        if missing := [name for name in pieces if name not in names]:
            raise ConfigError(f"{checkpoint.name} lacks {_some(missing)}")
        if unexpected := [name for name in names if name not in pieces and not self._may_be_ignored(name)]:
            raise ConfigError(f"{checkpoint.name} has tensors that the model does not use: {_some(unexpected)}")
        if twice := [name for name, count in names.items() if count > 1]:
            raise ConfigError(f"{checkpoint.name} has {_some(twice)} more than once")

    def _may_be_ignored(self, name: str) -> bool:
        tied = name == "lm_head.weight" and "lm_head" not in self.layout.params
        return tied or name.endswith(_HARMLESS)

    def _add(self, name: str, array: np.ndarray) -> None:
        piece = self.layout.pieces[name]
        if array.shape != piece.shape:
            raise ConfigError(f"{name} has shape {list(array.shape)}, the config needs {list(piece.shape)}")
        parts = self.waiting.setdefault(piece.param, {})
        if piece.layer is None:
            sharding, shape = self.layout.params[piece.param].sharding, self.layout.shard_shapes[name]
            parts[name] = from_shards(sharding, shape, lambda i: self.layout.shard_of(name, array, i))
        else:
            parts[name] = np.array(array)  # a copy: a view would keep the whole file mapped
        if len(parts) == len(self.layout.wanted[piece.param]):
            del self.waiting[piece.param]
            jax.block_until_ready(self.in_flight)
            self.params[piece.param], *scale = self._make(piece, parts)
            self.params |= {f"{piece.param}_scale": found for found in scale}
            self.in_flight = self.params[piece.param]

    def _make(self, piece: Piece, parts: dict[str, Any]) -> tuple[jax.Array, ...]:
        """The parameter and, if it is quantized, its scales."""
        param, names = self.layout.params[piece.param], self.layout.wanted[piece.param]
        if piece.layer is None:
            return self.join(param)([parts[name] for name in names])
        shape = param.sharding.shard_shape(param.shape)

        def stacked(i: int) -> np.ndarray:
            rows = [self.layout.shard_of(name, parts[name], i).astype(np.float32) for name in names]
            return np.concatenate(rows).reshape(shape).astype(param.dtype)

        return (from_shards(param.sharding, shape, stacked),)


def _matrix(
    mesh: Mesh, make: Callable[[Any], list[jax.Array]], in_spec: PartitionSpec, param: jax.ShapeDtypeStruct
) -> Callable[[Any], tuple[jax.Array, ...]]:
    """A program that gives `param` and, if it is quantized, the scales of its rows. `make` makes on each device, of an
    argument that is split like `in_spec`, the parts of its shard.
    """
    spec, format = spec_at(param.sharding), format_of(param.dtype)
    specs = (spec,) if format is None else (spec, rows_of(spec))
    shards = mesh.size if in_is_split(spec) else 1

    def joined(argument: Any) -> tuple[jax.Array, ...]:
        parts = make(argument)
        if format is None:
            return (jnp.concatenate([part.astype(param.dtype) for part in parts]),)
        numbers, scales = zip(*(quantize(part, format, shards=shards) for part in parts), strict=True)
        return jnp.concatenate(numbers), jnp.concatenate(scales)

    places = tuple(place(mesh, each) for each in specs)
    return jax.jit(on_each(joined, mesh, in_spec, specs), out_shardings=places)


def _with_stacked_scales(params: dict[str, jax.Array], layout: _Layout) -> dict[str, jax.Array]:
    """The scales of all layers (layers.0.qkv_scale, ...) in one array (qkv_scale)."""
    for name, param in layout.params.items():
        if name.endswith("_scale") and name not in params:
            rows = [params.pop(f"layers.{i}.{name}") for i in range(param.shape[0])]
            params[name] = jax.jit(jnp.stack, out_shardings=param.sharding)(rows)
    return params


def _some(names: list[str], limit: int = 5) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


# ---- weights from nothing


def _dummy(layout: _Layout, seed: int, progress: bool) -> dict[str, jax.Array]:
    """Random matrices, norms of one, biases of zero, all made on the devices. One compilation per shape."""
    made = [(name, param) for name, param in layout.params.items() if not name.endswith("_scale")]
    params, bar = {}, tqdm(made, desc="Making dummy weights", unit="tensor", disable=not progress)

    @cache
    def matrix(parts: tuple[tuple[Shape, Shape], ...], param: jax.ShapeDtypeStruct) -> Callable[[Any], Any]:
        make = partial(_random_shard, parts=parts, shards=layout.mesh.size)
        return _matrix(layout.mesh, lambda seed: [make(seed)], WHOLE, param)

    for i, (name, param) in enumerate(bar):
        if name.endswith("norm"):
            params[name] = jnp.ones(param.shape, param.dtype, device=param.sharding)
        elif name.endswith("bias"):
            params[name] = jnp.zeros(param.shape, param.dtype, device=param.sharding)
        else:
            parts = tuple((layout.pieces[name].shape, layout.shard_shapes[name]) for name in layout.wanted[name])
            params[name], *scale = matrix(parts, param)(np.uint32(((seed << 16) + i) & 0xFFFFFFFF))
            params |= {f"{name}_scale": found for found in scale}
    return jax.block_until_ready(_with_stacked_scales(params, layout))


def _random_shard(seed: jax.Array, *, parts: tuple[tuple[Shape, Shape], ...], shards: int) -> jax.Array:
    """This device's shard of a random matrix of `parts`, each (its shape, that of a shard of it).

    Its elements depend on where they are in the model, and so not on the number of shards.
    """
    i, above, rows = this_shard(shards), 0, []
    for whole, shard in parts:
        rows.append(above + begin(whole[0], shard[0], shards, i) + jnp.arange(shard[0]))
        above += whole[0]
    (_, whole), (_, shard) = parts[0]
    return _normal(seed, jnp.concatenate(rows), begin(whole, shard, shards, i) + jnp.arange(shard))


def _normal(seed: jax.Array, rows: jax.Array, columns: jax.Array) -> jax.Array:
    """Normally distributed numbers f32[rows, columns], a hash of seed, row and column."""
    row = _mix(rows.astype(jnp.uint32) + _mix(seed + jnp.uint32(0x9E3779B9)))[:, None]
    column = columns.astype(jnp.uint32)[None, :] * jnp.uint32(0x9E3779B9)
    bits = _mix(_mix(column ^ row) + row)
    uniform = ((bits >> 9).astype(jnp.float32) + 0.5) * 2.0**-22 - 1  # inside of (-1, 1)
    return DUMMY_STD * 2**0.5 * jax.lax.erf_inv(uniform)


def _mix(x: jax.Array) -> jax.Array:
    """A bijection of 32 bits in which each input bit moves each output bit (multipliers of the "hash prospector")."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x21F0AAAD)
    x = (x ^ (x >> 15)) * jnp.uint32(0xD35A2D97)
    return x ^ (x >> 15)

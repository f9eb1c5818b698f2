"""Weights from a checkpoint (or from nothing) to the device, one tensor at a time.

Each tensor goes to the device as the file has it; joining (q/k/v, gate/up), transposing and casting happen there.
The host therefore holds one tensor at a time, plus the rows of norms and biases that are stacked over layers.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Sharding, SingleDeviceSharding
from tqdm import tqdm

from jaxserve.checkpoint import Checkpoint
from jaxserve.errors import ConfigError
from jaxserve.models.base import ModelConfig, Piece
from jaxserve.models.layers import Decoder
from jaxserve.models.registry import ARCHITECTURES

Placement = Callable[[str, tuple[int, ...]], Sharding]
"""(parameter, its shape [out, in]) -> where it lives. Parameters are named as attributes: embed, layers.0.qkv."""

DUMMY_STD = 0.02
_HARMLESS = ("rotary_emb.inv_freq", "masked_bias")  # buffers that old checkpoints saved by mistake


@dataclass(frozen=True)
class LoadedModel:
    """Weights on the device, and the structure that `nnx.merge(graphdef, params)` makes a model of, inside jit.

    `params` are plain nested dicts: jit takes those in a third of the time that it needs for an nnx.State.
    """

    config: ModelConfig
    graphdef: nnx.GraphDef[Decoder]
    params: dict[str, Any]

    @property
    def nbytes(self) -> int:
        """Bytes of weights, all devices together."""
        return sum(p.nbytes for p in jax.tree.leaves(self.params))


def load_model(
    checkpoint: Checkpoint | None,
    config: ModelConfig,
    dtype: Any,
    *,
    load_format: str = "auto",
    placement: Placement | None = None,
    seed: int = 0,
    progress: bool = True,
) -> LoadedModel:
    """The model of `config` with weights in `dtype`: the checkpoint's, or random ones if load_format is "dummy".

    Without `placement` everything goes to the first device. Raises ConfigError naming tensors that are missing,
    unexpected or of the wrong shape.
    """
    family = ARCHITECTURES[config.architecture]
    graphdef, state = nnx.split(nnx.eval_shape(lambda: family(config, dtype)))
    leaves, treedef = jax.tree_util.tree_flatten_with_path(state)
    shapes = {_name(path): tuple(leaf.shape) for path, leaf in leaves}
    place = placement or (lambda name, shape: SingleDeviceSharding(jax.devices()[0]))
    shardings = {name: place(name, shape) for name, shape in shapes.items()}
    if load_format == "dummy":
        params = _dummy(shapes, shardings, dtype, seed, progress)
    elif checkpoint is None:
        raise ConfigError("a model without a checkpoint needs --load-format dummy", param="load_format")
    else:
        params = _Loader(family.pieces(config), shapes, shardings, dtype).load(checkpoint, progress)
    state = jax.tree.unflatten(treedef, [params[name] for name in shapes])
    return LoadedModel(config, graphdef, nnx.to_pure_dict(state))


def model_shapes(config: ModelConfig, dtype: Any) -> LoadedModel:
    """The model of `config` with shapes in place of weights."""
    family = ARCHITECTURES[config.architecture]
    graphdef, state = nnx.split(nnx.eval_shape(lambda: family(config, dtype)))
    return LoadedModel(config, graphdef, nnx.to_pure_dict(state))


def _name(path: tuple) -> str:
    """layers.0.qkv, from the path of a leaf in the state."""
    return ".".join(str(key.key) for key in path if hasattr(key, "key"))


class _Loader:
    """Collects the pieces of each parameter until it is whole, then makes it."""

    def __init__(
        self, pieces: dict[str, Piece], shapes: dict[str, tuple[int, ...]], shardings: dict[str, Sharding], dtype: Any
    ):
        self.pieces, self.shapes, self.shardings, self.dtype = pieces, shapes, shardings, dtype
        self.params: dict[str, jax.Array] = {}
        self.waiting: dict[str, dict[str, Any]] = {}  # param -> HF name -> part on the device, or row on the host
        self.in_flight: Any = ()  # the parameter that the device may still be copying from the host
        self.wanted: dict[str, list[str]] = {}  # param -> HF names of its pieces, in order
        for name in sorted(pieces, key=lambda name: (pieces[name].layer or 0, pieces[name].part)):
            self.wanted.setdefault(pieces[name].param, []).append(name)

    def load(self, checkpoint: Checkpoint, progress: bool) -> dict[str, jax.Array]:
        self._check_names(checkpoint)
        with tqdm(total=len(self.pieces), desc="Loading weights", unit="tensor", disable=not progress) as bar:
            for name, read in checkpoint.tensors():
                if name in self.pieces:
                    self._add(name, read())
                    bar.update()
        return jax.block_until_ready(self.params)

    def _check_names(self, checkpoint: Checkpoint) -> None:
        """Raises ConfigError before anything is read, which may take minutes."""
        names = Counter(name for name, _ in checkpoint.tensors())
        if missing := [name for name in self.pieces if name not in names]:
            raise ConfigError(f"{checkpoint.name} lacks {_some(missing)}")
        if unexpected := [name for name in names if name not in self.pieces and not self._may_be_ignored(name)]:
            raise ConfigError(f"{checkpoint.name} has tensors that the model does not use: {_some(unexpected)}")
        if twice := [name for name, count in names.items() if count > 1]:
            raise ConfigError(f"{checkpoint.name} has {_some(twice)} more than once")

    def _may_be_ignored(self, name: str) -> bool:
        tied = name == "lm_head.weight" and "lm_head" not in self.shapes
        return tied or name.endswith(_HARMLESS)

    def _add(self, name: str, array: np.ndarray) -> None:
        piece = self.pieces[name]
        if array.shape != piece.shape:
            raise ConfigError(f"{name} has shape {list(array.shape)}, the config needs {list(piece.shape)}")
        parts = self.waiting.setdefault(piece.param, {})
        sharding = self.shardings[piece.param]
        if piece.layer is None:
            parts[name] = jax.device_put(array, sharding)
        else:
            parts[name] = np.array(array)  # a copy: a view would keep the whole file mapped
        if len(parts) == len(self.wanted[piece.param]):
            del self.waiting[piece.param]
            jax.block_until_ready(self.in_flight)
            self.in_flight = self.params[piece.param] = self._make(piece, [parts[n] for n in self.wanted[piece.param]])

    def _make(self, piece: Piece, parts: list[Any]) -> jax.Array:
        sharding = self.shardings[piece.param]
        if piece.layer is not None:
            rows = np.concatenate([p.astype(np.float32) for p in parts]).reshape(self.shapes[piece.param])
            return jax.device_put(rows.astype(self.dtype), sharding)
        join = jax.jit(_join, static_argnames="dtype", out_shardings=sharding)
        return join(parts, dtype=jnp.dtype(self.dtype))


def _join(parts: list[jax.Array], *, dtype: Any) -> jax.Array:
    """Parts [out_i, in] -> one [sum of out_i, in] in dtype."""
    return jnp.concatenate([p.astype(dtype) for p in parts])


def _some(names: list[str], limit: int = 5) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def _dummy(
    shapes: dict[str, tuple[int, ...]], shardings: dict[str, Sharding], dtype: Any, seed: int, progress: bool
) -> dict[str, jax.Array]:
    """Random matrices, norms of one, biases of zero, all made on the device. One compilation per shape."""
    params, bar = {}, tqdm(shapes.items(), desc="Making dummy weights", unit="tensor", disable=not progress)
    for i, (name, shape) in enumerate(bar):
        if name.endswith("norm"):
            params[name] = jnp.ones(shape, dtype, device=shardings[name])
        elif name.endswith("bias"):
            params[name] = jnp.zeros(shape, dtype, device=shardings[name])
        else:
            normal = jax.jit(_normal, static_argnames=("shape", "dtype"), out_shardings=shardings[name])
            params[name] = normal(np.uint32(((seed << 16) + i) & 0xFFFFFFFF), shape=shape, dtype=jnp.dtype(dtype))
    return jax.block_until_ready(params)


def _normal(seed: jax.Array, *, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    return DUMMY_STD * jax.random.normal(jax.random.key(seed), shape, dtype)

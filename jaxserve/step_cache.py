"""Steps traced once per machine: a second start reads their StableHLO from disk instead of tracing Python again.

XLA's own cache keeps compiled programs, but finds them by the traced module, and tracing a step takes about a second
of Python on a slow core. Files are named by everything that the module depends on, this package's source included;
what no start has used for a month is deleted.
"""

import contextlib
import hashlib
import logging
import os
import tempfile
import time
from collections.abc import Callable
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
from jax import export
from jax._src.compilation_cache import compress_executable, decompress_executable  # what no public names do
from jax._src.config import traceback_in_locations_limit  # here alone it is a context

from jaxserve.config import cache_dir, make_cache_dir
from jaxserve.errors import ConfigError
from jaxserve.sharding import described, is_here

log = logging.getLogger(__name__)

KEEP_S = 30 * 24 * 3600
PACKED = (b"\x78", b"\x28\xb5\x2f\xfd")  # how what zlib and zstandard have compressed begins

# Kernels that stay with the jax version they are of.
OURS = tuple(export.DisabledSafetyCheck.custom_call(name) for name in ("mosaic_gpu_v2", "__gpu$xla.gpu.triton"))


def lower(
    function: Callable[..., list[jax.Array]], shapes: list[Any], *, donated: range, name: str, device: Any
) -> Any:
    """`function` of flat array arguments, lowered for a kind of device, to be compiled; `name` tells apart what shapes
    do not.

    Arguments at the positions `donated` are donated. Raises what tracing raises.
    """
    exported = trace(function, shapes, donated=donated, name=name, device=device)
    return jitted(exported.call, tuple(donated)).lower(*shapes)


def trace(
    function: Callable[..., list[jax.Array]], shapes: list[Any], *, donated: range, name: str, device: Any
) -> export.Exported:
    """What `lower` lowers: read, or traced and kept. The kind of device need not be one of this host."""
    file = path(function, shapes, donated=donated, name=name, device=device)
    exported = _read(file)
    if exported is None:
        platforms = None if is_here(device) else ["cuda" if device.platform == "gpu" else device.platform]
        # No lines of Python: they are part of a Triton kernel's code. Of JAX's own functions in it they tell where this
        # process traced them first, so that the same step would be another program, which XLA's cache does not have.
        with traceback_in_locations_limit(0):
            exporting = export.export(jitted(function, tuple(donated)), platforms=platforms, disabled_checks=OURS)
            exported = exporting(*shapes)
        _write(file, bytes(exported.serialize()))
    return exported


def path(_: Any, shapes: list[Any], *, donated: range, name: str, device: Any) -> Path:
    """Where `trace` keeps it."""
    return cache_dir() / "steps" / f"{_key(name, shapes, device)}.stablehlo"


def jitted(function: Callable[..., Any], donated: tuple[int, ...]) -> Any:
    """Keeps arguments that are only written to: buffers of results."""
    return jax.jit(function, donate_argnums=donated, keep_unused=True)


def use_compile_cache() -> None:
    """Compiled steps are kept on disk, the small ones too: a second start compiles nothing. A user's own wins."""
    try:
        make_cache_dir("xla")
    except ConfigError as error:
        log.warning("%s; what this start compiles is not kept", error.message)
    prune()
    if jax.config.jax_compilation_cache_dir or not (cache_dir() / "xla").is_dir():
        return
    jax.config.update("jax_compilation_cache_dir", str(cache_dir() / "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def prune() -> None:
    """Deletes steps that nobody has used for KEEP_S, and compiled ones that are damaged."""
    _drop_damaged(cache_dir() / "xla")
    oldest = time.time() - KEEP_S
    for path in (*(cache_dir() / "steps").rglob("*"), *(cache_dir() / "xla").rglob("*")):
        with contextlib.suppress(OSError):  # another process may do the same, or the cache be read-only
            facts = path.stat()
            if path.is_file() and max(facts.st_mtime, facts.st_atime) < oldest:
                path.unlink()


def _drop_damaged(folder: Path) -> None:
    """Deletes compiled steps that cannot be unpacked: of a full disk, say. JAX would keep them, and compile each time.

    Looks at those written since the last call. JAX compresses with zstandard where that is installed, else with zlib,
    and leaves alone what an environment of the other kind has written: so does this.
    """
    foreign = next(start for start in PACKED if not compress_executable(b"").startswith(start))
    marker, begun = folder / "checked", folder / "checking"
    checked = marker.stat().st_mtime if marker.exists() else 0.0
    with contextlib.suppress(OSError):
        begun.touch()
    for path in folder.glob("*-cache"):
        with contextlib.suppress(OSError):
            if path.stat().st_mtime < checked:
                continue
            try:
                if not (packed := path.read_bytes()).startswith(foreign):
                    decompress_executable(packed)
            except OSError:
                continue
            except Exception as error:  # of whichever package has compressed it
                log.warning("%s is damaged (%s): compiling that step again", path, error)
                path.unlink()
    with contextlib.suppress(OSError):
        os.replace(begun, marker)  # which keeps the time


def _key(name: str, shapes: list[Any], device: Any) -> str:
    facts = [
        name,
        f"{jax.config.jax_enable_x64} {jax.config.jax_default_matmul_precision}",
        _source(),
        *map(version, ("jax", "jaxlib", "flax")),
        device.platform,
        device.device_kind,
        *(f"{s.dtype}{s.shape}{described(s.sharding)}" for s in shapes),
    ]
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()


@cache
def _source() -> str:
    """Digest of this package's source: a changed line is a new step."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _read(path: Path) -> export.Exported | None:
    try:
        data = bytearray(path.read_bytes())
        with contextlib.suppress(OSError):
            os.utime(path)  # used: prune() lets it be
        return export.deserialize(data)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except Exception as error:  # a damaged file must not keep the server from starting
        log.warning("%s cannot be read (%s): tracing that step again", path, error)
        return None


def _write(path: Path, data: bytes) -> None:
    """Whole or not at all: another process may read it."""
    try:
        make_cache_dir("steps")
    except ConfigError:
        return  # which the engine says once, when it starts
    try:
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            (Path(folder) / path.name).write_bytes(data)
            os.replace(Path(folder) / path.name, path)
    except OSError as error:
        log.warning("%s cannot be written (%s): the next start will trace that step again", path, error)

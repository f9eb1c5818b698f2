"""`jaxserve collect-env`: versions and hardware, for a bug report. Prints no secrets."""

import argparse
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

from jaxserve import __version__
from jaxserve.config import cache_dir, reported_environment

PACKAGES = (
    "jax jaxlib jax-cuda12-plugin jax-cuda13-plugin libtpu flax numpy ml_dtypes jaxtyping safetensors gguf "
    "transformers tokenizers huggingface_hub aiohttp uvloop msgspec pyzmq prometheus-client openai torch"
).split()
GPU_FIELDS = "index,name,driver_version,memory.total,memory.used,compute_cap"
TIMEOUT_S = 20


def add_collect_env_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--no-devices", action="store_true", help="do not start JAX: say nothing of its devices")


def run_collect_env(args: argparse.Namespace) -> int:
    print("\n".join(lines(with_devices=not args.no_devices)))
    return 0


def lines(*, with_devices: bool) -> Iterator[str]:
    """The report, `name: value` by `name: value`."""
    yield f"jaxserve: {__version__}"
    yield f"python: {sys.version.split()[0]} ({sys.executable})"
    yield f"os: {platform.platform()}"
    yield f"cpu: {_cpu_name()}, {_usable_cpus()} usable of {os.cpu_count()}"
    yield f"memory: {_memory()}"
    yield f"free disk at {cache_dir()}: {_free_disk(cache_dir())}"
    for name in PACKAGES:
        if version := _version(name):
            yield f"{name}: {version}"
    yield from _section("gpus", _gpus)
    if with_devices:
        yield from _section("jax devices", _devices)
    yield from _section("environment", lambda: [f"{k}={v}" for k, v in reported_environment().items()])


def _section(title: str, entries: Callable[[], list[str]]) -> Iterator[str]:
    found = entries()
    yield f"{title}:" if found else f"{title}: none"
    yield from (f"  {entry}" for entry in found)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str:
    """The model's name where Linux tells it, else the architecture."""
    try:
        rows = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((row.split(":", 1)[1].strip() for row in rows if row.startswith("model name")), platform.machine())


def _usable_cpus() -> int | None:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def _memory() -> str:
    try:
        rows = dict(row.split(":", 1) for row in Path("/proc/meminfo").read_text().splitlines())
        total, free = (int(rows[name].split()[0]) / 2**20 for name in ("MemTotal", "MemAvailable"))
    except (OSError, KeyError, ValueError):
        return "unknown"
    return f"{total:.1f} GiB, {free:.1f} GiB free"


def _free_disk(path: Path) -> str:
    while not path.exists():
        path = path.parent
    return f"{shutil.disk_usage(path).free / 2**30:.1f} GiB"


def _gpus() -> list[str]:
    """One line for each GPU that nvidia-smi shows."""
    if not shutil.which("nvidia-smi"):
        return []
    command = ["nvidia-smi", f"--query-gpu={GPU_FIELDS}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return [f"nvidia-smi failed: {error}"]
    return done.stdout.splitlines() if done.returncode == 0 else [f"nvidia-smi failed: {done.stderr.strip()}"]


def _devices() -> list[str]:
    """One line for each device that JAX can use, with its memory where it tells."""
    try:
        import jax

        return [_device_line(device) for device in jax.devices()]
    except Exception as error:  # a report is wanted most when JAX does not start
        return [f"JAX does not start: {type(error).__name__}: {error}"]


def _device_line(device) -> str:
    stats = device.memory_stats() or {}
    memory = f", {stats['bytes_limit'] / 2**30:.1f} GiB" if "bytes_limit" in stats else ""
    return f"{device.id}: {device.platform} {device.device_kind}{memory}"

"""`jaxserve collect-env`: versions and hardware, for a bug report. Prints no secrets."""

import argparse
import os
import platform
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

from jaxserve import __version__
from jaxserve.config import cache_dir, reported_environment
from jaxserve.errors import ConfigError
from jaxserve.tpu_topology import CHIPS, GiB, chips_of_host, device_files, parse_topology

PACKAGES = (
    "jax jaxlib jax-cuda12-plugin jax-cuda13-plugin jax-cuda13-pjrt nvidia-cublas nvidia-cudnn-cu13 "
    "nvidia-cuda-runtime nvidia-cuda-nvcc nvidia-nccl-cu13 libtpu flax numpy ml_dtypes jaxtyping safetensors gguf "
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
    yield from _section("tpus", tpus)
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


def tpus(root: Path = Path("/")) -> list[str]:
    """What this host has of TPUs, without starting JAX, which one process at a time can do: the chips, whether they can
    be opened, the slice that the environment names, and what makes starts slow.
    """
    chips, files = Counter(chips_of_host(root)), device_files(root)
    found = [f"{count} x {kind}{_chip_figures(kind)}" for kind, count in chips.items()]
    if not found:
        return []
    closed = [path for path in files if not os.access(path, os.R_OK | os.W_OK)]
    state = f"{_listed(closed)} cannot be opened by this user" if closed else "can be opened"
    found.append(f"device files: {_listed(files)}: {state}" if files else "device files: none, as in some containers")
    name = reported_environment().get("TPU_ACCELERATOR_TYPE")
    found.append(f"slice: {_slice(name)}" if name else "slice: TPU_ACCELERATOR_TYPE is not set")
    if not _version("libtpu"):
        found.append("libtpu is not installed: pip install 'jax[tpu]'")
    huge_pages = root / "sys/kernel/mm/transparent_hugepage/enabled"
    if huge_pages.exists() and "[always]" not in (text := huge_pages.read_text().strip()):
        found.append(f"transparent huge pages: {text}: starts are slower than with 'always'")
    return found


def _listed(paths: list[Path]) -> str:
    return ", ".join(map(str, paths))


def _chip_figures(kind: str) -> str:
    chip = CHIPS.get(kind)
    return f" ({chip.hbm_bytes / GiB:g} GiB for programs each)" if chip else ""


def _slice(name: str) -> str:
    """The slice of that name."""
    try:
        return str(parse_topology(name))
    except ConfigError:
        return f"{name}, which jaxserve does not know"


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
    coords = getattr(device, "coords", None)
    place = f" at {tuple(coords)} of host {device.process_index}" if coords is not None else ""
    return f"{device.id}: {device.platform} {device.device_kind}{place}{memory}"

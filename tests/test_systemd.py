"""The unit of docs/tpu.md: systemd and the command line take it, and all that a server keeps lies where it may write."""

import argparse
import configparser
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from jaxserve.config import ServeConfig, add_arguments, from_arguments

PAGE = Path(__file__).parent.parent / "docs" / "tpu.md"
TEXT = re.search(r"```ini\n(.*?)```", PAGE.read_text(), re.DOTALL)[1]  # type: ignore[index]


def service() -> configparser.SectionProxy:
    parser = configparser.ConfigParser(interpolation=None)
    parser.optionxform = str  # type: ignore[assignment]
    parser.read_string(TEXT)
    return parser["Service"]


def test_the_command_reads_the_file_that_it_names(tmp_path: Path):
    program, command, *argv = shlex.split(service()["ExecStart"])
    assert Path(program).name == "jaxserve" and command == "serve"
    options = tmp_path / "options.yaml"
    options.write_text("tensor-parallel-size: 8\n")
    assert argv == ["--config", "/etc/jaxserve/options.yaml"]
    parser = argparse.ArgumentParser()
    add_arguments(parser, ServeConfig)
    assert from_arguments(parser.parse_args(["--config", str(options)]), ServeConfig).tensor_parallel_size == 8


def test_what_is_kept_lies_in_the_cache_directory():
    """The user of a service need not have a home: programs and weights would go there."""
    unit = service()
    kept = dict(word.split("=", 1) for word in unit["Environment"].split())
    assert set(kept) == {"JAXSERVE_CACHE_DIR", "HF_HOME"}
    for path in kept.values():
        assert Path(path).is_relative_to(f"/var/cache/{unit['CacheDirectory']}")


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd is not installed")
@pytest.mark.parametrize(
    ("wrong", "said"), [("", ""), ("Restart=sometimes", "Restart"), ("LimitMEMLOK=1", "LimitMEMLOK")]
)
def test_systemd_takes_it(wrong: str, said: str, tmp_path: Path):
    unit = tmp_path / "jaxserve.service"
    program = service()["ExecStart"].split()[0]
    unit.write_text(TEXT.replace(program, sys.executable).replace("[Service]", f"[Service]\n{wrong}"))
    done = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True, check=False)
    assert "jaxserve.service" not in done.stderr if not said else said in done.stderr, done.stderr

"""How the engine's process is started (what it does there: test_serve.py)."""

import os

import pytest

from jaxserve.config import EngineConfig
from jaxserve.engine_process import EngineProcess


@pytest.mark.parametrize("given", [None, "glibc.malloc.check=1"])
async def test_the_engine_gets_huge_pages_unless_the_user_set_glibc_up(monkeypatch, given):
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    if given:
        monkeypatch.setenv("GLIBC_TUNABLES", given)
    engine = await EngineProcess.start(EngineConfig(model="nowhere"))
    try:
        with open(f"/proc/{engine._process.pid}/environ") as file:
            environment = dict(line.split("=", 1) for line in file.read().split("\0") if "=" in line)
    finally:
        await engine.stop(grace_s=0)
    assert environment["GLIBC_TUNABLES"] == (given or "glibc.malloc.hugetlb=1")
    assert environment["PATH"] == os.environ["PATH"]

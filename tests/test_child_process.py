"""Children end with their parent, however that ends."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from jaxserve.child_process import ChildProcess

ROOT = Path(__file__).parent.parent
CHILD = """
import json, signal, sys, time
from jaxserve.child_process import read_start
start = read_start(lambda message: print(json.dumps(message), file=open(start["log"], "a")))
print(json.dumps(start["say"]), file=open(start["log"], "a"))
time.sleep(60)
"""
DEAF = "import time; time.sleep(60)"
PARENT = """
import asyncio, json, sys
from jaxserve.child_process import ChildProcess
async def main():
    print(ChildProcess("child_of_a_test", json.loads(sys.argv[1])).pid, flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "child_of_a_test.py").write_text(CHILD)
    (tmp_path / "deaf_child_of_a_test.py").write_text(DEAF)
    return os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}


async def logged(path: Path, lines: list[str]) -> None:
    async with asyncio.timeout(20):
        while not path.exists() or path.read_text().splitlines() != lines:
            await asyncio.sleep(0.01)


async def test_it_is_told_what_to_do_and_ends_when_its_stdin_does(tmp_path: Path, environment):
    child = ChildProcess("child_of_a_test", {"log": str(tmp_path / "log"), "say": ["ä", 1]}, environment)
    await logged(tmp_path / "log", ['["\\u00e4", 1]'])
    child.tell({"more": 2})
    await logged(tmp_path / "log", ['["\\u00e4", 1]', '{"more": 2}'])
    await child.stop(grace_s=20)
    assert child.ended.result() == 0
    child.tell("nobody listens")
    child.signal(signal.SIGTERM)


async def test_one_that_does_not_listen_is_killed(environment):
    child = ChildProcess("deaf_child_of_a_test", None, environment)
    await child.stop(grace_s=0.05)
    assert child.ended.result() == -signal.SIGKILL


async def test_a_killed_parent_leaves_no_child(tmp_path: Path, environment):
    start = f'{{"log": "{tmp_path}/log", "say": "here"}}'
    parent = subprocess.Popen([sys.executable, "-c", PARENT, start], env=environment, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    await logged(tmp_path / "log", ['"here"'])
    parent.kill()
    parent.wait()
    parent.stdout.close()
    async with asyncio.timeout(10):
        while Path(f"/proc/{pid}").exists():  # whoever adopts it reaps it
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            if state == "Z":
                break
            await asyncio.sleep(0.02)

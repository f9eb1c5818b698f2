"""A process of ours, told what to do by the first line of its stdin, and ended by the end of that. Never imports jax.

parent                                     child (main())
ChildProcess(module, start) ──one line──►  read_start(): the line; from then on a thread waits for the end of stdin
    ended: a future     ◄──exit code─────
    stop() ─────────────stdin closes────►  exits at once; so it does if the parent dies, however that happens
"""

import asyncio
import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

import msgspec


class ChildProcess:
    """A running child. In a process group of its own: Ctrl-C in a terminal is for the parent, which ends it gracefully.

    Not a session of its own: Linux shares the cores out between sessions first (autogroup), so that nice would mean
    nothing among the two.
    """

    def __init__(self, module: str, start: Any, environment: Mapping[str, str] | None = None):
        """Runs `python -m module` and sends it `start` as JSON. To be made in a running event loop."""
        # Not asyncio's own way: uvloop knows no process_group, and preexec_fn is not safe beside threads.
        self._process = subprocess.Popen(
            [sys.executable, "-m", module], stdin=subprocess.PIPE, env=environment, process_group=0
        )
        self.pid = self._process.pid
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[int] = self._loop.create_future()  # the exit code, or minus the signal
        threading.Thread(target=self._wait, daemon=True).start()
        self.tell(start)

    def _wait(self) -> None:
        code = self._process.wait()
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody wants to know
            self._loop.call_soon_threadsafe(self.ended.set_result, code)

    def tell(self, message: Any) -> None:
        """Sends one line of JSON; nothing, if the child has ended."""
        stdin = self._process.stdin
        assert stdin is not None
        if not stdin.closed:
            with contextlib.suppress(OSError):
                stdin.write(msgspec.json.encode(message) + b"\n")
                stdin.flush()

    def signal(self, number: int) -> None:
        self._process.send_signal(number)  # none, if it has ended

    async def stop(self, grace_s: float) -> None:
        """Closes its stdin, which ends it; kills it if that takes longer than `grace_s` seconds."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        await asyncio.wait([self.ended], timeout=grace_s)
        if not self.ended.done():
            self._process.kill()
            await asyncio.wait([self.ended])


def read_start(on_message: Callable[[Any], object] = lambda message: None) -> Any:
    """What the parent sent first. From now on the end of stdin ends this process; `on_message` gets what else it tells.

    In a thread; and by os._exit, since the main one may be anywhere.
    """
    stdin = sys.stdin.fileno()  # not sys.stdin: a thread inside its buffer would abort the interpreter's own exit
    start = msgspec.json.decode(_read_line(stdin))

    def listen() -> None:
        while line := _read_line(stdin):
            on_message(msgspec.json.decode(line))
        os._exit(0)

    threading.Thread(target=listen, daemon=True).start()
    return start


def _read_line(file: int) -> bytes:
    """A line, or what there is of one at the end."""
    line = b""
    while not line.endswith(b"\n") and (byte := os.read(file, 1)):
        line += byte
    return line

"""Further HTTP processes of a server (--api-server-count), beside that of serve.py, which starts and ends them.

    serve.py: HTTP process 1                   HTTP process 2, 3, ... (main())
    HttpProcesses.start(engine) ─on stdin────► the config, and where the engine is
        ready() ◄────Unix socket (peers.py)─── each listens at the same port
        signal() ─────────SIGINT, SIGTERM────► finishes its calls, as process 1 does
        engine_ended() ──────on stdin────────► ends its calls with an error

One that ends unasked ends the server, since nobody could say what its clients wait for. All have the engine to
themselves (engine_process.py): requests, queue and limits are the engine's. Never imports jax.
"""

import asyncio
import contextlib
import functools
import logging
import math
import os
import socket
import sys
import time
from concurrent.futures import Future
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from jaxserve.checkpoint import Checkpoint
from jaxserve.child_process import ChildProcess, read_start
from jaxserve.config import ServeConfig
from jaxserve.engine_process import EngineProcess, SocketClient, make_frontend
from jaxserve.errors import ConfigError, EngineDead, JaxserveError
from jaxserve.http.app import ABORT_S, GRACE_S, cannot_listen, serve
from jaxserve.http.peers import Peers
from jaxserve.logs import setup_logging

log = logging.getLogger(__name__)

HTTP_NICE = 10
READY_PERIOD_S = 0.05  # between two looks at whether a process serves
STOP_S = 0.3  # that a process gets to end at once


class HttpProcesses:
    """Those beside this one: none, unless the config says so.

    config   with the port that all share
    peers    this process among them, from start() on
    crashed  says which one has ended unasked, once one has
    """

    def __init__(self, config: ServeConfig):
        """Looks whether the port is free, and holds it if it is to be shared. Raises ConfigError if it is taken."""
        self.config = config
        self.peers = Peers()
        self.crashed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._children: list[ChildProcess] = []
        self._deadline_s = math.inf  # by which they must have ended; finite once they are asked to
        _bound(config).close()  # not shared: another such server may be there
        self._held: socket.socket | None = None
        if config.api_server_count > 1:
            self._held = _bound(config, shared=True)  # from now on another server finds it taken
            self.config = replace(config, port=self._held.getsockname()[1])

    def start(self, engine: EngineProcess) -> None:
        """Starts them; they wait for the engine to be warm."""
        count = self.config.api_server_count
        if count == 1:
            return
        self.peers = Peers(0, count, engine.directory)
        start = {
            "address": engine.address,
            "directory": str(engine.directory),
            "config": {f.name: getattr(self.config, f.name) for f in fields(ServeConfig)},
        }
        for number in range(1, count):
            child = ChildProcess("jaxserve.http_process", {**start, "number": number})
            child.ended.add_done_callback(functools.partial(self._ended, number))
            self._children.append(child)

    def _ended(self, number: int, ended: asyncio.Future[int]) -> None:
        if self._deadline_s == math.inf and not self.crashed.done():
            name = _name(number, self.config.api_server_count)
            self.crashed.set_result(f"{name} ended with code {ended.result()}")

    async def ready(self) -> None:
        """Waits until all serve. Raises JaxserveError if one ends before that."""
        for number in range(1, self.config.api_server_count):
            while not await self.peers.is_ready(number):
                if self.crashed.done():
                    raise JaxserveError(f"{self.crashed.result()} before it was ready")
                await asyncio.sleep(READY_PERIOD_S)

    def signal(self, number: int) -> None:
        """Passes on a signal: they end as this process does, in the same time."""
        self._must_end_in(GRACE_S + 2 * ABORT_S)
        for child in self._children:
            child.signal(number)

    def engine_ended(self, reason: str) -> None:
        """Lets them tell their clients; they then end."""
        self._must_end_in(2 * ABORT_S)
        for child in self._children:
            child.tell(reason)

    def _must_end_in(self, seconds: float) -> None:
        self._deadline_s = min(self._deadline_s, time.monotonic() + seconds)

    async def stop(self) -> None:
        """Ends them: those that were asked to end get the time that is left for it."""
        if self._children and self._deadline_s < math.inf:
            left_s = max(self._deadline_s - time.monotonic(), 0)
            await asyncio.wait([child.ended for child in self._children], timeout=left_s)
        self._must_end_in(0)
        await asyncio.gather(*(child.stop(grace_s=STOP_S) for child in self._children))
        await self.peers.close()
        if self._held:
            self._held.close()


def _bound(config: ServeConfig, *, shared: bool = False) -> socket.socket:
    """A socket at the port. shared: other sockets may be bound to it. Raises ConfigError if it is taken."""
    if shared and not hasattr(socket, "SO_REUSEPORT"):
        raise ConfigError(
            "--api-server-count must be 1 on this system: it has no SO_REUSEPORT", param="api_server_count"
        )
    bound = socket.socket(socket.AF_INET6 if ":" in config.host else socket.AF_INET)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if shared:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        bound.bind((config.host, config.port))
    except OSError as error:
        bound.close()
        raise cannot_listen(config, error) from None
    return bound


def yield_to_the_engine() -> None:
    """Lowers the priority of this process's threads, where the model runs on the same cores.

    Each layer's matmul joins threads on all cores: one that HTTP pushes aside for a moment holds up the whole step.
    With one stream on two cores the server does 89% of what the engine does alone so (docs/benchmarks.md).
    """
    with contextlib.suppress(OSError):
        for thread_id in os.listdir("/proc/self/task"):
            os.setpriority(os.PRIO_PROCESS, int(thread_id), HTTP_NICE)


def run(main: Any) -> int:
    """Runs a coroutine in the faster event loop, where there is one (not on Windows)."""
    try:
        from uvloop import run
    except ImportError:
        from asyncio import run
    return run(main)


def _name(number: int, count: int) -> str:
    return f"HTTP process {number + 1} of {count}"


# ------------------------------------------------------------------------------------------- the further process


async def _serve(start: dict[str, Any], engine_ended: Future[str]) -> int:
    """Serves until a signal, or until the engine has ended; returns the exit code."""
    config = ServeConfig(**start["config"])
    client = SocketClient(start["address"])

    async def ready() -> None:
        try:
            await client.connect()
        except JaxserveError:
            sys.exit(2)  # the first process says why

    checkpoint = await asyncio.to_thread(Checkpoint.open, config)
    frontend = await make_frontend(config, checkpoint, checkpoint.sampling_defaults(config), client, ready)
    if client.info.device == "cpu":
        yield_to_the_engine()
    peers = Peers(start["number"], config.api_server_count, Path(start["directory"]))
    http = asyncio.create_task(serve(frontend, client, config, peers=peers, on_ready=lambda url: None))
    dying = asyncio.wrap_future(engine_ended)
    await asyncio.wait([http, dying], return_when=asyncio.FIRST_COMPLETED)
    if http.done():
        await http
        await client.close()
        return 0
    client.die(EngineDead(dying.result()))
    http.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await http
    return 1


def main() -> None:
    engine_ended: Future[str] = Future()
    start = read_start(lambda reason: engine_ended.set_result(reason))
    setup_logging(logging.WARNING, _name(start["number"], start["config"]["api_server_count"]))
    try:
        sys.exit(run(_serve(start, engine_ended)))
    except JaxserveError as error:
        log.error("%s", error.message)
        sys.exit(2)


if __name__ == "__main__":
    main()

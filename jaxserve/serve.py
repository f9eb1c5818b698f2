"""`jaxserve serve`: starts the engine process, then speaks HTTP in this one."""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable

from jaxserve.checkpoint import Checkpoint
from jaxserve.config import ServeConfig
from jaxserve.engine_process import EngineProcess, start_engine
from jaxserve.frontend import Frontend
from jaxserve.http.app import cannot_listen
from jaxserve.http.app import serve as serve_http
from jaxserve.logs import setup_logging

log = logging.getLogger(__name__)

HTTP_NICE = 10
SIGNALS = (signal.SIGINT, signal.SIGTERM)


def main(config: ServeConfig) -> int:
    """Runs the server until SIGINT or SIGTERM; returns the exit code. Raises ConfigError, EngineDead."""
    setup_logging()
    try:
        from uvloop import run  # a faster event loop, where it exists (not on Windows)
    except ImportError:
        from asyncio import run
    return run(_serve(config))


async def _serve(config: ServeConfig) -> int:
    task, signals = asyncio.create_task(_start(config)), []

    def interrupt(number: int) -> None:
        if not signals:
            task.cancel()
        signals.append(number)

    _on_signals(interrupt)
    try:
        engine, frontend = await task
    except asyncio.CancelledError:
        _die_of(signals[0])
        raise
    try:
        task = http = asyncio.create_task(serve_http(frontend, engine.client, config))
        if signals:  # when it had just started
            http.cancel()
        dying = asyncio.create_task(engine.wait())
        await asyncio.wait([http, dying], return_when=asyncio.FIRST_COMPLETED)
        if http.done() and not http.cancelled():
            await http
            return 0
        if not http.done():
            log.error("the engine process ended with code %s: shutting down", dying.result())
            http.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await http
            return 1
    finally:
        for number in SIGNALS:  # it is ending as it is
            signal.signal(number, signal.SIG_IGN)
        await engine.stop()
    _die_of(signals[0])
    return 1


async def _start(config: ServeConfig) -> tuple[EngineProcess, Frontend]:
    """A warm engine and its front end. If it fails or is cancelled, no engine is left."""
    started = time.monotonic()
    checkpoint = await asyncio.to_thread(Checkpoint.open, config)  # before the engine: only one downloads
    _check_port(config)
    engine, frontend = await start_engine(config, checkpoint)
    if engine.client.info.device == "cpu":
        _yield_to_the_engine()
    log.info("ready after %.1f s", time.monotonic() - started)
    return engine, frontend


def _on_signals(handler: Callable[[int], object]) -> None:
    """From now on SIGINT and SIGTERM call `handler`, until serve() takes them."""
    for number in SIGNALS:
        with contextlib.suppress(NotImplementedError):  # on Windows: signals end the process
            asyncio.get_running_loop().add_signal_handler(number, handler, number)


def _die_of(number: int) -> None:
    """Ends this process as the signal would have: at once, where an exit would wait for a thread that downloads."""
    print(file=sys.stderr)  # the engine's progress bar may stand on this line
    log.info("interrupted while starting")
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _yield_to_the_engine() -> None:
    """Lowers the priority of this process's threads, where the model runs on the same cores.

    Each layer's matmul joins threads on all cores: one that HTTP pushes aside for a moment holds up the whole step.
    With one stream on two cores the server does 89% of what the engine does alone so (docs/benchmarks.md).
    """
    with contextlib.suppress(OSError):
        for thread_id in os.listdir("/proc/self/task"):
            os.setpriority(os.PRIO_PROCESS, int(thread_id), HTTP_NICE)


def _check_port(config: ServeConfig) -> None:
    """Raises ConfigError now if the port is taken, and not after minutes of warm-up."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((config.host, config.port))
        except OSError as error:
            raise cannot_listen(config, error) from None

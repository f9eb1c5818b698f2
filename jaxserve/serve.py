"""`jaxserve serve`: starts the engine process, and further HTTP processes if asked to; then speaks HTTP in this one."""

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Callable

from jaxserve.checkpoint import Checkpoint
from jaxserve.config import ServeConfig
from jaxserve.engine_process import EngineProcess, start_engine
from jaxserve.errors import EngineDead
from jaxserve.frontend import Frontend
from jaxserve.http.app import serve as serve_http
from jaxserve.http_process import HttpProcesses, run, yield_to_the_engine
from jaxserve.logs import setup_logging

log = logging.getLogger(__name__)

SIGNALS = (signal.SIGINT, signal.SIGTERM)


def main(config: ServeConfig) -> int:
    """Runs the server until SIGINT or SIGTERM; returns the exit code. Raises ConfigError, EngineDead."""
    setup_logging()
    return run(_serve(config))


async def _serve(config: ServeConfig) -> int:
    task, signals = asyncio.create_task(_start(config)), []

    def interrupt(number: int) -> None:
        if not signals:
            task.cancel()
        signals.append(number)

    _on_signals(interrupt)
    try:
        engine, frontend, others = await task
    except asyncio.CancelledError:
        _die_of(signals[0])
        raise
    try:
        serving = serve_http(frontend, engine.client, others.config, peers=others.peers, on_signal=others.signal)
        task = http = asyncio.create_task(serving)
        if signals:  # when it had just started
            http.cancel()
        dying = asyncio.create_task(engine.wait())
        await asyncio.wait([http, dying, others.crashed], return_when=asyncio.FIRST_COMPLETED)
        if http.done() and not http.cancelled():
            await http
            return 0
        if not http.done():
            reason = f"the engine process ended with code {dying.result()}" if dying.done() else others.crashed.result()
            log.error("%s: shutting down", reason)
            engine.client.die(EngineDead(reason))  # tells this process's clients; nothing new if the engine has ended
            others.engine_ended(reason)
            http.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await http
            return 1
    finally:
        for number in SIGNALS:  # it is ending as it is
            signal.signal(number, signal.SIG_IGN)
        await others.stop()
        await engine.stop()
    _die_of(signals[0])
    return 1


async def _start(config: ServeConfig) -> tuple[EngineProcess, Frontend, HttpProcesses]:
    """A warm engine, its front end, and the other HTTP processes at work. If it fails or is cancelled, none is left."""
    started = time.monotonic()
    checkpoint = await asyncio.to_thread(Checkpoint.open, config)  # before the engine: only one downloads
    others = HttpProcesses(config)  # which says now that the port is taken, and not after minutes of warm-up
    try:
        engine, frontend = await start_engine(config, checkpoint, meanwhile=others.start)
        try:
            await others.ready()
        except BaseException:
            await engine.stop()
            raise
    except BaseException:
        await others.stop()
        raise
    if engine.client.info.device == "cpu":
        yield_to_the_engine()
    log.info("ready after %.1f s", time.monotonic() - started)
    return engine, frontend, others


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

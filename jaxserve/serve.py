"""`jaxserve serve`: starts the engine process, then speaks HTTP in this one."""

import asyncio
import contextlib
import logging
import time

from jaxserve.checkpoint import Checkpoint
from jaxserve.config import ServeConfig
from jaxserve.engine_process import EngineProcess
from jaxserve.frontend import Frontend
from jaxserve.http.app import serve as serve_http
from jaxserve.logs import setup_logging

log = logging.getLogger(__name__)


def main(config: ServeConfig) -> int:
    """Runs the server until SIGINT or SIGTERM; returns the exit code. Raises ConfigError, EngineDead."""
    setup_logging()
    with contextlib.suppress(ImportError):  # a faster event loop, where it exists (not on Windows)
        import uvloop

        return uvloop.run(_serve(config))
    return asyncio.run(_serve(config))


async def _serve(config: ServeConfig) -> int:
    started = time.monotonic()
    checkpoint = await asyncio.to_thread(Checkpoint.open, config)  # before the engine: only one downloads
    engine = await EngineProcess.start(config)
    try:
        tokenizer = await asyncio.to_thread(checkpoint.load_tokenizer, config)
        await engine.ready()
        frontend = Frontend(tokenizer, engine.client.info, checkpoint.sampling_defaults(config))
        log.info("ready after %.1f s", time.monotonic() - started)
        http = asyncio.create_task(serve_http(frontend, engine.client, config))
        dying = asyncio.create_task(engine.wait())
        await asyncio.wait([http, dying], return_when=asyncio.FIRST_COMPLETED)
        if http.done():
            await http
            return 0
        log.error("the engine process ended with code %s: shutting down", dying.result())
        http.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await http
        return 1
    finally:
        await engine.stop()

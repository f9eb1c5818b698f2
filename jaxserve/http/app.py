"""The HTTP server: an aiohttp application over a Frontend and an EngineClient, and how it runs in production."""

import asyncio
import contextlib
import errno
import logging
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from jaxserve.config import ServeConfig
from jaxserve.errors import ConfigError
from jaxserve.frontend import Frontend
from jaxserve.http.auth import auth_middleware
from jaxserve.http.connection import Connection
from jaxserve.http.cors import Cors
from jaxserve.http.errors import error_middleware
from jaxserve.http.metrics import traffic_log
from jaxserve.http.peers import Peers, pass_on_middleware
from jaxserve.http.request_id import add_request_id
from jaxserve.http.response_store import ResponseStore
from jaxserve.http.routes import DOC_ROUTES, ROUTES
from jaxserve.http.state import SERVER, Server
from jaxserve.metrics import Metrics
from jaxserve.parsers import Formats, find_formats
from jaxserve.request import EngineClient

log = logging.getLogger(__name__)

# `docker stop` kills 10 s after SIGTERM. Until then: GRACE_S, ABORT_S twice (aiohttp waits, cancels, and waits again),
# and the engine's end (engine_process.STOP_S).
GRACE_S = 6.0  # that running calls get to finish
ABORT_S = 1.0  # that cancelled calls then get to send their last event
KEEPALIVE_S = 75.0  # that a connection may idle, or take to send the headers of a request
BACKLOG = 128  # connections that wait to be accepted


def make_app(
    frontend: Frontend, client: EngineClient, config: ServeConfig, peers: Peers | None = None
) -> web.Application:
    """The application, without a port to listen on. peers: the server's other HTTP processes."""
    peers = peers or Peers()
    names = config.served_model_name or [config.model]
    app = web.Application(middlewares=[error_middleware], client_max_size=config.max_body_bytes)
    if config.allowed_origins:
        Cors(config).install(app)  # before the keys: a browser's preflight has none
    if config.api_key:
        app.middlewares.append(auth_middleware(config.api_key))
    if peers.count > 1:
        app.middlewares.append(pass_on_middleware(peers))
    metrics = Metrics(lambda: client.stats, names[0])
    responses = ResponseStore(config.response_store_size, config.response_store_ttl, processes=peers.count)
    app[SERVER] = Server(frontend, client, config, metrics, names, _formats(frontend, config), responses, peers)
    app.add_routes(route for route in ROUTES if not (config.disable_docs and route in DOC_ROUTES))
    app.on_response_prepare.append(add_request_id)
    if peers.number == 0:  # it is the engine's traffic, and so the server's
        app.cleanup_ctx.append(traffic_log)
    app.on_cleanup.append(_close_calls)
    return app


def _formats(frontend: Frontend, config: ServeConfig) -> Formats:
    """How the model writes calls and reasoning, by name or by its template."""
    template = frontend.tokenizer.template_for(tools=True)
    formats = find_formats(config.tool_call_parser, config.reasoning_parser, template)
    tools, reasoning = formats.tools_name, formats.reasoning_name
    if tools == "none":
        known = "tools" in (template or "")
        tools = "not read (--tool-call-parser NAME says how the model writes them)" if known else "not in its template"
    if reasoning == "none":
        reasoning = "not told from the answer (--reasoning-parser NAME says how the model writes it)"
    log.info("tool calls: %s; reasoning: %s", tools, reasoning)
    return formats


async def _close_calls(app: web.Application) -> None:
    await app[SERVER].responses.close()
    await asyncio.gather(*app[SERVER].closing, return_exceptions=True)
    await app[SERVER].peers.close()


@asynccontextmanager
async def listening(
    frontend: Frontend,
    client: EngineClient,
    config: ServeConfig,
    *,
    peers: Peers | None = None,
    grace_s: float = GRACE_S,
    hurry: asyncio.Event | None = None,
) -> AsyncIterator[str]:
    """A server at work; yields its URL. On leaving it stops accepting, and running calls get `grace_s` seconds.

    `hurry`, once set, ends these seconds.

    Raises ConfigError if it cannot listen there.
    """
    app = make_app(frontend, client, config, peers)
    # handler_cancellation: a client that goes away cancels its handler, and so its request in the engine.
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=ABORT_S)
    await runner.setup()
    try:
        listeners = await _listen(runner, config, app[SERVER].peers)
        try:
            yield _url(config.host, listeners[0].sockets[0].getsockname()[1])
        finally:
            for listener in listeners:
                listener.close()
        _drop_incomplete(runner)
        await _finish(app[SERVER], grace_s, hurry or asyncio.Event())
    finally:
        await runner.cleanup()


async def _listen(runner: web.AppRunner, config: ServeConfig, peers: Peers) -> list[asyncio.Server]:
    """At the port, and if there are other HTTP processes also for them."""
    loop, manager = asyncio.get_running_loop(), runner.server
    assert manager is not None, "set up"

    options: dict[str, Any] = {"access_log": None, "keepalive_timeout": KEEPALIVE_S, "auto_decompress": False}

    def connection() -> Connection:
        return Connection(manager, loop=loop, **options)

    shared = True if peers.count > 1 else None
    try:
        listeners = [await loop.create_server(connection, config.host, config.port, backlog=BACKLOG, reuse_port=shared)]
    except OSError as error:
        raise cannot_listen(config, error) from None
    if peers.socket_path:
        listeners.append(await loop.create_unix_server(connection, peers.socket_path, backlog=BACKLOG))
    return listeners


def cannot_listen(config: ServeConfig, error: OSError) -> ConfigError:
    """The error of an address that cannot be bound, with what to do about it."""
    reason = error.strerror or str(error)
    if error.errno == errno.EADDRINUSE:
        reason = "the port is in use; choose another with --port, or --port 0 for any free one"
    return ConfigError(f"cannot listen on {config.host}:{config.port}: {reason}", param="port")


def _drop_incomplete(runner: web.AppRunner) -> None:
    """Closes connections without a call, or with one that is not all here: there is nothing to finish."""
    reading = runner.app[SERVER].reading
    for connection in list(runner.server.connections) if runner.server is not None else ():
        if connection._current_request is None or connection in reading:  # what no public name tells
            connection.force_close()
        else:
            connection.close()  # after this call


async def _finish(server: Server, grace_s: float, hurry: asyncio.Event) -> None:
    """Waits for the running calls, then ends what is left at the engine: its answer says "abort"."""
    if server.calls and not hurry.is_set():
        log.info("finishing %s, for at most %g s; Ctrl-C ends this now", _requests(len(server.calls)), grace_s)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(grace_s):
            while (server.calls or server.peers.passing) and not hurry.is_set():
                await asyncio.sleep(0.02)
    if left := [request_id for call in server.calls for request_id in call.request_ids]:
        log.warning("cancelling %s", _requests(len(left)))
        await asyncio.gather(*map(server.client.cancel, left), return_exceptions=True)


def _requests(count: int) -> str:
    return f"{count} running request{'s' * (count != 1)}"


def _url(host: str, port: int) -> str:
    shown = {"0.0.0.0": "localhost", "::": "localhost", "": "localhost"}.get(host, host)
    return f"http://[{shown}]:{port}" if ":" in shown else f"http://{shown}:{port}"


def print_ready(url: str) -> None:
    print(f"jaxserve is ready: {url}/v1", flush=True)


async def serve(
    frontend: Frontend,
    client: EngineClient,
    config: ServeConfig,
    *,
    peers: Peers | None = None,
    on_ready: Callable[[str], object] = print_ready,
    on_signal: Callable[[int], object] = lambda number: None,
    grace_s: float = GRACE_S,
) -> None:
    """Serves until SIGTERM, after which running calls get `grace_s` seconds, or SIGINT, which ends them at once.

    A second signal is like SIGINT. `on_ready` is told the URL with its port, `on_signal` each signal.
    """
    loop = asyncio.get_running_loop()
    stop, hurry = asyncio.Event(), asyncio.Event()

    def take(number: int) -> None:
        on_signal(number)
        if number == signal.SIGINT or stop.is_set():
            hurry.set()
        stop.set()

    with contextlib.ExitStack() as undo:
        for number in (signal.SIGINT, signal.SIGTERM):
            with contextlib.suppress(NotImplementedError):  # Windows has no such handlers: signals end the process
                loop.add_signal_handler(number, take, number)
                undo.callback(loop.remove_signal_handler, number)
        async with listening(frontend, client, config, peers=peers, grace_s=grace_s, hurry=hurry) as url:
            on_ready(url)
            await stop.wait()
            log.info("shutting down")

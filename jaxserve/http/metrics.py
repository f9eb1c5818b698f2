"""GET /metrics, and the log line about traffic."""

import asyncio
import logging
from collections.abc import AsyncIterator

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from jaxserve.http.operation import operation
from jaxserve.http.state import SERVER
from jaxserve.metrics import LOG_PERIOD_S, TrafficLog

log = logging.getLogger(__name__)


@operation(reply=str, content_type="text/plain")
async def metrics(request: web.Request) -> web.Response:
    """Counters, gauges and histograms for Prometheus."""
    server = request.app[SERVER]
    others = [each.decode() for each in await server.peers.ask(request)]
    body = server.metrics.text(others)
    return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_LATEST})


async def traffic_log(app: web.Application) -> AsyncIterator[None]:
    """While the app runs, logs a line per period with traffic."""

    async def run() -> None:
        traffic = TrafficLog(app[SERVER].metrics.stats)
        while True:
            await asyncio.sleep(LOG_PERIOD_S)
            if line := traffic.line():
                log.info(line)

    task = asyncio.create_task(run())
    yield
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)

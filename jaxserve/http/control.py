"""The engine as a whole: GET /load, POST /abort_requests, /reset_prefix_cache, /pause, /resume, /sleep, /wake_up."""

import asyncio

from aiohttp import web

from jaxserve.control import Pause, ResetPrefixCache, Resume, Sleep, WakeUp
from jaxserve.errors import RequestError
from jaxserve.http.schema import AbortBody
from jaxserve.http.state import SERVER, read_object
from jaxserve.request import short


async def load(request: web.Request) -> web.Response:
    """How many calls are being answered that generate text."""
    return web.json_response({"server_load": len(request.app[SERVER].calls)})


async def abort_requests(request: web.Request) -> web.Response:
    """Ends calls by the ids that their clients know, or all: each answers with finish_reason "abort"."""
    server = request.app[SERVER]
    body, _ = server.parse(AbortBody, await read_object(request) if request.body_exists else {})
    wanted = set(body.request_ids or ())
    calls = [call for call in server.calls if not wanted or wanted & call.names]
    await asyncio.gather(*(server.client.cancel(each) for call in calls for each in call.request_ids))
    return web.json_response({"status": "aborted", "aborted": len(calls)})


async def reset_prefix_cache(request: web.Request) -> web.Response:
    """Forgets all cached pages: prompts are computed anew."""
    _query(request)
    await request.app[SERVER].client.control(ResetPrefixCache())
    return web.json_response({"success": True})


async def pause(request: web.Request) -> web.Response:
    """Answers when no request runs any more that `mode` lets finish."""
    given = _query(request, "mode", "clear_cache")
    mode, clear_cache = given.get("mode", "abort"), _flag("clear_cache", given.get("clear_cache", "true"))
    await request.app[SERVER].client.control(Pause(mode, clear_cache))  # type: ignore[arg-type]
    return web.json_response({"status": "paused"})


async def resume(request: web.Request) -> web.Response:
    _query(request)
    await request.app[SERVER].client.control(Resume())
    return web.json_response({"status": "resumed"})


async def is_paused(request: web.Request) -> web.Response:
    return web.json_response({"is_paused": request.app[SERVER].client.stats.paused})


async def sleep(request: web.Request) -> web.Response:
    """Answers when the memory is free."""
    given = _query(request, "level", "mode")
    level = given.get("level", "1")
    command = Sleep(int(level) if level in ("1", "2") else level, given.get("mode", "abort"))  # type: ignore[arg-type]
    await request.app[SERVER].client.control(command)
    return web.json_response({"is_sleeping": True})


async def wake_up(request: web.Request) -> web.Response:
    """Answers when what `tags` name, repeated or comma-separated, is back; without them all is."""
    _query(request, "tags")
    tags = [tag for value in request.query.getall("tags", []) for tag in value.split(",")]
    stats = await request.app[SERVER].client.control(WakeUp(tuple(tags)) if tags else WakeUp())  # type: ignore[arg-type]
    return web.json_response({"is_sleeping": stats.sleep_level > 0})


async def is_sleeping(request: web.Request) -> web.Response:
    return web.json_response({"is_sleeping": request.app[SERVER].client.stats.sleep_level > 0})


def _query(request: web.Request, *known: str) -> dict[str, str]:
    """The options in the URL. Raises RequestError for an unknown one, one given twice, and a body."""
    for name in request.query:
        if name not in known:
            takes = f"it takes {' and '.join(known)}" if known else "it takes none"
            raise RequestError(f"{request.path} has no option {short(name)}: {takes}", param=name[:64])
        if name != "tags" and len(request.query.getall(name)) > 1:
            raise RequestError(f"{name} is given more than once", param=name)
    if request.body_exists:
        raise RequestError(f"{request.path} takes its options in the URL, as in ?name=value, and no body")
    return dict(request.query)


def _flag(name: str, value: str) -> bool:
    if value.lower() not in ("true", "false", "1", "0"):
        raise RequestError(f"{name} must be true or false, got {short(value)}", param=name)
    return value.lower() in ("true", "1")

"""The engine as a whole: GET /load, POST /abort_requests, /reset_prefix_cache, /pause, /resume, /sleep, /wake_up."""

import asyncio
from typing import Any, get_args, get_type_hints

import msgspec
from aiohttp import web

from jaxserve.control import PARTS, SLEEP_LEVELS, Pause, ResetPrefixCache, Resume, Sleep, WakeUp
from jaxserve.errors import EngineDead, RequestError
from jaxserve.http.operation import operation
from jaxserve.http.replies import Aborted, Asleep, Load, Paused, Status, Success
from jaxserve.http.schema import AbortBody
from jaxserve.http.state import SERVER, read_object
from jaxserve.request import short

OF_ENGINE = (EngineDead,)
FLAG = {"type": "boolean", "default": True}
LEVEL = {"type": "integer", "enum": list(SLEEP_LEVELS), "default": 1}


def _choices(command: type[msgspec.Struct], name: str) -> dict[str, Any]:
    """JSON Schema of a field of a command."""
    return {"enum": list(get_args(get_type_hints(command)[name])), "default": getattr(command(), name)}


@operation(reply=Load)
async def load(request: web.Request) -> web.Response:
    """How many calls are being answered that generate text."""
    server = request.app[SERVER]
    others = [msgspec.json.decode(each, type=Load).server_load for each in await server.peers.ask(request)]
    return _json(Load(len(server.calls) + sum(others)))


@operation(AbortBody, reply=Aborted, errors=OF_ENGINE)
async def abort_requests(request: web.Request) -> web.Response:
    """Ends calls by the ids that their clients know, or all: each answers with finish_reason "abort", or (embeddings)
    with status 499.
    """
    server = request.app[SERVER]
    body, _ = server.parse(AbortBody, await read_object(request) if request.body_exists else {})
    wanted = set(body.request_ids or ())
    calls = [call for call in server.calls if not wanted or wanted & call.names]
    aborted = sum(not call.ending for call in calls)
    for call in calls:
        call.ending = True
    await asyncio.gather(*(server.client.cancel(each) for call in calls for each in call.request_ids))
    others = [msgspec.json.decode(each, type=Aborted).aborted for each in await server.peers.ask(request)]
    return _json(Aborted(aborted=aborted + sum(others)))


@operation(reply=Success, errors=OF_ENGINE)
async def reset_prefix_cache(request: web.Request) -> web.Response:
    """Forgets all cached pages: prompts are computed anew."""
    await _query(request)
    await request.app[SERVER].client.control(ResetPrefixCache())
    return _json(Success())


@operation(reply=Status, query={"mode": _choices(Pause, "mode"), "clear_cache": FLAG}, errors=OF_ENGINE)
async def pause(request: web.Request) -> web.Response:
    """Starts no new request; answers when none runs any more that `mode` lets finish."""
    given = await _query(request, "mode", "clear_cache")
    mode, clear_cache = given.get("mode", "abort"), _flag("clear_cache", given.get("clear_cache", "true"))
    await request.app[SERVER].client.control(Pause(mode, clear_cache))  # type: ignore[arg-type]
    return _json(Status("paused"))


@operation(reply=Status, errors=OF_ENGINE)
async def resume(request: web.Request) -> web.Response:
    """Ends a pause: what waited goes on."""
    await _query(request)
    await request.app[SERVER].client.control(Resume())
    return _json(Status("resumed"))


@operation(reply=Paused)
async def is_paused(request: web.Request) -> web.Response:
    """Whether the engine is paused."""
    return _json(Paused(request.app[SERVER].client.stats.paused))


@operation(reply=Asleep, query={"level": LEVEL, "mode": _choices(Sleep, "mode")}, errors=OF_ENGINE)
async def sleep(request: web.Request) -> web.Response:
    """Frees the memory of weights and KV cache; answers when it is free."""
    given = await _query(request, "level", "mode")
    level = given.get("level", "1")
    command = Sleep(int(level) if level in ("1", "2") else level, given.get("mode", "abort"))  # type: ignore[arg-type]
    await request.app[SERVER].client.control(command)
    return _json(Asleep(True))


@operation(reply=Asleep, query={"tags": {"type": "array", "items": {"enum": list(PARTS)}}}, errors=OF_ENGINE)
async def wake_up(request: web.Request) -> web.Response:
    """Ends a sleep; answers when what `tags` name, repeated or comma-separated, is back; without them all is."""
    await _query(request, "tags")
    tags = [tag for value in request.query.getall("tags", []) for tag in value.split(",")]
    stats = await request.app[SERVER].client.control(WakeUp(tuple(tags)) if tags else WakeUp())  # type: ignore[arg-type]
    return _json(Asleep(stats.sleep_level > 0))


@operation(reply=Asleep)
async def is_sleeping(request: web.Request) -> web.Response:
    """Whether the engine is asleep, or not all of it is back."""
    return _json(Asleep(request.app[SERVER].client.stats.sleep_level > 0))


def _json(answer: msgspec.Struct) -> web.Response:
    return web.Response(body=msgspec.json.encode(answer), content_type="application/json")


async def _query(request: web.Request, *known: str) -> dict[str, str]:
    """The options in the URL. Raises RequestError for an unknown one, one given twice, and any in a body."""
    for name in request.query:
        if name not in known:
            takes = f"it takes {' and '.join(known)}" if known else "it takes none"
            raise RequestError(f"{request.path} has no option {short(name)}: {takes}", param=name[:64])
        if name != "tags" and len(request.query.getall(name)) > 1:
            raise RequestError(f"{name} is given more than once", param=name)
    if request.body_exists and await read_object(request):  # {} is what clients send that always send JSON
        raise RequestError(f"{request.path} takes its options in the URL, as in ?name=value, and none in a body")
    return dict(request.query)


def _flag(name: str, value: str) -> bool:
    if value.lower() not in ("true", "false", "1", "0"):
        raise RequestError(f"{name} must be true or false, got {short(value)}", param=name)
    return value.lower() in ("true", "1")

"""X-Request-Id: every answer has one, to be found again in the logs of both sides."""

import re
import uuid

from aiohttp import web

HEADER = "X-Request-Id"
CALL_ID = web.RequestKey("call_id", str)  # where a handler leaves the id that the body of its answer bears

_SANE = re.compile(r"[\w.:/+=@~-]{1,128}", re.ASCII)


async def add_request_id(request: web.Request, response: web.StreamResponse) -> None:
    """Echoes the client's id if it is short and plain, else tells ours. A hook for `app.on_response_prepare`."""
    response.headers[HEADER] = _given(request) or request.get(CALL_ID) or uuid.uuid4().hex


def call_names(request: web.Request) -> list[str]:
    """The ids by which the client knows the call: that in the answer's body, and the header's."""
    return [name for name in (request.get(CALL_ID), _given(request)) if name]


def _given(request: web.Request) -> str | None:
    given = request.headers.get(HEADER, "")
    return given if _SANE.fullmatch(given) else None

"""API keys: with any set, every route but the health check needs `Authorization: Bearer KEY`."""

import hashlib
import hmac
from collections.abc import Sequence

from aiohttp import web

from jaxserve.errors import Unauthorized
from jaxserve.http.errors import Handler

OPEN_PATHS = ("/health",)
OWNER = web.RequestKey("owner", bytes)  # a digest of the call's key: whose the things are that it leaves here


def auth_middleware(keys: Sequence[str]):
    """Refuses calls without one of `keys`. All keys are compared, each in constant time."""
    expected = [key.encode() for key in keys]
    owners = [hashlib.sha256(key).digest() for key in expected]

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path not in OPEN_PATHS:
            scheme, given = (*request.headers.get("Authorization", "").split(None, 1), "", "")[:2]
            key = given.strip().encode("utf-8", "surrogateescape")
            matches = [hmac.compare_digest(key, each) for each in expected]
            if scheme.lower() != "bearer" or not any(matches):
                raise Unauthorized("a valid API key is needed: send the header `Authorization: Bearer KEY`")
            request[OWNER] = owners[matches.index(True)]
        return await handler(request)

    return check

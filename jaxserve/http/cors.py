"""CORS: pages of the named origins may call the API from a browser. https://fetch.spec.whatwg.org/#http-cors-protocol

A browser asks first (preflight: OPTIONS, without an API key), then calls; every answer, also an error, must name the
page's origin, or the page may not read it. Answers repeat what was asked instead of saying "*", which would not cover
Authorization.
"""

from aiohttp import web

from jaxserve.config import ServeConfig
from jaxserve.errors import RequestError
from jaxserve.http.errors import Handler
from jaxserve.request import short

SAFE_HEADERS = {"accept", "accept-language", "content-language", "content-type"}  # need no permission
MAX_AGE_S = 600


class Cors:
    """The rules of one server; empty lists of methods and headers allow all."""

    def __init__(self, config: ServeConfig):
        self._origins = config.allowed_origins
        self._methods = config.allowed_methods or ["*"]
        self._headers = {name.lower() for name in config.allowed_headers or ["*"]} | SAFE_HEADERS
        self._credentials = config.allow_credentials

    def install(self, app: web.Application) -> None:
        app.middlewares.append(self._answer_preflight)
        app.on_response_prepare.append(self._name_origin)

    @web.middleware
    async def _answer_preflight(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        method = request.headers.get("Access-Control-Request-Method")
        if request.method != "OPTIONS" or not method or "Origin" not in request.headers:
            return await handler(request)
        asked = request.headers.get("Access-Control-Request-Headers", "")
        self._check("origin", request.headers["Origin"], self._origins)
        self._check("method", method, self._methods)
        for name in filter(None, map(str.strip, asked.lower().split(","))):
            self._check("header", name, self._headers)
        headers = {"Access-Control-Allow-Methods": method, "Access-Control-Max-Age": str(MAX_AGE_S)}
        if asked:
            headers["Access-Control-Allow-Headers"] = asked
        return web.Response(status=204, headers=headers)

    @staticmethod
    def _check(what: str, value: str, allowed: list[str] | set[str]) -> None:
        if value not in allowed and "*" not in allowed:
            raise RequestError(f"calls from other origins: {what} {short(value)} is not allowed (--allowed-{what}s)")

    async def _name_origin(self, request: web.Request, response: web.StreamResponse) -> None:
        response.headers.add("Vary", "Origin")
        origin = request.headers.get("Origin")
        if origin and (origin in self._origins or "*" in self._origins):
            response.headers["Access-Control-Allow-Origin"] = origin
            if self._credentials:
                response.headers["Access-Control-Allow-Credentials"] = "true"

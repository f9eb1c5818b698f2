"""One client's connection: what never becomes a request is answered in the error shape, too, and logged by nobody.

aiohttp would answer in plain text, and log a traceback per stranger who speaks TLS or sends half a header.
"""

from typing import Any

from aiohttp import web

from jaxserve.errors import RequestError
from jaxserve.http.errors import describe, error_response, http_error
from jaxserve.request import short


class Connection(web.RequestHandler):
    __slots__ = ()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """The answer to bytes that are no request. What a handler raises ends in the middleware, not here."""
        if request.writer.output_size > 0:
            raise ConnectionError("an answer has begun; there is no room for an error")
        if status == 400:
            reason = " ".join((message or "").split())
            response = error_response(RequestError(f"this is not a valid HTTP request: {short(reason, 200)}").info())
        else:
            response = error_response(describe(exc if isinstance(exc, Exception) else RuntimeError(message)))
        response.force_close()
        return response

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Also what aiohttp refuses before the middleware sees it (417)."""
        if isinstance(resp, web.HTTPException) and resp.status >= 400:
            resp = error_response(http_error(request, resp))
        return await super().finish_response(request, resp, start_time)

    def log_exception(self, *args: Any, **kw: Any) -> None:
        """A body that cannot be decoded is the client's affair; it has been told."""
        if not isinstance(kw.get("exc_info"), web.RequestPayloadError):
            super().log_exception(*args, **kw)

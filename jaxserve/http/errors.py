"""The one error body of every route: what went wrong becomes {"error": {message, type, param, code}}."""

import asyncio
import difflib
import logging
from collections.abc import Awaitable, Callable
from http import HTTPStatus

from aiohttp import ClientConnectionError, web

from jaxserve.errors import (
    ErrorInfo,
    JaxserveError,
    MethodNotAllowed,
    NotFound,
    PayloadTooLarge,
    Unauthorized,
)
from jaxserve.request import short

log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def describe(error: Exception) -> ErrorInfo:
    """An exception as clients may see it. What nobody raised on purpose is logged here, once, and not told."""
    if isinstance(error, JaxserveError):
        if error.status >= 500 and error.retry_after_s is None:  # one that says when to come back is no failure
            log.error("request failed: %s: %s", type(error).__name__, error.message)
        return error.info()
    log.error("request failed: unexpected %s", type(error).__name__, exc_info=error)
    return ErrorInfo("Internal server error; the server's log says more.", "InternalServerError", None, 500)


def error_response(info: ErrorInfo) -> web.Response:
    headers = {}
    if info.retry_after_s is not None:
        headers["Retry-After"] = str(info.retry_after_s)
    if info.code == Unauthorized.status:
        headers["WWW-Authenticate"] = "Bearer"
    response = web.json_response(info.body(), status=info.code, headers=headers)
    if info.code == PayloadTooLarge.status:
        response.force_close()  # what is left of the body is not read: no next call can come behind it
    return response


@web.middleware
async def error_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answers every failure in the error shape. A client that has gone gets nothing."""
    try:
        return await handler(request)
    except asyncio.CancelledError:
        raise
    except web.HTTPException as error:
        if error.status < 400:
            raise
        response = error_response(http_error(request, error))
        if "Allow" in error.headers:
            response.headers["Allow"] = error.headers["Allow"]
        return response
    except ClientConnectionError:
        raise  # aiohttp closes the connection quietly
    except Exception as error:
        return error_response(describe(error))


def body_too_large(limit: int) -> PayloadTooLarge:
    return PayloadTooLarge(f"the request body is larger than the limit of {limit} bytes (--max-body-bytes)")


def _other_route(request: web.Request) -> str:
    """Where a client may have wanted to go."""
    paths = {resource.canonical for resource in request.app.router.resources()}
    close = [f"/v1{request.path}"] if f"/v1{request.path}" in paths else []
    close = close or difflib.get_close_matches(request.path[:100], paths, n=1, cutoff=0.8)
    if close:
        return f"did you mean {close[0]}?"
    return "GET /v1/models names the model" + (", /docs lists the routes" if "/docs" in paths else "")


def http_error(request: web.BaseRequest, error: web.HTTPException) -> ErrorInfo:
    """aiohttp's own refusals (routing, body size) in our words."""
    place = f"{request.method} {short(request.path)}"
    if isinstance(error, web.HTTPNotFound) and isinstance(request, web.Request):
        return NotFound(f"{place}: there is no such route; {_other_route(request)}").info()
    if isinstance(error, web.HTTPMethodNotAllowed):
        return MethodNotAllowed(f"{place}: use {' or '.join(sorted(error.allowed_methods))}").info()
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        return body_too_large(request.client_max_size).info()
    phrase = HTTPStatus(error.status).phrase
    return ErrorInfo(phrase, phrase.title().replace(" ", "") + "Error", None, error.status)

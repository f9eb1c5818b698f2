"""What a route takes and answers, said at its handler; /openapi.json and /docs are made from it."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from jaxserve.errors import JaxserveError
from jaxserve.http.schema import Body

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One way to call the server.

    body     the class of the request's body; several: any one of them; none: it takes no body. One without required
             fields may be left out
    reply    the struct of the answer; str: a text of `content_type`; None: an answer without a body
    event    the struct of each server-sent event, if the call may stream
    query    JSON Schemas of the parameters in the URL
    errors   what the route raises besides what its body, path and keys already imply
    """

    body: tuple[type[Body], ...] = ()
    reply: Any = None
    event: Any = None
    content_type: str = "application/json"
    query: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    errors: tuple[type[JaxserveError], ...] = ()


def operation(
    *body: type[Body],
    reply: Any = None,
    event: Any = None,
    content_type: str = "application/json",
    query: Mapping[str, Mapping[str, Any]] | None = None,
    errors: tuple[type[JaxserveError], ...] = (),
) -> Callable[[Handler], Handler]:
    """Says of a handler what it takes and answers; see Operation."""
    what = Operation(body=body, reply=reply, event=event, content_type=content_type, query=query or {}, errors=errors)

    def describe(handler: Handler) -> Handler:
        handler.__dict__["operation"] = what
        return handler

    return describe


def operation_of(handler: Any) -> Operation | None:
    """None if nobody said."""
    return getattr(handler, "operation", None)

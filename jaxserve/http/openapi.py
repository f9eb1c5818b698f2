"""GET /openapi.json: what this server answers to, as OpenAPI 3.1, made from the declarations that the server runs on.

Routes come from the application's router, their bodies and answers from @operation (operation.py), fields from
schema.py and request.py, errors from errors.py. https://spec.openapis.org/oas/v3.1.1
"""

import inspect
import re
from collections.abc import Iterator
from typing import Any

import msgspec
from aiohttp import web

from jaxserve import __version__
from jaxserve.errors import (
    DeadlineExceeded,
    EngineDead,
    JaxserveError,
    MethodNotAllowed,
    NotFound,
    PayloadTooLarge,
    QueueFull,
    RequestError,
    RequestTimeout,
    Unauthorized,
    UnsupportedMediaType,
)
from jaxserve.http.auth import OPEN_PATHS
from jaxserve.http.json_schema import REFS, Schema, body_schema, reply_schemas
from jaxserve.http.operation import Operation, operation, operation_of
from jaxserve.http.replies import ErrorReply
from jaxserve.http.schema import Body, Facts, GenerateBody, field_specs
from jaxserve.http.state import SERVER, Server

OF_BODIES = (NotFound, RequestTimeout, PayloadTooLarge, UnsupportedMediaType)
OF_GENERATION = (QueueFull, EngineDead, DeadlineExceeded)
INFO = """The OpenAI API for one language model, with the further fields of vLLM's.

`null` means the same as leaving a field out. Unknown fields, and values that ask for what is not supported, are
refused with an error that names them. Every answer bears `X-Request-Id`, the client's own if it sent one.

With `stream` the answer is a sequence of server-sent events, each `data: ` and one JSON object, the last one
`data: [DONE]`. What is wrong with a request is told before the first event, as an HTTP error; what fails later is told
as an event that holds an `error`.
"""


@operation(reply=dict)
async def openapi(request: web.Request) -> web.Response:
    """This API as an OpenAPI document."""
    return web.Response(body=msgspec.json.encode(document(request.app)), content_type="application/json")


def document(app: web.Application) -> dict[str, Any]:
    """The OpenAPI document of an application with all its routes."""
    server = app[SERVER]
    routes = list(described(app))
    operations = [each for _, _, _, each in routes]
    bodies = dict.fromkeys(cls for each in operations for cls in each.body)
    schemas = reply_schemas([ErrorReply, *(t for each in operations for t in (each.reply, each.event) if t)])
    keyed = bool(server.config.api_key)
    paths: dict[str, dict[str, Any]] = {}
    for method, path, handler, each in routes:
        paths.setdefault(path, {})[method] = _operation(method, path, handler, each, schemas, keyed)
    components: dict[str, Any] = {
        "schemas": {cls.__name__: body_schema(cls, facts_of(server)) for cls in bodies}
        | {name: schema for name, schema in schemas.items() if isinstance(name, str)},
        "responses": {cls.__name__: _error_response(cls) for cls in _error_types(operations)},
    }
    if keyed:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer", "description": "--api-key"}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "jaxserve", "version": __version__, "description": INFO},
        "servers": [{"url": "/"}],
        "paths": dict(sorted(paths.items())),
        "components": components,
        **({"security": [{"key": []}]} if keyed else {}),
    }


def facts_of(server: Server) -> Facts:
    """What the schema of a body needs to know of this server."""
    info, frontend = server.frontend.info, server.frontend
    return Facts(
        model_names=tuple(server.model_names),
        vocab_size=info.vocab_size,
        max_model_len=info.max_model_len,
        hidden_size=info.hidden_size,
        matryoshka=info.matryoshka,
        limits_thinking=server.formats.limits_thinking(frontend.tokenizer.added_token_id),
        has_priorities=info.scheduling_policy == "priority",
        keeps_responses=server.responses.size > 0,
        ignore_unknown=server.config.ignore_unknown_fields,
        defaults=frontend.defaults,
    )


def described(app: web.Application) -> Iterator[tuple[str, str, Any, Operation]]:
    """Method (in lower case), path, handler and operation of every route; HEAD is GET without a body."""
    for resource in app.router.resources():
        for route in resource:
            if route.method != "HEAD":
                described_as = operation_of(route.handler) or Operation(reply=Any)
                yield route.method.lower(), resource.canonical, route.handler, described_as


def _operation(
    method: str, path: str, handler: Any, each: Operation, schemas: dict[Any, Schema], keyed: bool
) -> dict[str, Any]:
    doc = inspect.getdoc(handler) or ""
    names = re.findall(r"{(\w+)}", path)
    said: dict[str, Any] = {
        "operationId": "_".join([method, *re.findall(r"\w+", path)]),
        "summary": doc.split("\n\n")[0].replace("\n", " "),
        "tags": [handler.__module__.rpartition(".")[2]],
        "parameters": [
            *({"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
              for name in names),
            *({"name": name, "in": "query", "schema": schema} for name, schema in each.query.items()),
        ],
        "responses": {
            "200": _answer(each, schemas),
            **{str(cls.status): {"$ref": f"#/components/responses/{cls.__name__}"}
               for cls in _errors_of(each, guarded=keyed and path not in OPEN_PATHS, with_path=bool(names))},
        },
    }  # fmt: skip
    if each.body:
        refs = [{"$ref": REFS.format(name=cls.__name__)} for cls in each.body]
        schema = refs[0] if len(refs) == 1 else {"anyOf": refs}
        content = {"schema": schema, "examples": _examples(each.body)}
        needed = any(spec.required for cls in each.body for spec in field_specs(cls).values())
        said["requestBody"] = {"required": needed, "content": {"application/json": content}}
    if keyed and path in OPEN_PATHS:
        said["security"] = []
    return said


def _answer(each: Operation, schemas: dict[Any, Schema]) -> dict[str, Any]:
    answer: dict[str, Any] = {"description": "the answer"}
    if each.reply is not None:
        answer["content"] = {each.content_type: {"schema": schemas[each.reply]}}
    if each.event is not None:
        answer["description"] = "the answer; with stream=true its pieces, as server-sent events"
        answer["content"]["text/event-stream"] = {"schema": _event(schemas[each.event])}
    return answer


def _event(piece: Schema) -> Schema:
    """One server-sent event; as OpenAPI 3.2 has it, an object with the event's fields."""
    error = {"$ref": REFS.format(name=ErrorReply.__name__)}
    data = {"contentMediaType": "application/json", "contentSchema": {"anyOf": [piece, error]}}
    return {
        "type": "object",
        "properties": {"data": {"type": "string", "anyOf": [data, {"const": "[DONE]"}]}},
        "required": ["data"],
    }


def _examples(bodies: tuple[type[Body], ...]) -> dict[str, Any]:
    return {cls.__name__: {"value": example(cls)} for cls in bodies}


def example(cls: type[Body]) -> dict[str, Any]:
    """A small body that works: its required fields."""
    fields = cls.__dataclass_fields__.values()
    return {f.name: f.metadata["example"] for f in fields if "example" in f.metadata}


def _errors_of(each: Operation, *, guarded: bool, with_path: bool) -> list[type[JaxserveError]]:
    """What a call may be refused with, in the order of their status."""
    generates = any(issubclass(cls, GenerateBody) for cls in each.body)
    errors = {
        RequestError,
        MethodNotAllowed,
        JaxserveError,
        *each.errors,
        *(OF_BODIES if each.body else ()),
        *(OF_GENERATION if generates else ()),
        *((NotFound,) if with_path else ()),
        *((Unauthorized,) if guarded else ()),
    }
    return sorted(errors, key=lambda cls: cls.status)


def _error_types(operations: list[Operation]) -> list[type[JaxserveError]]:
    found = {cls for each in operations for cls in _errors_of(each, guarded=True, with_path=True)}
    return sorted(found, key=lambda cls: cls.status)


def _error_response(cls: type[JaxserveError]) -> dict[str, Any]:
    """One response of the errors of a status."""
    response: dict[str, Any] = {
        "description": (inspect.getdoc(cls) or cls.type).split("\n\n")[0],
        "content": {"application/json": {"schema": {"$ref": REFS.format(name=ErrorReply.__name__)}}},
    }
    if cls.retry_after_s is not None:
        response["headers"] = {"Retry-After": {"description": "seconds", "schema": {"type": "integer"}}}
    if cls is Unauthorized:
        response["headers"] = {"WWW-Authenticate": {"schema": {"type": "string"}}}
    return response

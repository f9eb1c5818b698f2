"""What the handlers of one app share."""

import asyncio
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from aiohttp import web

from jaxserve.config import ServeConfig
from jaxserve.errors import NotFound, PayloadTooLarge, RequestError, RequestTimeout, UnsupportedMediaType
from jaxserve.frontend import Frontend
from jaxserve.http import schema
from jaxserve.http.errors import body_too_large
from jaxserve.http.response_store import ResponseStore
from jaxserve.metrics import Metrics
from jaxserve.parsers import Formats
from jaxserve.request import EngineClient, short

if TYPE_CHECKING:
    from jaxserve.http.peers import Peers  # which reads bodies as this does


@dataclass(slots=True, eq=False)
class Call:
    """A call that generates: the ids by which its client knows it, and those of its requests at the engine.

    ending: it needs nothing more from the engine, or was aborted; what is left is its answer's end
    """

    names: frozenset[str]
    request_ids: Sequence[str]
    ending: bool = False


@dataclass(frozen=True, slots=True)
class Server:
    """The parts of a running server.

    formats: how the model writes tool calls and reasoning
    responses: what /v1/responses keeps
    peers: the other HTTP processes of the same server
    calls: those that are open
    closing: tasks that cancel what calls left behind
    reading: connections with a call whose body is still on its way
    """

    frontend: Frontend
    client: EngineClient
    config: ServeConfig
    metrics: Metrics
    model_names: Sequence[str]
    formats: Formats
    responses: ResponseStore
    peers: "Peers"
    started: int = field(default_factory=lambda: int(time.time()))
    calls: set[Call] = field(default_factory=set)
    closing: set[asyncio.Task] = field(default_factory=set)
    reading: set[web.RequestHandler] = field(default_factory=set)

    def model_name(self, asked: str | None) -> str:
        """The name to answer with. Raises NotFound if this is no name of the model."""
        name = asked or self.model_names[0]
        if name not in self.model_names:
            served = " and ".join(map(short, self.model_names))
            raise NotFound(f"The model {short(asked)} does not exist: this server has {served}.", param="model")
        return name

    def parse[B: schema.Body](self, cls: type[B], raw: dict[str, Any]) -> tuple[B, dict[str, Any]]:
        """See schema.parse."""
        ignore = self.config.ignore_unknown_fields
        return schema.parse(cls, raw, check_model=self.model_name, ignore_unknown=ignore)


SERVER = web.AppKey("server", Server)
BODY_BYTES = web.RequestKey("body_bytes", int)  # the size of what read_object() has read


ENCODINGS = ("identity", "gzip", "deflate")
GZIP_MAGIC = b"\x1f\x8b"  # of each member
MAX_GZIP_MEMBERS = 16  # one behind the other; each costs a copy of what follows
BODY_TIMEOUT_S = 120.0  # that a client may take to send a body


async def read_object(request: web.Request) -> dict[str, Any]:
    """The JSON object that was sent. Raises UnsupportedMediaType, PayloadTooLarge, RequestTimeout, RequestError."""
    if request.content_type != "application/json":
        given = short(request.headers.get("Content-Type", "none"))
        raise UnsupportedMediaType(f"the Content-Type must be application/json, got {given}")
    body = await read_body(request)
    request[BODY_BYTES] = len(body)  # not content_length: a chunked body has none
    return schema.decode_object(body)


async def read_body(request: web.Request) -> bytes:
    """What was sent, decompressed. Raises UnsupportedMediaType, PayloadTooLarge, RequestTimeout, RequestError."""
    limit = request.client_max_size
    if (encoding := request.headers.get("Content-Encoding", "identity").lower()) not in ENCODINGS:
        known = ", ".join(ENCODINGS)
        raise UnsupportedMediaType(f"the Content-Encoding must be one of {known}, got {short(encoding)}")
    if (size := request.content_length or 0) > limit:
        raise PayloadTooLarge(f"the request body has {size} bytes; the limit is {limit} bytes (--max-body-bytes)")
    reading = request.app[SERVER].reading
    reading.add(request.protocol)
    try:
        body = await _read(request)
    finally:
        reading.discard(request.protocol)
    return await asyncio.to_thread(_inflated, body, encoding, limit) if body and encoding != "identity" else body


async def _read(request: web.Request) -> bytes:
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            return await request.read()
    except TimeoutError:
        raise RequestTimeout(f"the request body did not arrive within {BODY_TIMEOUT_S:g} seconds") from None
    except web.RequestPayloadError as error:
        reason = short(" ".join(str(error.__cause__ or error).split()), 200)
        raise RequestError(f"the request body cannot be decoded: {reason}") from None


def _inflated(body: bytes, encoding: str, limit: int) -> bytes:
    """Not left to aiohttp, which takes encodings by what is installed, and tells in words only which it lacks."""
    bare = body[0] & 0xF != zlib.DEFLATED  # deflate without the header that it should have: some clients send it so
    wbits = 16 + zlib.MAX_WBITS if encoding == "gzip" else -zlib.MAX_WBITS if bare else zlib.MAX_WBITS
    data = b""
    for _ in range(MAX_GZIP_MEMBERS if encoding == "gzip" else 1):
        stream = zlib.decompressobj(wbits)
        try:
            data += stream.decompress(body, limit + 1 - len(data))
        except zlib.error as error:
            raise RequestError(f"the request body cannot be decoded: {error}") from None
        if len(data) > limit:
            raise body_too_large(limit)
        if not stream.eof:
            raise RequestError(f"the request body cannot be decoded: as {encoding}, it is cut off")
        if not (body := stream.unused_data):
            return data
        if not body.startswith(GZIP_MAGIC):
            break
    raise RequestError(f"the request body cannot be decoded: as {encoding}, more follows its end")

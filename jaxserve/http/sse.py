"""Server-sent events: the answer of a streaming call, opened with its first event."""

import msgspec
from aiohttp import web

from jaxserve.errors import ErrorInfo

HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # nginx would hold events back
}
DONE = b"data: [DONE]\n\n"


def event(data: msgspec.Struct | dict) -> bytes:
    """One event of one line of JSON."""
    return b"data: " + msgspec.json.encode(data) + b"\n\n"


class EventStream:
    """The headers go out with the first event: until then the call can still be answered with an HTTP error.

    `done` follows the last event.
    """

    def __init__(self, request: web.Request, *, done: bytes = DONE):
        self._request = request
        self._done = done
        self.response = web.StreamResponse(headers=HEADERS)

    @property
    def opened(self) -> bool:
        return self.response.prepared

    async def send(self, events: bytes) -> None:
        """Sends one or more encoded events. Raises ClientConnectionError if the client has gone."""
        if not self.opened:
            await self.response.prepare(self._request)
        await self.response.write(events)

    async def fail(self, error: ErrorInfo) -> None:
        """Ends an opened stream with an error."""
        await self.send(event(error.body()) + self._done)
        await self.response.write_eof()

    async def end(self, last: bytes = b"") -> web.StreamResponse:
        await self.send(last + self._done)
        await self.response.write_eof()
        return self.response

"""The HTTP processes of one server (--api-server-count), and what they ask each other.

    client ──TCP──► any process ──Unix socket──► all others: their share of /load, /metrics, /abort_requests
                                ──Unix socket──► the one that keeps a stored response: the call is passed on to it

All listen on the same port, and the kernel deals out the connections (SO_REUSEPORT). Each also listens at a socket file
in a private directory: a call that comes there is of another process, and is answered for this one alone.
"""

import asyncio
import re
import uuid
from collections.abc import Mapping
from pathlib import Path

import aiohttp
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from jaxserve.errors import EngineDead
from jaxserve.http.request_id import CALL_ID, HEADER
from jaxserve.http.state import read_body

ASK_S = 5.0  # that another process gets to answer for itself
# Headers of one connection, or of how a body is sent on it.
OF_CONNECTIONS = frozenset(
    "connection content-encoding content-length expect host keep-alive te trailer transfer-encoding upgrade".split()
)
_KEPT = re.compile(r"resp_(\d{1,3})_[0-9a-f]{32}")


class Peers:
    """This process among those of its server. `passing`: calls that are now passed on to another one."""

    def __init__(self, number: int = 0, count: int = 1, directory: Path | None = None):
        """number: of this process, from 0. directory: private to the server; where the sockets are if count > 1."""
        self.number, self.count = number, count
        self._directory = directory
        self._sessions: dict[int, aiohttp.ClientSession] = {}
        self.passing = 0

    @property
    def socket_path(self) -> str | None:
        """Where this process listens for the others; None: there are none."""
        return self._path(self.number) if self.count > 1 else None

    def _path(self, number: int) -> str:
        assert self._directory is not None, "given if there are several"
        return str(self._directory / f"http-{number}.sock")

    def _session(self, number: int) -> aiohttp.ClientSession:
        if number not in self._sessions:
            connector = aiohttp.UnixConnector(self._path(number), limit=0)
            timeout = aiohttp.ClientTimeout(total=None)
            self._sessions[number] = aiohttp.ClientSession("http://peer", connector=connector, timeout=timeout)
        return self._sessions[number]

    async def close(self) -> None:
        for session in self._sessions.values():
            await session.close()

    # ------------------------------------------------------------------------------------------------ all others

    async def ask(self, request: web.Request) -> list[bytes]:
        """What each of the others answers to the same call for itself; nothing if it is another one that asks here.

        Raises EngineDead if one does not answer.
        """
        if self.count == 1 or _is_of_peer(request):
            return []
        body, headers = await _body_of(request), _headers(request.headers)
        method = "GET" if request.method == "HEAD" else request.method  # what is asked for is what they would say
        others = [number for number in range(self.count) if number != self.number]

        async def one(number: int) -> bytes:
            try:
                async with asyncio.timeout(ASK_S):
                    session = self._session(number)
                    async with session.request(method, request.path_qs, headers=headers, data=body) as answer:
                        answer.raise_for_status()
                        return await answer.read()
            except (aiohttp.ClientError, TimeoutError):
                raise EngineDead(f"HTTP process {number + 1} of {self.count} does not answer") from None

        return await asyncio.gather(*map(one, others))

    async def is_ready(self, number: int) -> bool:
        """Whether that process serves."""
        try:
            async with asyncio.timeout(ASK_S), self._session(number).get("/version") as answer:
                await answer.read()
                return True  # whatever it says: it may ask for a key
        except (aiohttp.ClientError, TimeoutError):
            return False

    # ------------------------------------------------------------------------------------------ stored responses

    def new_response_id(self) -> str:
        """An id that tells which process keeps the response."""
        return f"resp_{self.number}_{uuid.uuid4().hex}" if self.count > 1 else f"resp_{uuid.uuid4().hex}"

    def keeper(self, request: web.Request, response_id: str | None) -> int | None:
        """The number of the process that keeps the response, if this call is to be passed on to it."""
        match = _KEPT.fullmatch(response_id or "")
        if not match or _is_of_peer(request):
            return None
        number = int(match[1])
        return number if number < self.count and number != self.number else None

    async def pass_on(self, request: web.Request, number: int) -> web.StreamResponse:
        """The answer of another process, as it comes. Raises EngineDead if there is none."""
        gone = EngineDead(f"HTTP process {number + 1} of {self.count}, which keeps this response, does not answer")
        body, headers = await _body_of(request), _headers(request.headers)
        self.passing += 1
        try:
            session = self._session(number)
            try:
                answer = await session.request(request.method, request.path_qs, headers=headers, data=body)
            except aiohttp.ClientError:  # not to be taken for one of our client's
                raise gone from None
            async with answer:
                request[CALL_ID] = answer.headers.get(HEADER, "")
                response = web.StreamResponse(status=answer.status, headers=_headers(answer.headers))
                response.content_length = answer.content_length
                await response.prepare(request)
                try:
                    async for chunk in answer.content.iter_any():
                        await response.write(chunk)
                except aiohttp.ClientPayloadError:  # it has ended amid its answer: so does ours
                    raise aiohttp.ClientConnectionResetError(gone.message) from None
                await response.write_eof()
                return response
        finally:
            self.passing -= 1


def pass_on_middleware(peers: Peers) -> Middleware:
    """Sends calls about a stored response to the process that keeps it."""

    @web.middleware
    async def pass_on(request: web.Request, handler: Handler) -> web.StreamResponse:
        if (number := peers.keeper(request, request.match_info.get("response_id"))) is not None:
            return await peers.pass_on(request, number)
        return await handler(request)

    return pass_on


async def _body_of(request: web.Request) -> bytes | None:
    """What of a body is to be passed on: that of a POST. Raises what read_body raises."""
    return await read_body(request) or None if request.method == "POST" else None


def _is_of_peer(request: web.Request) -> bool:
    """Whether it came through this process's socket file, and not through the port."""
    return request.transport is not None and isinstance(request.transport.get_extra_info("sockname"), str | bytes)


def _headers(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name.lower() not in OF_CONNECTIONS}

"""A small client of the OpenAI API over HTTP: what `chat`, `complete` and `bench serve` speak to a server with."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Any, Self

import aiohttp
import msgspec

from jaxserve.errors import ConfigError, ErrorInfo, JaxserveError, NotFound, Unauthorized
from jaxserve.request import short

CONNECT_TIMEOUT_S = 10
HINT = "is the server running? `jaxserve serve` starts one"


class ApiClient:
    """One server, one pool of connections. Every failure is a JaxserveError whose message can be shown as it is."""

    def __init__(self, base_url: str, api_key: str | None = None):
        """`base_url` is what all paths are appended to; call inside a running event loop. Raises ConfigError."""
        self.base_url = base_url.rstrip("/")
        if not re.match(r"https?://[^/]", self.base_url):
            host = re.sub(r"^\w*:*/+", "", self.base_url) or "localhost:8000"
            raise ConfigError(f"{base_url!r} is no URL of a server: write it with http://, like http://{host}")
        self._session = aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._session.close()

    async def models(self, path: str = "/models") -> list[dict[str, Any]]:
        """The entries that GET `path` lists; at least one."""
        url = f"{self.base_url}{path}"
        try:
            text = await self.get_text(url)
        except NotFound as error:
            raise NotFound(f"{url}: {error.message}; {self._other_url(url)}") from None
        try:
            models = json.loads(text)["data"]
            models[0]["id"]
        except (ValueError, KeyError, TypeError, IndexError):
            raise NotFound(f"{url} lists no model; {self._other_url(url)}") from None
        return models

    def _other_url(self, url: str) -> str:
        """What the user may have meant, where `url` is not the one that lists models."""
        if "/v1/v1/" in url:
            return f"this URL goes without /v1: try {self.base_url.removesuffix('/v1')}"
        if "/v1/" not in url:
            return f"the URL of such a server ends with /v1: try {self.base_url}/v1"
        return "is this the address of an OpenAI-compatible server?"

    async def get_text(self, url: str) -> str:
        """The body of a GET on a full URL."""
        try:
            async with self._session.get(url) as response:
                await _raise_for_status(response)
                return await response.text()
        except (aiohttp.ClientError, OSError) as error:
            raise _unreachable(url, error) from None

    async def stream(self, path: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """POSTs `body` and yields each event of the answer until [DONE]. Closing it early closes the connection."""
        url = f"{self.base_url}{path}"
        try:
            async with self._session.post(url, json=body) as response:
                await _raise_for_status(response)
                async for event in _events(response):
                    if error := event.get("error"):
                        raise _error_of(error, response.status)
                    yield event
        except (aiohttp.ClientError, OSError) as error:
            raise _unreachable(url, error) from None


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """Server-sent events, decoded. The events of this API are one `data:` line each."""
    decode = msgspec.json.Decoder().decode
    pending = b""
    async for block in response.content.iter_any():
        *lines, pending = (pending + block).split(b"\n")
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                return
            try:
                yield decode(data)
            except msgspec.DecodeError:
                raise JaxserveError(f"the server sent an event that is not JSON: {short(data)}") from None
    raise JaxserveError("the server closed the stream before [DONE]")


async def _raise_for_status(response: aiohttp.ClientResponse) -> None:
    if response.status < 400:
        return
    text = await response.text(errors="replace")
    try:
        error = json.loads(text)["error"]
    except (ValueError, KeyError, TypeError):
        error = text
    exception = _error_of(error, response.status)
    if isinstance(exception, Unauthorized):
        exception.message += " (--api-key KEY or JAXSERVE_API_KEY names one)"
    raise exception


def _error_of(error: Any, status: int) -> JaxserveError:
    """The exception of an OpenAI error body; other servers' shapes become its message."""
    if isinstance(error, dict) and isinstance(error.get("message"), str):
        code = error.get("code")
        code = code if isinstance(code, int) and status < 400 else status
        info = ErrorInfo(error["message"], str(error.get("type")), error.get("param"), code)
    else:
        info = ErrorInfo(f"HTTP {status}: {short(error, 300)}", "", None, status)
    return info.exception()


def _unreachable(url: str, error: BaseException) -> JaxserveError:
    if isinstance(error, (aiohttp.ClientConnectorError, asyncio.TimeoutError)):
        return JaxserveError(f"cannot reach {url} ({getattr(error, 'strerror', None) or 'no answer'}): {HINT}")
    return JaxserveError(f"the connection to {url} broke: {error or type(error).__name__}")

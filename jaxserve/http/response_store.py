"""Responses kept for later calls: in memory, so many at most, each for so long, each seen by its owner's key only."""

import asyncio
import hmac
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from jaxserve.errors import NotFound, QueueFull
from jaxserve.http.response_replies import Response
from jaxserve.request import short
from jaxserve.shapes import ceil_div

EVENTS_TTL_S = 300.0  # for which the events of a background stream can be had again after its end


class EventLog:
    """The encoded events of a background stream: event N is number N. Readers may come at any time."""

    def __init__(self) -> None:
        self._events: list[bytes] = []
        self._closed = False
        self._grown = asyncio.Event()

    def extend(self, events: list[bytes]) -> None:
        self._events += events
        self._wake()

    def close(self) -> None:
        self._closed = True
        self._wake()

    def _wake(self) -> None:
        self._grown.set()
        self._grown = asyncio.Event()

    async def read(self, start: int) -> AsyncIterator[bytes]:
        """Events from number `start` on, joined as they are there, until the log is closed."""
        while True:
            if start < len(self._events):
                events = self._events[start:]
                start += len(events)
                yield b"".join(events)
            elif self._closed:
                return
            else:
                await self._grown.wait()


@dataclass(slots=True, eq=False)
class StoredResponse:
    """A response and what a later call needs of it.

    items: what it was generated from, including what came before this call
    size_chars: about as much text is in all that
    task: generates it, if it runs in the background
    """

    response: Response
    owner: bytes
    items: list[dict[str, Any]]
    size_chars: int = 0
    task: asyncio.Task | None = None
    events: EventLog | None = None
    timers: list[asyncio.TimerHandle] = field(default_factory=list)

    @property
    def running(self) -> bool:
        return self.task is not None and not self.task.done()


class ResponseStore:
    """At most `size` responses, each for `ttl_s` seconds after its end; the oldest makes room for a new one.

    Of several `processes` of a server, to which the kernel deals out the calls, each keeps its share.
    """

    def __init__(self, size: int, ttl_s: float, *, processes: int = 1):
        self.size = size
        self._share = ceil_div(size, processes)
        self._ttl_s = ttl_s
        self._stored: dict[str, StoredResponse] = {}  # in the order in which they came

    def __len__(self) -> int:
        return len(self._stored)

    def get(self, response_id: str, owner: bytes, *, param: str | None = None) -> StoredResponse:
        """Raises NotFound, in the same words whether it is unknown or somebody else's."""
        stored = self._stored.get(response_id)
        if stored is None or not hmac.compare_digest(stored.owner, owner):
            place = f"{param}: " if param else ""
            raise NotFound(
                f"{place}there is no response {short(response_id)}; at most {self.size} are kept"
                f" (--response-store-size), for {self._ttl_s:g} s (--response-store-ttl)",
                param=param or "response_id",
            )
        return stored

    def add_running(self, stored: StoredResponse) -> None:
        """Keeps a response that runs in the background; call `finish` at its end. Raises QueueFull."""
        if sum(each.running for each in self._stored.values()) >= self._share:
            raise QueueFull(f"{self._share} responses already run in the background (--response-store-size)")
        self._add(stored)

    def add_finished(self, stored: StoredResponse) -> None:
        self._add(stored)
        self.finish(stored)

    def _add(self, stored: StoredResponse) -> None:
        finished = [each for each in self._stored.values() if not each.running]
        for oldest in finished[: max(len(self._stored) + 1 - self._share, 0)]:
            self.remove(oldest)
        self._stored[stored.response.id] = stored

    def finish(self, stored: StoredResponse) -> None:
        """From now on its time runs. Unless it was removed while it ran."""
        if self._stored.get(stored.response.id) is not stored:
            return
        loop = asyncio.get_running_loop()
        stored.timers.append(loop.call_later(self._ttl_s, self.remove, stored))
        if stored.events:
            stored.timers.append(loop.call_later(EVENTS_TTL_S, setattr, stored, "events", None))

    def remove(self, stored: StoredResponse) -> None:
        """Forgets it; a running one is cancelled."""
        self._stored.pop(stored.response.id, None)
        for timer in stored.timers:
            timer.cancel()
        if stored.task:
            stored.task.cancel()

    async def close(self) -> None:
        """Cancels what still runs, and waits until it has ended."""
        tasks = [stored.task for stored in self._stored.values() if stored.task]
        for stored in list(self._stored.values()):
            self.remove(stored)
        await asyncio.gather(*tasks, return_exceptions=True)

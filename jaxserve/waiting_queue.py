"""Sequences that wait for a slot and pages, lowest key first. Never imports jax."""

import heapq

from jaxserve.sequence import Sequence, Status


class WaitingQueue:
    """A heap by `Sequence.key`. Sequences that were cancelled meanwhile are dropped lazily."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple, Sequence]] = []
        self._dead = 0

    def __len__(self) -> int:
        return len(self._heap) - self._dead

    def __iter__(self):
        return (seq for _, seq in self._heap if seq.status is Status.WAITING)

    def push(self, seq: Sequence) -> None:
        heapq.heappush(self._heap, (seq.key, seq))

    def peek(self) -> Sequence | None:
        """The first in line."""
        while self._heap and self._heap[0][1].status is not Status.WAITING:
            heapq.heappop(self._heap)
            self._dead -= 1
        return self._heap[0][1] if self._heap else None

    def pop(self) -> Sequence:
        """Removes what peek() returned."""
        return heapq.heappop(self._heap)[1]

    def note_cancelled(self) -> None:
        """One of the queue has left the status WAITING without being popped."""
        self._dead += 1
        if self._dead > 64 and self._dead > len(self._heap) // 2:
            self._heap = [entry for entry in self._heap if entry[1].status is Status.WAITING]
            heapq.heapify(self._heap)
            self._dead = 0

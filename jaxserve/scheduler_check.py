"""The scheduler's invariants, checked in tests after every call and by an idle engine. Never imports jax."""

from __future__ import annotations

from collections import Counter
from itertools import chain
from typing import TYPE_CHECKING

from jaxserve.paging.page_pool import InvariantError
from jaxserve.sequence import Status
from jaxserve.shapes import ceil_div

if TYPE_CHECKING:
    from jaxserve.scheduler import Scheduler, Sequence


def check_scheduler(scheduler: Scheduler) -> None:
    """Raises InvariantError unless

    - every page has as many holders as its refcount says, and every slot one holder at most;
    - a running sequence holds exactly the pages of its computed tokens; nobody else holds anything;
    - the page that a sequence writes next is its own;
    - every unfinished sequence is in exactly one place: running, draining, in the queue, or parked.
    """
    scheduler.pool.check()
    if scheduler.cache is not None:
        scheduler.cache.check()
    seqs = list(chain.from_iterable(scheduler.requests.values()))
    holders = Counter(chain.from_iterable(seq.pages for seq in scheduler.running))
    for page in range(1, scheduler.pool.num_pages):
        count = scheduler.pool.refcount(page)
        _require(count == holders[page], f"page {page}: refcount {count}, but {holders[page]} holders")
    slots = sorted([seq.slot for seq in scheduler.running] + scheduler.free_slots)
    _require(slots == list(range(scheduler.max_num_seqs)), f"slots are lost or held twice: {slots}")
    for seq in seqs:
        _check_sequence(scheduler, seq)
    _check_places(scheduler, seqs)


def _check_sequence(scheduler: Scheduler, seq: Sequence) -> None:
    name = f"sequence {seq.index} of {seq.request.request_id}"
    if seq.status is not Status.RUNNING:
        _require(not seq.pages and seq.slot == -1, f"{name} is {seq.status.value} and holds pages or a slot")
    if seq.status is Status.FINISHED:
        return
    _require(not seq.forkable or seq.computed >= seq.prompt_len, f"{name} is forkable without its whole prompt")
    _require(0 <= seq.pending <= len(scheduler.in_flight), f"{name} has {seq.pending} tokens pending")
    _require(seq.computed <= seq.num_tokens <= seq.limit, f"{name}: computed {seq.computed} of {seq.num_tokens} tokens")
    if seq.status is Status.RUNNING:
        _require(len(seq.pages) == ceil_div(seq.computed, scheduler.page_size), f"{name} holds {len(seq.pages)} pages")
        for page in seq.pages[seq.computed // scheduler.page_size :]:
            _require(scheduler.pool.refcount(page) == 1, f"{name} will write to page {page}, which is shared")
    elif seq.status is Status.WAITING:
        _require(seq.computed == 0, f"{name} waits with computed tokens")
        pages = ceil_div(seq.num_tokens, scheduler.page_size)
        _require(pages <= scheduler.pool.capacity, f"{name} waits for {pages} pages, more than there are")
    else:
        _require(seq.pending > 0, f"{name} drains but no token is on its way")


def _check_places(scheduler: Scheduler, seqs: list[Sequence]) -> None:
    queued = [*scheduler.waiting, *scheduler.held]
    parked = [p for seq in seqs for p in seq.parked if p.status is not Status.FINISHED]
    places = Counter([*scheduler.running, *scheduler._draining, *queued, *parked])
    alive = [seq for seq in seqs if seq.status is not Status.FINISHED]
    _require(places == Counter(alive), "a sequence is lost, or in two places")
    _require(len(scheduler.waiting) + len(scheduler.held) == len(queued), "the length of the queue is wrong")
    _require(scheduler._alive == len(alive), f"{len(alive)} sequences are unfinished, {scheduler._alive} were counted")
    unstarted = sum(seq.index == 0 and not seq.started for seq in alive)
    _require(scheduler._unstarted == unstarted, f"{unstarted} requests wait, {scheduler._unstarted} were counted")


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise InvariantError(message)

"""Decides what each step computes: queue, slots, pages, token budget, preemption. Host side, never jax.

    plan n ─ launch n ─ plan n+1 ─ launch n+1 ─ commit n ─ plan n+2 ─ launch n+2 ─ commit n+1 ...

A step is planned before the ids of the one before are here. Ends by count (max_tokens, max_model_len) are known when
planning, so no row goes past them; stop ids and cancels show up later, and a row launched meanwhile for such a sequence
is dropped at its commit. Pages are given back at once all the same: every launch takes the memory that the previous
one returns, so the device finishes with a page before anybody writes to it again.
"""

import heapq
from collections import deque

import numpy as np

from jaxserve.errors import QueueFull, RequestError
from jaxserve.grammar import JUMP_FROM, GrammarState
from jaxserve.paging.page_pool import PagePool
from jaxserve.paging.page_table import PageTableWrites
from jaxserve.paging.prefix_cache import PrefixCache, extend_hashes
from jaxserve.plan import Event, Plan, Rows
from jaxserve.request import NOT_FINITE, NOTHING_ALLOWED, EngineStats, Request
from jaxserve.scheduler_check import check_scheduler
from jaxserve.sequence import Sequence, Status, check_servable, make_sequences
from jaxserve.shapes import Limit, ceil_div
from jaxserve.waiting_queue import WaitingQueue

__all__ = ["Event", "Plan", "Rows", "Scheduler", "Sequence", "Status"]

UNREGISTERABLE = 1 << 60  # `Sequence.registered` of one whose KV the prefix cache must not learn
SAMPLES_PER_PLACE = 16  # sequences that may wait, per request that may
WATERMARK = 100  # one page in so many is left by admission to those that already run, so that they need not preempt


class Scheduler:
    """Queue, slots and pages of all sequences. Not thread-safe; ids out of order or twice are refused.

    num_pages           pages of the device's pool, trash page 0 included
    max_num_seqs        slots: sequences that run together, and so decode rows of one step, at most
    limits              what a step with prompts in it holds, see `shapes.step_limits`
    max_prefill_rows    chunks in the prefill region of one step
    max_queue_len       requests that wait; a further one is refused, also while 16 times as many sequences wait
    policy              "fcfs", or "priority": lowest Request.priority first, then earliest arrival
    checks              tests: run check() after every call
    """

    def __init__(
        self, *, num_pages: int, page_size: int, max_num_seqs: int, max_model_len: int, limits: tuple[Limit, ...],
        max_prefill_rows: int | None = None, max_queue_len: int = 1024,
        policy: str = "fcfs", prefix_caching: bool = True, checks: bool = False,
    ):  # fmt: skip
        if policy not in ("fcfs", "priority"):
            raise ValueError(f"policy must be fcfs or priority, got {policy!r}")
        self.page_size, self.max_model_len = page_size, max_model_len
        self.max_num_seqs, self.max_queue_len = max_num_seqs, max_queue_len
        self.limits = limits
        self._limit, self._decode_rows = limits[0], 0  # of the step that is being planned
        self.max_prefill_rows = max_prefill_rows or max_num_seqs
        self.policy, self.checks = policy, checks
        self.pool = PagePool(num_pages, page_size)
        self.cache = PrefixCache(self.pool) if prefix_caching else None
        self.running: list[Sequence] = []  # in order of admission
        self.waiting = WaitingQueue()
        self.held = WaitingQueue()  # requests that came after hold()
        self.requests: dict[str, list[Sequence]] = {}  # those with an unfinished sequence
        self.free_slots = list(range(max_num_seqs - 1, -1, -1))
        self.in_flight: deque[Plan] = deque()  # planned and not committed
        self._table = PageTableWrites()
        self._watermark = ceil_div(self.pool.capacity, WATERMARK)
        self._draining: list[Sequence] = []
        self._last_rows: list[Sequence] = []  # sequences whose last row is in the newest plan
        self._forkable: list[Sequence] = []  # sequences whose whole prompt is computed once the plan being made has run
        self._deadlines: list[tuple[float, int, str]] = []
        self._endings: list[Event] = []
        self._serial = 0
        self._held_from: int | None = None  # serial from which on requests are held
        self._frozen = False
        self._alive = 0  # unfinished sequences
        self._unstarted = 0  # requests of which nothing has been admitted yet
        self._unswept = False  # somebody in `running` or `_draining` is so no longer
        self._backlog = False  # the newest plan left somebody in the queue
        self._preempted = False  # the plan being made preempted somebody
        self._counts = EngineStats()

    # ------------------------------------------------------------------------------------------ requests in and out

    def add(self, request: Request, grammar: GrammarState | None = None) -> list[Sequence]:
        """Accepts a request: its n sequences wait; each that is admitted gets a copy of `grammar`.

        Raises QueueFull, or RequestError if it can never be served.
        """
        if request.request_id in self.requests:
            raise RequestError(f"request_id {request.request_id!r} is already in use", param="request_id")
        check_servable(request, self.max_model_len, self.pool.capacity * self.page_size)
        room = self.max_queue_len + (0 if self._backlog else len(self.free_slots))
        if self._unstarted >= room:
            raise QueueFull(
                f"the waiting queue is full: {self._unstarted} requests wait (max_queue_len {self.max_queue_len})"
            )
        waiting, most = self._alive - len(self.running) - len(self._draining), room * SAMPLES_PER_PLACE
        if waiting >= most:
            raise QueueFull(
                f"the waiting queue is full: {waiting} sequences wait, {most} may (max_queue_len {self.max_queue_len})"
            )
        self._serial += 1
        seqs = make_sequences(request, self._serial, self.policy, self.max_model_len, grammar)
        self.requests[request.request_id] = seqs
        self._alive += len(seqs)
        self._unstarted += 1
        self._queue_of(seqs[0]).push(seqs[0])
        if request.deadline_s is not None:
            heapq.heappush(self._deadlines, (request.deadline_s, self._serial, request.request_id))
        self._check()
        return list(seqs)

    def cancel(self, request_id: str, index: int | None = None, reason: str = "abort") -> None:
        """Ends one sequence of a request, or all of them, which take_endings() tells. Unknown ids are over already."""
        seqs = self.requests.get(request_id, [])
        for seq in seqs[::-1]:  # the first one last: it would send those parked behind it to the queue
            if seq.status is not Status.FINISHED and index in (None, seq.index):
                self._end(seq, reason)
        self._check()

    def expire(self, now_s: float) -> None:
        """Ends requests whose deadline (time.monotonic()) is over with "timeout"."""
        while self._deadlines and self._deadlines[0][0] <= now_s:
            _, serial, request_id = heapq.heappop(self._deadlines)
            seqs = self.requests.get(request_id)
            if seqs and seqs[0].serial == serial:  # not a later request of the same id
                self.cancel(request_id, reason="timeout")

    def take_endings(self) -> list[Event]:
        """Sequences that ended outside of commit(): cancelled, expired, or grown out of the pool. Ask after plan()."""
        endings, self._endings = self._endings, []
        return endings

    @property
    def has_work(self) -> bool:
        """Whether anything is left to plan, commit or tell: not of requests that are held or frozen."""
        plannable = not self._frozen and (self.running or self._draining or self.waiting)
        return bool(plannable or self.in_flight or self._endings)

    def overdue(self, now_s: float) -> bool:
        """Whether expire() may have something to end."""
        return bool(self._deadlines) and self._deadlines[0][0] <= now_s

    def hold(self, *, freeze: bool) -> None:
        """From now on requests wait, until go_on(); those before finish, or `freeze`: nothing at all is planned."""
        self._frozen = freeze
        if self._held_from is None:
            self._held_from = self._serial + 1

    def go_on(self) -> None:
        """Ends what hold() began."""
        self._frozen, self._held_from = False, None
        for seq in self.held:
            self.waiting.push(seq)
        self.held = WaitingQueue()
        self._check()

    def _queue_of(self, seq: Sequence) -> WaitingQueue:
        return self.waiting if self._held_from is None or seq.serial < self._held_from else self.held

    def reset_prefix_cache(self) -> None:
        """Forgets all cached pages. Sequences that run keep theirs, and no later request will find those."""
        if self.cache is not None:
            self.cache.reset()
            for seq in self.running:
                seq.registered = UNREGISTERABLE
                seq.forkable = False

    # ---------------------------------------------------------------------------------------------------------- plan

    def plan(self) -> Plan | None:
        """The next step, or None if nothing can be computed now. A plan counts as launched: do so before the next."""
        if self._frozen:
            return None
        plan = Plan()
        self._preempted = False
        self._forkable = []
        self._drain_last_rows()
        self._decode_rows = sum(seq.pending > 0 for seq in self.running)
        limits = self.limits[1:] if self._decode_rows else self.limits
        self._limit = next(limit for limit in limits if self._decode_rows <= limit.rows)
        reserved = self._plan_running(plan)
        if not self._preempted:
            self._admit(plan, reserved)
        self._backlog = len(self.waiting) > 0
        if plan.num_rows:
            self._seal(plan)
        self._check()
        return plan if plan.num_rows else None

    def plan_again(self, plan: Plan, count: int) -> list[Plan]:
        """`count` more steps of the same rows as `plan`, the newest one; none unless it is sure that they all are.

        So nobody may wait or be amid a prompt, and nobody reach its end or lack a page before the last of them.
        """
        if not count or len(self.waiting) or len(plan.prefill) or len(plan.decode) != len(self.running):
            return []
        if any(len(seq.token_ids) + seq.pending + count > seq.limit for seq in self.running):
            return []
        ends = (ceil_div(seq.computed + count, self.page_size) for seq in self.running)
        missing = sum(max(end - len(seq.pages), 0) for end, seq in zip(ends, self.running, strict=True))
        if missing > self.pool.num_free:
            return []
        plans = []
        for _ in range(count):
            again = self.plan()
            assert again is not None, "all of its rows go on"
            plans.append(again)
        return plans

    def _drain_last_rows(self) -> None:
        """Gives back slots and pages of sequences with nothing left to compute: they only wait for their last token."""
        if not self._last_rows:
            return
        for seq in self._last_rows:
            if seq.status is Status.RUNNING and not (seq.forkable and any(not s.started for s in seq.siblings)):
                self._drain(seq)
        self._last_rows = []
        self._sweep()

    def _drain(self, seq: Sequence) -> None:
        self._release(seq)
        seq.status = Status.DRAINING
        self._draining.append(seq)
        self._unswept = True

    def _plan_running(self, plan: Plan) -> int:
        """Gives every running sequence its row. Returns how many pages those amid their prompt will still need."""
        page_size, decode = self.page_size, plan.decode
        reserved = 0
        for seq in self.running.copy():
            pending = seq.pending
            if not pending:  # all tokens are known: a chunk of the prompt, or of what a preempted one had
                if seq.status is Status.RUNNING:
                    reserved += self._plan_known(seq, plan)
                continue
            # One token, which only the device knows yet.
            start = seq.computed
            num_tokens = len(seq.token_ids) + pending
            if num_tokens >= seq.limit or seq.status is not Status.RUNNING:  # nothing left, or preempted just now
                continue
            if start >= len(seq.pages) * page_size and not self._grow(seq, num_tokens, plan):
                continue
            decode.add(seq, start, 1, True)
            decode.tokens.append(-1)
            seq.computed = num_tokens
            seq.pending = pending + 1
            if num_tokens + 1 == seq.limit:
                self._last_rows.append(seq)
        return reserved

    def _plan_known(self, seq: Sequence, plan: Plan) -> int:
        """Gives a sequence without pending tokens a row, if the budget allows. Returns the pages it will still need."""
        count = self._count_now(seq, plan)
        if count and not self._grow(seq, seq.computed + count, plan):
            return 0
        if count:
            self._add_row(seq, count, plan)
        return ceil_div(len(seq.token_ids), self.page_size) - len(seq.pages)

    def _count_now(self, seq: Sequence, plan: Plan) -> int:
        """How many of a sequence's tokens this step can compute."""
        count = len(seq.token_ids) - seq.computed
        if self._is_decode(seq, count):
            return count if self._has_decode_row(plan) else 0
        if len(plan.prefill) == self.max_prefill_rows:
            return 0
        return min(count, max(self._limit.tokens - sum(plan.prefill.counts), 0))

    def _has_decode_row(self, plan: Plan) -> bool:
        """Whether the step has room for one more: it may become one of more rows, if its chunks are not too long."""
        if self._decode_rows < self._limit.rows:
            return True
        chunks = sum(plan.prefill.counts)
        wider = (limit for limit in self.limits[1:] if limit.rows > self._decode_rows and limit.tokens >= chunks)
        self._limit = next(wider, self._limit)
        return self._decode_rows < self._limit.rows

    def _is_decode(self, seq: Sequence, remaining: int) -> bool:
        # Logprobs of prompt tokens are only made in the prefill region.
        return remaining == 1 and not (seq.score_prompt and seq.computed < seq.prompt_len)

    def _add_row(self, seq: Sequence, count: int, plan: Plan) -> None:
        """Adds a row of known tokens, for which the pages are there."""
        start, end = seq.computed, seq.computed + count
        remaining = len(seq.token_ids) - start
        sample = count == remaining
        if self._is_decode(seq, remaining):
            plan.decode.add(seq, start, 1, True)
            plan.decode.tokens.append(seq.token_ids[start])
            self._decode_rows += 1
        else:
            plan.prefill.add(seq, start, count, sample)
        seq.computed = end
        if seq.index == 0 and len(seq.siblings) > 1 and end >= seq.prompt_len:
            self._forkable.append(seq)
        if sample:
            seq.pending = 1
            if end + 1 == seq.limit:
                self._last_rows.append(seq)

    def _seal(self, plan: Plan) -> None:
        """The rows are final: fill in chunk tokens, tell the cache of full pages, let siblings of whole prompts go."""
        prefill = plan.prefill
        for seq, start, count in zip(prefill.seqs, prefill.starts, prefill.counts, strict=True):
            prefill.tokens += seq.token_ids[start : start + count]
            self._register(seq)
        for seq in self._forkable:
            if seq.status is Status.RUNNING:
                seq.forkable = True
                self._unpark(seq)
        plan.page_writes = self._table.take()
        self.in_flight.append(plan)
        self._counts.steps += 1

    def _unpark(self, seq: Sequence) -> None:
        """Sends the siblings that wait for this sequence to the queue: to start from its prompt, or without it."""
        for sibling in seq.parked:
            if sibling.status is Status.WAITING:
                self._queue_of(sibling).push(sibling)
        seq.parked = []

    # --------------------------------------------------------------------------------------------- pages, preemption

    def _grow(self, seq: Sequence, num_tokens: int, plan: Plan) -> bool:
        """Gives a running sequence pages for `num_tokens` tokens, preempting others. False: it lost its own place."""
        have = len(seq.pages)
        need = ceil_div(num_tokens, self.page_size) - have
        if need <= 0:
            return True
        while (pages := self.pool.allocate(need)) is None:
            if len(self.running) == 1:
                self._outgrow(seq)
                return False
            victim = self.running[-1] if self.policy == "fcfs" else max(self.running, key=lambda s: s.key)
            self._preempt(victim, plan)
            if victim is seq:
                return False
        # A page is begun when those before it are full of tokens that have arrived meanwhile.
        self._register(seq)
        self._attach(seq, pages)
        return True

    def _attach(self, seq: Sequence, pages: list[int]) -> None:
        self._table.put(seq.slot, len(seq.pages), pages)
        seq.pages += pages

    def _outgrow(self, seq: Sequence) -> None:
        """Nobody else holds a page and there is none left: the sequence ends with "length" here."""
        if seq.pending:
            seq.limit = seq.num_tokens
            self._drain(seq)
            self._sweep()
        else:
            self._end(seq, "length")

    def _preempt(self, seq: Sequence, plan: Plan) -> None:
        """Takes all pages from a running sequence, and its row of this step: it will compute everything anew."""
        self._preempted = True
        for rows in (plan.decode, plan.prefill):
            if row := rows.remove(seq):
                seq.computed, _, sampled = row
                seq.pending -= sampled
        self._table.drop(seq.slot)
        self._release(seq)
        self.running.remove(seq)
        seq.status = Status.WAITING
        seq.computed = 0
        seq.preemptions += 1
        self._counts.preemptions += 1
        self.waiting.push(seq)

    def _release(self, seq: Sequence) -> None:
        """Gives back slot and pages."""
        self._register(seq)
        self.pool.free(seq.pages)
        seq.pages = []
        seq.forkable = False
        self.free_slots.append(seq.slot)
        seq.slot = -1

    def _register(self, seq: Sequence) -> None:
        """Tells the prefix cache of full pages whose tokens are known here and computed by a planned step."""
        full = min(seq.computed, len(seq.token_ids)) // self.page_size
        if self.cache is None or full <= seq.registered:
            return
        extend_hashes(seq.hashes, seq.token_ids, self.page_size)
        for i in range(seq.registered, full):
            self.cache.register(seq.hashes[i], seq.pages[i])
        seq.registered = full

    # ----------------------------------------------------------------------------------------------------- admission

    def _admit(self, plan: Plan, reserved: int) -> None:
        """Admits from the queue in order while slots, pages and budget last. `reserved` pages are spoken for."""
        while self.free_slots and (seq := self.waiting.peek()):
            if seq.pending:  # preempted with a token on its way: it cannot go on before that is here
                return
            pages, computed, copy_of = self._reusable(seq)
            if not computed % self.page_size and self._is_being_computed(seq, computed // self.page_size, plan):
                return
            new = ceil_div(seq.num_tokens, self.page_size) - len(pages)
            spare = self.pool.num_free - reserved - (self._watermark if self.running else 0)
            if new + self.pool.num_revived(pages) > spare:
                return
            seq.computed = computed
            count = self._count_now(seq, plan)
            if not count:
                seq.computed = 0
                return
            self.waiting.pop()
            self._start(seq, pages, copy_of, count, plan)
            reserved += ceil_div(seq.num_tokens - seq.pending, self.page_size) - len(seq.pages)

    def _reusable(self, seq: Sequence) -> tuple[list[int], int, int | None]:
        """Pages to share, how many tokens are computed with them, and the page whose copy is needed beside them."""
        first = seq.siblings[0]
        if not seq.started and first.forkable:
            # All but the last prompt token, which is computed again to draw from. Its page will be written: copy it.
            shared, beyond = divmod(seq.prompt_len - 1, self.page_size)
            return first.pages[:shared], seq.prompt_len - 1, first.pages[shared] if beyond else None
        if self.cache is None or seq.needs_whole_prompt:
            return [], 0, None
        extend_hashes(seq.hashes, seq.token_ids, self.page_size)
        pages = self.cache.lookup(seq.hashes, (len(seq.token_ids) - 1) // self.page_size)
        return pages, len(pages) * self.page_size, None

    def _is_being_computed(self, seq: Sequence, page: int, plan: Plan) -> bool:
        """Whether a sequence with a chunk in this step fills the next page that `seq` needs: soon it can be shared."""
        if self.cache is None or seq.needs_whole_prompt or (page + 1) * self.page_size >= len(seq.token_ids):
            return False
        wanted = seq.hashes[page : page + 1]
        return any(other.hashes[page : page + 1] == wanted for other in plan.prefill.seqs)

    def _start(self, seq: Sequence, pages: list[int], copy_of: int | None, count: int, plan: Plan) -> None:
        """Admits a sequence whose `computed` tokens lie in shared `pages` (and the copy), and plans its first row."""
        self.pool.share(pages)
        fresh = self.pool.allocate(ceil_div(seq.computed + count, self.page_size) - len(pages))
        assert fresh is not None, "the pages were counted before"
        seq.slot = self.free_slots.pop()
        seq.status = Status.RUNNING
        seq.registered = len(pages)
        self.running.append(seq)
        plan.admitted.append(seq)
        if copy_of is not None:
            plan.copies.append((copy_of, fresh[0]))
        if not seq.started:
            self._note_first_admission(seq)
        self._attach(seq, [*pages, *fresh])
        self._add_row(seq, count, plan)

    def _note_first_admission(self, seq: Sequence) -> None:
        seq.started = True
        # Shared until now, with its siblings and with whoever has the same grammar: who waits takes no memory.
        seq.token_ids, seq.grammar = seq.token_ids.copy(), seq.grammar and seq.grammar.copy()
        seq.cached = seq.computed if not seq.siblings[0].forkable else seq.siblings[0].cached
        if seq.index == 0:
            self._unstarted -= 1
            self._counts.prompt_tokens += seq.prompt_len
            if self.cache is not None and not seq.needs_whole_prompt:
                self._counts.prefix_cache_query_tokens += seq.prompt_len
                self._counts.prefix_cache_hit_tokens += seq.cached

    # -------------------------------------------------------------------------------------------------------- commit

    def commit(self, plan: Plan, sampled: np.ndarray | list[int]) -> list[Event]:
        """Takes the ids that a step drew, i32[rows] (of rows that do not sample: anything).

        NOT_FINITE and NOTHING_ALLOWED end a row with "error"; after the first the cache forgets its pages.
        Steps are committed in the order in which they were planned, each once.
        """
        if not self.in_flight or self.in_flight[0] is not plan:
            raise ValueError("steps must be committed once, in the order of their plans")
        ids = sampled.tolist() if isinstance(sampled, np.ndarray) else sampled
        if len(ids) != plan.num_rows:
            raise ValueError(f"the step has {plan.num_rows} rows, but {len(ids)} ids came back")
        self.in_flight.popleft()
        decode, prefill = plan.decode, plan.prefill
        events = [
            self._accept(seq, ids[row], row)
            for row, seq in enumerate(decode.seqs)
            if seq.status is not Status.FINISHED and decode.samples[row]
        ]
        for i, seq in enumerate(prefill.seqs):
            if seq.status is Status.FINISHED:
                continue
            if prefill.starts[i] + prefill.counts[i] >= seq.prompt_len:
                seq.score_prompt = False
            if prefill.samples[i]:
                row = len(decode) + i
                events.append(self._accept(seq, ids[row], row))
        self._sweep()
        self._check()
        return events

    def _accept(self, seq: Sequence, token: int, row: int) -> Event:
        """Appends a drawn token, and ends the sequence if that was its last."""
        seq.pending -= 1
        if token < 0:
            if self.cache is not None and token == NOT_FINITE:  # its pages may be what is broken
                self.cache.forget(seq.hashes)
                seq.registered = UNREGISTERABLE
            self._finish(seq, "error")
            return Event(seq, None, "error", None, row, nothing_allowed=token == NOTHING_ALLOWED)
        forced = []
        if self._append(seq, token) and seq.grammar is not None:
            forced = self._jump(seq, seq.grammar)
        return Event(seq, token, seq.finish_reason, seq.stop_reason, row, forced)

    def _append(self, seq: Sequence, token: int) -> bool:
        """Whether the sequence goes on after this token."""
        self._counts.generation_tokens += 1
        seq.token_ids.append(token)
        num_tokens = len(seq.token_ids)
        if token in seq.stop_ids and num_tokens - seq.prompt_len > seq.request.params.min_tokens:
            by_id = token in (seq.request.params.stop_token_ids or ())
            self._finish(seq, "stop", token if by_id else None)
        elif seq.grammar is not None and not seq.grammar.accept(token):
            self._finish(seq, "error")
        elif seq.grammar is not None and seq.grammar.complete and not seq.request.free_after_grammar:
            self._finish(seq, "stop")
        elif num_tokens >= seq.limit:
            self._finish(seq, "length")
        elif seq.grammar is not None and seq.grammar.complete:
            seq.grammar = None
        return seq.status is not Status.FINISHED

    def _jump(self, seq: Sequence, grammar: GrammarState) -> list[int]:
        """Appends the tokens that must follow, if they are many. They are then computed like a piece of a prompt."""
        forced = grammar.forced() if seq.may_jump else []
        if len(forced) < JUMP_FROM:
            return []
        taken = []
        for token in forced:
            taken.append(token)
            if not self._append(seq, token):
                return taken
        # The first of them is what the row in flight is about to draw: let it draw for nothing.
        for plan in self.in_flight:
            for rows in (plan.decode, plan.prefill):
                if seq in rows.seqs and rows.samples[row := rows.seqs.index(seq)]:
                    rows.samples[row] = False
                    seq.pending -= 1
        return taken

    def _end(self, seq: Sequence, reason: str) -> None:
        """Ends a sequence outside of commit()."""
        self._finish(seq, reason)
        self._sweep()
        self._endings.append(Event(seq, None, reason, None, -1))

    def _finish(self, seq: Sequence, reason: str, stop_reason: int | None = None) -> None:
        """The only way out. Leaves the lists to _sweep(), so that many can finish at once."""
        was, first = seq.status, seq.siblings[0]
        if was is Status.RUNNING:
            self._release(seq)
        seq.status, seq.finish_reason, seq.stop_reason = Status.FINISHED, reason, stop_reason
        self._alive -= 1
        self._unswept = True
        if was is Status.WAITING and seq not in first.parked:
            self._queue_of(seq).note_cancelled()
        self._unpark(seq)
        if seq is first and not seq.started:
            self._unstarted -= 1
        if all(s.status is Status.FINISHED for s in seq.siblings):
            del self.requests[seq.request.request_id]
            seq.siblings.clear()  # a cycle of references would keep all their tokens until a garbage collection

    def _sweep(self) -> None:
        """Drops whoever has left them from the lists of those that run and drain."""
        if self._unswept:
            self.running = [seq for seq in self.running if seq.status is Status.RUNNING]
            self._draining = [seq for seq in self._draining if seq.status is Status.DRAINING]
            self._unswept = False

    # --------------------------------------------------------------------------------------------------------- state

    def stats(self) -> EngineStats:
        """Counters since start and gauges of now. O(running)."""
        counts, page_size = self._counts, self.page_size
        counts.running = len(self.running) + len(self._draining)
        counts.waiting = self._alive - counts.running
        counts.pages_used, counts.pages_total = self.pool.num_used, self.pool.capacity
        counts.allocated_token_slots = counts.pages_used * page_size
        # Only the tail of a sequence's last page is unused, and that page is nobody else's.
        unused = sum(len(seq.pages) * page_size - seq.computed for seq in self.running)
        counts.used_token_slots = counts.allocated_token_slots - unused
        return counts

    def check(self) -> None:
        """Raises InvariantError if pages, slots, queue and sequences contradict each other. O(everything)."""
        check_scheduler(self)

    def _check(self) -> None:
        if self.checks:
            check_scheduler(self)

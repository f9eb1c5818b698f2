"""A pretended device for scheduler tests: it stores token ids where a real one stores their keys and values.

Every launched row must find exactly its own sequence's tokens in all positions before its own, whatever was shared,
copied, preempted or evicted. The token that it then draws is a function of all it has read, so that the output of a
sequence depends on nothing but its request: any lost, doubled or foreign token changes everything after it.
"""

import zlib
from array import array
from typing import Any

from jaxserve.plan import Event, Plan
from jaxserve.request import Request, SamplingParams
from jaxserve.scheduler import Scheduler, Sequence
from jaxserve.shapes import Limit

VOCAB = 50
EOS = 7
GARBAGE = -9


def make_request(name: str, prompt: list[int], *, max_tokens: int = 8, n: int = 1, **fields: Any) -> Request:
    """A request whose output ends at EOS; `fields` are those of Request, or knobs of SamplingParams."""
    own = {key: fields.pop(key) for key in ("stop_ids", "priority", "arrival_s", "deadline_s") if key in fields}
    params = SamplingParams(n=n, max_tokens=None, **fields)
    return Request(
        request_id=name, prompt_token_ids=prompt, params=params, max_tokens=max_tokens, **{"stop_ids": [EOS]} | own
    )


def make_scheduler(**options: Any) -> Scheduler:
    """A small scheduler that checks itself after every call. max_prefill_tokens: of every step, if no `limits`."""
    defaults = {"num_pages": 33, "page_size": 4, "max_num_seqs": 4, "max_model_len": 100}
    options = {**defaults, "checks": True, **options}
    limit = Limit(options["max_num_seqs"], options.pop("max_prefill_tokens", 16))
    return Scheduler(**{"limits": (limit, limit), **options})


def draw(request: Request, index: int, tokens: list[int]) -> int:
    """The token after `tokens`: any change in them changes it."""
    seed = zlib.crc32(f"{request.request_id}/{index}".encode())
    return zlib.crc32(array("i", tokens).tobytes(), seed) % VOCAB


def expected_output(request: Request, index: int, max_model_len: int) -> list[int]:
    """What the sequence must produce, were it alone on an endless device."""
    tokens = list(request.prompt_token_ids)
    while len(tokens) < min(len(request.prompt_token_ids) + request.max_tokens, max_model_len):
        tokens.append(draw(request, index, tokens))
        if tokens[-1] in request.stop_ids:
            break
    return tokens[len(request.prompt_token_ids) :]


class Device:
    """Pages, page table and last_token of a pretended device, and the step that works on them."""

    def __init__(self, scheduler: Scheduler):
        self.page_size = scheduler.page_size
        self.pages = [[GARBAGE] * self.page_size for _ in range(scheduler.pool.num_pages)]
        self.table = [[0] * 64 for _ in range(scheduler.max_num_seqs)]
        self.last_token = [GARBAGE] * scheduler.max_num_seqs
        self.true_tokens: dict[Sequence, list[int]] = {}

    def launch(self, plan: Plan) -> list[int]:
        """Runs a step as the contract says: set-up, copies, all KV writes, all reads, draws. Returns the ids drawn."""
        for slot, column, page in plan.page_writes:
            assert page != 0, "the trash page was handed out"
            assert slot in plan.decode.slots or slot in plan.prefill.slots, "a slot without a row is written to"
            self.table[slot][column] = page
        for src, dst in plan.copies:
            self.pages[dst] = list(self.pages[src])
        rows = self._rows(plan)
        for slot, start, tokens, _, _ in rows:
            for position, token in enumerate(tokens, start):
                self._page(slot, position)[position % self.page_size] = token
        return [self._attend(*row) for row in rows]

    def _rows(self, plan: Plan) -> list[tuple[int, int, list[int], bool, Sequence]]:
        rows = []
        assert len(set(plan.decode.seqs + plan.prefill.seqs)) == plan.num_rows, "a sequence has two rows"
        for region in (plan.decode, plan.prefill):
            at = 0
            for seq, slot, start, count, sample in zip(
                region.seqs, region.slots, region.starts, region.counts, region.samples, strict=True
            ):
                assert slot == seq.slot and count >= 1
                tokens = region.tokens[at : at + count]
                at += count
                rows.append((slot, start, [self.last_token[slot] if t == -1 else t for t in tokens], sample, seq))
            assert at == len(region.tokens)
        assert all(count == 1 for count in plan.decode.counts) and all(plan.decode.samples)
        return rows

    def _page(self, slot: int, position: int) -> list[int]:
        page = self.table[slot][position // self.page_size]
        assert page != 0, "a row works on the trash page"
        return self.pages[page]

    def _attend(self, slot: int, start: int, tokens: list[int], sample: bool, seq: Sequence) -> int:
        truth = self.true_tokens.setdefault(seq, list(seq.request.prompt_token_ids))
        end = start + len(tokens)
        read = [self._page(slot, p)[p % self.page_size] for p in range(end)]
        assert read == truth[:end], f"{seq.request.request_id}/{seq.index} reads {read} for {truth[:end]}"
        assert sample == (end == len(truth)), "a row draws if and only if it reaches the end"
        if not sample:
            return GARBAGE
        assert end < seq.limit, "a row was planned past the end of its sequence"
        token = draw(seq.request, seq.index, read)
        truth.append(token)
        self.last_token[slot] = token
        return token


class Loop:
    """An engine loop over the pretended device, `depth` steps ahead of their commits."""

    def __init__(self, scheduler: Scheduler, depth: int = 1):
        self.scheduler, self.depth = scheduler, depth
        self.device = Device(scheduler)
        self.in_flight: list[tuple[Plan, list[int]]] = []
        self.ends: dict[tuple[str, int], Event] = {}
        self.outputs: dict[tuple[str, int], list[int]] = {}
        self.plans: list[Plan] = []
        self.looped = 0

    def plan(self, again: int = 0) -> Plan | None:
        """The next step, and `again` more if they are sure to have the same rows."""
        plan = self.scheduler.plan()
        self.note(self.scheduler.take_endings())
        if plan:
            self._launch(plan)
            following = self.scheduler.plan_again(plan, again)
            assert len(following) in (0, again)
            for other in following:
                assert (other.decode.seqs, other.decode.slots) == (plan.decode.seqs, plan.decode.slots)
                assert not (
                    other.prefill.seqs
                    or other.admitted
                    or other.copies
                    or other.decode.tokens.count(-1) < len(other.decode)
                )
                self._launch(other)
            self.looped += bool(following)
        return plan

    def _launch(self, plan: Plan) -> None:
        self.plans.append(plan)
        self.in_flight.append((plan, self.device.launch(plan)))

    def commit(self) -> list[Event]:
        plan, ids = self.in_flight.pop(0)
        events = self.scheduler.commit(plan, ids)
        self.note(events)
        return events

    def note(self, events: list[Event]) -> None:
        for event in events:
            name = (event.seq.request.request_id, event.seq.index)
            assert name not in self.ends, f"{name} speaks after its end"
            if event.token is not None:
                self.outputs.setdefault(name, []).append(event.token)
            if event.finish_reason:
                self.ends[name] = event

    def step(self, again: int = 0) -> Plan | None:
        """Plans and launches a step, `again` more if they are sure to be alike, and commits those `depth` before."""
        plan = self.plan(again)
        if self.in_flight and plan is None:
            self.commit()
        while len(self.in_flight) > self.depth + again:
            self.commit()
        return plan

    def verify(self, request: Request, *, cancelled: bool = False) -> None:
        """The request's sequences have ended, for the right reason, with exactly the tokens they must have."""
        pool_tokens = self.scheduler.pool.capacity * self.scheduler.page_size
        for index in range(request.params.n):
            name = (request.request_id, index)
            output, reason = self.outputs.get(name, []), self.ends[name].finish_reason
            expected = expected_output(request, index, self.scheduler.max_model_len)
            assert output == expected[: len(output)], name
            if reason == "stop":
                assert output == expected and output[-1] in request.stop_ids
            elif reason == "length":
                total = len(request.prompt_token_ids) + len(output)
                assert output == expected or total == pool_tokens + 1, f"{name} was cut at {total} tokens"
            else:
                assert cancelled, f"{name} ended with {reason}"

    def run(self, max_steps: int = 2000) -> int:
        """Steps until all is done, and everything is given back. Returns how many steps that took."""
        steps = 0
        while self.scheduler.has_work:
            self.step()
            steps += 1
            assert steps <= max_steps, "the scheduler makes no progress"
        self.scheduler.check()
        assert self.scheduler.pool.num_used == 0
        assert len(self.scheduler.free_slots) == self.scheduler.max_num_seqs
        assert not self.scheduler.running and not len(self.scheduler.waiting)
        return steps

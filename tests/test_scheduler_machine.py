"""Random adds, steps, cancels and faults in tiny pools, against the pretended device of scheduler_sim."""

import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from jaxserve import shapes
from jaxserve.errors import QueueFull, RequestError
from jaxserve.request import Request
from jaxserve.shapes import Limit, choose_bucket, coarse, make_buckets, step_limits
from tests.scheduler_sim import Loop, make_request, make_scheduler

PREFIXES = [[], [1, 1, 1], [1, 1, 1, 1], [1, 1, 1, 1, 2, 2, 2, 2], [1, 1, 1, 1, 3, 3, 3, 3, 4]]
REQUESTS = st.fixed_dictionaries(
    {
        "prompt": st.builds(
            list.__add__, st.sampled_from(PREFIXES), st.lists(st.integers(0, 9), min_size=1, max_size=9)
        ),
        "max_tokens": st.sampled_from([20, 14, 9, 4, 1]),
        "n": st.sampled_from([1, 1, 3, 2]),
        "priority": st.integers(0, 2),
        "deadline_s": st.sampled_from([None, None, None, 50.0, 100.0]),
        "prompt_logprobs": st.sampled_from([None, None, None, 0]),
    }
)


class SchedulerMachine(RuleBasedStateMachine):
    """Every request ends, with the tokens that it would have had alone; pages and slots come back; no step is idle."""

    policy = "fcfs"
    prefix_caching = True

    @initialize(
        num_pages=st.sampled_from([8, 9, 10, 12, 14, 20, 6, 4]),
        max_num_seqs=st.sampled_from([4, 3, 5, 2, 1]),
        max_model_len=st.sampled_from([60, 33, 20, 12]),
        max_prefill_tokens=st.sampled_from([14, 7, 4, 1]),
        max_prefill_rows=st.sampled_from([None, 1, 2]),
        tokens_beside_rows=st.sampled_from([None, 1, 2]),
        depth=st.sampled_from([1, 1, 1, 0, 2]),
    )
    def start(self, depth: int, **sizes) -> None:
        scheduler = make_scheduler(
            max_queue_len=6, policy=self.policy, prefix_caching=self.prefix_caching, **self.limited(**sizes)
        )
        self.loop = Loop(scheduler, depth)
        self.requests: dict[str, Request] = {}
        self.spoiled: set[str] = set()  # requests of which something was cancelled, expired or made to fail

    @staticmethod
    def limited(*, max_num_seqs: int, max_prefill_tokens: int, tokens_beside_rows: int | None, **sizes) -> dict:
        """tokens_beside_rows: what limits a step with decode rows; twice as much is one with few rows, or with none."""
        limits = (Limit(max_num_seqs, max_prefill_tokens),) * 2
        if tokens_beside_rows:
            few = Limit(max(max_num_seqs // 2, 1), 2 * tokens_beside_rows)
            limits = (few, few, Limit(max_num_seqs, tokens_beside_rows))
        return {"max_num_seqs": max_num_seqs, "limits": limits, **sizes}

    @rule(several=st.lists(REQUESTS, min_size=1, max_size=4))
    def add(self, several: list[dict]) -> None:
        for fields in several:
            name = f"r{len(self.requests)}"
            self.add_one(make_request(name, arrival_s=float(len(self.requests)), **fields))

    def add_one(self, request: Request) -> None:
        scheduler = self.loop.scheduler
        longest = min(scheduler.max_model_len, scheduler.pool.capacity * 4) - 1
        waiting = scheduler.stats().waiting
        try:
            scheduler.add(request)
        except QueueFull:
            assert waiting >= scheduler.max_queue_len
        except RequestError:
            assert len(request.prompt_token_ids) > longest
        else:
            assert len(request.prompt_token_ids) <= longest
            self.requests[request.request_id] = request

    @rule(times=st.sampled_from([3, 9, 5, 1]), again=st.sampled_from([0, 1, 3]))
    def step(self, times: int, again: int) -> None:
        for _ in range(times):
            stuck = self.loop.scheduler.has_work and not self.loop.in_flight
            ends = len(self.loop.ends)
            plan = self.loop.step(again)
            assert plan or not stuck or len(self.loop.ends) > ends, "an idle engine found nothing to do"

    @rule(again=st.sampled_from([0, 0, 1, 3]))
    def plan_only(self, again: int) -> None:
        self.loop.plan(again)

    @precondition(lambda self: self.loop.in_flight)
    @rule()
    def commit_only(self) -> None:
        self.loop.commit()

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.requests)))
        index = data.draw(st.sampled_from([None, 0, 1, 2]))
        self.loop.scheduler.cancel(name, index)
        self.spoiled.add(name)

    @rule(now_s=st.sampled_from([40.0, 60.0, 110.0]))
    def expire(self, now_s: float) -> None:
        self.loop.scheduler.expire(now_s)
        late = (name for name, r in self.requests.items() if r.deadline_s is not None and r.deadline_s <= now_s)
        self.spoiled.update(late)

    @precondition(lambda self: self.loop.in_flight)
    @rule(data=st.data())
    def spoil_logits(self, data: st.DataObject) -> None:
        plan, ids = self.loop.in_flight[0]
        row = data.draw(st.integers(0, len(ids) - 1))
        ids[row] = -1
        self.spoiled.add([*plan.decode.seqs, *plan.prefill.seqs][row].request.request_id)

    @rule()
    def reset_prefix_cache(self) -> None:
        self.loop.scheduler.reset_prefix_cache()

    @rule(freeze=st.booleans())
    def hold(self, freeze: bool) -> None:
        self.loop.scheduler.hold(freeze=freeze)

    @rule()
    def hold_until_idle(self) -> None:
        """All that came before ends, whatever waits before it in the queue; what comes after does not begin."""
        self.loop.scheduler.hold(freeze=False)
        new = make_request(f"held{len(self.requests)}", [1, 2, 3], n=2, priority=-1)
        try:
            self.loop.scheduler.add(new)
            self.requests[new.request_id] = new
        except QueueFull:
            pass
        held = set(self.loop.scheduler.held)
        for _ in range(2000):
            if not self.loop.scheduler.has_work:
                break
            self.loop.step()
        assert not self.loop.scheduler.has_work and set(self.loop.scheduler.held) == held
        assert self.loop.scheduler.pool.num_used == 0

    @rule()
    def go_on(self) -> None:
        self.loop.scheduler.go_on()

    def teardown(self) -> None:
        if hasattr(self, "loop"):
            self.loop.scheduler.go_on()
            self.loop.run()
            for name, request in self.requests.items():
                self.loop.verify(request, cancelled=name in self.spoiled)


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_random_life(policy: str, prefix_caching: bool):
    machine = type("Machine", (SchedulerMachine,), {"policy": policy, "prefix_caching": prefix_caching})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=30, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_crowded_pool(policy: str, prefix_caching: bool):
    """More sequences than pages: most of what happens is preemption, sharing and eviction."""
    preemptions = 0
    for seed in range(60):
        rng = random.Random(seed)
        scheduler = make_scheduler(
            num_pages=rng.randint(5, 13), max_num_seqs=rng.randint(2, 6), max_prefill_tokens=rng.randint(1, 14),
            max_prefill_rows=rng.choice([None, 1, 2]), policy=policy, prefix_caching=prefix_caching,
        )  # fmt: skip
        loop = Loop(scheduler, depth=rng.choice([0, 1, 1, 1, 2]))
        requests: dict[str, Request] = {}
        cancelled = set()
        for i in range(rng.randint(3, 12)):
            prompt = rng.choice(PREFIXES) + [rng.randrange(8) for _ in range(rng.randint(1, 7))]
            request = make_request(
                f"r{i}", prompt, max_tokens=rng.randint(1, 20), n=rng.choice([1, 1, 2, 3]), priority=rng.randrange(3),
                arrival_s=float(i), prompt_logprobs=rng.choice([None, None, None, 0]),
            )  # fmt: skip
            if len(prompt) < scheduler.pool.capacity * 4:
                scheduler.add(request)
                requests[request.request_id] = request
            for _ in range(rng.randrange(3)):
                loop.step()
            if requests and rng.random() < 0.1:
                name = rng.choice(sorted(requests))
                scheduler.cancel(name, rng.choice([None, 0, 1]))
                cancelled.add(name)
        loop.run()
        preemptions += scheduler.stats().preemptions
        for name, request in requests.items():
            loop.verify(request, cancelled=name in cancelled)
    assert preemptions > 150


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_every_plan_has_a_bucket(platform: str, monkeypatch: pytest.MonkeyPatch):
    """The limits of deployments, on a small scale: few rows are 1, many 8."""
    monkeypatch.setattr(shapes, "FEW_ROWS", 1)
    monkeypatch.setattr(shapes, "MANY_ROWS", 8)
    plans, wider = 0, 0
    for seed in range(60):
        rng = random.Random(seed)
        max_num_seqs = rng.choice([1, 2, 3, 6, 8, 9, 12, 14])
        budget = max_num_seqs + rng.choice([1, 2, 3, 4, 8, 30])
        mixed = rng.choice([max_num_seqs + 1, budget, rng.randint(max_num_seqs + 1, budget)])
        buckets = make_buckets(max_num_seqs, budget, mixed, platform=platform)
        scheduler = make_scheduler(
            num_pages=rng.choice([9, 13, 20, 40, 80]), max_num_seqs=max_num_seqs,
            limits=step_limits(max_num_seqs, budget, mixed), max_prefill_rows=max(b.prefill_rows for b in buckets),
        )  # fmt: skip
        loop = Loop(scheduler, depth=rng.choice([0, 1, 2]))
        for i in range(rng.randint(3, 30)):
            prompt = rng.choice(PREFIXES) + [rng.randrange(8) for _ in range(rng.choice([1, 1, 1, 4, 5, 9]))]
            n, scored = rng.choice([1, 1, 1, 2, 3, 8]), rng.choice([None, None, None, 0])
            scheduler.add(
                make_request(f"r{i}", prompt, max_tokens=rng.choice([1, 2, 5, 14]), n=n, prompt_logprobs=scored)
            )
            for _ in range(rng.choice([0, 0, 0, 0, 1, 3])):
                loop.step()
        loop.run()
        for plan in loop.plans:
            for fitting in (buckets, coarse(buckets)):
                choose_bucket(fitting, len(plan.decode), len(plan.prefill.tokens), len(plan.prefill))
            wider += len(plan.decode) > 8 and len(plan.prefill) > 0
        plans += len(loop.plans)
    assert plans > 1000 and wider > 10

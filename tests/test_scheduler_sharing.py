"""Preemption, prefix sharing and n > 1, with the bug reports 35 to 41 of serving-api.md section 7 as whole kinds."""

import pytest

from jaxserve.errors import RequestError
from jaxserve.paging.page_pool import InvariantError
from jaxserve.request import Request
from jaxserve.scheduler import Scheduler, Status
from tests.scheduler_sim import Loop, make_request, make_scheduler

LONG = list(range(10, 30))  # 20 tokens: 5 pages of 4
POLICIES = pytest.mark.parametrize("policy", ["fcfs", "priority"])
CACHING = pytest.mark.parametrize("prefix_caching", [True, False])


def run_all(scheduler: Scheduler, requests: list[Request], depth: int = 1) -> Loop:
    loop = Loop(scheduler, depth)
    for request in requests:
        scheduler.add(request)
    loop.run()
    for request in requests:
        loop.verify(request)
    return loop


# --------------------------------------------------------------------------------------------------------- preemption


def test_fcfs_preempts_the_last_admitted_and_takes_it_back_first():
    loop = Loop(make_scheduler(num_pages=7, prefix_caching=False))
    requests = [make_request(name, [ord(name), 1, 2], stop_ids=[], max_tokens=9) for name in "abc"]
    for request in requests:
        loop.scheduler.add(request)
    while not loop.scheduler.stats().preemptions:
        plan = loop.step()
    assert plan and not plan.admitted, "nobody is admitted in a step that preempts"
    assert [seq.request.request_id for seq in loop.scheduler.running] == ["a", "b"]
    assert [seq.request.request_id for seq in loop.scheduler.waiting] == ["c"]
    loop.scheduler.add(make_request("late", [1]))
    loop.run()
    for request in requests:
        loop.verify(request)
    order = [seq.request.request_id for plan in loop.plans for seq in plan.admitted]
    assert order == ["a", "b", "c", "c", "late"]


def test_priority_preempts_the_least_urgent_even_if_its_row_was_planned():
    loop = Loop(make_scheduler(num_pages=5, policy="priority", prefix_caching=False))
    low = make_request("low", [1, 2, 3], priority=5, stop_ids=[], max_tokens=9)
    high = make_request("high", [4, 5], priority=0, arrival_s=1.0, stop_ids=[], max_tokens=12)
    loop.scheduler.add(low)
    loop.step()
    loop.scheduler.add(high)
    while not loop.scheduler.stats().preemptions:
        plan = loop.step()
    assert plan and [seq.request.request_id for seq in plan.decode.seqs] == ["high"]
    loop.run()
    loop.verify(low)
    loop.verify(high)
    assert loop.scheduler.stats().preemptions == 1


@pytest.mark.parametrize("n", [1, 2])
def test_a_chunk_that_was_taken_back_is_not_taken_for_computed(n: int):
    """One long prompt loses its chunk to an urgent sequence that grows in the same step."""
    loop = Loop(make_scheduler(num_pages=23, policy="priority", max_prefill_tokens=8, max_num_seqs=2))
    low = make_request("low", list(range(79)), priority=5, n=n, stop_ids=[], max_tokens=4)
    high = make_request("high", [99], stop_ids=[], max_tokens=30)
    waits = make_request("waits", [98], stop_ids=[], arrival_s=1.0)
    loop.scheduler.add(low)
    planned = loop.plan()
    for request in (high, waits):
        loop.scheduler.add(request)
    while not loop.scheduler.stats().preemptions:
        planned = loop.step()
    assert planned and [seq.request.request_id for seq in planned.decode.seqs] == ["high"]
    assert loop.plans[-2].prefill.starts == [64], "the chunk that was taken back is the one after"
    assert not planned.prefill.tokens and not planned.admitted, "nobody is admitted in a step that preempts"
    loop.scheduler.cancel("high")  # before it evicts what the other one would find of its own
    loop.run()
    loop.verify(low)
    loop.verify(waits)


def test_a_preempted_sequence_waits_for_its_pending_token():
    scheduler = make_scheduler(num_pages=5, prefix_caching=False)
    scheduler.add(make_request("a", [1, 2, 3], stop_ids=[], max_tokens=12))
    (victim,) = scheduler.add(make_request("b", [4, 5, 6], stop_ids=[], max_tokens=12))
    plans = []
    while victim.status is not Status.WAITING or not victim.preemptions:
        plans.append(scheduler.plan())
        if len(plans) > 2 and not victim.preemptions:
            scheduler.commit(plans.pop(0), [9, 9])
    assert victim.pending and victim.computed == 0
    scheduler.cancel("a")  # pages enough are free now
    assert scheduler.plan() is None
    before = len(victim.token_ids)
    while victim.pending:
        assert victim.slot == -1
        plan = plans.pop(0)
        scheduler.commit(plan, [8] * plan.num_rows)
    assert victim.token_ids[before:] == [8] * (len(victim.token_ids) - before)
    plan = scheduler.plan()
    assert plan and plan.prefill.tokens == victim.token_ids and plan.prefill.starts == [0]


def test_a_sequence_may_finish_while_it_is_preempted():
    scheduler = make_scheduler(num_pages=5, prefix_caching=False)
    scheduler.add(make_request("a", [1, 2, 3], stop_ids=[], max_tokens=12))
    (victim,) = scheduler.add(make_request("b", [4, 5, 6], stop_ids=[7], max_tokens=12))
    plans = [scheduler.plan()]
    while not victim.preemptions:
        plans.append(scheduler.plan())
        if not victim.preemptions:
            scheduler.commit(plans.pop(0), [9, 9])
    events = scheduler.commit(plans.pop(0), [9, 7])
    assert [event.finish_reason for event in events] == [None, "stop"] and victim.status is Status.FINISHED
    assert len(scheduler.waiting) == 0 and list(scheduler.requests) == ["a"]


def test_a_resumed_sequence_finds_its_own_pages_in_the_cache():
    loop = Loop(make_scheduler(num_pages=10))
    loop.scheduler.add(make_request("a", LONG[:8], stop_ids=[], max_tokens=20))
    (victim,) = loop.scheduler.add(make_request("b", LONG[12:], stop_ids=[], max_tokens=12))
    while not victim.preemptions:
        loop.step()
    while victim.status is not Status.RUNNING:
        plan = loop.step()
    assert plan and (plan.prefill.starts or plan.decode.starts)[0] >= 0
    loop.run()
    assert victim.cached == 0, "cached tells of the first admission"


# ---------------------------------------------------------------------------------------------------- prefix sharing


def test_an_equal_beginning_is_shared_except_for_the_last_token():
    loop = Loop(make_scheduler())
    run = [make_request("a", LONG), make_request("same", LONG), make_request("longer", [*LONG, 1, 2])]
    cached = []
    for request in run:
        (seq,) = loop.scheduler.add(request)
        loop.run()
        loop.verify(request)
        cached.append(seq.cached)
    assert cached == [0, 16, 20]


def test_pages_of_a_running_sequence_are_shared_too():
    loop = Loop(make_scheduler())
    loop.scheduler.add(make_request("a", LONG, stop_ids=[], max_tokens=20))
    loop.step()
    (seq,) = loop.scheduler.add(make_request("b", [*LONG, 5]))
    loop.step()
    assert seq.status is Status.WAITING, "the page that it needs next is just being computed"
    loop.step()
    assert seq.cached == 20 and loop.scheduler.pool.refcount(seq.pages[0]) == 2


def test_outputs_are_found_as_a_later_prompt():
    loop = Loop(make_scheduler())
    loop.scheduler.add(make_request("turn 1", LONG[:6], stop_ids=[], max_tokens=8))
    loop.run()
    history = LONG[:6] + loop.outputs["turn 1", 0]
    (seq,) = loop.scheduler.add(make_request("turn 2", [*history, 1, 2]))
    loop.run()
    assert seq.cached == 12, "all full pages of the 13 tokens whose KV was computed"


def test_equal_beginnings_that_come_together_are_computed_once():
    scheduler = make_scheduler(max_prefill_tokens=64, max_num_seqs=4)
    requests = [make_request(str(i), [*LONG, 40 + i]) for i in range(4)]
    loop = run_all(scheduler, requests)
    assert len(loop.plans[0].prefill) == 1 and len(loop.plans[1].prefill.seqs + loop.plans[1].decode.seqs) == 4
    assert scheduler.stats().prefix_cache_hit_tokens == 3 * 20


def test_without_the_cache_nothing_is_shared():
    scheduler = make_scheduler(prefix_caching=False)
    run_all(scheduler, [make_request("a", LONG), make_request("b", LONG)])
    stats = scheduler.stats()
    assert stats.prefix_cache_query_tokens == stats.prefix_cache_hit_tokens == 0 and scheduler.cache is None


# ------------------------------------------------------------------------------------------------------------- n > 1


@CACHING
@pytest.mark.parametrize("prompt_len", [1, 2, 4, 5, 8, 9, 11])
def test_siblings_share_the_prompt_and_copy_its_last_page(prompt_len: int, prefix_caching: bool):
    request = make_request("a", LONG[:prompt_len], n=3, stop_ids=[], max_tokens=7)
    loop = run_all(make_scheduler(prefix_caching=prefix_caching), [request])
    assert [seq.index for seq in loop.plans[0].admitted] == [0], "the others wait for the prompt"
    plan = loop.plans[1]
    assert [seq.index for seq in plan.admitted] == [1, 2] and len(plan.prefill) == 0
    assert plan.decode.starts == [prompt_len, prompt_len - 1, prompt_len - 1]
    assert plan.decode.tokens == [-1, LONG[prompt_len - 1], LONG[prompt_len - 1]]
    assert len(plan.copies) == (2 if (prompt_len - 1) % 4 else 0)


@CACHING
def test_siblings_whose_first_is_cancelled_early_go_on_without_it(prefix_caching: bool):
    loop = Loop(make_scheduler(max_prefill_tokens=6, prefix_caching=prefix_caching))
    loop.scheduler.add(make_request("a", LONG, n=3, stop_ids=[]))
    loop.step()
    loop.scheduler.cancel("a", 0)
    loop.run()
    assert [loop.ends["a", i].finish_reason for i in range(3)] == ["abort", "length", "length"]
    assert sorted(len(loop.outputs["a", i]) for i in (1, 2)) == [8, 8]


@CACHING
def test_siblings_share_even_if_the_first_makes_one_token(prefix_caching: bool):
    request = make_request("a", LONG, n=3, stop_ids=[], max_tokens=1)
    loop = run_all(make_scheduler(max_prefill_tokens=20, prefix_caching=prefix_caching), [request])
    assert sum(plan.num_tokens for plan in loop.plans) == 20 + 1 + 1


def test_siblings_do_not_hold_up_others_while_they_wait_for_the_prompt():
    loop = Loop(make_scheduler(max_prefill_tokens=12))
    loop.scheduler.add(make_request("a", LONG, n=3))
    loop.scheduler.add(make_request("b", [1, 2]))
    loop.step()
    plan = loop.step()
    assert plan and [seq.request.request_id for seq in plan.prefill.seqs] == ["a", "b"]


# ------------------------------------------------------------------------------------- bug reports of other engines


@POLICIES
@CACHING
def test_report_35_a_sequence_larger_than_the_pool_never_hangs(policy: str, prefix_caching: bool):
    """Fits max_model_len but not the pool: refused at the door, or ended with "length" when it grows out of it."""
    options = {"num_pages": 6, "max_model_len": 1000, "policy": policy, "prefix_caching": prefix_caching}
    with pytest.raises(RequestError, match="KV cache"):
        make_scheduler(**options).add(make_request("too long", [1] * 20))
    for depth in (0, 1):
        for prompt_len in (1, 4, 16, 19):
            grows = make_request("grows", [1] * prompt_len, stop_ids=[], max_tokens=900)
            others = [make_request(str(i), [2, 3], max_tokens=4, priority=i % 2) for i in range(4)]
            loop = run_all(make_scheduler(**options), [grows, *others], depth)
            assert loop.ends["grows", 0].finish_reason == "length"
            assert prompt_len + len(loop.outputs["grows", 0]) == 20 + 1, "the last token needs no page"


@POLICIES
@CACHING
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_report_37_a_tiny_pool_gives_the_text_of_a_large_one(policy: str, prefix_caching: bool, depth: int):
    """No stale token is appended, and no output forgotten, when a sequence is preempted a step ahead of its tokens."""
    requests = [
        make_request(str(i), [*LONG[: 3 * (i % 2) + 4], i], n=1 + i % 3, stop_ids=[], max_tokens=16, priority=-i)
        for i in range(6)
    ]
    outputs = []
    for num_pages in (200, 10):
        scheduler = make_scheduler(
            num_pages=num_pages, max_num_seqs=6, policy=policy, prefix_caching=prefix_caching, max_prefill_tokens=5
        )
        loop = run_all(scheduler, requests, depth)
        outputs.append(loop.outputs)
        assert bool(scheduler.stats().preemptions) == (num_pages == 10)
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("when", ["before plan", "before commit", "after commit"])
def test_report_39_finish_and_abort_in_one_step_free_once(when: str):
    """A page or slot given back twice would later belong to two sequences."""
    loop = Loop(make_scheduler(prefix_caching=False))
    loop.scheduler.add(make_request("a", [1, 2, 3], stop_ids=[], max_tokens=3))
    other = make_request("other", LONG[:9], stop_ids=[], max_tokens=12)
    loop.scheduler.add(other)
    for _ in range(2):
        loop.step()
    if when == "before plan":
        loop.scheduler.cancel("a")
    loop.plan()
    if when == "before commit":
        loop.scheduler.cancel("a")
    while len(loop.in_flight) > 1:
        loop.commit()
    loop.commit()
    if when == "after commit":
        loop.scheduler.cancel("a")
    later = [make_request(f"later {i}", [i, i, i, i, i], stop_ids=[], max_tokens=6) for i in range(3)]
    for request in later:
        loop.scheduler.add(request)
    loop.run()
    for request in [other, *later]:
        loop.verify(request)
    assert loop.ends["a", 0].finish_reason == ("length" if when == "after commit" else "abort")


def test_report_39_a_double_free_is_noticed_at_once():
    scheduler = make_scheduler(checks=False)
    (seq,) = scheduler.add(make_request("a", [1, 2, 3]))
    scheduler.plan()
    scheduler.pool.free(seq.pages)
    with pytest.raises(InvariantError, match="refcount"):
        scheduler.check()
    with pytest.raises(InvariantError, match="freed more often"):
        scheduler.cancel("a")


@pytest.mark.parametrize("still_running", [True, False])
def test_report_41_pages_of_other_weights_are_never_served(still_running: bool):
    """After a reset nothing computed before it is found: not even by a sequence that went on registering pages."""
    loop = Loop(make_scheduler())
    (old,) = loop.scheduler.add(make_request("old", LONG, n=1, stop_ids=[], max_tokens=12))
    if still_running:
        for _ in range(3):
            loop.step()
    else:
        loop.run()
    loop.scheduler.reset_prefix_cache()
    loop.run()
    assert len(loop.scheduler.cache or ()) == 0
    history = LONG + loop.outputs["old", 0]
    (new,) = loop.scheduler.add(make_request("new", [*history, 1]))
    loop.run()
    assert new.cached == 0
    (newer,) = loop.scheduler.add(make_request("newer", [*history, 1]))
    loop.run()
    assert newer.cached == 32 and old.status is Status.FINISHED


def test_report_41_siblings_do_not_start_from_pages_of_other_weights():
    loop = Loop(make_scheduler(max_num_seqs=1))
    loop.scheduler.add(make_request("a", LONG[:9], n=2, stop_ids=[], max_tokens=4))
    loop.step()
    loop.scheduler.reset_prefix_cache()
    loop.run()
    assert sum(plan.num_tokens for plan in loop.plans) == 2 * (9 + 3)

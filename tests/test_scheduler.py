"""The scheduler's rules, one by one. Random lives are in test_scheduler_machine.py."""

import numpy as np
import pytest

from jaxserve.errors import QueueFull, RequestError
from jaxserve.plan import Plan
from jaxserve.request import NOTHING_ALLOWED
from jaxserve.scheduler import Status
from jaxserve.shapes import Limit
from tests.scheduler_sim import EOS, Loop, draw, expected_output, make_request, make_scheduler

LONG = list(range(10, 30))  # 20 tokens: 5 pages of 4


def names(rows) -> list[str]:
    return [f"{seq.request.request_id}/{seq.index}" for seq in rows.seqs]


def planned(loop: Loop) -> Plan:
    plan = loop.plan()
    assert plan is not None
    return plan


# ---------------------------------------------------------------------------------------------------------- regions


def test_first_a_chunk_then_single_tokens():
    loop = Loop(make_scheduler())
    loop.scheduler.add(make_request("a", [1, 2, 3, 4, 5], max_tokens=3))
    plan = planned(loop)
    assert (plan.prefill.starts, plan.prefill.counts, plan.prefill.samples) == ([0], [5], [True])
    assert plan.prefill.tokens == [1, 2, 3, 4, 5] and len(plan.decode) == 0
    assert [seq.slot for seq in plan.admitted] == plan.prefill.slots
    plan = planned(loop)
    assert (plan.decode.starts, plan.decode.counts, plan.decode.tokens) == ([5], [1], [-1])
    assert plan.admitted == [] and len(plan.prefill) == 0


def test_a_token_that_is_known_here_is_not_read_from_the_device():
    loop = Loop(make_scheduler())
    loop.scheduler.add(make_request("a", [1, 2, 3], max_tokens=4, stop_ids=[]))
    planned(loop)
    (event,) = loop.commit()
    assert planned(loop).decode.tokens == [event.token]


def test_a_prompt_of_one_token_is_a_decode_row():
    loop = Loop(make_scheduler())
    loop.scheduler.add(make_request("a", [9]))
    plan = planned(loop)
    assert plan.decode.tokens == [9] and plan.decode.samples == [True] and len(plan.prefill) == 0


def test_decode_rows_do_not_compete_with_chunks():
    loop = Loop(make_scheduler(max_prefill_tokens=6, max_num_seqs=3))
    loop.scheduler.add(make_request("a", [1, 2], stop_ids=[], max_tokens=20))
    loop.step()
    loop.scheduler.add(make_request("b", LONG))
    for start in (0, 6, 12):
        plan = planned(loop)
        assert names(plan.decode) == ["a/0"] and plan.prefill.starts == [start] and plan.prefill.counts == [6]
        assert plan.prefill.samples == [False]
    plan = planned(loop)
    assert (plan.prefill.starts, plan.prefill.counts, plan.prefill.samples) == ([18], [2], [True])


STEPS = (Limit(4, 12), Limit(1, 3), Limit(4, 5))


def test_chunks_are_smaller_while_others_decode():
    loop = Loop(make_scheduler(limits=STEPS))
    loop.scheduler.add(make_request("a", LONG, stop_ids=[], max_tokens=4))
    assert [planned(loop).prefill.counts for _ in range(2)] == [[12], [8]]  # nobody is kept waiting
    loop.scheduler.add(make_request("b", LONG[::-1]))
    plans = [planned(loop) for _ in range(4)]
    assert [names(plan.decode) for plan in plans] == [["a/0"]] * 3 + [[]]
    assert [plan.prefill.counts for plan in plans] == [[3], [3], [3], [11]]


def test_chunks_are_as_large_as_the_number_of_decoding_rows_allows():
    loop = Loop(make_scheduler(limits=STEPS))
    for name in "ab":
        loop.scheduler.add(make_request(name, LONG[:4], stop_ids=[], max_tokens=20))
    planned(loop)
    loop.scheduler.add(make_request("c", LONG[::-1]))
    assert [planned(loop).prefill.counts for _ in range(2)] == [[5], [5]]


def test_rows_of_one_known_token_make_a_step_one_of_more_rows_unless_its_chunks_are_too_long():
    """No step is compiled that holds both."""
    limits = (Limit(2, 14), Limit(2, 6), Limit(5, 4))
    loop = Loop(make_scheduler(limits=limits, max_num_seqs=5))
    for name in "abcd":
        loop.scheduler.add(make_request(name, [3], stop_ids=[]))
    loop.scheduler.add(make_request("e", LONG))
    plan = planned(loop)
    assert names(plan.decode) == ["a/0", "b/0", "c/0", "d/0"] and plan.prefill.counts == [4]

    loop = Loop(make_scheduler(limits=limits))
    loop.scheduler.add(make_request("e", LONG[:10]))
    for name in "abc":
        loop.scheduler.add(make_request(name, [3], stop_ids=[]))
    plans = [planned(loop) for _ in range(2)]
    assert [plan.prefill.counts for plan in plans] == [[10], []]
    assert [names(plan.decode) for plan in plans] == [["a/0", "b/0"], ["e/0", "a/0", "b/0", "c/0"]]


def test_a_chunk_that_leaves_one_token_ends_in_the_decode_region():
    loop = Loop(make_scheduler(max_prefill_tokens=4))
    loop.scheduler.add(make_request("a", [1, 2, 3, 4, 5]))
    assert planned(loop).prefill.samples == [False]
    assert planned(loop).decode.tokens == [5]


def test_chunks_share_the_budget_in_order():
    loop = Loop(make_scheduler(max_prefill_tokens=9))
    for name in "abc":
        loop.scheduler.add(make_request(name, [ord(name), 2, 3, 4]))
    plan = planned(loop)
    assert names(plan.prefill) == ["a/0", "b/0", "c/0"] and plan.prefill.counts == [4, 4, 1]
    assert names(planned(loop).prefill) == ["c/0"]


def test_no_more_chunks_than_rows():
    loop = Loop(make_scheduler(max_prefill_rows=2))
    for name in "abc":
        loop.scheduler.add(make_request(name, [ord(name), 2, 3]))
    assert names(planned(loop).prefill) == ["a/0", "b/0"]
    plan = planned(loop)
    assert names(plan.prefill) == ["c/0"] and names(plan.decode) == ["a/0", "b/0"]


def test_rows_keep_the_order_of_admission():
    loop = Loop(make_scheduler())
    for name in "abcd":
        loop.scheduler.add(make_request(name, [ord(name), 2, 3], stop_ids=[], max_tokens=9))
    planned(loop)
    assert all(names(planned(loop).decode) == ["a/0", "b/0", "c/0", "d/0"] for _ in range(3))


def test_prompt_logprobs_are_made_in_the_prefill_region_without_the_cache():
    loop = Loop(make_scheduler(max_prefill_tokens=4))
    loop.scheduler.add(make_request("warm", [1, 2, 3, 4, 5]))
    loop.run()
    loop.scheduler.add(make_request("a", [1, 2, 3, 4, 5], prompt_logprobs=1, max_tokens=2, stop_ids=[]))
    (seq,) = loop.scheduler.requests["a"]
    plans = [planned(loop), planned(loop)]
    assert [plan.prefill.starts for plan in plans] == [[0], [4]]
    assert [plan.prefill.counts for plan in plans] == [[4], [1]]
    assert seq.cached == 0 and seq.score_prompt
    assert len(planned(loop).decode) == 1, "its outputs are decode rows even before the prompt is committed"
    loop.commit()
    assert seq.score_prompt
    loop.commit()
    assert not seq.score_prompt


# ------------------------------------------------------------------------------------------------------------- ends


def test_no_row_is_planned_past_the_length_limits():
    loop = Loop(make_scheduler(max_model_len=8))
    loop.scheduler.add(make_request("short", [1, 2, 3], max_tokens=2, stop_ids=[]))
    loop.scheduler.add(make_request("full", [1, 2, 3], max_tokens=50, stop_ids=[]))
    loop.run()
    assert [len(loop.outputs[name, 0]) for name in ("short", "full")] == [2, 5]
    assert {event.finish_reason for event in loop.ends.values()} == {"length"}
    rows = [name for plan in loop.plans for name in names(plan.decode) + names(plan.prefill)]
    assert rows.count("short/0") == 2 and rows.count("full/0") == 5


def test_slot_and_pages_are_free_before_the_last_token_is_here():
    loop = Loop(make_scheduler(max_num_seqs=1, prefix_caching=False))
    loop.scheduler.add(make_request("a", [1, 2, 3], max_tokens=1))
    loop.scheduler.add(make_request("b", [4, 5, 6], max_tokens=1))
    assert names(planned(loop).prefill) == ["a/0"]
    assert names(planned(loop).prefill) == ["b/0"], "b takes the slot while a's only token is on its way"
    assert loop.scheduler.stats().running == 2
    loop.run()
    assert all(event.finish_reason == "length" for event in loop.ends.values())


@pytest.mark.parametrize(("ids", "stop_reason"), [([], None), ([5], 5)])
def test_stop_ids_end_a_sequence_and_its_next_row_is_dropped(ids: list[int], stop_reason: int | None):
    scheduler = make_scheduler()
    scheduler.add(make_request("a", [1, 2], stop_ids=[5], stop_token_ids=ids))
    first, second = scheduler.plan(), scheduler.plan()
    assert first and second
    (event,) = scheduler.commit(first, [5])
    assert (event.token, event.finish_reason, event.stop_reason, event.row) == (5, "stop", stop_reason, 0)
    assert scheduler.pool.num_used == 0 and not scheduler.requests and scheduler.has_work
    assert scheduler.commit(second, [6]) == []
    assert event.seq.output_ids == [5] and not scheduler.has_work


def test_stop_ids_do_not_count_before_min_tokens():
    scheduler = make_scheduler()
    scheduler.add(make_request("a", [1, 2], stop_ids=[5], min_tokens=2))
    for expected in (None, None, "stop"):
        plan = scheduler.plan()
        assert plan
        (event,) = scheduler.commit(plan, [5])
        assert event.finish_reason == expected


def test_a_stop_id_as_the_last_possible_token_is_a_stop():
    scheduler = make_scheduler()
    scheduler.add(make_request("a", [1, 2], max_tokens=1, stop_ids=[5]))
    plan = scheduler.plan()
    assert plan and scheduler.commit(plan, [5])[0].finish_reason == "stop"


@pytest.mark.parametrize("depth", [0, 1])
def test_logits_that_are_not_finite_end_one_sequence_and_poison_no_cache(depth: int):
    loop = Loop(make_scheduler(), depth)
    loop.scheduler.add(make_request("bad", LONG, max_tokens=4))
    loop.scheduler.add(make_request("good", [1, 2, 3], max_tokens=4))
    while not len(planned(loop).decode):
        pass
    for _, ids in loop.in_flight:
        ids[0] = -1
    loop.run()
    assert loop.ends["bad", 0].finish_reason == "error" and loop.ends["bad", 0].token is None
    assert loop.ends["good", 0].finish_reason in ("length", "stop")
    (seq,) = loop.scheduler.add(make_request("again", LONG))
    loop.run()
    assert seq.cached == 0


def test_a_request_that_forbids_all_tokens_ends_and_the_pages_it_shares_stay():
    loop = Loop(make_scheduler())
    (first,) = loop.scheduler.add(make_request("first", LONG, max_tokens=1))
    loop.run()
    loop.scheduler.add(make_request("none", LONG, max_tokens=4))
    planned(loop)
    for _, ids in loop.in_flight:
        ids[0] = NOTHING_ALLOWED
    loop.run()
    assert loop.ends["none", 0].finish_reason == "error" and loop.ends["none", 0].nothing_allowed
    (seq,) = loop.scheduler.add(make_request("again", LONG))
    loop.run()
    assert seq.cached == 16


def test_row_numbers_of_events_count_decode_rows_first():
    loop = Loop(make_scheduler())
    loop.scheduler.add(make_request("a", [1, 2], stop_ids=[], max_tokens=9))
    planned(loop)
    loop.commit()
    loop.scheduler.add(make_request("b", [3, 4], stop_ids=[], max_tokens=9))
    planned(loop)
    assert [(event.seq.request.request_id, event.row) for event in loop.commit()] == [("a", 0), ("b", 1)]


def test_ids_come_as_an_array_too():
    scheduler = make_scheduler()
    scheduler.add(make_request("a", [1, 2], stop_ids=[5]))
    plan = scheduler.plan()
    assert plan and scheduler.commit(plan, np.array([6], np.int32))[0].token == 6


def test_commits_out_of_order_twice_or_of_another_size_are_faults():
    scheduler = make_scheduler()
    scheduler.add(make_request("a", [1, 2]))
    first, second = scheduler.plan(), scheduler.plan()
    assert first and second
    with pytest.raises(ValueError, match="order of their plans"):
        scheduler.commit(second, [1])
    with pytest.raises(ValueError, match="1 rows, but 2 ids"):
        scheduler.commit(first, [1, 2])
    scheduler.commit(first, [1])
    with pytest.raises(ValueError, match="once"):
        scheduler.commit(first, [1])


# ------------------------------------------------------------------------------------------------------ at the door


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([], {}, "empty"),
        ([1] * 100, {}, r"100 tokens.*max_model_len \(100\)"),
        ([1] * 12, {"num_pages": 4}, r"12 tokens.*KV cache holds \(12\)"),
    ],
)
def test_prompts_that_can_never_be_served_are_refused(prompt: list[int], options: dict, message: str):
    scheduler = make_scheduler(**options)
    with pytest.raises(RequestError, match=message) as error:
        scheduler.add(make_request("a", prompt))
    assert error.value.param == "prompt" and not scheduler.has_work


def test_requests_of_one_name_and_of_no_tokens_are_refused():
    scheduler = make_scheduler()
    scheduler.add(make_request("a", [1]))
    with pytest.raises(RequestError, match="already in use"):
        scheduler.add(make_request("a", [2]))
    with pytest.raises(RequestError, match="max_tokens"):
        scheduler.add(make_request("b", [1], max_tokens=0))


def test_a_full_queue_refuses_at_once_and_takes_again_later():
    loop = Loop(make_scheduler(max_num_seqs=1, max_queue_len=2))
    loop.scheduler.add(make_request("runs", [1, 2], stop_ids=[], max_tokens=3))
    loop.step()
    for i in range(2):
        loop.scheduler.add(make_request(f"waits{i}", [1, 2], n=3 if i else 1))
    with pytest.raises(QueueFull, match=r"2 requests wait \(max_queue_len 2\)"):
        loop.scheduler.add(make_request("refused", [1, 2]))
    loop.scheduler.cancel("waits0")
    loop.scheduler.add(make_request("taken", [1, 2]))
    loop.run()


def test_who_waits_shares_the_prompt_and_who_runs_has_his_own():
    """The tokens of a request are in memory once, whatever n is, until its sequences are admitted."""
    loop = Loop(make_scheduler(max_num_seqs=2))
    request = make_request("a", LONG, n=128, stop_ids=[], max_tokens=3)
    seqs = loop.scheduler.add(request)
    assert len({id(seq.token_ids) for seq in seqs}) == 1
    for _ in range(4):
        loop.step()
    started = [seq for seq in seqs if seq.started]
    assert 1 < len(started) < 6
    assert len({id(seq.token_ids) for seq in started}) == len(started)
    assert all(seq.token_ids is request.prompt_token_ids for seq in seqs if not seq.started)
    loop.run()
    assert request.prompt_token_ids == LONG


def test_samples_that_wait_fill_the_queue_too():
    loop = Loop(make_scheduler(max_num_seqs=1, max_queue_len=3))
    loop.scheduler.add(make_request("large", [1, 2], n=128))  # an empty queue takes it
    with pytest.raises(QueueFull, match=r"128 sequences wait, \d+ may \(max_queue_len 3\)"):
        loop.scheduler.add(make_request("refused", [1, 2]))
    loop.scheduler.cancel("large")
    loop.scheduler.add(make_request("taken", [1, 2]))
    loop.run()


def test_requests_that_a_free_slot_awaits_do_not_fill_the_queue():
    scheduler = make_scheduler(max_num_seqs=2, max_queue_len=1)
    for i in range(3):
        scheduler.add(make_request(str(i), [1, 2]))
    with pytest.raises(QueueFull):
        scheduler.add(make_request("3", [1, 2]))


# -------------------------------------------------------------------------------------------------- cancel, deadlines


@pytest.mark.parametrize("steps", [0, 1, 2, 4])
def test_cancel_wherever_it_is(steps: int):
    loop = Loop(make_scheduler(max_prefill_tokens=8))
    loop.scheduler.add(make_request("a", LONG, stop_ids=[]))
    loop.scheduler.add(make_request("b", LONG[::-1], stop_ids=[]))
    for _ in range(steps):
        loop.step()
    loop.scheduler.cancel("a")
    loop.scheduler.cancel("a")
    loop.scheduler.cancel("never heard of")
    loop.run()
    assert loop.ends["a", 0].finish_reason == "abort"
    assert loop.outputs["b", 0] == expected_output(make_request("b", LONG[::-1], stop_ids=[]), 0, 100)


def test_cancel_one_of_n():
    loop = Loop(make_scheduler())
    loop.scheduler.add(make_request("a", [1, 2, 3, 4, 5], n=3, stop_ids=[]))
    for _ in range(3):
        loop.step()
    loop.scheduler.cancel("a", 1)
    loop.run()
    assert [loop.ends["a", i].finish_reason for i in range(3)] == ["length", "abort", "length"]


def test_a_deadline_ends_what_runs_and_what_waits():
    loop = Loop(make_scheduler(max_num_seqs=1))
    loop.scheduler.add(make_request("runs", [1, 2], stop_ids=[], max_tokens=30, deadline_s=5.0))
    loop.scheduler.add(make_request("waits", [1, 2], n=2, deadline_s=6.0))
    loop.scheduler.add(make_request("patient", [1, 2]))
    loop.step()
    loop.scheduler.expire(4.9)
    assert len(loop.scheduler.requests) == 3
    loop.scheduler.expire(6.0)
    loop.run()
    reasons = {name: event.finish_reason for name, event in loop.ends.items()}
    assert reasons.pop(("patient", 0)) in ("stop", "length")
    assert set(reasons.values()) == {"timeout"} and len(reasons) == 3


def test_a_deadline_is_not_inherited_by_a_later_request_of_the_same_name():
    scheduler = make_scheduler()
    scheduler.add(make_request("a", [1, 2], deadline_s=5.0))
    scheduler.cancel("a")
    scheduler.add(make_request("a", [1, 2]))
    scheduler.expire(9.0)
    assert [event.finish_reason for event in scheduler.take_endings()] == ["abort"]


def test_cancelled_waiters_do_not_pile_up():
    scheduler = make_scheduler(max_num_seqs=1)
    scheduler.add(make_request("runs", [1, 2]))
    scheduler.plan()
    for i in range(500):
        scheduler.add(make_request(str(i), [1, 2]))
        scheduler.cancel(str(i))
    assert len(scheduler.waiting) == 0 and len(scheduler.waiting._heap) < 200


# ------------------------------------------------------------------------------------------------------------ order


def admission_order(loop: Loop) -> list[str]:
    loop.run()
    return [seq.request.request_id for plan in loop.plans for seq in plan.admitted]


def test_fcfs_takes_them_as_they_came():
    loop = Loop(make_scheduler(max_num_seqs=1))
    for name, priority in (("a", 2), ("b", 0), ("c", 1)):
        loop.scheduler.add(make_request(name, [1, 2], priority=priority))
    assert admission_order(loop) == ["a", "b", "c"]


def test_priority_then_arrival():
    loop = Loop(make_scheduler(max_num_seqs=1, policy="priority"))
    for name, priority, arrival_s in (("a", 2, 0.0), ("b", 1, 2.0), ("c", 1, 1.0), ("d", 1, 2.0)):
        loop.scheduler.add(make_request(name, [1, 2], priority=priority, arrival_s=arrival_s))
    assert admission_order(loop) == ["c", "b", "d", "a"]


def test_nobody_overtakes_a_prompt_that_waits_for_pages():
    loop = Loop(make_scheduler(num_pages=9, prefix_caching=False))
    loop.scheduler.add(make_request("runs", LONG, stop_ids=[], max_tokens=4))
    loop.step()
    loop.scheduler.add(make_request("large", LONG[::-1]))
    loop.scheduler.add(make_request("small", [1]))
    loop.step()
    loop.step()
    assert [seq.request.request_id for seq in loop.scheduler.running] == ["runs"]
    assert list(dict.fromkeys(admission_order(loop))) == ["runs", "large", "small"]


@pytest.mark.parametrize("together", [True, False])
def test_pages_for_the_rest_of_a_prompt_are_not_given_to_others(together: bool):
    loop = Loop(make_scheduler(num_pages=9, max_prefill_tokens=6))
    loop.scheduler.add(make_request("a", [*LONG, *range(30, 38)], max_tokens=1))  # 7 of 8 pages
    if not together:
        loop.step()
    for name in ("b", "c", "d"):
        loop.scheduler.add(make_request(name, [1], max_tokens=4))
    order = admission_order(loop)
    assert order == ["a", "b", "c", "d"] and loop.scheduler.stats().preemptions == 0
    (plan,) = (plan for plan in loop.plans if "b/0" in [f"{s.request.request_id}/0" for s in plan.admitted])
    assert not any(seq.request.request_id == "a" for seq in plan.prefill.seqs + plan.decode.seqs)


def test_unknown_policy():
    with pytest.raises(ValueError, match="policy must be"):
        make_scheduler(policy="lottery")


# ------------------------------------------------------------------------------------------- steps that are alike


def all_decode(*prompts: list[int], max_tokens: int = 8, **options) -> tuple[Loop, Plan]:
    """Each has drawn two tokens, the second in the plan that is returned."""
    loop = Loop(make_scheduler(**options))
    for i, prompt in enumerate(prompts):
        loop.scheduler.add(make_request(f"r{i}", prompt, max_tokens=max_tokens, stop_ids=[]))
    planned(loop)
    return loop, planned(loop)


def test_steps_are_alike_until_a_row_ends_by_count():
    loop, plan = all_decode([1, 2, 3], [4, 5])
    assert loop.scheduler.plan_again(plan, 7) == []
    plans = loop.scheduler.plan_again(plan, 6)
    assert [each.decode.seqs for each in plans] == [plan.decode.seqs] * 6
    assert [each.decode.starts for each in plans] == [[4 + i, 3 + i] for i in range(6)]
    assert loop.scheduler.plan() is None


def test_steps_are_not_alike_while_somebody_waits():
    loop, plan = all_decode([1, 2, 3], [4, 5], max_num_seqs=1)
    assert loop.scheduler.plan_again(plan, 1) == []
    loop.scheduler.cancel("r1")
    assert len(loop.scheduler.plan_again(plan, 1)) == 1


def test_steps_are_not_alike_while_somebody_is_amid_a_prompt():
    loop, plan = all_decode([1, 2, 3])
    loop.scheduler.add(make_request("long", LONG, stop_ids=[]))
    plan = planned(loop)
    assert len(plan.prefill) == len(plan.decode) == 1 and loop.scheduler.plan_again(plan, 1) == []


@pytest.mark.parametrize(("num_pages", "alike"), [(4, 0), (5, 1)])
def test_steps_are_not_alike_where_pages_are_short(num_pages: int, alike: int):
    """Both rows have filled a page of four, and one page is left of two that they need."""
    loop, plan = all_decode([1, 2, 3], [4, 5, 6], num_pages=num_pages)
    assert len(loop.scheduler.plan_again(plan, 1)) == alike
    assert loop.scheduler.stats().preemptions == 0


# ------------------------------------------------------------------------------------------------ pages and statistics


def test_pages_are_taken_as_tokens_need_them():
    loop = Loop(make_scheduler(max_prefill_tokens=6))
    loop.scheduler.add(make_request("a", LONG[:13], stop_ids=[], max_tokens=10))
    held = []
    for _ in range(8):
        plan = planned(loop)
        held.append((loop.scheduler.pool.num_used, len(plan.page_writes)))
    assert held == [(2, 2), (3, 1), (4, 1), (4, 0), (4, 0), (4, 0), (5, 1), (5, 0)]


def test_statistics():
    loop = Loop(make_scheduler(max_num_seqs=2))
    for name in ("a", "b"):
        loop.scheduler.add(make_request(name, [*LONG[:9]], stop_ids=[], max_tokens=5, n=2))
    loop.step()
    loop.step()
    stats = loop.scheduler.stats()
    assert (stats.running, stats.waiting) == (2, 2) and stats.steps == 2
    assert stats.pages_total == 32 and stats.pages_used == 2 + 1 + 1, "two full pages of the prompt are shared"
    assert stats.allocated_token_slots == 16 and stats.used_token_slots == 8 + 2 + 1
    loop.run()
    stats = loop.scheduler.stats()
    assert (stats.running, stats.waiting, stats.pages_used) == (0, 0, 0)
    assert stats.prompt_tokens == 18 and stats.generation_tokens == 20
    assert stats.prefix_cache_query_tokens == 18 and stats.prefix_cache_hit_tokens == 8


def test_waste_stays_low_in_steady_load():
    scheduler = make_scheduler(
        num_pages=900, page_size=16, max_num_seqs=16, max_model_len=1000, max_prefill_tokens=4096, checks=False
    )
    for i in range(16):
        scheduler.add(make_request(str(i), [i] * (512 + i), stop_ids=[], max_tokens=200))
    waste = []
    for _ in range(150):
        plan = scheduler.plan()
        assert plan
        stats = scheduler.stats()
        waste.append(1 - stats.used_token_slots / stats.allocated_token_slots)
        scheduler.commit(plan, [1] * plan.num_rows)
    assert max(waste) < 0.04


def test_the_pretended_device_notices_wrong_tokens():
    """Guards the guard: a page that holds something else must not go unseen."""
    loop = Loop(make_scheduler())
    loop.scheduler.add(make_request("a", [1, 2, 3], stop_ids=[]))
    planned(loop)
    (seq,) = loop.scheduler.running
    loop.device.pages[seq.pages[0]][1] = 44
    with pytest.raises(AssertionError, match="reads"):
        loop.plan()
    assert draw(seq.request, 0, [1, 2, 3]) != draw(seq.request, 0, [1, 44, 3]) and EOS >= 0


def test_a_request_keeps_nothing_alive_after_its_end():
    loop = Loop(make_scheduler())
    seqs = loop.scheduler.add(make_request("a", [1, 2, 3], n=2))
    loop.run()
    assert all(seq.status is Status.FINISHED and not seq.siblings and not seq.parked for seq in seqs)

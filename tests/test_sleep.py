"""Pause, sleep and wake up of a whole engine: what becomes of requests, memory and texts (control.py)."""

import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxserve.config import EngineConfig
from jaxserve.control import Pause, ResetPrefixCache, Resume, Sleep, WakeUp
from jaxserve.engine import Engine
from jaxserve.errors import EngineAsleep, EngineError, RequestError
from tests.test_engine import ids_of, no_room, request, run

MODEL = Path(__file__).parent / "goldens" / "qwen2_tied"
PROMPT = list(range(5, 42))


@pytest.fixture(scope="module")
def shared() -> Engine:
    config = EngineConfig(
        model=str(MODEL), page_size=16, max_num_seqs=8, max_num_batched_tokens=40, max_model_len=128,
        kv_cache_memory_bytes=2**20,
    )  # fmt: skip
    return Engine(config, checks=True)


@pytest.fixture
def engine(shared: Engine) -> Iterator[Engine]:
    yield shared
    shared.control(Resume())
    shared.control(WakeUp())
    run(shared, [])


@pytest.fixture(scope="module")
def compiles() -> list[str]:
    """Names of what JAX has measured."""
    events: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(lambda event, *_, **__: events.append(event))
    return events


def device_bytes() -> int:
    return sum(array.nbytes for array in jax.live_arrays())


def ends(deltas: list) -> dict[str, str]:
    return {delta.request_id: delta.finish_reason for delta in deltas if delta.finish_reason}


def drained(engine: Engine) -> list:
    deltas = []
    while engine.has_work():
        deltas += engine.step()
    return deltas


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize(
    "tags", [[("weights", "kv_cache")], [("weights",), ("kv_cache",)], [("kv_cache",), ("weights",)]]
)
def test_the_same_text_after_sleep_with_no_compile(engine: Engine, level: int, tags: list[tuple], compiles: list):
    ask = {"temperature": 1.0, "seed": 7}
    before = ids_of(run(engine, [request("a", PROMPT, 12, **ask)])["a", 0])
    full = device_bytes()
    engine.control(Sleep(level=level))
    assert not engine.busy and engine.stats().sleep_level == level
    assert device_bytes() < full / 4
    with pytest.raises(EngineAsleep, match="wake_up") as caught:
        engine.submit(request("b", PROMPT, 4))
    assert caught.value.info().retry_after_s and caught.value.info().exception().retry_after_s
    compiles.clear()
    for part in tags:
        assert engine.stats().sleep_level == level, "not all of it is back"
        engine.control(WakeUp(part))
    assert engine.stats().sleep_level == 0
    hits = engine.stats().prefix_cache_hit_tokens
    after = run(engine, [request("a", PROMPT, 12, **ask)])
    assert ids_of(after["a", 0]) == before
    assert engine.stats().prefix_cache_hit_tokens == hits, "the pages are gone, and so the cache forgot them"
    assert engine.stats().compiles_after_warmup == 0
    assert level == 2 or "/jax/core/compile/backend_compile_duration" not in compiles
    assert device_bytes() == full


@pytest.mark.parametrize("level", [1, 2])
def test_quantized_weights_come_back_as_they_were(level: int):
    config = EngineConfig(
        model=str(MODEL), page_size=16, max_num_seqs=4, max_num_batched_tokens=48, max_model_len=64,
        kv_cache_memory_bytes=2**20, quantization="int8", enforce_eager=True,
    )  # fmt: skip
    engine = Engine(config, checks=True)
    before = ids_of(run(engine, [request("a", PROMPT, 12)])["a", 0])
    kept = [np.array(weight) for weight in engine._runner._weights]
    engine.control(Sleep(level=level))
    engine.control(WakeUp())
    for was, weight in zip(kept, engine._runner._weights, strict=True):
        assert was.dtype == weight.dtype
        np.testing.assert_array_equal(weight, was)
    assert {str(weight.dtype) for weight in kept} >= {"int8", "float32"}
    assert ids_of(run(engine, [request("a", PROMPT, 12)])["a", 0]) == before


def test_deeper_sleep(engine: Engine):
    """Level 2 after level 1 drops what is in host memory; level 1 after level 2 cannot bring it back."""
    before = ids_of(run(engine, [request("a", PROMPT, 8)])["a", 0])
    for level, now in ((1, 1), (2, 2), (1, 2)):
        engine.control(Sleep(level=level))
        assert engine.stats().sleep_level == now
    engine.control(WakeUp())
    assert ids_of(run(engine, [request("a", PROMPT, 8)])["a", 0]) == before


def test_sleep_ends_requests_or_waits_for_them(engine: Engine):
    for mode, reason in (("abort", "abort"), ("wait", "length")):
        for name in ("a", "b"):
            engine.submit(request(name, PROMPT, 20))
        engine.step()
        engine.control(Sleep(mode=mode))
        assert engine.busy, "there is a step on the device"
        with pytest.raises(EngineAsleep):
            engine.submit(request("late", PROMPT, 4))
        assert ends(drained(engine)) == {"a": reason, "b": reason}
        assert not engine.busy and engine.stats().sleep_level == 1
        engine.control(WakeUp())
    assert len(ids_of(run(engine, [request("c", PROMPT, 4)])["c", 0])) == 4


def test_wake_up_while_falling_asleep(engine: Engine):
    engine.submit(request("a", PROMPT, 20))
    engine.step()
    engine.control(Sleep(mode="wait"))
    with pytest.raises(RequestError, match="falling asleep"):
        engine.control(Pause("keep"))
    engine.control(WakeUp())
    engine.submit(request("b", PROMPT, 2))
    assert ends(drained(engine)) == {"a": "length", "b": "length"}
    assert engine.stats().sleep_level == 0


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_pause_holds_new_requests_until_resume(engine: Engine, mode: str):
    alone = ids_of(run(engine, [request("a", PROMPT, 20, n=2, temperature=1.0, seed=3)])["a", 1])
    engine.submit(request("a", PROMPT, 20, n=2, temperature=1.0, seed=3))
    seen = [delta for _ in range(4) for delta in engine.step()]
    engine.control(Pause(mode, clear_cache=False))
    engine.submit(request("new", PROMPT, 4, n=2, temperature=1.0))
    engine.submit(request("gone", PROMPT, 4))
    engine.cancel("new", 0)
    engine.cancel("gone")
    deltas = drained(engine)
    seen += deltas
    assert not engine.busy and engine.stats().paused
    reasons = {"gone": "abort", "new": "abort"} | (
        {} if mode == "keep" else {"a": "abort" if mode == "abort" else "length"}
    )
    assert ends(deltas) == reasons
    assert engine.knows("new") and engine.knows("a") == (mode == "keep")
    engine.control(Resume())
    assert not engine.stats().paused
    deltas = drained(engine)
    assert {name for name, reason in ends(deltas).items() if reason == "length"} == {"new"} | (
        {"a"} if mode == "keep" else set()
    )
    if mode != "abort":
        assert ids_of([d for d in seen + deltas if (d.request_id, d.index) == ("a", 1)]) == alone


def test_a_request_whose_grammar_is_ready_only_then(engine: Engine):
    for command, back in ((Sleep(), WakeUp()), (Pause(), Resume())):
        future: Future = Future()
        engine._compiling["late"] = request("late", PROMPT, 4), future
        engine.control(command)
        assert not engine.busy
        future.set_result(None)
        (answer,) = drained(engine)
        if isinstance(command, Sleep):
            assert answer.error is not None and answer.error.type == EngineAsleep.type
        else:
            assert answer.error is None and engine.knows("late")
        engine.control(back)
    assert ends(drained(engine)) == {"late": "length"}


def test_a_deadline_runs_while_paused(engine: Engine):
    engine.control(Pause("keep"))
    late = request("late", PROMPT, 4)
    late.deadline_s = time.monotonic() + 0.05
    engine.submit(late)
    engine.submit(request("other", PROMPT, 4))
    assert not engine.has_work()
    time.sleep(0.06)
    assert ends(drained(engine)) == {"late": "timeout"}
    engine.control(Resume())
    assert ends(drained(engine)) == {"other": "length"}


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_pause_forgets_the_prefix_cache_if_told_to(engine: Engine, mode: str):
    for clear in (False, True):
        run(engine, [request("a", PROMPT, 4)])
        hits = engine.stats().prefix_cache_hit_tokens
        engine.control(Pause(mode, clear_cache=clear))
        engine.control(Resume())
        run(engine, [request("a", PROMPT, 4)])
        assert (engine.stats().prefix_cache_hit_tokens == hits) == clear
    engine.control(ResetPrefixCache())
    hits = engine.stats().prefix_cache_hit_tokens
    run(engine, [request("a", PROMPT, 4)])
    assert engine.stats().prefix_cache_hit_tokens == hits


def test_a_paused_engine_sleeps_and_is_still_paused_when_it_wakes(engine: Engine):
    engine.submit(request("a", PROMPT, 6))
    engine.step()
    engine.control(Pause("keep"))
    engine.submit(request("b", PROMPT, 6))
    engine.control(Sleep(mode="wait"))  # frozen requests go on, to their end
    assert ends(drained(engine)) == {"a": "length"}
    engine.control(WakeUp())
    assert engine.stats().paused and not engine.has_work()
    engine.control(Resume())
    assert ends(drained(engine)) == {"b": "length"}


def test_what_cannot_be_brought_back_leaves_it_asleep(engine: Engine, monkeypatch):
    def load():
        raise FileNotFoundError("model.safetensors")

    engine.control(Sleep(level=2))
    with monkeypatch.context() as patch:
        patch.setattr(engine._controller, "_load_model", load)
        with pytest.raises(EngineError, match=r"weights cannot be brought back.*model\.safetensors"):
            engine.control(WakeUp())
    assert engine.stats().sleep_level == 2
    engine.control(WakeUp())
    assert engine.stats().sleep_level == 0


@pytest.mark.parametrize(
    ("level", "where", "what"),
    [
        (1, "jax.device_put", r"weights .* the [\d.]+ KiB of weights"),
        (2, "jaxserve.models.loading._with_stacked_scales", r"weights .* the [\d.]+ KiB of weights"),
        (1, "jaxserve.runner.Runner._allocate_kv_cache", r"kv_cache .* the KV cache of 1\.00 MiB"),
    ],
)
def test_memory_that_others_took_meanwhile_is_waited_for(
    engine: Engine, level: int, where: str, what: str, monkeypatch
):
    before = ids_of(run(engine, [request("a", PROMPT, 8)])["a", 0])
    engine.control(Sleep(level=level))
    asleep = device_bytes()
    for _ in range(2):
        with monkeypatch.context() as patch:
            patch.setattr(where, no_room)
            with pytest.raises(EngineError, match=rf"{what}.*still asleep.*wake up again") as caught:
                engine.control(WakeUp())
        assert "--" not in caught.value.message, "a server's options are what they are"
        assert engine.stats().sleep_level == level
        assert device_bytes() == asleep or what.startswith("kv_cache"), "nothing of what was loaded is left"
        with pytest.raises(EngineAsleep):
            engine.submit(request("b", PROMPT, 4))
    engine.control(WakeUp())
    assert ids_of(run(engine, [request("a", PROMPT, 8)])["a", 0]) == before


@pytest.mark.parametrize(
    ("make", "param"),
    [
        (lambda: Pause("stop"), "mode"),  # type: ignore[arg-type]
        (lambda: Sleep(level=3), "level"),
        (lambda: Sleep(level=True), "level"),
        (lambda: Sleep(mode="keep"), "mode"),  # type: ignore[arg-type]
        (lambda: WakeUp(("scheduling",)), "tags"),  # type: ignore[arg-type]
    ],
)
def test_bad_commands(make, param: str):
    with pytest.raises(RequestError) as caught:
        make()
    assert caught.value.param == param

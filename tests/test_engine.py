"""The whole engine on tiny checkpoints of every architecture, against Hugging Face Transformers (tests/goldens).

Whatever the path (alone, in a mixed batch, in chunks, after a prefix hit, preempted), the ids must be the same.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax._src import xla_bridge

from jaxserve import deployment
from jaxserve.checkpoint import Checkpoint
from jaxserve.config import EngineConfig, offline_config
from jaxserve.deployment import resolve_deployment
from jaxserve.engine import Engine, _start_jax
from jaxserve.errors import ConfigError, DoesNotFit, EngineDead, QueueFull, RequestError
from jaxserve.models.registry import resolve
from jaxserve.programs import LOOP_STEPS, Kind, Programs
from jaxserve.request import Request, SamplingParams
from jaxserve.runner import MEMORY_PERIOD_S, Program, Runner
from jaxserve.sharding import shard_of

GOLDENS = Path(__file__).parent / "goldens"
CASES = sorted(path.parent.name for path in GOLDENS.glob("*/config.json"))
CLEAR = {
    "float32": 1e-3,
    "float16": 2e-2,
    "bfloat16": 0.15,
}  # margin between the best two scores: above it the ids must agree


def config_of(case: str, *, pool_tokens: int = 4096, **options) -> EngineConfig:
    """A small engine that compiles only what it meets. `pool_tokens` sets the size of its KV pool, on all devices."""
    config = EngineConfig(model=str(GOLDENS / case), page_size=16, max_num_seqs=16, max_num_batched_tokens=48)
    model, _ = resolve(Checkpoint.open(config).config)
    itemsize = 4 if options.get("dtype", "float32") == "float32" else 2
    shard = shard_of(model, options.get("tensor_parallel_size", 1))
    size = (pool_tokens + config.page_size) * shard.kv_bytes_per_token(itemsize)
    small = {"enforce_eager": True, "kv_cache_memory_bytes": size, "max_model_len": 128, "dtype": "float32"}
    return replace(config, **small | options)


FEW_PROGRAMS = {"max_num_seqs": 4, "max_num_batched_tokens": 20}  # most of the time is XLA's: two sizes of each region


def request(name, prompt_ids, max_tokens, **params) -> Request:
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True, **params})
    return Request(
        request_id=str(name), prompt_token_ids=list(prompt_ids), params=params, max_tokens=max_tokens,
        stop_ids=params.stop_token_ids, seed=params.seed,
    )  # fmt: skip


def run(engine: Engine, requests: list[Request]) -> dict[tuple[str, int], list]:
    """All deltas of each sequence, in order. The books are checked after every step."""
    for one in requests:
        engine.submit(one)
    deltas: dict[tuple[str, int], list] = {}
    for _ in range(5000):
        if not engine.has_work():
            break
        for delta in engine.step():
            deltas.setdefault((delta.request_id, delta.index), []).append(delta)
    assert not engine.has_work()
    assert engine.stats().pages_used == 0
    return deltas


def ids_of(deltas: list) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


def golden(case: str) -> list[dict]:
    return json.loads((GOLDENS / case / "golden.json").read_text())


def assert_equal_where_clear(entry: dict, ids: list[int], dtype: str) -> None:
    """Up to the first difference, which must be at a place where the best two are as good as equal."""
    assert len(ids) == len(entry["ids"])
    different = np.flatnonzero(np.array(ids) != np.array(entry["ids"]))
    if len(different):
        assert entry["margins"][different[0]] < CLEAR[dtype], f"token {different[0]}: {ids} != {entry['ids']}"
        assert different[0] > 0


@pytest.mark.parametrize(
    ("case", "dtype"),
    [*((case, "float32") for case in CASES), ("qwen2_tied", "float16"), ("qwen3", "float16"), ("llama", "bfloat16")],
)
def test_greedy_ids_equal_transformers_on_every_path(case, dtype):
    """Four at once; 16 of them in test_steps_ahead_change_nothing."""
    engine = Engine(config_of(case, pool_tokens=208, dtype=dtype, **FEW_PROGRAMS), checks=True)
    check_every_path(engine, golden(case), dtype)


def check_every_path(engine: Engine, entries: list[dict], dtype: str) -> None:
    """Alone, after a prefix hit, batched, in chunks, preempted. The engine's pool must be too small for all it runs."""
    for i, entry in enumerate(entries):  # alone, and then after a prefix hit
        for _ in range(2):
            alone = run(engine, [request(i, entry["prompt_ids"], len(entry["ids"]))])
            assert_equal_where_clear(entry, ids_of(alone[str(i), 0]), dtype)
    assert engine.stats().prefix_cache_hit_tokens > 0 and engine.stats().preemptions == 0
    # Together: prompts longer than the budget of a step are computed in chunks, and the pool is too small for all.
    mixed = [entries[i % len(entries)] for i in range(16)]
    deltas = run(engine, [request(i, e["prompt_ids"], len(e["ids"])) for i, e in enumerate(mixed)])
    for i, entry in enumerate(mixed):
        assert_equal_where_clear(entry, ids_of(deltas[str(i), 0]), dtype)
    assert engine.stats().preemptions > 0
    engine.reset_prefix_cache()
    deltas = run(engine, [request(i, e["prompt_ids"], len(e["ids"])) for i, e in enumerate(mixed)])
    for i, entry in enumerate(mixed):
        assert_equal_where_clear(entry, ids_of(deltas[str(i), 0]), dtype)


@pytest.mark.parametrize("ahead", [1, 2])
def test_steps_ahead_change_nothing(ahead, monkeypatch):
    """Accelerators launch short steps two ahead. What a stop id ends is then two steps further."""
    entries, most = golden("llama"), []
    monkeypatch.setattr(Engine, "_ahead", lambda self: ahead)
    engine = Engine(config_of("llama", pool_tokens=208), checks=True)
    launch = engine._runner.launch

    def counted(plan, *following):
        most.append(1 + len(engine._in_flight))
        return launch(plan, *following)

    engine._runner.launch = counted  # type: ignore[method-assign]
    check_every_path(engine, entries, "float32")
    assert max(most) == ahead + 1
    ids, stop = entries[0]["ids"], entries[0]["ids"][5]
    stopped = request("s", entries[0]["prompt_ids"], len(ids))
    stopped.stop_ids = [stop]
    assert ids_of(run(engine, [stopped])["s", 0]) == ids[: ids.index(stop) + 1]


@pytest.fixture
def looping(monkeypatch) -> Iterator[tuple[Engine, list[tuple[int, int, int]]]]:
    """What GPUs do: steps that are sure to have the same rows are launched as one, here those of at most 8. And what
    was launched: rows, steps, launches on their way.
    """
    resolve_backend = deployment.resolve_backend
    monkeypatch.setattr(
        deployment, "resolve_backend", lambda *args, **how: replace(resolve_backend(*args, **how), platform="gpu")
    )
    monkeypatch.setattr(Programs, "options", lambda self, key: {})
    monkeypatch.setattr("jaxserve.programs.LOOP_ROWS", 8)
    engine, launched = Engine(config_of("llama", pool_tokens=208), checks=True), []
    launch = engine._runner.launch

    def counted(plan, *following):
        if (ahead := list(engine._in_flight)) and len(ahead[-1].plans) > 1:
            assert len(ahead) == 1, "after a loop one launch is ahead"
        launched.append((len(plan.decode), 1 + len(following), 1 + len(ahead)))
        return launch(plan, *following)

    engine._runner.launch = counted  # type: ignore[method-assign]
    yield engine, launched


def test_loops_of_steps_change_nothing(looping):
    """A stop id, or a request that comes meanwhile, is seen after the last of them."""
    (engine, launched), entries = looping, golden("llama")
    check_every_path(engine, entries, "float32")
    assert {steps for _, steps, _ in launched} == {1, LOOP_STEPS}
    assert {1, 2, 8} & {rows for rows, steps, _ in launched if steps > 1} > {1}
    short = [request(f"s{i}", [5 + i, 6, 7], 8) for i in range(12)]
    alone = [ids_of(run(engine, [each])[each.request_id, 0]) for each in short]
    together = run(engine, short)
    assert [ids_of(together[f"s{i}", 0]) for i in range(12)] == alone
    assert max(rows for rows, steps, _ in launched if steps > 1) <= 8 < max(rows for rows, *_ in launched)
    assert {Kind.PLAIN, Kind.LOOP} == {kind for kind, _ in engine._runner._ready}
    launched.clear()
    ids, stop = entries[0]["ids"], entries[0]["ids"][5]
    stopped = request("s", entries[0]["prompt_ids"], len(ids))
    stopped.stop_ids = [stop]
    assert ids_of(run(engine, [stopped])["s", 0]) == ids[: ids.index(stop) + 1]
    assert any(steps > 1 for _, steps, _ in launched)


@pytest.mark.parametrize(
    "knobs", [{"logprobs": 2}, {"repetition_penalty": 5.0}, {"top_k": 2, "temperature": 2.0}, {"logit_bias": {7: 100}}],
    ids=str,
)  # fmt: skip
def test_rows_with_knobs_take_no_loop(looping, knobs: dict):
    (engine, launched), prompt = looping, golden("llama")[0]["prompt_ids"]
    (with_knobs,) = run(engine, [request("a", prompt, 12, seed=3, **knobs)]).values()
    assert launched and all(steps == 1 for _, steps, _ in launched)
    plain = request("b", prompt, 12, seed=3, temperature=knobs.get("temperature", 0.0))
    (without,) = run(engine, [plain]).values()
    assert any(steps > 1 for _, steps, _ in launched)
    if "logprobs" in knobs:
        assert ids_of(with_knobs) == ids_of(without) and all(delta.logprobs for delta in with_knobs)
    else:
        assert ids_of(with_knobs) != ids_of(without)


def test_a_draw_is_the_same_in_a_loop_as_with_a_knob_that_changes_nothing(looping):
    (engine, launched), prompt = looping, golden("llama")[0]["prompt_ids"]
    drawn = [
        request(name, prompt, 16, temperature=1.0, seed=3, **how) for name, how in (("a", {}), ("b", {"top_k": 1000}))
    ]
    said = [ids_of(run(engine, [each])[each.request_id, 0]) for each in drawn]
    assert said[0] == said[1] and len(set(said[0])) > 4
    assert any(steps > 1 for _, steps, _ in launched)


@pytest.mark.parametrize(
    "case", ["qwen3", *(pytest.param(case, marks=pytest.mark.heavy) for case in ("llama", "qwen2_tied"))]
)
def test_a_quantized_model_says_the_same_on_every_path(case: str):
    """Alone, after a prefix hit, batched, in chunks, preempted: up to ties, which float32 attention may decide."""
    engine = Engine(config_of(case, pool_tokens=208, quantization="int8"), checks=True)
    entries = [entry | {"ids": [], "margins": []} for entry in golden(case)]
    for i, entry in enumerate(entries):
        (deltas,) = run(engine, [request(i, entry["prompt_ids"], 16, logprobs=2)]).values()
        entry["ids"] = ids_of(deltas)
        for delta in deltas:
            for token in delta.logprobs:
                first, second = token.top_logprobs[:2]
                entry["margins"].append(first - second)
    check_every_path(engine, entries, "float32")


def test_same_seed_same_text_on_every_path():
    prompts = [list(range(3 + i, 3 + i + 5 * (i + 1))) for i in range(8)]

    def drawn(engine, indices):
        requests = [request(i, prompts[i], 24, temperature=1.0, seed=100 + i, top_p=0.95, top_k=50) for i in indices]
        return {key: ids_of(deltas) for key, deltas in run(engine, requests).items()}

    roomy = Engine(config_of("llama"), checks=True)
    alone = {k: v for i in range(8) for k, v in drawn(roomy, [i]).items()}
    assert len({tuple(v) for v in alone.values()}) == 8
    assert drawn(roomy, range(8)) == alone  # batched, after prefix hits
    tight = Engine(config_of("llama", pool_tokens=160), checks=True)
    assert drawn(tight, range(8)) == alone
    assert tight.stats().preemptions > 0


def test_samples_share_the_prompt_and_differ():
    engine = Engine(config_of("qwen2_tied"), checks=True)
    prompt = list(range(5, 42))  # two full pages and a partial one, which is copied on write
    four = run(engine, [request("a", prompt, 12, temperature=1.0, seed=7, n=4)])
    texts = [ids_of(four["a", i]) for i in range(4)]
    assert len({tuple(t) for t in texts}) == 4
    two = run(engine, [request("b", prompt, 12, temperature=1.0, seed=7, n=2)])
    assert [ids_of(two["b", i]) for i in range(2)] == texts[:2]


def test_no_compile_after_warm_up_whatever_is_asked():
    engine = Engine(config_of("qwen3", enforce_eager=False), checks=True)
    asks = [
        {}, {"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.9}, {"temperature": 0.7, "top_k": 5, "min_p": 0.1},
        {"presence_penalty": 1.0}, {"repetition_penalty": 1.3, "frequency_penalty": 0.5}, {"logit_bias": {5: 9.0}},
        {"allowed_token_ids": [7, 8, 9]}, {"min_tokens": 3, "stop_token_ids": [4]}, {"logprobs": 3},
        {"prompt_logprobs": 2}, {"temperature": 1.0, "n": 3}, {"logprobs": 0, "prompt_logprobs": 0},
    ]  # fmt: skip
    requests = [request(i, range(1 + i, 4 + 5 * i), 10, **ask) for i, ask in enumerate(asks)]
    first = run(engine, requests)
    assert run(engine, [request(f"again{i}", range(1 + i, 4 + 5 * i), 10) for i in range(16)])
    assert engine.stats().compiles_after_warmup == 0
    assert set(ids_of(first["7", 0])) <= {7, 8, 9}
    assert 5 in ids_of(first["6", 0])


def test_logprobs_equal_transformers():
    entry = golden("llama")[0]
    engine = Engine(config_of("llama"), checks=True)
    deltas = run(engine, [request("a", entry["prompt_ids"], len(entry["ids"]), logprobs=4)])["a", 0]
    found = [logprob for delta in deltas for logprob in delta.logprobs]
    np.testing.assert_allclose([f.logprob for f in found], entry["logprobs"], atol=1e-3)
    assert all(f.rank == 1 and f.top_ids[0] == f.token_id and len(f.top_ids) == 4 for f in found)


def test_prompt_logprobs_are_the_same_twice_and_in_chunks():
    """vllm#8268 and its kind: prompt logprobs with prefix caching and chunked prefill were missing or stale."""
    prompt = [(7 * i) % 200 + 3 for i in range(90)]
    engine = Engine(config_of("llama"), checks=True)
    twice = [run(engine, [request("a", prompt, 2, prompt_logprobs=2)])["a", 0][0].prompt_logprobs for _ in range(2)]
    wide = Engine(config_of("llama", max_num_batched_tokens=128), checks=True)
    whole = run(wide, [request("a", prompt, 2, prompt_logprobs=2)])["a", 0][0].prompt_logprobs
    assert twice[0] == twice[1]
    assert len(whole) == len(prompt) and whole[0] is None
    assert [t.token_id for t in whole[1:]] == prompt[1:]
    np.testing.assert_allclose([t.logprob for t in whole[1:]], [t.logprob for t in twice[0][1:]], atol=1e-4)


def test_prompt_logprobs_come_once_for_all_samples():
    engine = Engine(config_of("llama"), checks=True)
    prompt = [(7 * i) % 200 + 3 for i in range(60)]  # in chunks
    deltas = run(engine, [request("a", prompt, 4, temperature=1.0, n=3, prompt_logprobs=1)])
    sent = [delta.prompt_logprobs for i in range(3) for delta in deltas["a", i] if delta.prompt_logprobs is not None]
    assert len(sent) == 1 and len(sent[0]) == len(prompt)
    alone = run(engine, [request("b", prompt, 4, prompt_logprobs=1)])["b", 0][0].prompt_logprobs
    assert sent[0] == alone


def test_stop_ids_end_a_sequence_and_min_tokens_hold_them_back():
    engine = Engine(config_of("llama"), checks=True)
    ids = ids_of(run(engine, [request("a", [5, 6, 7], 12)])["a", 0])
    stop = ids[4]
    deltas = run(engine, [request("a", [5, 6, 7], 12, stop_token_ids=[stop])])["a", 0]
    assert ids_of(deltas) == ids[: ids.index(stop) + 1]
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", stop)
    held = ids_of(run(engine, [request("a", [5, 6, 7], 12, stop_token_ids=[stop], min_tokens=12)])["a", 0])
    assert len(held) == 12 and stop not in held[:-1]


def test_cancel_ends_at_once_and_gives_pages_back():
    engine = Engine(config_of("llama"), checks=True)
    engine.submit(request("a", range(3, 40), 60))
    engine.submit(request("b", range(3, 40), 6))
    for _ in range(4):
        engine.step()
    engine.cancel("a")
    ends = [(d.request_id, d.finish_reason) for _ in range(20) for d in engine.step() if d.finish_reason]
    assert sorted(ends) == [("a", "abort"), ("b", "length")]
    assert engine.stats().pages_used == 0 and not engine.has_work()


def test_a_deadline_ends_a_request_with_an_error():
    engine = Engine(config_of("llama", request_timeout=1e-6), checks=True)
    deltas = run(engine, [request("a", [5, 6, 7], 12)])["a", 0]
    assert deltas[-1].finish_reason == "timeout" and deltas[-1].error.code == 504


def test_a_full_queue_refuses():
    engine = Engine(config_of("llama", max_queue_len=1), checks=True)
    with pytest.raises(QueueFull, match="max_queue_len 1"):
        for i in range(40):
            engine.submit(request(i, [5, 6, 7], 4))
    run(engine, [])


@pytest.mark.parametrize(
    ("env", "started", "share", "in_force"),
    [
        ({}, False, "0.8", None),
        ({}, True, None, "0.75: JAX was started before, with its default"),
        ({"XLA_CLIENT_MEM_FRACTION": "0.5"}, False, "0.5", "0.5: XLA_CLIENT_MEM_FRACTION=0.5"),
        ({"XLA_CLIENT_MEM_FRACTION": ".80"}, True, ".80", None),
        ({"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.6"}, False, None, "0.6: XLA_PYTHON_CLIENT_MEM_FRACTION=0.6"),
        ({"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}, False, "0.8", None),
    ],
    ids=str,
)
def test_the_share_of_a_gpu_is_in_force_or_a_line_says_so(env, started, share, in_force, monkeypatch, caplog):
    for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(xla_bridge, "backends_are_initialized", lambda: started)
    monkeypatch.setattr(jax, "local_devices", lambda: [SimpleNamespace(platform="gpu")])
    _start_jax(0.8)
    assert os.environ.get("XLA_CLIENT_MEM_FRACTION") == share
    expected = [f"--gpu-memory-utilization 0.8 is not in force, but {in_force}"] if in_force else []
    assert [record.getMessage() for record in caplog.records] == expected


def test_the_peak_of_memory_is_that_of_the_fullest_device_and_asked_for_at_times(monkeypatch):
    peaks, now = [1, 3], [5.0]
    stats = [lambda i=i: {"bytes_in_use": 1, "peak_bytes_in_use": peaks[i]} for i in (0, 1)]
    devices = [SimpleNamespace(memory_stats=each) for each in stats]
    runner = SimpleNamespace(_peak_due_s=0.0, _programs=SimpleNamespace(mesh=SimpleNamespace(local_devices=devices)))
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    assert Runner.peak_memory_bytes(runner) == 3
    peaks[0] = 9
    assert Runner.peak_memory_bytes(runner) == 3
    now[0] += MEMORY_PERIOD_S
    assert Runner.peak_memory_bytes(runner) == 9


def test_whether_jax_was_started_is_seen():
    code = (
        "from jax._src.xla_bridge import backends_are_initialized as started; import jax; assert not started();"
        "jax.devices(); assert started()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"max_model_len": 100_000}, ConfigError, "at most the model's"),
        (
            {"pool_tokens": 64, "max_model_len": 128},
            DoesNotFit,
            r"longest that fits is 64.*--max-model-len 64 \(or auto\), or give more memory with --kv-cache-memory-bytes$",
        ),
        ({"max_num_batched_tokens": 20}, ConfigError, "at least max_num_seqs"),
        ({"attention_backend": "mosaic_gpu"}, ConfigError, "mosaic_gpu"),
    ],
)
def test_options_that_cannot_be_honoured_are_refused(options, error, words):
    with pytest.raises(error, match=words):
        Engine(config_of("llama", **options))


def test_max_model_len_auto_takes_what_fits():
    engine = Engine(config_of("llama", pool_tokens=64, max_model_len="auto"))
    assert engine.info.max_model_len == 64
    with pytest.raises(RequestError, match="64"):
        engine.submit(request("a", range(64), 1))


def test_short_answers_of_many_samples_end_in_the_same_step():
    """Siblings that start and end together: the first one's end must not forget what the others still need."""
    engine = Engine(config_of("llama"), checks=True)
    deltas = run(engine, [request("a", range(5, 30), 1, temperature=1.0, n=4, prompt_logprobs=1)])
    assert [len(ids_of(deltas["a", i])) for i in range(4)] == [1] * 4
    assert all(deltas["a", i][-1].finish_reason == "length" for i in range(4))


@pytest.mark.parametrize(
    "params",
    [
        {"top_k": 2**40, "temperature": 1.0},
        {"seed": 2**63 - 1, "temperature": 2.0},
        {"min_p": 1.0, "top_p": 1e-30, "temperature": 1e-4},
        {"repetition_penalty": 100.0, "presence_penalty": 2.0, "frequency_penalty": -2.0},
        {"repetition_penalty": 1e-30},
        {"logit_bias": dict.fromkeys(range(200), 1e30)},
    ],
    ids=str,
)
def test_extreme_values_never_end_the_engine(params):
    engine = Engine(config_of("llama"), checks=True)
    deltas = run(engine, [request("a", [5, 6, 7], 4, **params), request("b", [5, 6, 7], 4)])
    assert deltas["a", 0][-1].finish_reason in ("length", "error")
    assert deltas["b", 0][-1].finish_reason == "length"


def test_a_request_that_forbids_every_token_is_told_so_and_flushes_nothing():
    engine = Engine(config_of("llama"), checks=True)
    prompt = list(range(5, 5 + 2 * engine.info.page_size + 3))
    run(engine, [request("a", prompt, 1)])
    contradictory = request("b", prompt, 4, allowed_token_ids=[9])
    contradictory.bad_words_ids = [[9, 9]]  # the first 9 may come
    first, last = run(engine, [contradictory])["b", 0]
    assert first.token_ids == [9] and last.finish_reason == "error"
    assert last.error.code == 400 and "no token is allowed" in last.error.message
    assert run(engine, [request("c", prompt, 1)])["c", 0][0].cached_tokens == 2 * engine.info.page_size


def test_a_failed_step_ends_all_requests_and_the_engine_takes_no_more():
    engine = Engine(config_of("llama"), checks=True)
    engine.submit(request("a", [5, 6, 7], 4))
    engine.step()
    engine._runner.launch = None  # type: ignore[method-assign]
    with pytest.raises(TypeError):
        engine.step()
    assert [(d.request_id, d.finish_reason) for d in engine.step()] == [("a", "error")]
    assert not engine.has_work()
    with pytest.raises(EngineDead, match="NoneType"):
        engine.submit(request("b", [5, 6, 7], 4))


def test_report_47_top_k_zero_draws_from_all():
    """tpu-inference#1386: top_k=0 was taken for 1, so that sampling was greedy."""
    engine = Engine(config_of("llama"), checks=True)
    for top_k, expected in ((0, range(5, 21)), (-1, range(5, 21)), (1, [1])):
        draws = [request(i, [5, 6, 7], 1, temperature=1.0, top_k=top_k, seed=i) for i in range(20)]
        assert len({ids_of(deltas)[0] for deltas in run(engine, draws).values()}) in expected


def test_report_17_logits_that_overflow_fail_one_request():
    """A token whose embedding is not finite: who has it in the prompt is told, who shares the step is not touched."""
    engine = Engine(config_of("llama"), checks=True)
    fine = ids_of(run(engine, [request("a", [5, 6, 7], 6)])["a", 0])
    paths, _ = jax.tree_util.tree_flatten_with_path(engine._runner._loaded.params)
    (at,) = (i for i, (path, _) in enumerate(paths) if "embed" in jax.tree_util.keystr(path))
    weights = engine._runner._weights
    weights[at] = weights[at].at[9].set(np.inf)
    deltas = run(engine, [request("good", [5, 6, 7], 6), request("bad", [5, 9, 7], 6)])
    assert deltas["bad", 0][-1].finish_reason == "error" and not ids_of(deltas["bad", 0])
    assert ids_of(deltas["good", 0]) == fine


@pytest.mark.parametrize(("flags", "expected"), [("fpu amx_bf16 avx", "bfloat16"), ("fpu avx512_bf16", "float32")])
def test_the_type_on_a_cpu_is_one_that_it_computes_in(monkeypatch, flags, expected):
    monkeypatch.setattr(Path, "read_text", lambda self: f"flags\t: {flags}\n")
    hf = {"architectures": ["LlamaForCausalLM"], "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64}
    hf |= {"num_hidden_layers": 1, "num_attention_heads": 1}

    def dtype_on(platform: str, **options: str) -> str:
        return resolve_deployment(EngineConfig(**options), hf, platform, "any").dtype

    assert (dtype_on("cpu"), dtype_on("cpu", dtype="float16"), dtype_on("gpu")) == (expected, "float16", "bfloat16")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, 1024), ({"max_num_batched_tokens": 2048}, 1024), ({"max_num_batched_tokens": 1024}, 256),
        ({"max_num_batched_tokens": 512}, 256), ({"max_num_mixed_tokens": 2048}, 256), ({"max_num_seqs": 300}, 300),
    ],
)  # fmt: skip
def test_an_llm_on_a_gpu_computes_many_sequences_if_its_budget_has_room(options: dict, expected: int):
    """A small budget is no reason to refuse a number that nobody gave."""
    hf = Checkpoint.open(EngineConfig(model=str(GOLDENS / "llama"))).config
    made = resolve_deployment(offline_config("LLM", "", options), hf, "gpu", "NVIDIA H200")
    assert made.max_num_seqs == expected


def test_16_bits_on_a_cpu_have_no_decode_step_of_one_row():
    """XLA multiplies one row in 16 bits very slowly there."""
    engine = Engine(config_of("llama", dtype="bfloat16"), checks=True)
    assert min(b.decode_rows for b in engine._runner._programs.layouts if not b.prefill_tokens) == 2


def test_kv_pages_lie_right_behind_the_weights(monkeypatch: pytest.MonkeyPatch):
    """What is allocated while programs are compiled would leave a hole in the device's memory, where XLA had tried
    kernels out: a layer's pages would not fit any more (a Llama-8B on an H200 did not start, with 3.2 GiB to spare).
    """
    before, made = set(map(id, jax.live_arrays())), []
    allocate, ready = Runner._allocate_kv_cache, []

    def seen(runner: Runner) -> None:
        weights = set(map(id, runner._weights))
        made.extend(a for a in jax.live_arrays() if id(a) not in before | weights)
        ready.append(len(runner._ready))
        allocate(runner)

    monkeypatch.setattr(Runner, "_allocate_kv_cache", seen)
    Engine(config_of("qwen2_tied", enforce_eager=False, **FEW_PROGRAMS))
    assert ready[0] > 4, "the programs were compiled before"
    assert not made


def no_room(*_: object, **__: object) -> None:
    raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 3.36GiB")


@pytest.mark.parametrize(
    ("where", "what", "option"),
    [
        ("jaxserve.models.loading.load_model", r"the [\d.]+ KiB of weights", "gpu_memory_utilization"),
        ("jaxserve.programs.Programs.size_pool", "a step of the most tokens", "max_num_batched_tokens"),
        ("jaxserve.runner.Runner._compile", "the programs", "kv_cache_memory_bytes"),
        ("jaxserve.runner.Runner._allocate_kv_cache", r"the KV cache of 2\.\d\d MiB", "kv_cache_memory_bytes"),
        ("jaxserve.runner.Program.allocate", "the programs' inputs and results", "kv_cache_memory_bytes"),
        ("jaxserve.runner._write_pages", "the slots of 4 sequences", "kv_cache_memory_bytes"),
    ],
)
def test_what_a_device_has_no_room_for_at_the_start(where: str, what: str, option: str, monkeypatch):
    monkeypatch.setattr(where, no_room)
    flag = f"--{option.replace('_', '-')}"
    with pytest.raises(DoesNotFit, match=rf"no room for {what} \(.*allocate 3.36GiB\): .*{flag}") as caught:
        Engine(config_of("qwen2_tied", enforce_eager=False, **FEW_PROGRAMS))
    assert caught.value.param == option


def test_what_a_device_has_no_room_for_in_a_step_that_compiles(monkeypatch: pytest.MonkeyPatch):
    engine = Engine(config_of("qwen2_tied"))
    engine.submit(request("a", [5, 6, 7], 2))
    monkeypatch.setattr(Program, "allocate", no_room)
    with pytest.raises(DoesNotFit, match=r"the forward program of 0 decode rows \+ 32 .*--kv-cache-memory-bytes"):
        engine.step()
    with pytest.raises(EngineDead, match="no room for"):
        engine.submit(request("b", [5, 6, 7], 2))


def test_memory_is_counted_for_what_programs_are_sent_and_hold(monkeypatch: pytest.MonkeyPatch):
    engine = Engine(config_of("qwen2_tied", enforce_eager=False, **FEW_PROGRAMS))
    allocated = [(p.sent, p.held) for programs in engine._runner._ready.values() for p in programs]
    monkeypatch.setattr(Programs, "_profile_keys", lambda self: [])
    assert engine._runner._programs.needs.step == sum(array.nbytes for array in jax.tree.leaves(allocated)) > 0

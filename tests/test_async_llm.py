"""`AsyncLLM`: one real engine process of a tiny model, many iterators, and what users do to them."""

import asyncio
import contextlib
import gc
import json
import os
import signal
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from jaxserve import AsyncLLM, RequestOutput, RequestOutputKind, SamplingParams
from jaxserve.config import EngineConfig
from jaxserve.errors import ConfigError, EngineAsleep, EngineDead, QueueFull, RequestError

pytestmark = pytest.mark.asyncio(loop_scope="module")
TOKENIZER = str(Path(__file__).parent / "goldens" / "vocab" / "smollm.gguf")
SHAPE = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 1024, "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048,
}  # fmt: skip
LONG = SamplingParams(temperature=0, max_tokens=1500, ignore_eos=True)


@pytest.fixture(scope="module")
def options(tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(SHAPE))
    return {
        "model": str(folder), "load_format": "dummy", "tokenizer": TOKENIZER, "enforce_eager": True, "dtype": "float32",
        "kv_cache_memory_bytes": 2**23, "max_num_seqs": 4, "max_num_batched_tokens": 24,
    }  # fmt: skip


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def llm(options) -> AsyncIterator[AsyncLLM]:
    async with AsyncLLM(**options) as running:
        yield running


def params(**more) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": 12, "ignore_eos": True, **more})


async def collect(outputs: AsyncIterator[RequestOutput]) -> list[RequestOutput]:
    return [output async for output in outputs]


async def rests(llm: AsyncLLM) -> None:
    """Waits until nothing runs at the engine; fails if something does for long."""
    client, _ = await llm._started()
    async with asyncio.timeout(60):
        while client.stats.running or client.stats.waiting or client._streams:
            await asyncio.sleep(0.01)
    assert not llm._live


async def test_cumulative_outputs_grow_and_do_not_change(llm):
    # long enough that a reader who falls behind, and gets what waits at once, is still told several times
    outputs = await collect(llm.generate("Hello, my name is", params(logprobs=2, max_tokens=60), "mine"))
    assert len(outputs) > 3 and [o.finished for o in outputs] == [False] * (len(outputs) - 1) + [True]
    assert {o.request_id for o in outputs} == {"mine"} and outputs[0].prompt == "Hello, my name is"
    last = outputs[-1].outputs[0]
    for output in outputs:
        one = output.outputs[0]
        assert last.token_ids[: len(one.token_ids)] == one.token_ids and last.text.startswith(one.text)
        assert one.logprobs is not None and len(one.logprobs) == len(one.token_ids)
    sizes = [len(o.outputs[0].token_ids) for o in outputs]
    assert sizes == sorted(sizes) and sizes[-1] == 60 and last.finish_reason == "length"
    stats = outputs[-1].metrics
    assert stats is not None and stats.first_token_s is not None and stats.finished_s is not None
    assert stats.arrival_s < stats.first_token_s < stats.finished_s and stats.queue_s >= 0
    assert outputs[0].metrics is not None and outputs[0].metrics.finished_s is None


async def test_deltas_join_to_the_whole_and_final_only_is_one(llm):
    prompt = {"prompt_token_ids": [5, 6, 7]}
    more = {"logprobs": 2, "n": 2, "temperature": 1.0, "seed": 7, "max_tokens": 60}
    (final,) = await collect(llm.generate(prompt, params(output_kind=RequestOutputKind.FINAL_ONLY, **more)))
    deltas = await collect(llm.generate(prompt, params(output_kind=RequestOutputKind.DELTA, **more)))
    cumulative = await collect(llm.generate(prompt, params(**more)))
    assert final.finished and cumulative[-1].outputs == final.outputs and len(deltas) > 6
    for whole in final.outputs:
        pieces = [o.outputs[0] for o in deltas if o.outputs[0].index == whole.index]
        assert "".join(p.text for p in pieces) == whole.text
        assert [t for p in pieces for t in p.token_ids] == whole.token_ids
        assert [entry for p in pieces for entry in p.logprobs or ()] == whole.logprobs
        assert [p.finish_reason for p in pieces] == [None] * (len(pieces) - 1) + [whole.finish_reason]
        assert pieces[-1].cumulative_logprob == whole.cumulative_logprob
    assert [o.finished for o in deltas] == [False] * (len(deltas) - 1) + [True]


async def test_many_at_once_are_what_they_are_alone(llm):
    prompts = [[3 + i] * (1 + i) for i in range(20)]
    alone = [(await collect(llm.generate(p, params())))[-1].outputs for p in prompts[::7]]
    together = await asyncio.gather(*(collect(llm.generate(p, params())) for p in prompts))
    assert [outputs[-1].outputs for outputs in together[::7]] == alone
    await rests(llm)


async def test_a_stop_string_ends_it(llm):
    whole = (await collect(llm.generate([5, 6, 7], params(max_tokens=40))))[-1].outputs[0].text
    stop = whole[len(whole) // 2 :][:3]
    last = (await collect(llm.generate([5, 6, 7], params(max_tokens=1500, stop=[stop]))))[-1]
    assert last.finished and last.outputs[0].finish_reason == "stop" and last.outputs[0].stop_reason == stop
    assert last.outputs[0].text == whole[: whole.index(stop)]
    await rests(llm)


async def test_an_iterator_left_early_cancels_its_request(llm):
    async for output in llm.generate([5, 6, 7], LONG, "left"):
        assert output.request_id == "left"
        break
    gc.collect()
    await rests(llm)
    outputs = llm.generate([5, 6, 7], LONG, "left")
    await anext(outputs)
    await outputs.aclose()
    assert not llm._live
    task = asyncio.create_task(collect(llm.generate([5, 6, 7], LONG, "left")))  # the id is free at once
    while "left" not in llm._live:
        await asyncio.sleep(0)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    last = (await collect(llm.generate([5, 6, 7], params(), "left")))[-1]
    assert len(last.outputs[0].token_ids) == 12 and last.outputs[0].finish_reason == "length"
    await rests(llm)


async def test_abort_ends_the_iterator_with_a_last_output(llm):
    async def asked(name: str) -> RequestOutput:
        outputs = [o async for o in llm.generate([5, 6, 7], LONG, name)]
        return outputs[-1]

    tasks = [asyncio.create_task(asked(name)) for name in ("a", "b")]
    while len(llm._live) < 2:
        await asyncio.sleep(0)
    await llm.abort(["a", "b", "unknown"])
    for output in await asyncio.gather(*tasks):
        assert output.finished and output.outputs[0].finish_reason == "abort"
    await llm.abort("a")
    await rests(llm)


async def test_a_live_request_id_is_refused_and_its_owner_goes_on(llm):
    first = llm.generate([5, 6, 7], params(), "twice")
    await anext(first)
    with pytest.raises(RequestError, match="request_id 'twice' is in use") as caught:
        await collect(llm.generate([5, 6, 7], params(), "twice"))
    assert caught.value.param == "request_id"
    assert (await collect(first))[-1].outputs[0].finish_reason == "length"
    again = await collect(llm.generate([5, 6, 7], params(), "twice"))
    assert len(again[-1].outputs[0].token_ids) == 12


@pytest.mark.parametrize(
    ("prompt", "more", "words"),
    [
        ([5, 10**6], {}, ["prompt", "vocabulary"]),
        ("", {}, ["prompt", "empty"]),
        (5, {}, ["prompt", "5"]),
        (["text"], {}, ["prompt", "token ids"]),
        ({"prompt": "a", "more": 1}, {}, ["prompt_token_ids", "more"]),
        ([5], {"request_id": ""}, ["request_id", "''"]),
        ([5], {"request_id": 7}, ["request_id", "7"]),
        ([5], {"priority": 1}, ["priority", "--scheduling-policy"]),
        ([5], {"sampling_params": SamplingParams(max_tokens=2048)}, ["max_tokens", "2047", "2048"]),
    ],
)
async def test_refusals(llm, prompt, more, words):
    with pytest.raises(RequestError) as caught:
        await collect(llm.generate(prompt, **more))
    assert all(word in caught.value.message for word in words)
    assert not llm._live


TEMPLATE = "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
TOOL = {"type": "function", "function": {"name": "now"}}


async def test_a_chat_is_the_prompt_that_its_template_writes(llm):
    shown = '{"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}'
    for tools, before in ((None, ""), ([TOOL], shown)):
        asked = llm.chat([{"role": "user", "content": "hi"}], params(), "c", chat_template=TEMPLATE, tools=tools)
        outputs = await collect(asked)
        plain = (await collect(llm.generate(f"{before}user: hi", params())))[-1]
        assert outputs[-1].outputs == plain.outputs and outputs[-1].prompt == plain.prompt
        assert {output.request_id for output in outputs} == {"c"} and len(outputs) > 1
    for bad, param in (
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": "a"}], "tools": [{}]}, "tools.0.type"),
    ):
        with pytest.raises(RequestError) as caught:
            await collect(llm.chat(**bad, chat_template=TEMPLATE))
        assert caught.value.param == param
    await rests(llm)


async def test_embeddings_beside_other_requests(llm):
    prompts = [list(range(5, 5 + length)) for length in (1, 17, 60, 200)]
    running = asyncio.create_task(collect(llm.generate([5, 6, 7], params())))
    together = await asyncio.gather(*(llm.embed(prompt, str(i)) for i, prompt in enumerate(prompts)))
    await running
    for i, (prompt, found) in enumerate(zip(prompts, together, strict=True)):
        assert (found.request_id, found.prompt_token_ids, found.finished) == (str(i), prompt, True)
        vector = found.outputs.embedding
        assert len(vector) == 64 and sum(x * x for x in vector) == pytest.approx(1, abs=1e-5)
        assert vector == pytest.approx((await llm.embed(prompt)).outputs.embedding, abs=1e-5)
    mean = (await llm.embed(prompts[1], pooling="mean")).outputs.embedding
    assert mean != pytest.approx(together[1].outputs.embedding, abs=1e-3)
    for bad, param in (
        ({"pooling": "max"}, "pooling"),
        ({"dimensions": 0}, "dimensions"),
        ({"request_id": ""}, "request_id"),
    ):
        with pytest.raises(RequestError) as caught:
            await llm.embed([5], **bad)
        assert caught.value.param == param
    await rests(llm)


async def test_health_and_tokenizer(llm):
    await llm.check_health()
    tokenizer = await llm.get_tokenizer()
    assert tokenizer.decode(tokenizer.encode("Hello")) == "Hello"


async def test_a_pause_holds_what_comes_and_freezes_or_ends_what_runs(llm):
    alone = (await collect(llm.generate([5, 6, 7], params())))[-1].outputs
    frozen = llm.generate([5, 6, 7], LONG)
    await anext(frozen)
    await llm.pause_generation("keep", clear_cache=False)
    assert await llm.is_paused() and not await llm.is_sleeping()
    held = asyncio.create_task(collect(llm.generate([5, 6, 7], params())))
    await asyncio.sleep(0.2)
    assert not held.done()
    await llm.resume_generation()
    assert not await llm.is_paused()
    assert (await held)[-1].outputs == alone
    await llm.pause_generation()
    assert (await collect(frozen))[-1].outputs[0].finish_reason == "abort"
    await llm.resume_generation()
    with pytest.raises(RequestError, match="mode must be"):
        await llm.pause_generation("soon")
    await rests(llm)


async def test_it_sleeps_and_says_the_same_after_that(llm):
    prompt = list(range(5, 60))
    alone = (await collect(llm.generate(prompt, params())))[-1].outputs
    assert (await collect(llm.generate(prompt, params())))[-1].num_cached_tokens > 0
    await llm.reset_prefix_cache()
    assert (await collect(llm.generate(prompt, params())))[-1].num_cached_tokens == 0
    for level in (1, 2):
        await llm.sleep(level)
        assert await llm.is_sleeping()
        with pytest.raises(EngineAsleep):
            await collect(llm.generate(prompt, params()))
        await llm.wake_up(["weights"])
        assert await llm.is_sleeping(), "not all of it is back"
        await llm.wake_up()
        assert not await llm.is_sleeping()
        assert (await collect(llm.generate(prompt, params())))[-1].outputs == alone
    with pytest.raises(RequestError, match="level must be"):
        await llm.sleep(3)


# ------------------------------------------------------------------------------------------------ start and end


async def test_from_config_a_full_queue_and_a_dead_engine(options):
    config = EngineConfig(**{**options, "max_num_seqs": 1, "max_queue_len": 1, "page_size": 16})
    llm = AsyncLLM.from_config(config)
    first, second = llm.generate([5, 6], LONG), llm.generate([5, 6], LONG)
    await anext(first)
    waiting = asyncio.create_task(collect(second))
    while len(llm._live) < 2:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.2)
    with pytest.raises(QueueFull):
        await collect(llm.generate([5, 6], LONG))
    engine, _ = await llm._starting
    os.kill(engine._process.pid, signal.SIGKILL)
    for outputs in (collect(first), waiting):
        with pytest.raises(EngineDead, match="ended with code"):
            await outputs
    with pytest.raises(EngineDead):
        await llm.check_health()
    with pytest.raises(EngineDead):
        await collect(llm.generate([5, 6], LONG))
    await llm.shutdown()
    await llm.shutdown()
    with pytest.raises(EngineDead, match="shut down"):
        await llm.get_tokenizer()


async def test_shut_down_while_it_starts_leaves_no_engine(options, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    llm = AsyncLLM(**options)
    asked = [asyncio.create_task(collect(llm.generate([5, 6], LONG))) for _ in range(2)]
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children")
    before = set(children.read_text().split())
    while set(children.read_text().split()) == before:
        await asyncio.sleep(0.01)
    await llm.shutdown()
    for task in asked:
        with pytest.raises(EngineDead, match="shut down"):
            await task
    assert set(children.read_text().split()) <= before
    assert not list(tmp_path.iterdir()), "the socket's directory is left"
    await AsyncLLM(**options).shutdown()  # never started


async def test_a_start_that_fails_says_why_to_all(tmp_path):
    llm = AsyncLLM(str(tmp_path / "nothing"))
    for result in await asyncio.gather(llm.check_health(), llm.get_tokenizer(), return_exceptions=True):
        assert isinstance(result, ConfigError) and "nothing" in str(result)
    await llm.shutdown()
    with pytest.raises(TypeError, match="AsyncLLM.*unknown option 'blocksize'"):
        AsyncLLM("demo", blocksize=16)


async def test_it_belongs_to_one_event_loop(llm):
    def elsewhere() -> None:
        asyncio.run(llm.check_health())

    with pytest.raises(RuntimeError, match="another event loop"):
        await asyncio.to_thread(elsewhere)
    await llm.check_health()

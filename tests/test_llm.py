"""`LLM`: vLLM's two-line examples with the import changed, and what a list of prompts must survive."""

import os
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxserve import LLM, RequestOutputKind, SamplingParams
from jaxserve.beam_search import BeamSearchParams
from jaxserve.errors import EngineAsleep, RequestError
from jaxserve.request import SequenceDelta, StructuredOutputsParams

GOLDENS = Path(__file__).parent / "goldens"


@pytest.fixture(scope="module")
def llm(tmp_path_factory) -> LLM:
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(
        '{"architectures": ["LlamaForCausalLM"], "vocab_size": 1024, "hidden_size": 64, "intermediate_size": 96,'
        ' "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}'
    )
    return LLM(
        str(folder), load_format="dummy", tokenizer=str(GOLDENS / "vocab" / "smollm.gguf"), enforce_eager=True,
        dtype="float32", kv_cache_memory_bytes=2**22, max_num_seqs=8, max_num_batched_tokens=40,
    )  # fmt: skip


def test_results_come_in_the_order_of_the_prompts(llm):
    prompts = ["Hello, my name is", {"prompt": "The capital"}, {"prompt_token_ids": [5, 6, 7]}, [8, 9]]
    lengths = [9, 1, 5, 3]
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in lengths]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [len(o.outputs[0].token_ids) for o in outputs] == lengths
    assert [o.prompt for o in outputs] == ["Hello, my name is", "The capital", None, None]
    assert [o.prompt_token_ids for o in outputs[2:]] == [[5, 6, 7], [8, 9]]
    assert all(o.finished and o.outputs[0].finish_reason == "length" for o in outputs)


@pytest.mark.parametrize(
    "several", [iter, tuple, lambda texts: dict.fromkeys(texts).keys()], ids=["iter", "tuple", "keys"]
)
def test_prompts_come_in_any_collection(llm, several: Callable[[list[str]], Any]):
    texts = ["Hello", "The capital"]
    prompts = several(texts)
    outputs = llm.generate(prompts, SamplingParams(max_tokens=1), use_tqdm=False)
    assert [output.prompt for output in outputs] == texts


def test_token_ids_of_numpy_are_a_prompt_or_several(llm):
    params = SamplingParams(max_tokens=1)
    for prompts, ids in ((np.array([5, 6]), [[5, 6]]), (np.array([[5, 6], [7, 8]]), [[5, 6], [7, 8]])):
        assert [o.prompt_token_ids for o in llm.generate(prompts, params, use_tqdm=False)] == ids


@pytest.mark.parametrize("prompts", [b"hi", [b"hi"], bytearray(b"hi"), {"prompt_token_ids": b"hi"}])
def test_bytes_are_no_token_ids(llm, prompts):
    with pytest.raises(RequestError, match=r"a prompt must be a text or token ids, got (b|bytearray\(b)'hi'"):
        llm.generate(prompts)


def test_one_bad_prompt_computes_nothing(llm):
    before = llm.get_metrics()
    with pytest.raises(RequestError, match="vocabulary"):
        llm.generate([[5, 6], [5, 10**6]], use_tqdm=False)
    with pytest.raises(RequestError, match="one entry per prompt"):
        llm.generate([[5, 6]], [SamplingParams()] * 2, use_tqdm=False)
    assert llm.get_metrics().prompt_tokens == before.prompt_tokens


def test_a_chat_shows_its_tools_to_the_template(llm):
    template = "{{ tools | tojson }}{% for message in messages %}{{ message.content }}{% endfor %}"
    tool = {"type": "function", "function": {"name": "get_weather", "strict": True}}
    messages = [{"role": "user", "content": "hi"}]
    options = {"sampling_params": SamplingParams(max_tokens=1), "use_tqdm": False}
    prompt = llm.chat(messages, tools=[tool], chat_template=template, **options)[0].prompt
    shown = '{"name": "get_weather", "parameters": {"type": "object", "properties": {}}}'
    assert prompt == f'[{{"type": "function", "function": {shown}}}]hi'
    assert llm.chat(messages, chat_template=template, **options)[0].prompt == "nullhi"
    for tools, choice in (([], template), ([tool], "{{ messages[0].content }}")):
        with pytest.raises(RequestError) as caught:
            llm.chat(messages, tools=tools, chat_template=choice, **options)
        assert caught.value.param == "tools"


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


@pytest.mark.parametrize(
    ("call", "shown"),
    [
        (lambda llm: SamplingParams(n=None), "n must be an integer, got None"),
        (lambda llm: SamplingParams(temperature=True), "got True"),
        (lambda llm: SamplingParams(ignore_eos=None), "ignore_eos must be a boolean, got None"),
        (lambda llm: SamplingParams(stop=[None, False]), r"stop\[0\] must be a string, got None"),
        (lambda llm: SamplingParams(structured_outputs={"a": [None, False]}), r"got {'a': \[None, False\]}"),
        (lambda llm: SamplingParams(structured_outputs=StructuredOutputsParams(regex=True)), "got True"),
        (lambda llm: BeamSearchParams(beam_width=None, max_tokens=1), "beam_width must be an integer, got None"),
        (lambda llm: llm.generate([[5], None]), "got None"),
        (lambda llm: llm.generate(None), "got None"),
        (lambda llm: llm.chat(None), "messages must be a list, got None"),
        (lambda llm: llm.chat([None]), "messages.0 must be an object with role and content, got None"),
        (lambda llm: llm.chat([[True], user("x")]), "messages.0 must be an object with role and content, got True"),
        (lambda llm: llm.chat(user([None])), "got None"),
        (lambda llm: llm.chat(user({"a": True})), r"got {'a': True}"),
        (lambda llm: llm.chat(user("x"), tools=[None]), "tools.0 must be an object, got None"),
        (lambda llm: llm.embed("x", pooling=False), "got False"),
    ],
)
def test_errors_show_values_as_python_writes_them_and_over_http_as_json(llm, call: Callable[[LLM], Any], shown: str):
    with pytest.raises(RequestError, match=shown) as caught:
        call(llm)
    assert str(caught.value) == caught.value.message
    assert not re.search(r"null|true|false|[\ue000-\uf8ff]", caught.value.message)
    assert not re.search(r"[\ue000-\uf8ff]", caught.value.info().message)
    assert not re.search(r"None|True|False", caught.value.info().message)


@pytest.mark.parametrize("text", ["None", "null", "\ue000", "\ue001 \ue002", "True"])
def test_texts_in_errors_stay_what_they_are(text: str):
    with pytest.raises(RequestError) as caught:
        SamplingParams(n=text)
    assert caught.value.message == caught.value.info().message == f"n must be an integer, got {text!r}"


def test_an_interrupt_leaves_an_llm_that_works(llm):
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        for _ in range(200):
            llm.generate([[5, 6, 7]] * 8, params, use_tqdm=False)
    assert llm.get_metrics().running == 0 and llm.get_metrics().pages_used == 0
    again = llm.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True), use_tqdm=False)
    assert len(again[0].outputs[0].token_ids) == 4


def params(max_tokens: int, **more) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **more)


def test_enqueued_results_come_in_the_order_of_submission_and_once(llm):
    prompts = [[5, 6, 7], [8, 9], [10, 11, 12, 13]]
    lengths = [30, 2, 9]
    alone = [llm.generate(p, params(n), use_tqdm=False)[0].outputs for p, n in zip(prompts, lengths, strict=True)]
    ids = llm.enqueue(prompts[:2], [params(n) for n in lengths[:2]])
    (now,) = llm.generate([prompts[2]], params(2), use_tqdm=False)  # goes past them, and takes none of them along
    assert len(now.outputs[0].token_ids) == 2 and now.request_id not in ids
    ids += llm.enqueue({"prompt_token_ids": prompts[2]}, params(9), use_tqdm=False)
    outputs = llm.wait_for_completion()
    assert [o.request_id for o in outputs] == ids and len(set(ids)) == 3
    assert [o.outputs for o in outputs] == alone
    assert llm.wait_for_completion() == [] and not llm._engine.has_work()


def test_enqueued_chats_are_chats(llm):
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
    talks = [[{"role": "user", "content": text}] for text in ("1", "22")]
    answers = llm.chat(talks, params(3), chat_template=template, use_tqdm=False)
    ids = llm.enqueue_chat(talks, params(3), chat_template=template, use_tqdm=False)
    outputs = llm.wait_for_completion(use_tqdm=False)
    assert [o.request_id for o in outputs] == ids
    assert [(o.prompt, o.outputs) for o in outputs] == [(a.prompt, a.outputs) for a in answers]
    assert outputs[1].prompt == "user: 22"


def test_a_bad_prompt_enqueues_nothing(llm):
    with pytest.raises(RequestError, match="vocabulary"):
        llm.enqueue([[5, 6], [5, 10**6]])
    assert llm.wait_for_completion() == []


def test_an_interrupt_of_one_call_leaves_what_was_enqueued_before(llm):
    (alone,) = llm.generate([[5, 6, 7]], params(100), use_tqdm=False)
    llm.enqueue([[5, 6, 7]], params(100), use_tqdm=False)
    interrupt = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT))
    interrupt.start()
    with pytest.raises(KeyboardInterrupt):
        for _ in range(1000):
            llm.generate([[8, 9]] * 4, params(1), use_tqdm=False)
    (output,) = llm.wait_for_completion(use_tqdm=False)
    assert output.outputs == alone.outputs
    assert llm.get_metrics().running == 0 and llm.get_metrics().pages_used == 0


def test_a_sequence_that_fails_ends_its_request_and_no_other(llm, monkeypatch):
    step = llm._engine.step

    def failing() -> list[SequenceDelta]:
        deltas = step()
        for delta in deltas:
            if delta.request_id == failed and delta.index == 0 and delta.finish_reason:
                delta.finish_reason, delta.error = "error", RequestError("on fire").info()
        return deltas

    monkeypatch.setattr(llm._engine, "step", failing)
    two = SamplingParams(n=2, seed=1, max_tokens=5, ignore_eos=True)
    failed, _ = llm.enqueue([[5, 6, 7], [8, 9]], two, use_tqdm=False)
    bad, good = llm.wait_for_completion(use_tqdm=False)
    assert [one.finish_reason for one in bad.outputs] == ["error", "length"] and bad.finished
    assert [one.finish_reason for one in good.outputs] == ["length", "length"] and good.finished


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_a_list_gets_whole_answers_whatever_the_output_kind(llm, kind):
    whole = llm.generate([[5, 6, 7], [8, 9]], params(6), use_tqdm=False)
    outputs = llm.generate([[5, 6, 7], [8, 9]], params(6, output_kind=kind), use_tqdm=False)
    assert [o.outputs for o in outputs] == [o.outputs for o in whole]


def test_an_output_kind_is_one_of_the_three():
    with pytest.raises(RequestError, match="output_kind must be RequestOutputKind, got 1"):
        SamplingParams(output_kind=1)


def test_the_times_of_a_request(llm):
    before = time.monotonic()
    outputs = llm.generate([[5, 6, 7]] * 12, params(20), use_tqdm=False)  # more than run together
    after = time.monotonic()
    for output in outputs:
        stats = output.metrics
        assert before <= stats.arrival_s <= stats.arrival_s + stats.queue_s <= stats.first_token_s
        assert stats.first_token_s < stats.finished_s <= after
    assert outputs[-1].metrics.queue_s > outputs[0].metrics.queue_s


def test_numpy_prompts_are_token_ids(llm):
    (plain,), (numpy,) = (llm.generate(p, params(3), use_tqdm=False) for p in ([[5, 6]], [np.array([5, 6])]))
    assert plain.outputs == numpy.outputs and all(type(i) is int for i in numpy.prompt_token_ids)
    with pytest.raises(RequestError, match="must be a text or token ids"):
        llm.generate([[5, "6"]], use_tqdm=False)


def test_an_llm_that_slept_says_the_same(llm):
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)

    def text() -> str:
        return llm.generate("Hello, my name is", params, use_tqdm=False)[0].outputs[0].text

    before = text()
    for level in (1, 2):
        llm.sleep(level)
        with pytest.raises(EngineAsleep):
            text()
        llm.wake_up(["weights"])
        llm.wake_up(["kv_cache"])
        assert text() == before
    with pytest.raises(RequestError, match="level must be 1 or 2, got 3"):
        llm.sleep(3)
    for mode, reason in (("abort", "abort"), ("wait", "length")):
        llm.enqueue([[5, 6, 7], [8, 9]], params, use_tqdm=False)
        llm.sleep(mode=mode)
        assert [o.outputs[0].finish_reason for o in llm.wait_for_completion(use_tqdm=False)] == [reason] * 2
        llm.wake_up()


def test_unknown_options_are_named():
    with pytest.raises(TypeError, match="unknown option 'blocksize'"):
        LLM("demo", blocksize=16)

"""`LLM`: vLLM's two-line examples with the import changed, and what a list of prompts must survive."""

import os
import signal
import threading
from pathlib import Path

import pytest

from jaxserve import LLM, SamplingParams
from jaxserve.errors import RequestError

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
        kv_cache_memory_bytes=2**22, max_num_seqs=8, max_num_batched_tokens=40,
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


def test_an_interrupt_leaves_an_llm_that_works(llm):
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        for _ in range(200):
            llm.generate([[5, 6, 7]] * 8, params, use_tqdm=False)
    assert llm.get_metrics().running == 0 and llm.get_metrics().pages_used == 0
    again = llm.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True), use_tqdm=False)
    assert len(again[0].outputs[0].token_ids) == 4


def test_unknown_options_are_named():
    with pytest.raises(TypeError, match="no option 'blocksize'"):
        LLM("demo", blocksize=16)

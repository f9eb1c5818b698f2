"""Clients from PyPI, unmodified, against `jaxserve serve`: the demo model if it is in the cache, else a tiny random one."""

import asyncio
import contextlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import openai
import pytest
from pydantic import BaseModel
from transformers import PreTrainedTokenizerFast

from jaxserve import demo
from jaxserve.checkpoint import load_tokenizer
from jaxserve.config import cache_dir

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
GOLDENS = ROOT / "tests" / "goldens"
SHAPE = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 1024, "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048,
}  # fmt: skip
CHAT_TEMPLATE = """\
{%- if tools %}<|im_start|>system
Call a tool: <tool_call>{"name": ..., "arguments": ...}</tool_call>
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}<|im_end|>
{% endif %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}
{%- for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
START_S = 280
NAME = "served/name"
USER = [{"role": "user", "content": "What is the capital of France?"}]
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "get_weather", "description": "of a city", "parameters": WEATHER}}


class Color(BaseModel):
    """A structured answer, short whatever the model."""

    red: bool
    green: bool


class Served(NamedTuple):
    url: str  # ends in /v1
    is_demo: bool
    tokenizer: Path


def needs(package: str, extra: str) -> Any:
    """Marks a test that cannot run without a package of the extra. Where CI runs, all are installed."""
    missing = importlib.util.find_spec(package) is None and not os.environ.get("CI")
    return pytest.mark.skipif(missing, reason=f"{package} is not installed: pip install 'jaxserve[{extra}]'")


needs_langchain = needs("langchain_openai", "clients")
needs_llm = needs("llm", "clients")
needs_litellm = needs("litellm", "large-clients")
needs_lm_eval = needs("lm_eval", "large-clients")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    model = cache_dir() / "models" / Path(demo.MEMBER).name
    template = folder / "chat.jinja"
    template.write_text(CHAT_TEMPLATE)
    tokenizer, options = model, [str(model)]
    if not (is_demo := model.is_file()):
        model = folder / "model"
        model.mkdir()
        (model / "config.json").write_text(json.dumps(SHAPE))
        tokenizer = GOLDENS / "vocab" / "smollm.gguf"
        options = [str(model), "--load-format", "dummy", "--tokenizer", str(tokenizer), "--max-num-seqs", "4"]
    command = [
        sys.executable, "-m", "jaxserve", "serve", *options, "--port", "0", "--served-model-name", NAME,
        "--chat-template", str(template), "--tool-call-parser", "hermes", "--dtype", "float32",
    ]  # fmt: skip
    log = folder / "log"
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, cwd=ROOT, start_new_session=True)
    try:
        yield Served(ready(process, log) + "/v1", is_demo, tokenizer)
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(60)
        process.kill()


def ready(process: subprocess.Popen, log: Path) -> str:
    """The URL that the server prints once it is ready."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        if found := re.search(r"http://127\.0\.0\.1:\d+", log.read_text()):
            return found.group()
        time.sleep(0.1)
    raise AssertionError(f"not ready:\n{log.read_text()}")


def check_tool_call(name: str, arguments: str | dict) -> None:
    assert name == "get_weather"
    assert set(json.loads(arguments) if isinstance(arguments, str) else arguments) == {"city"}


# ---- openai


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=served.url, api_key="none", max_retries=0) as client:
        yield client


def test_openai_models(client: openai.OpenAI):
    (model,) = client.models.list()
    assert model.id == NAME and model.object == "model"
    assert client.models.retrieve(NAME) == model
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("another")


def test_openai_chat_whole_and_streamed(client: openai.OpenAI, served: Served):
    asked: Any = {"model": NAME, "messages": USER, "max_completion_tokens": 12, "temperature": 0}
    whole = client.chat.completions.create(**asked)
    assert whole.choices[0].message.content and whole.usage and whole.usage.completion_tokens <= 12
    assert not served.is_demo or "Paris" in whole.choices[0].message.content
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert streamed == whole.choices[0].message.content
    assert chunks[-1].usage and chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    with client.chat.completions.stream(**asked) as stream:
        deltas = [event.delta for event in stream if event.type == "content.delta"]
    assert "".join(deltas) == streamed  # get_final_completion() takes no answer that max_tokens has cut


async def test_openai_async(served: Served):
    asked: Any = {"model": NAME, "messages": USER, "max_completion_tokens": 12, "temperature": 0}
    async with openai.AsyncOpenAI(base_url=served.url, api_key="none", max_retries=0) as client:
        wholes = await asyncio.gather(*(client.chat.completions.create(**asked) for _ in range(6)))
        texts = {whole.choices[0].message.content for whole in wholes}
        stream = await client.chat.completions.create(**asked, stream=True)
        texts.add("".join([chunk.choices[0].delta.content or "" async for chunk in stream]))
    assert len(texts) == 1 and texts.pop()


def test_openai_parse(client: openai.OpenAI):
    asked: Any = {"model": NAME, "messages": USER, "response_format": Color, "max_completion_tokens": 200}
    assert isinstance(client.chat.completions.parse(**asked).choices[0].message.parsed, Color)
    with client.chat.completions.stream(**asked) as stream:
        for _ in stream:
            pass
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Color)


def test_openai_tools(client: openai.OpenAI):
    asked: Any = {"model": NAME, "tools": [TOOL], "parallel_tool_calls": False, "max_completion_tokens": 200}
    message = client.chat.completions.create(**asked, messages=USER, tool_choice="required").choices[0].message
    (call,) = message.tool_calls or []
    check_tool_call(call.function.name, call.function.arguments)
    answer = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    after = client.chat.completions.create(
        **asked | {"max_completion_tokens": 8}, messages=[*USER, message, answer], tool_choice="none"
    )
    assert after.choices[0].message.content and not after.choices[0].message.tool_calls
    parsed = client.chat.completions.parse(
        **asked | {"tools": [openai.pydantic_function_tool(Color)]}, messages=USER, tool_choice="required"
    )
    assert isinstance(parsed.choices[0].message.tool_calls[0].function.parsed_arguments, Color)


def test_openai_responses(client: openai.OpenAI, served: Served):
    asked: Any = {"model": NAME, "input": "What is the capital of France?", "max_output_tokens": 16, "temperature": 0}
    whole = client.responses.create(**asked)
    assert whole.output_text and whole.usage and whole.usage.output_tokens <= 16
    assert not served.is_demo or "Paris" in whole.output_text
    with client.responses.stream(**asked) as stream:  # get_final_response() knows completed ones only
        streamed: list[Any] = list(stream)
    for events in (streamed, list(client.responses.create(**asked, stream=True))):
        kinds = [event.type for event in events]
        assert kinds[0] == "response.created" and "response.output_text.delta" in kinds
        assert kinds[-1] == f"response.{whole.status}" and events[-1].response.output_text == whole.output_text
    parsed = client.responses.parse(**asked | {"max_output_tokens": 200}, text_format=Color)
    assert isinstance(parsed.output_parsed, Color)
    after = client.responses.create(**asked | {"input": "And of Spain?"}, previous_response_id=whole.id)
    assert after.usage and after.usage.input_tokens > whole.usage.input_tokens
    tool: Any = {"type": "function", **TOOL["function"]}
    called = client.responses.create(
        **asked | {"max_output_tokens": 200}, tools=[tool], tool_choice="required", parallel_tool_calls=False
    )
    call = called.output[-1]
    assert call.type == "function_call"
    check_tool_call(call.name, call.arguments)


def test_openai_embeddings(client: openai.OpenAI):
    texts = ["The sky is blue.", "日本語"]
    unasked = client.embeddings.create(model=NAME, input=texts)  # the client asks for base64 and decodes it
    floats = client.embeddings.create(model=NAME, input=texts, encoding_format="float")
    assert [len(each.embedding) for each in unasked.data] == [len(unasked.data[0].embedding)] * 2
    for one, other in zip(unasked.data, floats.data, strict=True):
        assert one.embedding == pytest.approx(other.embedding, abs=1e-6)
        assert sum(value * value for value in one.embedding) == pytest.approx(1, abs=1e-4)


def test_openai_legacy_completions(client: openai.OpenAI, served: Served):
    asked: Any = {"model": NAME, "prompt": ["The sky is", "One, two,"], "max_tokens": 6, "temperature": 0}
    whole = client.completions.create(**asked, logprobs=3)
    assert [choice.index for choice in whole.choices] == [0, 1]
    for choice in whole.choices:
        logprobs = choice.logprobs
        assert logprobs and logprobs.tokens and logprobs.token_logprobs and logprobs.top_logprobs
        assert len(logprobs.token_logprobs) == len(logprobs.tokens) == 6
        assert not served.is_demo or "".join(logprobs.tokens) == choice.text  # a random model cuts characters
        assert all(len(top) == 3 for top in logprobs.top_logprobs)
        assert [max(top.values()) for top in logprobs.top_logprobs] == logprobs.token_logprobs  # it was greedy
    streamed = {0: "", 1: ""}
    for chunk in client.completions.create(**asked, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == {choice.index: choice.text for choice in whole.choices}


# ---- langchain-openai


@pytest.fixture
def langchain(served: Served) -> Any:
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(model=NAME, base_url=served.url, api_key="none", temperature=0, max_tokens=200, max_retries=0)


@needs_langchain
async def test_langchain_chat(langchain: Any, served: Served):
    short = langchain.bind(max_tokens=12)
    whole = await short.ainvoke("What is the capital of France?")
    assert whole.content and whole.usage_metadata["output_tokens"] <= 12
    assert whole.response_metadata["finish_reason"] in ("length", "stop")
    assert not served.is_demo or "Paris" in whole.content
    assert short.invoke("What is the capital of France?").content == whole.content
    chunks = list(short.stream("What is the capital of France?"))
    assert "".join(chunk.content for chunk in chunks) == whole.content
    assert "".join([chunk.content async for chunk in short.astream("What is the capital of France?")]) == whole.content


@needs_langchain
@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_langchain_structured_output(langchain: Any, method: str):
    assert isinstance(langchain.with_structured_output(Color, method=method).invoke("Which colours?"), Color)


@needs_langchain
def test_langchain_tools(langchain: Any):
    with_tools = langchain.bind_tools([TOOL], tool_choice="any", parallel_tool_calls=False)
    message = with_tools.invoke("What is the weather in Paris?")
    (call,) = message.tool_calls
    check_tool_call(call["name"], call["args"])
    streamed = None
    for chunk in with_tools.stream("What is the weather in Paris?"):
        streamed = chunk if streamed is None else streamed + chunk
    assert streamed is not None and streamed.tool_calls[0]["args"] == call["args"]
    from langchain_core.messages import HumanMessage, ToolMessage

    asked = [HumanMessage("What is the weather in Paris?"), message, ToolMessage("sunny", tool_call_id=call["id"])]
    assert langchain.bind(max_tokens=8).invoke(asked).content


@needs_langchain
def test_langchain_responses(langchain: Any, served: Served):
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(model=NAME, base_url=served.url, api_key="none", max_tokens=16, use_responses_api=True)
    assert model.invoke("What is the capital of France?").text
    assert "".join(chunk.text for chunk in model.stream("What is the capital of France?"))


@needs_langchain
async def test_langchain_embeddings(client: openai.OpenAI, served: Served):
    from langchain_openai import OpenAIEmbeddings

    model = OpenAIEmbeddings(model=NAME, base_url=served.url, api_key="none", check_embedding_ctx_length=False)
    texts = ["The sky is blue.", "日本語"]
    expected = [each.embedding for each in client.embeddings.create(model=NAME, input=texts).data]
    for found in (model.embed_documents(texts), await model.aembed_documents(texts)):
        assert found == [pytest.approx(each, abs=1e-5) for each in expected]
    assert model.embed_query(texts[0]) == pytest.approx(expected[0], abs=1e-5)


# ---- litellm


@pytest.fixture
def litellm(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # nothing from the network
    import litellm

    return litellm


@needs_litellm
async def test_litellm(litellm: Any, served: Served):
    to: Any = {"model": f"openai/{NAME}", "api_base": served.url, "api_key": "none"}
    asked = {**to, "messages": USER, "max_tokens": 12, "temperature": 0}
    whole = litellm.completion(**asked)
    text = whole.choices[0].message.content
    assert text and whole.usage.completion_tokens <= 12
    assert not served.is_demo or "Paris" in text
    assert (await litellm.acompletion(**asked)).choices[0].message.content == text
    chunks = list(litellm.completion(**asked, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
    stream = await litellm.acompletion(**asked, stream=True)
    assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == text
    embedding = litellm.embedding(**to, input=["The sky is blue."])
    assert sum(value * value for value in embedding.data[0]["embedding"]) == pytest.approx(1, abs=1e-4)


@needs_litellm
def test_litellm_tools_and_schema(litellm: Any, served: Served):
    asked: Any = {"model": f"openai/{NAME}", "api_base": served.url, "api_key": "none", "messages": USER}
    tools = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
    (call,) = litellm.completion(**asked, **tools, max_tokens=200).choices[0].message.tool_calls
    check_tool_call(call.function.name, call.function.arguments)
    parsed = litellm.completion(**asked, response_format=Color, max_tokens=200).choices[0].message
    assert Color.model_validate_json(parsed.content)


# ---- llm


@needs_llm
def test_llm(served: Served, tmp_path: Path):
    models = [
        {"model_id": "ours", "model_name": NAME, "api_base": served.url, "supports_schema": True},
        {"model_id": "ours-completion", "model_name": NAME, "api_base": served.url, "completion": True},
    ]
    (tmp_path / "extra-openai-models.yaml").write_text(json.dumps(models))  # JSON is YAML

    def llm(*args: str) -> str:
        command = [sys.executable, "-m", "llm", *args]
        env = {**os.environ, "LLM_USER_PATH": str(tmp_path)}
        done = subprocess.run(command, env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "ours" in llm("models")
    options = ["-o", "temperature", "0", "-o", "max_tokens", "12"]
    whole = llm("-m", "ours", "What is the capital of France?", "--no-stream", *options)
    assert whole.strip() and (not served.is_demo or "Paris" in whole)
    assert llm("-m", "ours", "What is the capital of France?", *options) == whole
    assert llm("-m", "ours-completion", "The sky is", *options).strip()
    assert Color.model_validate_json(llm("-m", "ours", "Which?", "--schema", json.dumps(Color.model_json_schema())))
    assert llm("-c", "And of Spain?", *options).strip()  # a conversation goes on


# ---- lm-eval


TASKS = {"jaxserve_choices": 4, "jaxserve_prose": 3, "jaxserve_continue": 3}  # name -> rows


@needs_lm_eval
@pytest.mark.parametrize(("tokenized", "concurrent"), [(True, 4), (False, 1)], ids=["token ids", "texts"])
def test_lm_eval(served: Served, tmp_path: Path, tokenized: bool, concurrent: int):
    """Scores; of the demo model those of lm-eval's own Hugging Face backend (scripts/make_goldens.py)."""
    export_tokenizer(served.tokenizer, tmp_path / "tokenizer")
    model_args = [
        f"base_url={served.url}/completions", f"model={NAME}", f"tokenizer={tmp_path / 'tokenizer'}",
        f"tokenized_requests={tokenized}", f"num_concurrent={concurrent}", "max_retries=1",
        "tokenizer_backend=huggingface",
    ]  # fmt: skip
    rows = lm_eval(tmp_path, model_args)
    for task, count in TASKS.items():
        assert len(rows[task]) == count
    for task in ("jaxserve_choices", "jaxserve_prose"):
        assert all(-2000 < score <= 1 for row in rows[task] for score in numbers(row))
    if served.is_demo:
        compare(rows, json.loads((GOLDENS / "lm_eval" / "demo.json").read_text()))


def export_tokenizer(path: Path, folder: Path) -> None:
    """A tokenizer as files of Hugging Face Transformers, which lm-eval reads."""
    tokenizer = load_tokenizer(path, [])
    names = {name: tokenizer.special_tokens[name] for name in ("bos_token", "eos_token")}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer._backend, **names).save_pretrained(folder)


def lm_eval(folder: Path, model_args: list[str]) -> dict[str, list[list]]:
    """Task -> the answers to each of its rows, in order, as lm-eval logs them."""
    command = [
        sys.executable, "-m", "lm_eval", "run", "--model", "local-completions", "--model_args", ",".join(model_args),
        "--tasks", ",".join(TASKS), "--include_path", ".", "--output_path", str(folder / "out"), "--log_samples",
    ]  # fmt: skip
    env = {**os.environ, "HF_HOME": str(folder / "hf"), "HF_HUB_OFFLINE": "1", "OPENAI_API_KEY": "none"}
    cwd = GOLDENS / "lm_eval"  # the tasks name their data so
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    answers = {}
    for task in TASKS:
        (path,) = (folder / "out").rglob(f"samples_{task}_*.jsonl")
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        answers[task] = [row["filtered_resps"] for row in sorted(rows, key=lambda row: row["doc_id"])]
    return answers


def compare(found: dict[str, list[list]], golden: list[dict]) -> None:
    for task, rows in found.items():
        expected = [row["answers"] for row in golden if row["task"] == task]
        assert len(rows) == len(expected)
        for row, wanted in zip(rows, expected, strict=True):
            if task == "jaxserve_continue":
                assert row == wanted
            else:
                assert numbers(row) == pytest.approx(numbers(wanted), abs=1e-3), task


def numbers(answers: list) -> list[float]:
    """Log-likelihoods, and 1 or 0 for whether each was the greedy continuation. lm-eval logs both as strings."""
    flat = [value for answer in answers for value in (answer if isinstance(answer, list) else [answer])]
    return [float({"True": 1, "False": 0}.get(str(value), value)) for value in flat]

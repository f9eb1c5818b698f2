"""Conversations with calls, results and reasoning, as the templates of the families write them."""

from typing import Any

import pytest
import tokenizers
from chat_templates import (
    DEEPSEEK,
    DEEPSEEK_V31,
    GRANITE,
    HARMONY,
    HERMES,
    LLAMA3,
    MISTRAL,
    MISTRAL_BY_NAME,
    PLAIN,
    QWEN3,
    QWEN3_CODER,
)
from parser_cases import WEATHER

from jaxserve.chat import check_messages, render
from jaxserve.errors import RequestError
from jaxserve.tokenizer import Tokenizer

TEXT = '{"city":"Paris",  "days":3}'  # spaced as no template writes it
PRINTED = '{"city": "Paris", "days": 3}'


def call(arguments: Any = TEXT, **fields: Any) -> dict[str, Any]:
    return {
        "id": "abcdefghi",
        "type": "function",
        "function": {"name": "get_weather", "arguments": arguments},
        **fields,
    }


def history(**fields: Any) -> list[dict[str, Any]]:
    return [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": [call()], **fields},
        {"role": "tool", "content": "sunny", "tool_call_id": "abcdefghi"},
    ]


def prompt_of(template: str, messages: list[dict[str, Any]], tools: bool = True, **options: Any) -> str:
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer = Tokenizer(backend, bos_token_id=None, eos_token_ids=[], chat_template=template)
    shown = [WEATHER.for_template()] if tools else None
    return render(tokenizer, check_messages(messages), tools=shown, **options)


@pytest.mark.parametrize(
    ("template", "written"),
    [
        (HERMES, f'<tool_call>\n{{"name": "get_weather", "arguments": {PRINTED}}}\n</tool_call>'),
        (QWEN3, f'<tool_call>\n{{"name": "get_weather", "arguments": {PRINTED}}}\n</tool_call>'),
        (
            QWEN3_CODER,
            "<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n</parameter>",
        ),
        (LLAMA3, f'{{"name": "get_weather", "parameters": {PRINTED}}}'),
        (MISTRAL, f'[TOOL_CALLS][{{"name": "get_weather", "arguments": {PRINTED}}}]'),
        (MISTRAL_BY_NAME, f"get_weather[ARGS]{PRINTED}"),
        (GRANITE, f'<|tool_call|>[{{"name": "get_weather", "arguments": {PRINTED}}}]'),
        # Templates that print text.
        (DEEPSEEK, f"function<｜tool▁sep｜>get_weather\n```json\n{TEXT}\n```"),
        (DEEPSEEK_V31, f"get_weather<｜tool▁sep｜>{TEXT}<｜tool▁call▁end｜>"),
        (HARMONY, f"to=functions.get_weather<|channel|>commentary json<|message|>{PRINTED}<|call|>"),
    ],
)
def test_calls_and_results_are_written(template: str, written: str):
    prompt = prompt_of(template, history())
    assert written in prompt and "sunny" in prompt and "city" in prompt.replace(written, "")
    assert "None" not in prompt
    assert prompt_of(template, history(content="")) == prompt == prompt_of(template, history(content=[]))


def test_the_arguments_may_be_an_object_or_nothing():
    assert prompt_of(HERMES, history(tool_calls=[call({"city": "Paris", "days": 3})])) == prompt_of(HERMES, history())
    for nothing in ("", None, "{}"):
        assert '"arguments": {}}' in prompt_of(HERMES, history(tool_calls=[call(nothing)]))


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_reasoning_goes_where_the_template_reads_it(name: str):
    assert "<think>\nHm.\n</think>" in prompt_of(QWEN3, history(**{name: "Hm."}))
    assert "<|channel|>analysis<|message|>Hm.<|end|>" in prompt_of(HARMONY, history(**{name: "Hm."}))
    assert "Hm." not in prompt_of(HARMONY, history(**{name: "Hm."}, content="I call.")), "it takes one of them"
    assert prompt_of(HERMES, history(**{name: "Hm."})) == prompt_of(HERMES, history())
    alone = [{"role": "user", "content": "a"}, {"role": "assistant", "content": None, name: "Hm."}]
    assert "Hm." in prompt_of(QWEN3, alone)


@pytest.mark.parametrize(
    ("template", "efforts"),
    [
        (QWEN3, {"none": "</think>\n\n", "low": "assistant\n", None: "assistant\n"}),
        (HARMONY, {"high": "Reasoning: high", "none": "Reasoning: none", None: "Reasoning: medium"}),
        (GRANITE, {"high": "thought process", "none": "<|end_of_role|>", None: "<|end_of_role|>"}),
    ],
)
def test_reasoning_effort(template: str, efforts: dict[str | None, str]):
    for effort, written in efforts.items():
        prompt = prompt_of(template, [{"role": "user", "content": "a"}], tools=False, reasoning_effort=effort)
        assert prompt.endswith(written) if template is QWEN3 else written in prompt
        assert ("thought" in prompt) == (template is GRANITE and effort == "high")


def test_the_clients_own_switch_wins():
    options: dict[str, Any] = {"reasoning_effort": "high", "template_kwargs": {"enable_thinking": False}}
    assert prompt_of(QWEN3, [{"role": "user", "content": "a"}], **options).endswith("</think>\n\n")


@pytest.mark.parametrize(
    ("template", "messages", "options", "param"),
    [
        (PLAIN, [{"role": "user", "content": "a"}], {}, "tools"),
        (PLAIN, history(), {"tools": False}, "messages.1.tool_calls"),
        (HERMES, [{"role": "user", "content": "a"}], {"reasoning_effort": "high"}, "reasoning_effort"),
        (QWEN3, [{"role": "user", "content": "a"}], {"reasoning_effort": "much"}, "reasoning_effort"),
        (HERMES, history(tool_calls={}), {}, None),  # empty: none
        (HERMES, history(tool_calls="f"), {}, "messages.1.tool_calls"),
        (HERMES, history(tool_calls=["f"]), {}, "messages.1.tool_calls.0"),
        (HERMES, history(tool_calls=[call(type="custom")]), {}, "messages.1.tool_calls.0"),
        (HERMES, history(tool_calls=[call(mood="good")]), {}, "messages.1.tool_calls.0"),
        (HERMES, history(tool_calls=[call(id=5)]), {}, "messages.1.tool_calls.0.id"),
        (HERMES, history(tool_calls=[{"function": {"arguments": "{}"}}]), {}, "messages.1.tool_calls.0.function.name"),
        (HERMES, history(tool_calls=[call("{")]), {}, "messages.1.tool_calls.0.function.arguments"),
        (HERMES, history(tool_calls=[call("[]")]), {}, "messages.1.tool_calls.0.function.arguments"),
        (HERMES, history(tool_calls=[call("[" * 100_000)]), {}, "messages.1.tool_calls.0.function.arguments"),
        (HERMES, history(tool_calls=[call(5)]), {}, "messages.1.tool_calls.0.function.arguments"),
        (HERMES, history(reasoning=5), {}, "messages.1.reasoning"),
        (HERMES, [{"role": "user", "content": "a", "reasoning": "b"}], {}, "messages.0.reasoning"),
        (HERMES, [{"role": "user", "content": "a", "tool_calls": [call()]}], {}, "messages.0.tool_calls"),
        (HERMES, [{"role": "assistant", "content": None}], {}, "messages.0.content"),
        (MISTRAL, history(tool_calls=[call(id="1")]), {}, "messages"),
    ],
)
def test_what_is_refused(template: str, messages: list, options: dict[str, Any], param: str | None):
    if param is None:
        messages[1]["content"] = "x"
        assert prompt_of(template, messages)
        return
    with pytest.raises(RequestError) as caught:
        prompt_of(template, messages, **options)
    assert caught.value.param == param and len(caught.value.message) < 300


def test_a_template_without_tools_sees_none():
    assert prompt_of(HERMES, [{"role": "user", "content": "a"}], tools=False).count("system") == 0

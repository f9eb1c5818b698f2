"""Tool calls and reasoning over HTTP: answers, streams that say the same, tokens that are never lost, refusals."""

import json
import logging
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from jaxserve.tokenizer import Tokenizer

sys.path.insert(0, str(Path(__file__).parent.parent / "parsers"))
from chat_templates import HERMES, MISTRAL, PLAIN, QWEN3

CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "at": {"type": "object"}},
    "required": ["city"],
}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "description": "d", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "now"}},
]
NAMED = {"type": "function", "function": {"name": "get_weather"}}
ARGUMENTS = '{"city": "São \\"P\\" 日本 😀", "at": {"x": [1, {"y": {}}], "z": null}}'
CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


@pytest.fixture(scope="module")
def make_tokenizer() -> Callable[[str], Tokenizer]:
    """Bytes, a few merges, and marks: the end and Mistral's are special tokens, those of Qwen are not."""

    def make(template: str) -> Tokenizer:
        backend = tokenizers.Tokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        special = ["</s>", "<|im_start|>", "<|im_end|>", "[TOOL_CALLS]", "[THINK]", "[/THINK]", "<hidden>"]
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=290,
            special_tokens=special,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        backend.train_from_iterator([CALL] * 3, trainer)
        backend.add_tokens([AddedToken(m, normalized=False) for m in ("<tool_call>", "</tool_call>", "</think>")])
        return Tokenizer(backend, bos_token_id=None, eos_token_ids=[0], chat_template=template)

    return make


@pytest.fixture
def serving(start, make_engine, make_tokenizer) -> Callable[..., Any]:
    def run(template: str = QWEN3, **config: Any) -> Any:
        engine = make_engine(max_model_len=4096)
        engine.tokenizer = make_tokenizer(template)
        engine.info.vocab_size = engine.tokenizer.vocab_size
        return start(engine, **config)

    return run


@pytest.fixture
async def api(serving) -> AsyncIterator[Any]:
    async with serving() as running:
        yield running


def say(api, *texts: str) -> None:
    """Sequence i of each request answers texts[i], then ends."""
    scripts = [[*api.frontend.tokenizer.encode(text, add_special_tokens=False), 0] for text in texts]
    api.engine.script = lambda request, index: scripts[index]


def joined(events: list[dict]) -> dict[int, dict[str, Any]]:
    """The choices of a stream, put together as a client does it, in the shape of a whole answer."""
    choices: dict[int, dict[str, Any]] = {}
    for event in events:
        for piece in event["choices"]:
            choice = choices.setdefault(
                piece["index"], {"message": {}, "ids": [], "logprobs": [], "finish_reason": None}
            )
            assert choice["finish_reason"] is None, "nothing comes after the end"
            choice["finish_reason"], choice["stop_reason"] = piece["finish_reason"], piece["stop_reason"]
            choice["ids"] += piece.get("token_ids", [])
            choice["logprobs"] += (piece["logprobs"] or {}).get("content", [])
            message = choice["message"]
            for name, value in piece["delta"].items():
                if name == "role":
                    assert value == "assistant" and not message
                elif name == "tool_calls":
                    add_calls(message.setdefault(name, []), value)
                    continue
                assert value or name == "content", "no empty delta"
                message[name] = message.get(name, "") + value
    return choices


def add_calls(calls: list[dict], pieces: list[dict]) -> None:
    for piece in pieces:
        if piece["index"] == len(calls):
            assert set(piece) == {"index", "id", "type", "function"} and piece["type"] == "function"
            calls.append({"name": piece["function"]["name"], "arguments": ""})
        else:
            assert set(piece) == {"index", "function"} and set(piece["function"]) == {"arguments"}
        calls[piece["index"]]["arguments"] += piece["function"]["arguments"]


def said(choice: dict[str, Any]) -> dict[str, Any]:
    """Content, reasoning, calls and the end of a choice, whole or joined, in one shape."""
    message = choice["message"]
    calls = [call.get("function", call) for call in message.get("tool_calls", [])]
    return {
        "content": message["content"] or "",
        "reasoning": message.get("reasoning", ""),
        "calls": [(call["name"], call["arguments"]) for call in calls],
        "finish_reason": choice["finish_reason"],
        "stop_reason": choice["stop_reason"],
    }


async def test_a_call(api):
    say(api, CALL)
    answer = await api.ok(CHAT, {"messages": USER, "tools": TOOLS})
    choice = answer["choices"][0]
    assert choice["message"]["tool_calls"][0].pop("id").startswith("call_")
    assert choice["message"] == {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "tool_calls": [{"type": "function", "function": {"name": "get_weather", "arguments": ARGUMENTS}}],
    }
    assert choice["finish_reason"] == "tool_calls" and choice["stop_reason"] is None
    prompt = api.frontend.tokenizer.decode(api.engine.requests[0].prompt_token_ids, skip_special_tokens=False)
    assert "get_weather" in prompt and api.engine.requests[0].grammar is None


TEXTS = {
    "text only": "Just { text <tool \n",
    "a call": CALL,
    "text and calls": f"Let me look.\n{CALL}\n{NOW}",
    "reasoning and a call": f"<think>\nHm, a <tool_call>?\n</think>\n\n{CALL}",
    "reasoning and text": "<think>\nHm.\n</think>\n\nYes. 😀",
    "reasoning only": "<think>Hm.",
    "broken": '<tool_call>\n{"x": 1}\n</tool_call>',
}


@pytest.mark.parametrize("tokens_per_delta", [1, 4, 1000])
@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
@pytest.mark.parametrize("fields", [{}, {"max_tokens": 25}, {"stop": ["日"]}, {"stop": ["l_ca"]}], ids=str)
async def test_streams_say_the_same_and_lose_no_token(api, tokens_per_delta, text, fields):
    say(api, text)
    api.engine.tokens_per_delta = tokens_per_delta
    body = {"messages": USER, "tools": TOOLS, "logprobs": True, "return_token_ids": True, **fields}
    whole = (await api.ok(CHAT, body))["choices"][0]
    events = await api.events(CHAT, body | {"stream_options": {"include_usage": True}})
    choice = joined(events)[0]
    assert said(choice) == said(whole)
    usage = events[-1]["usage"]
    assert choice["ids"] == whole["token_ids"] and len(choice["ids"]) == usage["completion_tokens"]
    assert choice["logprobs"] == whole["logprobs"]["content"] and len(choice["logprobs"]) == len(choice["ids"])
    calls = said(whole)["calls"]
    if whole["finish_reason"] == "tool_calls":
        assert all(isinstance(json.loads(arguments), dict) for _, arguments in calls)


async def test_the_official_client(api):
    from openai import AsyncOpenAI

    say(api, f"<think>Hm.</think>{CALL}{NOW}")
    client = AsyncOpenAI(base_url=api.url + "/v1", api_key="none")
    tools: Any = TOOLS
    messages: Any = USER
    answer = await client.chat.completions.create(model="m", messages=messages, tools=tools)
    calls = answer.choices[0].message.tool_calls or []
    assert [(call.function.name, call.function.arguments) for call in calls] == [
        ("get_weather", ARGUMENTS),
        ("now", "{}"),
    ]
    assert answer.choices[0].message.reasoning == "Hm."  # type: ignore[union-attr]
    strict: Any = [{**tool, "function": {**tool["function"], "strict": True}} for tool in TOOLS]  # openai 2 wants it
    async with client.chat.completions.stream(model="m", messages=messages, tools=strict) as stream:
        final = await stream.get_final_completion()
    calls = final.choices[0].message.tool_calls or []
    assert [(call.function.name, call.function.arguments) for call in calls] == [
        ("get_weather", ARGUMENTS),
        ("now", "{}"),
    ]
    assert final.choices[0].finish_reason == "tool_calls"


@pytest.mark.parametrize(
    ("choice", "finish_reason"), [("auto", "tool_calls"), ("required", "tool_calls"), (NAMED, "stop")]
)
async def test_choices(api, choice, finish_reason):
    say(api, CALL)
    answer = await api.ok(CHAT, {"messages": USER, "tools": TOOLS, "tool_choice": choice})
    assert answer["choices"][0]["finish_reason"] == finish_reason
    grammar = api.engine.requests[0].grammar
    assert (grammar is None) == (choice == "auto")
    if grammar:
        assert LLMatcher.validate_grammar(grammar) == "" and "get_weather" in grammar
        assert ("now" in grammar) == (choice == "required")


def allowed(mode: Any, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@pytest.mark.parametrize("responses", [False, True])
async def test_only_allowed_tools_are_called(api, responses):
    flat = [{"type": "function", **tool["function"]} for tool in TOOLS]
    for mode in ("required", "auto"):
        choice = allowed(mode, "now")
        if responses:
            choice = {"type": "allowed_tools", "mode": mode, "tools": [{"type": "function", "name": "now"}]}
            body: dict[str, Any] = {
                "input": "hi",
                "tools": [dict(t, strict=False) for t in flat],
                "tool_choice": choice,
            }
            say(api, NOW)
            answer = await api.ok("/v1/responses", body)
            assert [item["name"] for item in answer["output"]] == ["now"] and answer["tool_choice"] == choice
            bad = {**choice, "tools": [{"type": "function", "name": "other"}]}
            error = await api.error("/v1/responses", {**body, "tool_choice": bad})
            assert error["param"] == "tool_choice.tools.0" and "'other'" in error["message"]
        else:
            say(api, NOW)
            body = {"messages": USER, "tools": TOOLS, "tool_choice": choice}
            assert said((await api.ok(CHAT, body))["choices"][0])["calls"] == [("now", "{}")]
        request = api.engine.requests[-1]
        assert (request.grammar is not None) is (mode == "required")
        assert "get_weather" not in (request.grammar or "") and "now" in (request.grammar or "now")
        prompt = api.frontend.tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False)
        assert "get_weather" in prompt, "the model is told of all"


async def test_auto_with_a_strict_tool_has_a_grammar(api):
    strict = {"type": "function", "function": TOOLS[0]["function"] | {"strict": True}}
    await api.ok(CHAT, {"messages": USER, "tools": [strict], "max_tokens": 1})
    assert "get_weather" in api.engine.requests[0].grammar


async def test_an_answers_form_leaves_room_for_reasoning_and_calls(api):
    body = {"messages": USER, "max_tokens": 1, "response_format": {"type": "json_object"}}
    await api.ok(CHAT, body)
    await api.ok(CHAT, body | {"tools": TOOLS})
    alone, with_tools = (request.grammar for request in api.engine.requests)
    assert "think" in alone and "get_weather" not in alone and "get_weather" in with_tools
    assert all(LLMatcher.validate_grammar(grammar) == "" for grammar in (alone, with_tools))


async def test_none_shows_no_tools_and_reads_no_calls(api):
    say(api, CALL)
    answer = await api.ok(CHAT, {"messages": USER, "tools": TOOLS, "tool_choice": "none"})
    assert answer["choices"][0]["message"]["content"] == CALL and answer["choices"][0]["finish_reason"] == "stop"
    await api.ok(CHAT, {"messages": USER})
    assert api.engine.requests[0].prompt_token_ids == api.engine.requests[1].prompt_token_ids


async def test_a_cut_call_ends_with_length_and_what_came_is_sent(api):
    say(api, CALL)
    tokens = len(api.frontend.tokenizer.encode(CALL[: CALL.index("日")], add_special_tokens=False))
    answer = await api.ok(CHAT, {"messages": USER, "tools": TOOLS, "max_tokens": tokens})
    choice = said(answer["choices"][0])
    assert choice["finish_reason"] == "length"
    assert choice["calls"] == [("get_weather", ARGUMENTS[: ARGUMENTS.index("日")])]


async def test_no_parallel_calls(api):
    say(api, CALL + NOW)
    answer = await api.ok(CHAT, {"messages": USER, "tools": TOOLS, "parallel_tool_calls": False})
    assert said(answer["choices"][0])["calls"] == [("get_weather", ARGUMENTS)]


async def test_a_stop_string_in_text_that_is_held_back_loses_nothing(api):
    """Report 5 of the serving notes: the text before it was buffered by the parser of calls."""
    say(api, "Well <tool box")
    for stop, content in ((["box"], "Well <tool "), (["ol"], "Well <to"), (["<tool b"], "Well ")):
        answer = await api.ok(CHAT, {"messages": USER, "tools": TOOLS, "stop": stop})
        assert answer["choices"][0]["message"]["content"] == content


async def test_a_stop_string_in_the_reasoning_ends_cleanly(api):
    """Report 7: a piece of the mark became content."""
    say(api, "<think>One.\n\nTwo.</think>Yes.")
    for stop, reasoning in ((["\n\n"], "One."), (["nk>Y"], "One.\n\nTwo.</thi"), (["hin"], "")):
        choice = (await api.ok(CHAT, {"messages": USER, "stop": stop}))["choices"][0]
        assert choice["finish_reason"] == "stop" and choice["stop_reason"] == stop[0]
        if reasoning:
            assert choice["message"]["reasoning"] == reasoning and choice["message"]["content"] is None


@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"response_format": {"type": "json_object"}}])
async def test_a_budget_of_reasoning_is_in_the_grammar(serving, fields):
    async with serving(MISTRAL, reasoning_parser="mistral") as api:
        body = {"messages": USER, "max_tokens": 1, **fields}
        await api.call(CHAT, {**body, "thinking_token_budget": 3})
        (request,) = api.engine.requests
        tokenizer = api.frontend.tokenizer
        matcher = LLMatcher(LLTokenizer(tokenizer.to_json(), eos_token=0), request.grammar)
        assert request.free_after_grammar is ("response_format" not in fields)
        answer = "[THINK]abc[/THINK]" + ('{"a": 1}' if "response_format" in fields else "")
        answer = tokenizer.encode(answer, add_special_tokens=False)
        assert matcher.try_consume_tokens(answer) == len(answer) and matcher.is_accepting()
        matcher.reset()
        thought = tokenizer.encode("[THINK]zzzz", add_special_tokens=False)
        assert matcher.try_consume_tokens(thought) == 4, "the mark and three tokens"
        assert matcher.compute_ff_tokens()[:1] == [tokenizer.added_token_id("[/THINK]")]
    async with serving(PLAIN) as api:
        error = await api.error(CHAT, {"messages": USER, "thinking_token_budget": 3})
        assert error["param"] == "thinking_token_budget" and "--reasoning-parser" in error["message"]
        await api.ok(CHAT, {"messages": USER, "thinking_token_budget": None, "max_tokens": 1})
        error = await api.error("/v1/completions", {"prompt": "a", "thinking_token_budget": 3})
        assert error["param"] == "thinking_token_budget"


async def test_with_thinking_off_everything_is_content(api):
    """Report 23: it all went to the reasoning, or was lost."""
    say(api, "Yes </think> no")
    for switch in ({"chat_template_kwargs": {"enable_thinking": False}}, {"reasoning_effort": "none"}):
        choice = (await api.ok(CHAT, {"messages": USER, **switch}))["choices"][0]
        assert choice["message"] == {"role": "assistant", "content": "Yes </think> no", "refusal": None}
        choice = joined(await api.events(CHAT, {"messages": USER, **switch}))[0]
        assert said(choice)["content"] == "Yes </think> no" and not said(choice)["reasoning"]


async def test_each_of_n_has_a_parser_of_its_own(api):
    say(api, f"<think>a</think>{CALL}", "plain", NOW)
    body = {"messages": USER, "tools": TOOLS, "n": 3, "seed": 1}
    whole = {choice["index"]: said(choice) for choice in (await api.ok(CHAT, body))["choices"]}
    assert [whole[i]["finish_reason"] for i in range(3)] == ["tool_calls", "stop", "tool_calls"]
    assert {i: said(choice) for i, choice in joined(await api.events(CHAT, body)).items()} == whole


@pytest.mark.parametrize("stream", [False, True])
async def test_usage_counts_reasoning_tokens(api, stream):
    say(api, "<think>Hm hm.</think>Yes.")
    tokens = len(api.frontend.tokenizer.encode("<think>Hm hm.</think>", add_special_tokens=False))
    body = {"messages": USER, "n": 1}
    if stream:
        usage = (await api.events(CHAT, body | {"stream_options": {"include_usage": True}}))[-1]["usage"]
    else:
        usage = (await api.ok(CHAT, body))["usage"]
    assert usage["completion_tokens_details"] == {"reasoning_tokens": tokens}


async def test_reasoning_may_be_left_out(api):
    say(api, "<think>Hm hm.</think>Yes.")
    body = {"messages": USER, "include_reasoning": False, "logprobs": True, "return_token_ids": True}
    answer = await api.ok(CHAT, body)
    choice = answer["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "Yes.", "refusal": None}
    assert api.frontend.tokenizer.decode(choice["token_ids"]) == "Yes."
    assert "Hm" not in json.dumps(choice) and answer["usage"]["completion_tokens_details"]["reasoning_tokens"] > 5
    streamed = joined(await api.events(CHAT, body))[0]
    assert (streamed["ids"], streamed["logprobs"]) == (choice["token_ids"], choice["logprobs"]["content"])


@pytest.mark.parametrize("tokens_per_delta", [1, 1000])
async def test_marks_that_are_special_tokens_are_read_and_never_shown(serving, tokens_per_delta):
    async with serving(MISTRAL + "{# [THINK] [/THINK] #}") as api:
        api.engine.tokens_per_delta = tokens_per_delta
        body = {"messages": USER, "tools": TOOLS}
        calls = '[{"name": "now", "arguments": {}}]'
        say(api, f"[THINK]Hm.<hidden>[/THINK]So<hidden> I[TOOL_CALLS]{calls}")
        choice = (await api.ok(CHAT, body))["choices"][0]
        expected = {"reasoning": "Hm.", "content": "So I", "calls": [("now", "{}")], "finish_reason": "tool_calls"}
        assert said(choice) == expected | {"stop_reason": None}
        assert len(choice["message"]["tool_calls"][0]["id"]) == 9, "its template takes no other"
        assert said(joined(await api.events(CHAT, body))[0]) == expected | {"stop_reason": None}
        say(api, "a[TOOL_CALLS]b")
        assert said((await api.ok(CHAT, body))["choices"][0])["content"] == "ab"
        assert (await api.ok(CHAT, {"messages": USER}))["choices"][0]["message"]["content"] == "ab"


async def test_the_parsers_can_be_named(serving):
    async with serving(HERMES, tool_call_parser="pythonic", reasoning_parser="deepseek_r1") as api:
        say(api, "Hm.</think>[get_weather(city='Paris'), now()]")
        choice = said((await api.ok(CHAT, {"messages": USER, "tools": TOOLS}))["choices"][0])
        assert choice["reasoning"] == "Hm." and choice["calls"] == [("get_weather", '{"city": "Paris"}'), ("now", "{}")]


@pytest.mark.parametrize(
    ("template", "tools", "reasoning"),
    [
        (QWEN3, "hermes", "qwen3"),
        (HERMES, "hermes", "not told from the answer (--reasoning-parser NAME"),
        (PLAIN, "not in its template", "not told from the answer (--reasoning-parser NAME"),
        (PLAIN + "{% if tools %}{{ tools | tojson }}{% endif %}", "not read (--tool-call-parser NAME", "not told"),
    ],
    ids=["qwen3", "hermes", "plain", "unknown"],
)
async def test_the_start_says_what_is_read_or_how_to_make_it_so(serving, caplog, template, tools, reasoning):
    with caplog.at_level(logging.INFO, "jaxserve"):
        async with serving(template):
            pass
    (line,) = [line for line in map(logging.LogRecord.getMessage, caplog.records) if line.startswith("tool calls: ")]
    assert line.startswith(f"tool calls: {tools}") and f"; reasoning: {reasoning}" in line


BAD_SCHEMA = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": {"type": "wobble"}}}}}
REFUSED = [
    ({"tools": []}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
    ({"tools": TOOLS, "tool_choice": "sometimes"}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice.function.name"),
    ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice.function"),
    ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools"),
    ({"tools": TOOLS, "tool_choice": allowed("none", "now")}, "tool_choice.allowed_tools.mode"),
    ({"tools": TOOLS, "tool_choice": allowed("auto")}, "tool_choice.allowed_tools.tools"),
    ({"tools": TOOLS, "tool_choice": allowed("auto", "now", "x")}, "tool_choice.allowed_tools.tools.1"),
    ({"tool_choice": allowed("auto", "now")}, "tool_choice.allowed_tools.tools.0"),
    ({"tool_choice": "auto"}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": 5}, "tool_choice"),
    ({"tools": TOOLS, "parallel_tool_calls": "no"}, "parallel_tool_calls"),
    ({"tools": [*TOOLS, BAD_SCHEMA], "tool_choice": "required"}, "tools.2.function.parameters"),
    ({"reasoning_effort": "much"}, "reasoning_effort"),
    ({"reasoning_effort": 5}, "reasoning_effort"),
    ({"include_reasoning": "no"}, "include_reasoning"),
    ({"thinking_token_budget": -1}, "thinking_token_budget"),
    ({"thinking_token_budget": 1.5}, "thinking_token_budget"),
    ({"thinking_token_budget": True}, "thinking_token_budget"),
    ({"thinking_token_budget": 5}, "thinking_token_budget"),  # here <think> is no token
    ({"messages": [{"role": "user", "content": "a", "tool_calls": [{}]}]}, "messages.0.tool_calls"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("fields", "param"), REFUSED, ids=[param for _, param in REFUSED])
async def test_bad_input_is_refused_by_place(api, fields, param, stream):
    error = await api.error(CHAT, {"messages": USER, "stream": stream, **fields})
    assert error["param"] == param and param in error["message"]


async def test_a_schema_that_no_grammar_needs_is_not_refused(api):
    await api.ok(CHAT, {"messages": USER, "tools": [BAD_SCHEMA], "max_tokens": 1})


async def test_a_model_that_is_not_known_to_call_says_how_to_make_it_known(serving):
    async with serving(PLAIN + "{% if tools %}{{ tools | tojson }}{% endif %}") as api:
        error = await api.error(CHAT, {"messages": USER, "tools": TOOLS})
        assert error["param"] == "tools" and "--tool-call-parser" in error["message"]
        await api.ok(CHAT, {"messages": USER, "tools": TOOLS, "tool_choice": "none", "max_tokens": 1})


@pytest.mark.parametrize("parser", ["auto", "none", "hermes"])
async def test_a_template_without_tools_says_so_and_names_no_option_that_would_not_help(serving, parser):
    async with serving(PLAIN, tool_call_parser=parser) as api:
        error = await api.error(CHAT, {"messages": USER, "tools": TOOLS})
        assert error["param"] == "tools" and "template takes no tools" in error["message"]
        assert "--tool-call-parser" not in error["message"] and "--chat-template" in error["message"]


async def test_tokenize_counts_tools(api):
    answer = await api.ok("/tokenize", {"messages": USER, "tools": TOOLS})
    await api.ok(CHAT, {"messages": USER, "tools": TOOLS, "max_tokens": 1})
    assert answer["tokens"] == api.engine.requests[0].prompt_token_ids
    assert answer["count"] > (await api.ok("/tokenize", {"messages": USER}))["count"]


async def test_an_answer_can_be_sent_back(api):
    say(api, f"<think>Hm.</think>{CALL}")
    message = (await api.ok(CHAT, {"messages": USER, "tools": TOOLS}))["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "sunny"}
    await api.ok(CHAT, {"messages": [*USER, message, result], "tools": TOOLS})
    prompt = api.frontend.tokenizer.decode(api.engine.requests[-1].prompt_token_ids, skip_special_tokens=False)
    assert f"<think>\nHm.\n</think>\n\n{CALL}<|im_end|>" in prompt and "<tool_response>\nsunny" in prompt

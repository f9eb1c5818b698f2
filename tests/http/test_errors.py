"""Bad calls: refused before anything is sent, in one error shape, naming field, limit and value; never a leak."""

import json
import logging
import re

import pytest

from jaxserve.errors import DeadlineExceeded, EngineDead, EngineError, QueueFull
from jaxserve.http.schema import UNSUPPORTED
from jaxserve.request import SequenceDelta

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
USER = [{"role": "user", "content": "hi"}]

# (fields, param): each is a 400 naming the field, alike for completions and chats. "Cases every engine should pass".
BAD_FIELDS = [
    ({"temperature": -1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"temperature": 10**400}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"n": 0}, "n"),
    ({"n": 2, "temperature": 0}, "n"),
    ({"n": 10**30}, "n"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 10**9}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"presence_penalty": 2.1}, "presence_penalty"),
    ({"frequency_penalty": -2.1}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"repetition_penalty": 10**400}, "repetition_penalty"),
    ({"stop": [""]}, "stop"),
    ({"stop": ""}, "stop"),
    ({"stop": list("abcdefghijklmnopq")}, "stop"),
    ({"stop": ["x" * 5000]}, "stop"),
    ({"stop": [1]}, "stop"),
    ({"stop": [None]}, "stop"),
    ({"logit_bias": {"5": None}}, "logit_bias[5]"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"stop_token_ids": [10**6]}, "stop_token_ids"),
    ({"stop_token_ids": ["a"]}, "stop_token_ids"),
    ({"logit_bias": {"abc": 1}}, "logit_bias"),
    ({"logit_bias": {"1000000": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"logit_bias": {"5": "x"}}, "logit_bias[5]"),
    ({"logit_bias": {"5": 10**400}}, "logit_bias[5]"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"allowed_token_ids": [10**6]}, "allowed_token_ids"),
    ({"bad_words": [""]}, "bad_words"),
    ({"bad_words": ["x" * 200]}, "bad_words"),
    ({"bad_words": ["w"] * 129}, "bad_words"),
    ({"seed": 2**63}, "seed"),
    ({"seed": 0.5}, "seed"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_use": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options"),
    ({"stream": "yes"}, "stream"),
    ({"stream": 1}, "stream"),
    ({"ignore_eos": "no"}, "ignore_eos"),
    ({"priority": 2**40}, "priority"),
    ({"user": 5}, "user"),
    ({"metadata": "x"}, "metadata"),
    ({"model": 5}, "model"),
    ({"nonsense": 1}, "nonsense"),
    ({"suffix": "x"}, "suffix"),
    ({"tools": []}, "tools"),
    ({"tool_choice": "auto"}, "tool_choice"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "x"}}}},
        "response_format",
    ),
    ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
    ({"structured_outputs": []}, "structured_outputs"),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": 10**6}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": "all"}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": 5, "truncation_side": "middle"}, "truncation_side"),
    ({"truncation_side": "left"}, "truncation_side"),
    ({"use_beam_search": True}, "use_beam_search"),
    ({"logprob_token_ids": [1]}, "logprob_token_ids"),
    ({"store": True}, "store"),
    ({"service_tier": "flex"}, "service_tier"),
]
OF_COMPLETIONS = {"echo", "best_of", "suffix"}  # fields that chats do not have
BAD_COMPLETIONS = [
    ({"prompt": ["a"] * 512, "n": 3, "temperature": 1}, "n"),  # 1,536 answers in one call
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": [""]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [10**6]}, "prompt"),
    ({"prompt": [10**40]}, "prompt"),
    ({"prompt": [1.5]}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": [None]}, "prompt"),
    ({"prompt": ["a", None]}, "prompt"),
    ({"prompt": [[1], [None]]}, "prompt.1"),
    ({"prompt": {"text": "a"}}, "prompt"),
    ({"prompt": ["a", [1]]}, "prompt"),
    ({"prompt": [[1], ["a"]]}, "prompt.1"),
    ({"prompt": [[1], [10**6]]}, "prompt.1"),
    ({"prompt": ["a", ""]}, "prompt.1"),
    ({"prompt": ["a"] * 1025}, "prompt"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": -1}, "logprobs"),
    ({"logprobs": True}, "logprobs"),  # a chat's boolean is not taken for the number 1
    ({"echo": "yes"}, "echo"),
    ({"echo": True, "max_tokens": 0, "min_tokens": 1}, "min_tokens"),
    ({"top_logprobs": 1}, "top_logprobs"),
    ({"messages": USER}, "messages"),
    ({"best_of": 0}, "best_of"),
    ({"best_of": 129}, "best_of"),
    ({"best_of": 2, "n": 3}, "best_of"),
    ({"best_of": 2, "stream": True}, "best_of"),
    ({"best_of": 2, "temperature": 0}, "best_of"),
    ({"best_of": 2, "echo": True, "max_tokens": 0}, "best_of"),
    ({"suffix": 5}, "suffix"),
]
BAD_CHATS = [
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": ["hi"]}, "messages.0"),
    ({"messages": [None]}, "messages.0"),
    ({"messages": [[None, True]]}, "messages.0"),
    ({"messages": [{"role": "user", "content": [None]}]}, "messages.0.content.0"),
    ({"messages": [{"content": "hi"}]}, "messages.0.role"),
    ({"messages": [{"role": "robot", "content": "hi"}]}, "messages.0.role"),
    ({"messages": [{"role": ["user"], "content": "hi"}]}, "messages.0.role"),
    ({"messages": [*USER, {"role": "user"}]}, "messages.1.content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": []}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": ["hi"]}]}, "messages.0.content.0"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0.text"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]},
        "messages.0.content.0.type",
    ),
    ({"messages": [{"role": "user", "content": "hi", "mood": "good"}]}, "messages.0"),
    ({"messages": [{"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}]}, "messages.0.tool_calls.0"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_completion_tokens": 10**9}, "max_completion_tokens"),
    ({"logprobs": 5}, "logprobs"),  # a completion's number is not taken for true
    ({"top_logprobs": 5}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": -2}, "top_logprobs"),
    ({"echo": True}, "echo"),
    ({"best_of": 2}, "best_of"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ({"chat_template": "{{ messages }}"}, "chat_template"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": 5}, "chat_template_kwargs"),
    ({"functions": [{}]}, "functions"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"audio": {"voice": "x"}}, "audio"),
    ({"prediction": {"type": "content"}}, "prediction"),
    ({"prompt": "hi"}, "prompt"),
]

PYTHONS_WORDS = re.compile(r"\b(None|NoneType|True|False)\b")  # clients wrote JSON: null, true, false


def _name(value: object) -> str:
    return json.dumps(value)[:50]


def modes(fields: dict) -> list[dict]:
    """The same fields in a plain and in a streaming call."""
    return [fields] if "stream_options" in fields else [{"stream": stream, **fields} for stream in (False, True)]


@pytest.mark.parametrize(("fields", "param"), BAD_FIELDS + BAD_COMPLETIONS, ids=_name)
async def test_bad_completions(api, fields, param):
    for each in modes(fields):
        error = await api.error(TEXT, {"model": "m", "prompt": "hi", **each})
        assert error["param"] == param and error["type"] == "BadRequestError"
        assert param.split(".")[0] in error["message"]
        assert not PYTHONS_WORDS.search(error["message"]), error["message"]
    assert not api.engine.requests, "a bad call reached the engine"


async def test_too_many_stop_ids_are_told_the_limit_why_and_what_to_do(api):
    await api.ok(TEXT, {"prompt": "a", "stop_token_ids": list(range(5, 61))})
    error = await api.error(TEXT, {"prompt": "a", "stop_token_ids": list(range(5, 62))})
    assert error["param"] == "stop_token_ids" and "at most 56 entries, got 57: " in error["message"]
    assert "keeps 64 ids" in error["message"] and "stop strings" in error["message"]


async def test_a_message_of_no_parts_is_told_that_it_is_empty(api):
    error = await api.error(CHAT, {"messages": [{"role": "user", "content": []}]})
    assert error["message"] == 'messages.0.content may not be an empty list; an empty text is ""'


@pytest.mark.parametrize(("fields", "param"), BAD_FIELDS + BAD_CHATS, ids=_name)
async def test_bad_chats(api, fields, param):
    for each in modes(fields):
        error = await api.error(CHAT, {"model": "m", "messages": USER, **each})
        assert error["param"] == param and error["type"] == "BadRequestError"
        assert not PYTHONS_WORDS.search(error["message"]), error["message"]
    assert not api.engine.requests, "a bad call reached the engine"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"nonsense",
        b'{"prompt": "hi", "temperature": NaN}',
        b'{"prompt": "hi", "temperature": Infinity}',
        b'{"prompt": "hi", "temperature": 1e999}',
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800 alone"}',
        b'{"prompt": "hi"} trailing',
        b'["prompt"]',
        b"null",
        b"[" * 100_000,
        b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"prompt": "hi", "metadata": ' + b'{"a":' * 50_000 + b"1" + b"}" * 50_001,
        b'{"prompt": "hi", "seed": ' + b"9" * 10_000 + b"}",
    ],
    ids=lambda body: body[:24].decode(errors="replace"),
)
async def test_bodies_that_are_no_json_object(api, body):
    await api.error(TEXT, None, data=body, headers={"Content-Type": "application/json"})
    await api.ok(TEXT, {"prompt": "still alive"})


@pytest.mark.parametrize("depth", [50, 300, 900])
async def test_nested_values_are_refused_with_a_short_message(api, depth):
    body = b'{"prompt": "hi", "stop": ' + b"[" * depth + b"]" * depth + b"}"
    await api.error(TEXT, None, data=body, headers={"Content-Type": "application/json"})


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", None])
async def test_wrong_content_type(api, kind):
    headers = {"Content-Type": kind} if kind else {}
    error = await api.error(
        TEXT, None, 415, data=b'{"prompt":"hi"}', headers=headers, skip_auto_headers=["Content-Type"]
    )
    assert error["type"] == "UnsupportedMediaTypeError"


async def test_a_charset_beside_the_content_type_is_fine(api):
    headers = {"Content-Type": "application/json; charset=utf-8"}
    assert (await api.call(TEXT, data='{"prompt":"é"}'.encode(), headers=headers))[0] == 200


async def test_bodies_over_the_limit(start):
    async with start(max_body_bytes=2000) as api:
        body = json.dumps({"prompt": "hi", "user": "x" * 3000}).encode()
        error = await api.error(TEXT, None, 413, data=body, headers={"Content-Type": "application/json"})
        assert "2000 bytes" in error["message"]

        async def chunked():
            for i in range(0, len(body), 500):
                yield body[i : i + 500]

        await api.error(TEXT, None, 413, data=chunked(), headers={"Content-Type": "application/json"})
        await api.ok(TEXT, {"prompt": "hi", "user": "x" * 1000})


@pytest.mark.parametrize("path", ["/", "/v1", "/v1/nothing", "/v1/completions/", "/v1/chat", "/redoc"])
async def test_unknown_routes(api, path):
    for method in ("GET", "POST"):
        error = await api.error(path, None, 404, method=method)
        assert error["type"] == "NotFoundError" and path in error["message"]


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", TEXT, "POST"),
        ("GET", CHAT, "POST"),
        ("GET", "/tokenize", "POST"),
        ("DELETE", TEXT, "POST"),
        ("OPTIONS", TEXT, "POST"),
        ("POST", "/v1/models", "GET,HEAD"),
        ("PUT", "/ping", "GET,HEAD,POST"),
    ],
)
async def test_wrong_methods(api, method, path, allowed):
    error = await api.error(path, None, 405, method=method)
    assert error["type"] == "MethodNotAllowedError"
    async with api.session.request(method, api.url + path) as response:
        assert response.headers["Allow"] == allowed


@pytest.mark.parametrize("path", [TEXT, CHAT, "/tokenize", "/detokenize"])
async def test_unknown_model(api, path):
    body = {
        TEXT: {"prompt": "a"},
        CHAT: {"messages": USER},
        "/tokenize": {"prompt": "a"},
        "/detokenize": {"tokens": []},
    }
    error = await api.error(path, {"model": "zz", **body[path]}, 404)
    assert error["type"] == "NotFoundError" and error["param"] == "model"
    assert error["message"] == "The model 'zz' does not exist: this server has 'm'."


async def test_the_model_is_checked_after_field_names_and_before_values(api):
    assert (await api.error(TEXT, {"model": "zz", "prompt": "a", "nonsense": 1}))["param"] == "nonsense"
    assert (await api.error(TEXT, {"model": "zz", "prompt": "a", "temperature": 9}, 404))["param"] == "model"


@pytest.mark.parametrize("name", sorted(set(UNSUPPORTED) - OF_COMPLETIONS))
async def test_unsupported_fields_are_refused_by_name_and_harmless_values_are_not(api, name):
    error = await api.error(TEXT, {"prompt": "hi", name: {"ask": "something"}})
    assert error["param"] == name and f"{name} is not supported yet" in error["message"]
    for value in (None, *UNSUPPORTED[name]):
        await api.ok(TEXT, {"prompt": "hi", name: value})


async def test_old_names_of_structured_outputs_point_to_the_new_ones(api):
    error = await api.error(TEXT, {"prompt": "x", "guided_choice": ["a", "b"]}, 400)
    assert "guided_choice is not supported yet, structured_outputs.choice is" in error["message"]


async def test_fields_that_ask_for_nothing_are_accepted(api):
    harmless = {
        "user": "u", "metadata": {"a": "b"}, "safety_identifier": "s", "prompt_cache_key": "k", "store": False,
        "prompt_cache_retention": "24h", "service_tier": "auto", "tool_choice": "none", "parallel_tool_calls": True,
        "response_format": {"type": "text"}, "modalities": ["text"], "n": None, "stop": None, "temperature": None,
        "logit_bias": None, "stream": None, "stream_options": None, "max_tokens": None, "seed": None, "model": "",
    }  # fmt: skip
    await api.ok(CHAT, {"messages": USER, **harmless})
    await api.ok(TEXT, {"prompt": "hi", **harmless})


async def test_unknown_fields_are_dropped_if_the_server_says_so(start):
    async with start(ignore_unknown_fields=True) as api:
        message = {"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": {}}], "mood": "good"}
        await api.ok(CHAT, {"messages": [message], "nonsense": 1})
        assert (await api.error(CHAT, {"messages": USER, "tools": []}))["param"] == "tools"


async def test_a_misspelt_field_gets_a_hint(api):
    assert "did you mean temperature?" in (await api.error(TEXT, {"prompt": "a", "temprature": 1}))["message"]


@pytest.mark.parametrize("body", [{"x" * 10**6: 1}, {"stop": ["y" * 10**6]}, {"temperature": "z" * 10**6}])
async def test_errors_do_not_echo_large_values(api, body):
    await api.error(TEXT, {"prompt": "hi", **body})  # checks the length of the message
    await api.error(TEXT, {"prompt": ["bad"] * 10**5 + [7]})
    await api.error(TEXT, {"prompt": [10**6] * 300})


async def test_prompts_that_leave_no_room(api):
    limit = api.frontend.info.max_model_len
    for prompt in ([5] * limit, [5] * (limit + 1)):
        for stream in (False, True):
            error = await api.error(TEXT, {"prompt": prompt, "stream": stream, "max_tokens": 1})
            assert error["param"] == "prompt"
            assert str(limit) in error["message"] and str(len(prompt)) in error["message"]
    await api.ok(TEXT, {"prompt": [5] * (limit - 1), "max_tokens": 1})
    error = await api.error(TEXT, {"prompt": [5] * (limit - 1), "max_tokens": 2})
    assert error["param"] == "max_tokens" and "at most 1" in error["message"]
    error = await api.error(CHAT, {"messages": [{"role": "user", "content": "long " * limit}], "stream": True})
    assert error["param"] == "messages"


async def test_absurdly_long_text_is_refused_untokenised(api, monkeypatch):
    monkeypatch.setattr(api.frontend, "encode", None)  # any use of it is a 500
    error = await api.error(TEXT, {"prompt": "x" * 10**6})
    assert error["param"] == "prompt" and "1000000 characters" in error["message"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_full_queue_is_told_before_headers(api, stream):
    api.engine.refusal = QueueFull("the queue is full: 8 requests wait (--max-queue-len)")
    async with api.session.post(api.url + TEXT, json={"prompt": "hi", "stream": stream}) as response:
        assert response.status == 429 and int(response.headers["Retry-After"]) >= 1
        assert (await response.json())["error"]["type"] == "RateLimitError"


async def test_if_one_of_several_prompts_is_refused_none_stays(start, make_engine):
    engine = make_engine(max_queue=2)
    engine.gate.clear()
    async with start(engine) as api:
        await api.error(TEXT, {"prompt": ["a", "b", "c"]}, 429)
        await api.settled()
        assert {request.request_id for request in engine.requests} <= {name for name, _ in engine.cancelled}


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (EngineError("page 7 is on fire"), 500, "InternalServerError"),
        (EngineDead("the engine process ended"), 503, "ServiceUnavailableError"),
        (DeadlineExceeded("too late"), 504, "TimeoutError"),
        (SequenceDelta("r", 0, finish_reason="timeout"), 504, "TimeoutError"),
        (SequenceDelta("r", 0, finish_reason="error"), 500, "InternalServerError"),
        (SequenceDelta("r", 0, finish_reason="error", error=EngineError("x").info()), 500, "InternalServerError"),
        (SequenceDelta("r", -1, finish_reason="error", error=QueueFull("x").info()), 429, "RateLimitError"),
        (None, 500, "InternalServerError"),  # the stream just ends
    ],
    ids=lambda value: getattr(value, "finish_reason", None) or type(value).__name__,
)
@pytest.mark.parametrize("prompts", ["a", ["a", "b"]], ids=["one", "two"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_errors_of_the_engine(api, error, status, kind, prompts, stream):
    api.engine.broken_at = (0, error)
    got = await api.error(TEXT, {"prompt": prompts, "stream": stream}, status)  # nothing was sent yet
    assert got["type"] == kind
    api.engine.broken_at = (3, error)
    if stream:
        *before, last = await api.events(TEXT, {"prompt": prompts})
        assert last["error"]["type"] == kind and last["error"]["code"] == status
        assert before and all("choices" in event for event in before)
    else:
        await api.error(TEXT, {"prompt": prompts}, status)
    await api.settled()


@pytest.mark.parametrize("at", [0, 3])
async def test_unexpected_errors_are_logged_once_and_not_told(api, caplog, at):
    api.engine.broken_at = (at, KeyError("secret"))
    with caplog.at_level(logging.WARNING):
        if at:
            error = (await api.events(CHAT, {"messages": USER}))[-1]["error"]
        else:
            error = await api.error(CHAT, {"messages": USER, "stream": True}, 500)
    assert "secret" not in json.dumps(error) and error["code"] == 500
    (record,) = caplog.records
    assert record.exc_info and "KeyError" in record.getMessage()


async def test_bad_calls_log_nothing(api, caplog):
    with caplog.at_level(logging.WARNING):
        await api.error(TEXT, {"prompt": "a", "temperature": 9})
        await api.error("/nothing", None, 404)
    assert not caplog.records


async def test_an_unknown_model_is_told_every_name(start):
    async with start(served_model_name=["a", "b"]) as api:
        error = await api.error(TEXT, {"model": "demo", "prompt": "hi"}, 404)
        assert error["message"].endswith("this server has 'a' and 'b'.")


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("/", "GET /v1/models names the model"),
        ("/v1", "GET /v1/models names the model"),
        ("/chat/completions", "did you mean /v1/chat/completions?"),
        ("/models", "did you mean /v1/models?"),
        ("/v1/chat/completion", "did you mean /v1/chat/completions?"),
        ("/v1/v1/models", "did you mean /v1/models?"),
    ],
)
async def test_a_route_that_is_not_there_names_one_that_is(api, path, hint):
    error = await api.error(path, None, 404, method="GET")
    assert hint in error["message"] and error["message"].startswith(f"GET '{path}': there is no such route; ")


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("messages", "hi", "messages must be a list, got 'hi'"),
        ("temperature", "warm", "temperature must be a number, got 'warm'"),
        ("max_tokens", 1.5, "max_tokens must be an integer, got 1.5"),
        ("stream", "yes", "stream must be a boolean, got 'yes'"),
        ("model", 5, "model must be a string, got 5"),
        ("logit_bias", [], "logit_bias must be an object, got []"),
        ("stop", 5, "stop must be a list or a string, got 5"),
        ("stop", [5], "stop[0] must be a string, got 5"),
        ("stop_token_ids", ["x"], "stop_token_ids[0] must be an integer, got 'x'"),
    ],
)
async def test_types_have_names_that_clients_know(api, field, value, words):
    error = await api.error(CHAT, {"messages": USER, field: value})
    assert error["message"] == words

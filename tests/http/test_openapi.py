"""/openapi.json tells the truth: what it allows is accepted, what it forbids is refused, and answers are as it says."""

import base64
import hashlib
import json
import re
import sys
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import jsonschema
import openapi_spec_validator
import pytest
import requests
import schemathesis
import tokenizers
from aiohttp import web
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import Struct
from schemathesis.core import NotSet
from schemathesis.specs.openapi import checks

from jaxserve.chat import EFFORTS
from jaxserve.config import ServeConfig
from jaxserve.errors import EngineError
from jaxserve.frontend import Frontend
from jaxserve.http.app import make_app
from jaxserve.http.json_schema import type_schema
from jaxserve.http.openapi import document, example
from jaxserve.http.operation import operation, operation_of
from jaxserve.http.responses_schema import LOGPROBS, ResponseBody
from jaxserve.http.routes import DOC_ROUTES, ROUTES
from jaxserve.http.schema import ChatBody, CompletionBody, Conflict, conflicts, field_specs
from jaxserve.request import SamplingParams, check_limits, knob
from jaxserve.tokenizer import Tokenizer

sys.path.insert(0, str(Path(__file__).parent.parent / "parsers"))
from chat_templates import QWEN3

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
RESPONSES = "/v1/responses"
USER = [{"role": "user", "content": "hi"}]
KEY = {"Authorization": "Bearer right"}
GENERATE = {CHAT: ChatBody, TEXT: CompletionBody, RESPONSES: ResponseBody}
NEEDED: dict[str, dict[str, Any]] = {CHAT: {"messages": USER}, TEXT: {"prompt": "hi"}, RESPONSES: {"input": "hi"}}
WITH_BODY = [route for route in ROUTES if (said := operation_of(route.handler)) and said.body]
POSITIVE, NEGATIVE = schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE
QUICK = settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck), database=None)

# Refusals whose cause JSON Schema cannot say.
BEYOND_SCHEMA = re.compile(
    r"(max_tokens|max_completion_tokens|max_output_tokens|min_tokens) must be at most"  # what a prompt leaves of it
    r"|has \d+ tokens; the model's context"
    r"|characters, which is too long for the model's context"
    r"|has no tokens"
    r"|bad_words: .* has \d+ tokens"
    r"|logit_bias: token id \d+ is outside the vocabulary"
    r"|allowed_token_ids leaves nothing"
    r"|the chat template refused the messages"
    r"| is bad: |structural_tag"  # what compilers of schemas, regexes and grammars say
    r"|give one of them|whitespace_pattern or disable_any_whitespace"
    r"|continue_final_message needs text"
    r"|the chat template leaves out the last message"
    r"|best_of must be (n with|at least n)"
    r"|suffix needs a model"
    r"|--tool-call-parser|the model's chat template takes no (tools|tool calls|reasoning.effort)"
    r"|digits, _ or -, got '[\w-]+\\n'"  # before which Python's $ matches, and that of JSON Schema does not
    r"|two tools are named|needs tools|is none of the tools"
    r"|must be the JSON text of an object|no function_call before it has the call_id"
    r"|previous_response_id: there is no response"
)


def path_of(route: web.RouteDef) -> str:
    return re.sub(r":[^}]+}", "}", route.path)


def name_of(route: web.RouteDef) -> str:
    return f"{route.method} {route.path}"


def app_of(make_engine, **config: Any) -> web.Application:
    engine = make_engine()
    defaults = config.pop("defaults", {})
    return make_app(Frontend(engine.tokenizer, engine.info, defaults), engine, ServeConfig(port=0, model="m", **config))


@pytest.fixture(scope="module")
def url(in_thread, tokenizer):
    with in_thread(max_model_len=64) as url:
        yield url


@pytest.fixture(scope="module")
def guarded(in_thread):
    with in_thread(max_model_len=64, api_key=["right"]) as url:
        yield url


@pytest.fixture(scope="module")
def doc(url) -> dict[str, Any]:
    return requests.get(url + "/openapi.json").json()


def without_conflicts(doc: dict[str, Any]) -> dict[str, Any]:
    """Generators give up on conditions across that many fields; bodies that break them are judged by the whole schema."""
    schemas = doc["components"]["schemas"]
    bare = {name: {k: v for k, v in schema.items() if k != "allOf"} for name, schema in schemas.items()}
    return {**doc, "components": {**doc["components"], "schemas": bare}}


def generator(doc: dict[str, Any], url: str, route: web.RouteDef) -> Any:
    schema = schemathesis.openapi.from_dict(without_conflicts(doc))
    schema.config.update(base_url=url)
    return schema[path_of(route)][route.method]


def validator_of(doc: dict[str, Any], schema: dict[str, Any]) -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator({**schema, "components": doc["components"]})


def body_validator(doc: dict[str, Any], route: web.RouteDef) -> jsonschema.Draft202012Validator:
    said = doc["paths"][path_of(route)][route.method.lower()]
    return validator_of(doc, said["requestBody"]["content"]["application/json"]["schema"])


# -------------------------------------------------------------------------------------------------- the whole document


@pytest.mark.parametrize("config", [{}, {"api_key": ["k"]}, {"ignore_unknown_fields": True}], ids=json.dumps)
def test_it_is_valid_openapi(make_engine, config):
    doc = document(app_of(make_engine, **config))
    openapi_spec_validator.validate(doc)
    assert set(doc["paths"]) == {path_of(route) for route in ROUTES}
    ids = [each["operationId"] for methods in doc["paths"].values() for each in methods.values()]
    assert len(ids) == len(set(ids)) == len(ROUTES)


@pytest.mark.parametrize("route", ROUTES, ids=name_of)
def test_every_route_says_what_it_does(route):
    assert operation_of(route.handler), "say at the handler with @operation what it takes and answers"
    assert (route.handler.__doc__ or "").strip(), "the first line of the handler's docstring is the route's summary"


def test_every_field_has_a_doc_and_every_required_one_an_example():
    for route in WITH_BODY:
        for cls in operation_of(route.handler).body:
            specs = field_specs(cls)
            assert all(spec.metadata.get("doc") for spec in specs.values()), cls
            assert {name for name, spec in specs.items() if spec.required} <= set(example(cls)), cls


def test_new_fields_and_routes_appear_by_themselves(make_engine):
    class Reply(Struct):
        mood: str

    @dataclass(kw_only=True)
    class MoodBody(ChatBody):
        conflicts = (Conflict("mood", {"ge": 5}, "stream", {"const": True}),)

        mood: int = knob(3, "how the answer should feel", ge=1, le=9)

    @operation(MoodBody, reply=Reply)
    async def feel(request: web.Request) -> web.Response:
        """How it feels."""
        return web.Response()

    app = app_of(make_engine)
    app.add_routes([web.post("/feel/{whose}", feel)])
    doc = document(app)
    openapi_spec_validator.validate(doc)
    said = doc["paths"]["/feel/{whose}"]["post"]
    assert said["summary"] == "How it feels." and said["parameters"][0]["name"] == "whose"
    schemas = doc["components"]["schemas"]
    assert schemas["MoodBody"]["properties"]["mood"] == {
        "description": "how the answer should feel", "type": ["integer", "null"], "minimum": 1, "maximum": 9,
        "default": 3,
    }  # fmt: skip
    assert set(field_specs(ChatBody)) < set(schemas["MoodBody"]["properties"])
    assert len(schemas["MoodBody"]["allOf"]) == len(schemas["ChatBody"]["allOf"]) + 1
    assert schemas["Reply"]["required"] == ["mood"]


def test_it_speaks_of_this_server(make_engine):
    config = {"served_model_name": ["a", "b"], "defaults": {"temperature": 0, "top_k": 20}}
    doc = document(app_of(make_engine, **config))
    fields = doc["components"]["schemas"]["ChatBody"]["properties"]
    assert fields["model"]["enum"] == ["a", "b", "", None]
    assert fields["temperature"]["default"] == 0 and fields["top_k"]["default"] == 20
    engine = make_engine()
    assert fields["allowed_token_ids"]["items"]["maximum"] == engine.info.vocab_size - 1
    assert fields["max_tokens"]["maximum"] == engine.info.max_model_len - 1
    validator = validator_of(doc, {"$ref": "#/components/schemas/ChatBody"})
    assert not validator.is_valid({"messages": USER, "n": 2}), "this model is greedy by default"
    assert validator.is_valid({"messages": USER, "n": 2, "temperature": 1})
    assert not validator.is_valid({"messages": USER, "nonsense": 1})
    loose = document(app_of(make_engine, ignore_unknown_fields=True))
    assert validator_of(loose, {"$ref": "#/components/schemas/ChatBody"}).is_valid({"messages": USER, "nonsense": 1})


@pytest.mark.parametrize(
    ("annotation", "limits", "schema"),
    [
        (int | None, {"ge": 1, "lt": 5}, {"type": ["integer", "null"], "minimum": 1, "exclusiveMaximum": 5}),
        (float, {"gt": 0}, {"type": "number", "exclusiveMinimum": 0}),
        (str, {"max_length": 3}, {"type": "string", "maxLength": 3}),
        (list[str], {"items": {"min_length": 1}}, {"type": "array", "items": {"type": "string", "minLength": 1}}),
        (list, {"min_items": 1}, {"type": "array", "minItems": 1}),
        (dict[str, float], {"max_items": 2},
         {"type": "object", "additionalProperties": {"type": "number"}, "maxProperties": 2}),
        (dict | None, {}, {"type": ["object", "null"]}),
        (str | dict, {}, {"anyOf": [{"type": "string"}, {"type": "object"}]}),
        (Any, {}, {}),
    ],
    ids=str,
)  # fmt: skip
def test_types_and_limits(annotation, limits, schema):
    assert type_schema(annotation, limits) == schema


def test_a_type_without_a_schema_is_named():
    with pytest.raises(TypeError, match="bytes"):
        type_schema(bytes, {})


async def test_only_keyed_servers_speak_of_keys_and_their_documents_need_one(start):
    async with start() as open_api, start(api_key=["right"]) as keyed:
        _, doc = await open_api.call("/openapi.json", method="GET")
        assert "security" not in doc and "401" not in json.dumps(doc["paths"])
        for path in ("/docs", "/openapi.json"):
            assert (await open_api.call(path, method="GET"))[0] == 200
            await keyed.error(path, None, 401, method="GET")
        _, doc = await keyed.call("/openapi.json", method="GET", headers=KEY)
        assert doc["security"] == [{"key": []}] and doc["paths"]["/health"]["get"]["security"] == []
        assert "401" in doc["paths"][TEXT]["post"]["responses"]
        assert "Authorization: Bearer" in (await keyed.call("/docs", method="GET", headers=KEY))[1]


async def test_documents_can_be_switched_off(start):
    async with start(disable_docs=True) as api:
        for route in DOC_ROUTES:
            await api.error(route.path, None, 404, method="GET")
        await api.ok(TEXT, {"prompt": "a"})


# ----------------------------------------------------------------------------------------------------------- the truth


@pytest.mark.parametrize(
    ("route", "mode"),
    [(route, POSITIVE) for route in ROUTES] + [(route, NEGATIVE) for route in WITH_BODY],
    ids=lambda value: name_of(value) if isinstance(value, web.RouteDef) else value.value,
)
def test_answers_conform(guarded, route, mode):
    """Status, headers, content type and body of every answer are as the document says; and none is a 5xx."""
    doc = requests.get(guarded + "/openapi.json", headers=KEY).json()
    case_of = generator(doc, guarded, route)

    @given(case=case_of.as_strategy(generation_mode=mode))
    @QUICK
    def conforms(case: schemathesis.Case) -> None:
        case.call_and_validate(headers=KEY, excluded_checks=[checks.positive_data_acceptance])

    conforms()


def agree(url: str, path: str, validator: jsonschema.Draft202012Validator, body: Any) -> int:
    """The server takes just what the schema allows, but for causes that no schema can say. The status."""
    response = requests.post(url + path, json=body)
    refusal = None if response.ok else response.json()["error"]
    error = refusal and refusal["message"]
    assert response.status_code < 500, (body, error)
    assert refusal is None or refusal["param"], f"no field is named for {body}: {error}"
    complaints = [each.message for each in validator.iter_errors(body)]
    if error is None:
        assert not complaints, f"accepted, but the schema says no to {body}: {complaints}"
    elif not complaints:
        assert BEYOND_SCHEMA.search(error), f"the schema allows {body}, but: {error}"
    return response.status_code


@pytest.mark.parametrize("route", WITH_BODY, ids=name_of)
def test_bodies_that_the_schema_allows_are_accepted(url, doc, route):
    validator, statuses = body_validator(doc, route), []

    @given(case=generator(doc, url, route).as_strategy())
    @settings(QUICK, max_examples=80)
    def accepted(case: schemathesis.Case) -> None:
        statuses.append(agree(url, route.path, validator, {} if isinstance(case.body, NotSet) else case.body))

    accepted()
    assert statuses.count(200) > len(statuses) / 10, "generated bodies are hardly ever served"


leaves = st.none() | st.booleans() | st.integers(-2, 70) | st.floats(-3, 3) | st.sampled_from(["", "m", "5", "auto"])
anything = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["role", "5", "x"]), inner, max_size=2),
    max_leaves=4,
)


@pytest.mark.parametrize("route", WITH_BODY, ids=name_of)
def test_schema_and_server_agree_on_any_value_of_any_field(url, doc, route):
    validator = body_validator(doc, route)
    bodies = operation_of(route.handler).body
    names = sorted({name for cls in bodies for name in [*field_specs(cls), *cls.unsupported]} | {"nonsense"})

    @given(data=st.data())
    @settings(QUICK, max_examples=80)
    def agreed(data: st.DataObject) -> None:
        needed = example(data.draw(st.sampled_from(bodies)))
        agree(
            url,
            route.path,
            validator,
            needed | data.draw(st.dictionaries(st.sampled_from(names), anything, max_size=2)),
        )

    agreed()


@pytest.mark.parametrize(
    ("path", "name"), [(path, name) for path, cls in GENERATE.items() for name in sorted(field_specs(cls))]
)
def test_schema_and_server_agree_at_the_limits(url, doc, path, name):
    """Each limit, one below and one above it; the shortest and the longest list and text."""
    schema = doc["components"]["schemas"][GENERATE[path].__name__]["properties"][name]
    (route,) = (route for route in ROUTES if route.path == path)
    validator = body_validator(doc, route)
    statuses = {agree(url, path, validator, {**NEEDED[path], name: value}) for value in edges(schema)}
    assert {200, 400} <= statuses, "whatever the value, it is all the same"


CONFLICTS = [(path, conflict) for path, cls in GENERATE.items() for conflict in conflicts(cls)]
OF_ANY_FIELD = (None, True, False, 0, 1, 2, 1e-6, 1e-5, {}, "left", "", [], [LOGPROBS])


@pytest.mark.parametrize(
    ("path", "conflict"),
    CONFLICTS,
    ids=lambda value: f"{value.field}-{value.other}" if isinstance(value, Conflict) else value,
)
def test_schema_and_server_agree_on_conflicts(url, doc, path, conflict):
    """Both fields absent, null, within and outside of the limits in which they exclude each other."""
    (route,) = (route for route in ROUTES if route.path == path)
    validator = body_validator(doc, route)
    fields = body_validator(doc, route).schema["components"]["schemas"][GENERATE[path].__name__]["properties"]
    values = [
        [{}, *({name: value} for value in OF_ANY_FIELD if validator_of(doc, fields[name]).is_valid(value))]
        for name in (conflict.field, conflict.other)
    ]
    bodies = [{**NEEDED[path], **one, **other} for one in values[0] for other in values[1]]
    assert {agree(url, path, validator, body) for body in bodies} == {200, 400}


PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTIONS = [
    {"name": "f"}, {"name": "f", "description": None, "parameters": None, "strict": None}, {"name": "a-B_9" * 12},
    {"name": "f", "description": "d", "parameters": PARAMETERS, "strict": True}, {"name": "f", "parameters": {}},
    {"name": "f", "parameters": {"properties": {"a": True}}}, {"name": "f", "parameters": {"required": []}},
    {}, {"name": ""}, {"name": "a b"}, {"name": "a" * 65}, {"name": "f\n"}, {"name": None}, {"name": 1}, {"name": "f", "x": 1},
    {"name": "f", "strict": 1}, {"name": "f", "description": 1}, {"name": "f", "parameters": []},
    {"name": "f", "parameters": {"type": "array"}}, {"name": "f", "parameters": {"type": None}},
    {"name": "f", "parameters": {"properties": []}}, {"name": "f", "parameters": {"properties": {"a": 1}}},
    {"name": "f", "parameters": {"required": "a"}}, {"name": "f", "parameters": {"required": [1]}},
]  # fmt: skip
TOOLS = [
    None, [], [{"name": "f"}], ["f"], [None], [{"type": "function"}], [{"type": "function", "function": None}],
    [{"type": "web_search"}], [{"type": "function", "function": {"name": "f"}, "x": 1}],
    *([{"type": "function", "function": function}] for function in FUNCTIONS),
    *([{"type": "function", **function}] for function in FUNCTIONS),
]  # fmt: skip
CHOICES = [
    None, "none", "auto", "required", "some", "", {}, {"type": "function"}, {"type": "function", "name": "f"},
    {"type": "function", "name": 1}, {"type": "function", "function": {"name": "f"}},
    {"type": "function", "function": {}}, {"type": "function", "function": {"name": 1}}, {"type": "x", "name": "f"},
    {"type": "function", "name": "f", "function": {"name": "f"}},
]  # fmt: skip


@pytest.fixture(scope="module")
def tools_url(in_thread, backend):
    """A server whose chat template knows tools and reasoning."""
    using = Tokenizer(backend, bos_token_id=0, eos_token_ids=[1], chat_template=QWEN3)
    with in_thread(max_model_len=2048, using=using) as url:
        yield url


@pytest.mark.parametrize("path", [CHAT, RESPONSES, "/v1/responses/input_tokens", "/tokenize"])
def test_schema_and_server_agree_on_tools(tools_url, path):
    (route,) = (route for route in ROUTES if route.path == path)
    validator = body_validator(requests.get(tools_url + "/openapi.json").json(), route)
    needed = {**NEEDED.get(path, {"messages": USER}), **({"max_tokens": 1} if path == CHAT else {})}
    if path == "/v1/responses/input_tokens":
        needed = {"input": "hi"}
    bodies = [{**needed, "tools": tools} for tools in TOOLS]
    if path != "/tokenize":
        some = FUNCTIONS[3] if path != CHAT else {"function": FUNCTIONS[3]}
        tools = [{"type": "function", **some}]
        bodies += [{**needed, "tools": tools, "tool_choice": choice} for choice in CHOICES]
        bodies += [{**needed, "tool_choice": choice} for choice in CHOICES]
        efforts = (None, *EFFORTS, "much", 1, {})
        bodies += [
            {**needed, **({"reasoning_effort": each} if path == CHAT else {"reasoning": {"effort": each}})}
            for each in efforts
        ]
    assert [agree(tools_url, path, validator, body) for body in bodies].count(200) >= len(FUNCTIONS) / 4


BUDGETS = [None, 0, 1, 2, 2048, 10**6, 2**64, -1, 1.0, 1.5, True, "5", [], {}]
BESIDE_A_BUDGET = [
    {}, {"response_format": {"type": "json_object"}}, {"structured_outputs": {"choice": ["yes", "no"]}},
    {"tools": [{"type": "function", "function": FUNCTIONS[3]}], "tool_choice": "required"},
    {"tools": [{"type": "function", "function": FUNCTIONS[3]}]}, {"reasoning_effort": "none"},
    {"include_reasoning": False}, {"n": 2}, {"chat_template_kwargs": {"enable_thinking": False}},
    {"messages": [*USER, {"role": "assistant", "content": "<think>a"}], "continue_final_message": True, "add_generation_prompt": False},
    {"logprobs": True, "top_logprobs": 2}, {"stream": True, "stream_options": {"include_usage": True}},
]  # fmt: skip


@pytest.fixture(scope="module")
def thinker_url(in_thread, backend):
    """A server whose model has marks of reasoning that are tokens: it keeps a thinking_token_budget."""
    backend = tokenizers.Tokenizer.from_str(backend.to_str())
    backend.add_tokens(["<think>", "</think>"])
    using = Tokenizer(backend, bos_token_id=0, eos_token_ids=[1], chat_template=QWEN3)
    with in_thread(max_model_len=2048, using=using) as url:
        yield url


def test_schema_and_server_agree_on_a_budget_of_reasoning(thinker_url, tools_url):
    (route,) = (route for route in ROUTES if route.path == CHAT)
    statuses = []
    for url in (thinker_url, tools_url):
        validator = body_validator(requests.get(url + "/openapi.json").json(), route)
        bodies = [
            {"messages": USER, "max_tokens": 1, **beside, "thinking_token_budget": budget}
            for budget in BUDGETS
            for beside in BESIDE_A_BUDGET
        ]
        statuses.append([agree(url, CHAT, validator, body) for body in bodies].count(200))
    assert statuses == [len(BESIDE_A_BUDGET) * 8, len(BESIDE_A_BUDGET)], "null and whole numbers; null"

    validator = body_validator(requests.get(thinker_url + "/openapi.json").json(), route)
    names = sorted(set(field_specs(ChatBody)) - {"thinking_token_budget"})

    @given(budget=st.sampled_from(BUDGETS), others=st.dictionaries(st.sampled_from(names), anything, max_size=2))
    @settings(QUICK, max_examples=80)
    def agreed(budget: Any, others: dict[str, Any]) -> None:
        agree(thinker_url, CHAT, validator, {**NEEDED[CHAT], **others, "thinking_token_budget": budget})

    agreed()


CALL = {"function": {"name": "f", "arguments": "{}"}}
ANSWERS = [
    {"content": "a"}, {"content": ""}, {"content": None}, {}, {"content": []}, {"content": [{"type": "text", "text": ""}]},
    {"content": "a", "tool_calls": []}, {"content": None, "tool_calls": []}, {"tool_calls": [CALL]},
    {"content": None, "tool_calls": [CALL]}, {"content": [], "tool_calls": [CALL]}, {"content": 1, "tool_calls": [CALL]},
    {"content": "a", "tool_calls": [CALL, CALL]}, {"tool_calls": CALL}, {"tool_calls": [None]}, {"tool_calls": [{}]},
    {"tool_calls": [{**CALL, "id": "c", "type": "function", "index": 0}]}, {"tool_calls": [{**CALL, "type": "x"}]},
    {"tool_calls": [{**CALL, "id": None}]}, {"tool_calls": [{**CALL, "type": None}]}, {"tool_calls": [{**CALL, "id": 1}]},
    {"tool_calls": [{**CALL, "x": 1}]}, {"tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]},
    {"tool_calls": [{"function": {"name": "f"}}]}, {"tool_calls": [{"function": {"name": "f", "arguments": None}}]},
    {"tool_calls": [{"function": {"name": "", "arguments": "{}"}}]}, {"tool_calls": [{"function": {"name": "f", "x": 1}}]},
    {"tool_calls": [{"function": {"name": "f", "arguments": "["}}]}, {"tool_calls": [{"function": {"arguments": "{}"}}]},
    {"reasoning": "why"}, {"reasoning": ""}, {"reasoning": 1}, {"reasoning_content": "why"}, {"reasoning_content": ""},
    {"reasoning": "", "reasoning_content": "why"}, {"content": "a", "reasoning": None, "reasoning_content": "why"}, {"content": None, "reasoning": "why"},
    {"content": "a", "refusal": None, "annotations": [], "audio": None, "function_call": None},
    {"content": "a", "refusal": "no"}, {"content": "a", "x": 1}, {"content": "a", "name": 1},
]  # fmt: skip


@pytest.mark.parametrize("role", ["assistant", "user", "tool"])
def test_schema_and_server_agree_on_messages(tools_url, role):
    (route,) = (route for route in ROUTES if route.path == "/tokenize")
    validator = body_validator(requests.get(tools_url + "/openapi.json").json(), route)
    bodies = [{"messages": [*USER, {"role": role, **answer}]} for answer in ANSWERS]
    assert {agree(tools_url, "/tokenize", validator, body) for body in bodies} == {200, 400}


OUTPUT = {"type": "function_call_output", "call_id": "c", "output": "o"}
ITEMS = [
    *({"role": "user", "content": content} for content in ("a", "", None, [], [{"type": "input_text", "text": "a"}])),
    {"role": "assistant", "type": None, "content": [{"type": "output_text", "text": "a", "annotations": [], "x": None}]},
    {"type": "message", "role": "developer", "content": "a", "id": "i", "status": "completed", "x": None},
    {"role": "tool", "content": "a"}, {"role": "user"}, {"content": "a"}, {"role": "user", "content": "a", "x": 1},
    {"role": "user", "content": [{"type": "input_image"}]}, {"role": "user", "content": [{"type": "input_text"}]},
    {"role": "user", "content": "a", "status": "x"}, {"role": "user", "content": "a", "id": 1}, "a", None, {},
    OUTPUT, {**OUTPUT, "output": [{"type": "input_text", "text": "a"}]}, {**OUTPUT, "output": []},
    {**OUTPUT, "call_id": "d"}, {**OUTPUT, "type": "x"}, {**OUTPUT, "output": None},
    {"type": "function_call", "call_id": "d", "name": "f", "arguments": "{}"},
    {"type": "function_call", "call_id": "d", "name": "f", "arguments": "["}, {"type": "function_call", "name": "f"},
    *({"type": "reasoning", "content": content, "summary": summary}
      for content in (None, [], [{"type": "reasoning_text", "text": "a"}], [{"type": "x", "text": "a"}])
      for summary in (None, [], [{"type": "summary_text", "text": "a"}], [{}], 1)), {"type": "reasoning"},
]  # fmt: skip


@pytest.mark.parametrize("path", [RESPONSES, "/v1/responses/input_tokens"])
def test_schema_and_server_agree_on_items(tools_url, path):
    (route,) = (route for route in ROUTES if route.path == path)
    validator = body_validator(requests.get(tools_url + "/openapi.json").json(), route)
    before = [*USER, {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}]
    bodies = [{"input": [*before, item]} for item in ITEMS] + [{"input": []}, {"input": ""}]
    assert {agree(tools_url, path, validator, body) for body in bodies} == {200, 400}


def edges(schema: dict[str, Any]) -> list[Any]:
    """Values around the limits that a schema names, and one of every type."""
    values: list[Any] = [None, True, False, 1, 1.5, "a", [], {}, [1], ["a"], {"1": 1}]
    for each in schema.get("anyOf", [schema]):
        for key in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
            if key in each:
                values += [each[key] - 1, each[key], each[key] + 1]
        items = each.get("items", {})
        item = "x" if items.get("type") == "string" else 1
        for key in ("minItems", "maxItems"):
            if key in each:
                values += [[item] * max(each[key] + i, 0) for i in (-1, 0, 1)]
        for key in ("minLength", "maxLength"):
            if key in items:
                values += [["x" * max(items[key] + i, 0)] for i in (-1, 0, 1)]
            if key in each:
                values += ["x" * max(each[key] + i, 0) for i in (-1, 0, 1)]
        for key in ("minimum", "maximum"):
            if key in items:
                values += [[items[key] - 1], [items[key]], [items[key] + 1]]
        if "maxProperties" in each:
            values += [{str(i).zfill(3): 1 for i in range(each["maxProperties"] + more)} for more in (0, 1)]
        values += each.get("enum", [])
    return values + schema.get("examples", [])


def test_the_limits_of_sampling_are_those_of_the_offline_class():
    """A value just outside what the schema says raises in SamplingParams too."""
    for name, field in SamplingParams.__dataclass_fields__.items():
        if not field.metadata.get("http", True):
            continue
        schema = type_schema(field.type, field.metadata)
        for key, step in (("minimum", -1), ("maximum", 1)):
            if key in schema:
                with pytest.raises(ValueError, match=name):
                    check_limits(name, schema[key] + step, field.type, field.metadata)


@pytest.mark.parametrize("whole", [5, 5.0])
async def test_a_whole_number_is_an_integer_however_it_is_written(api, whole):
    body = {"prompt": [whole, 6], "max_tokens": whole, "stop_token_ids": [whole], "top_k": whole}
    await api.ok(TEXT, body)
    request = api.engine.requests[0]
    assert repr(request.prompt_token_ids) == "[5, 6]" and repr(request.max_tokens) == "5"
    assert await api.ok("/detokenize", {"tokens": [whole]})
    for bad in (5.5, 1e300, -5.0):
        await api.error(TEXT, {"prompt": "a", "max_tokens": bad})


# Calls that ask for all that an answer can hold.
FULL = [
    (TEXT, {"prompt": ["a", "fox"], "n": 2, "logprobs": 2, "prompt_logprobs": 1, "return_token_ids": True}),
    (TEXT, {"prompt": "a", "echo": True, "logprobs": 1, "max_tokens": 0}),
    (TEXT, {"prompt": "a", "stop_token_ids": list(range(4, 50)), "max_tokens": 60}),
    (CHAT, {"messages": USER, "n": 2, "logprobs": True, "top_logprobs": 2, "return_token_ids": True}),
    (CHAT, {"messages": USER, "prompt_logprobs": 1, "stop": ["a", "e"]}),
    ("/tokenize", {"prompt": "fox", "return_token_strs": True}),
    ("/tokenize", {"messages": USER, "return_token_strs": True}),
    ("/detokenize", {"tokens": [5, 6]}),
    (RESPONSES, {"input": "hi", "include": [LOGPROBS], "top_logprobs": 2, "metadata": {"a": "b"}}),
    (RESPONSES, {"input": USER, "instructions": "Be kind.", "max_output_tokens": 3, "text": {"verbosity": "medium"}}),
    ("/v1/responses/input_tokens", {"input": USER, "truncation": "auto"}),
    ("/abort_requests", {}),
]


async def streamed(api, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    async with api.session.post(api.url + path, json={**body, "stream": True}) as response:
        assert response.content_type == "text/event-stream", await response.text()
        data = re.findall(r"^data: (.+)$", await response.text(), re.MULTILINE)
    assert (data[-1] == "[DONE]") == (path != RESPONSES)
    return [json.loads(each) for each in data if each != "[DONE]"]


@pytest.mark.parametrize(("path", "body"), FULL, ids=json.dumps)
async def test_full_answers_conform(api, path, body):
    _, doc = await api.call("/openapi.json", method="GET")
    content = doc["paths"][path]["post"]["responses"]["200"]["content"]
    validator_of(doc, content["application/json"]["schema"]).validate(await api.ok(path, body))
    if "text/event-stream" not in content or "prompt_logprobs" in body:
        return
    data, _ = content["text/event-stream"]["schema"]["properties"]["data"]["anyOf"]
    validator = validator_of(doc, data["contentSchema"])
    options = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    events = await streamed(api, path, {**body, **({} if path == RESPONSES else options)})
    api.engine.broken_at = (1, EngineError("x"))
    events += await streamed(api, path, {**body, "max_output_tokens" if path == RESPONSES else "max_tokens": 9})
    assert "error" in (events[-1]["response"] if path == RESPONSES else events[-1])
    for each in events:
        validator.validate(each)


# ------------------------------------------------------------------------------------------------------------ the page


class Page(HTMLParser):
    """What could reach out of the page, or run in it."""

    def __init__(self, text: str):
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs


async def page(api, **headers: str) -> tuple[str, Any]:
    async with api.session.get(api.url + "/docs", headers=headers) as response:
        assert response.status == 200 and response.content_type == "text/html"
        return await response.text(), response.headers


async def test_the_page_lists_everything(api):
    text, _ = await page(api)
    _, doc = await api.call("/openapi.json", method="GET")
    for path, methods in doc["paths"].items():
        for method in methods:
            assert f"<code>{method.upper()} {path}</code>" in text
            assert f"{api.url}{path}" in text, "no call to copy"
    for schema in doc["components"]["schemas"].values():
        if "additionalProperties" in schema:
            assert all(f"<code>{name}</code>" in text for name in schema["properties"])
    assert "not both top_logprobs ≥ 1 and logprobs = false" in text
    assert "≥ 0, ≤ 2" in text and "&quot;stream&quot;: true" in text


async def test_the_page_runs_nothing_and_loads_nothing(start):
    async with start(served_model_name=["<script>alert(1)</script>", "'\"&"]) as api:
        text, headers = await page(api)
        found = Page(text)
        assert not {"script", "iframe", "object", "embed", "link", "img", "form", "base"} & set(found.tags)
        assert not [name for name, _ in found.attributes if name.startswith("on") or name in ("style", "src")]
        links = [value for name, value in found.attributes if name == "href"]
        assert links and all(value == "openapi.json" or value.startswith("#") for value in links)
        style = text.split("<style>")[1].split("</style>")[0]
        digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
        policy = dict(part.strip().split(" ", 1) for part in headers["Content-Security-Policy"].split(";"))
        assert policy["default-src"] == "'none'" and policy["style-src"] == f"'sha256-{digest}'"


@pytest.mark.parametrize("host", ["evil\"'><b>", "a b.c", "$(id)", "[::1", ""])
async def test_a_host_that_is_none_is_not_shown(api, host):
    text, _ = await page(api, Host=host)
    assert "http://localhost:8000/v1/models" in text and (not host or host not in text)


async def test_the_calls_of_the_page_work(start):
    """Each curl command, as a shell would read it."""
    import shlex
    from html import unescape

    async with start(api_key=["right"]) as api:
        text, _ = await page(api, **KEY)
        calls = re.findall(r"<pre>(.+?)</pre>", text, re.DOTALL)
        assert len(calls) > len(ROUTES)
        background = {"input": "hi", "background": True}
        for call in calls:
            words = [word for word in shlex.split(unescape(call).replace("\\\n", "")) if word not in ("curl", "-N")]
            method = words[words.index("-X") + 1] if "-X" in words else "POST" if "-d" in words else "GET"
            target = next(word for word in words if word.startswith("http")).replace("{model}", "m")
            if "{response_id}" in target:
                made = await api.session.post(api.url + RESPONSES, json=background, headers=KEY)
                target = target.replace("{response_id}", (await made.json())["id"])
            sent = [words[i + 1].partition(": ") for i, word in enumerate(words) if word == "-H"]
            headers = {name: value.replace("$JAXSERVE_API_KEY", "right") for name, _, value in sent}
            data = words[words.index("-d") + 1].encode() if "-d" in words else None
            async with api.session.request(method, target, headers=headers, data=data) as response:
                assert response.status == 200, (call, await response.text())

"""Bodies, whatever they hold, either parse or are refused with one RequestError; the schema follows SamplingParams."""

import dataclasses
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.errors import RequestError
from jaxserve.http.responses_schema import InputTokensBody, ResponseBody
from jaxserve.http.schema import (
    UNSUPPORTED,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
    TokenizeChatBody,
    decode_object,
    field_specs,
    parse,
    split_prompts,
)
from jaxserve.request import SamplingParams

BODIES = [ChatBody, CompletionBody, DetokenizeBody, TokenizeBody, TokenizeChatBody, InputTokensBody, ResponseBody]
GOOD = {"prompt": "hi", "input": "hi", "messages": [{"role": "user", "content": "hi"}], "tokens": [1]}

leaves = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8)
)
values = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


def names_of(cls) -> list[str]:
    return sorted({*field_specs(cls), *(cls.unsupported or UNSUPPORTED), "nonsense"})


@pytest.mark.parametrize("cls", BODIES)
@given(data=st.data())
@settings(max_examples=80, deadline=None)
def test_any_value_of_any_field_parses_or_is_refused(cls, data):
    required = {name: GOOD[name] for name, spec in field_specs(cls).items() if spec.required}
    raw = required | data.draw(st.dictionaries(st.sampled_from(names_of(cls)), values, max_size=3))
    try:
        body, sampling = parse(cls, raw, check_model=lambda name: None, ignore_unknown=False)
        SamplingParams(**{"max_tokens": 16, **sampling})
        if isinstance(body, CompletionBody):
            split_prompts(body.prompt)
    except RequestError as error:
        assert error.status == 400 and 0 < len(error.message) < 500


@given(st.binary(max_size=40))
@settings(max_examples=80, deadline=None)
def test_any_bytes_decode_or_are_refused(body):
    try:
        assert isinstance(decode_object(body), dict)
    except RequestError as error:
        assert len(error.message) < 300


def test_every_sampling_field_is_an_http_field():
    http = {f.name for f in dataclasses.fields(SamplingParams) if f.metadata.get("http", True)}
    assert http <= set(field_specs(CompletionBody)) and "detokenize" not in http
    assert not set(field_specs(TokenizeBody)) & http, "/tokenize samples nothing"


def test_body_fields_win_over_sampling_fields_of_the_same_name():
    assert field_specs(ChatBody)["logprobs"].type is bool
    assert field_specs(CompletionBody)["logprobs"].sampling


def test_supported_fields_are_not_listed_as_unsupported():
    assert not set(UNSUPPORTED) & (set(field_specs(CompletionBody)) - {"echo", "best_of", "suffix"})
    only_of_chats = {"thinking_token_budget", "tools", "tool_choice", "include_reasoning", "reasoning_effort"}
    assert set(UNSUPPORTED) & set(field_specs(ChatBody)) - {"echo"} == only_of_chats
    assert not set(ResponseBody.unsupported) & set(field_specs(ResponseBody))


def test_null_is_the_default_for_every_field():
    for cls in BODIES:
        required = {name: GOOD[name] for name, spec in field_specs(cls).items() if spec.required}
        known = {*field_specs(cls), *cls.unsupported}
        nulls = {name: None for name in names_of(cls) if name in known and name not in required}
        body, sampling = parse(cls, required | nulls, check_model=lambda name: None, ignore_unknown=False)
        assert body == cls(**required) and sampling == {}


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
    ],
    ids=json.dumps,
)
def test_the_four_forms_of_a_prompt(prompt, prompts):
    assert split_prompts(prompt) == prompts


HALVES = [
    (r'{"user":"%s"}', r"\ud800"), (r'{"user":"x%sx"}', r"\uDFFF"), (r'{"user":"%s\n"}', r"\ud83d"),
    (r'{"user":"\\%s"}', r"\udc00"), (r'{"user":"\ud83d\ude00%s"}', r"\ude00"), (r'{"%s":1}', r"\uDABC"),
    (r'{"user":"%s\ud83d\ude00"}', r"\ud83d"), (r'{"user":"%s\u0041"}', r"\ud800"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "half"), HALVES)
def test_half_of_a_surrogate_pair_is_named(body, half):
    with pytest.raises(RequestError) as caught:
        decode_object((body % half).encode())
    place = f"{half} is half of a surrogate pair, and no character (byte {body.index('%s')})"
    assert caught.value.message == f"the request body is not valid JSON: {place}"


@pytest.mark.parametrize("body", ["", " ", "\n\t"])
def test_an_empty_body_is_called_empty(body):
    with pytest.raises(RequestError, match="is not valid JSON: it is empty"):
        decode_object(body.encode())


@pytest.mark.parametrize("body", [r'{"user":"\\ud800"}', r'{"user":"\ud83d\ude00"}'])
def test_whole_characters_pass(body):
    assert decode_object(body.encode()) == json.loads(body)


@pytest.mark.parametrize("body", [r'{"user":"\\ud800",}', r'{"user":"\ud83d\ude00",}', '{"user'])
def test_other_errors_keep_their_words(body):
    with pytest.raises(RequestError, match="trailing comma|truncated"):
        decode_object(body.encode())

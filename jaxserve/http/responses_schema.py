"""Bodies of /v1/responses: declared and checked as those of schema.py."""

import dataclasses
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from jaxserve.chat import EFFORTS
from jaxserve.errors import RequestError
from jaxserve.http.response_items import input_schema
from jaxserve.http.schema import HTTP_SAMPLING, Body, Conflict, Facts, priority_field, template_kwargs_field
from jaxserve.parsers import MAX_TOOLS, allowed_tools_schema, function_schema
from jaxserve.request import MAX_LOGPROBS, StructuredOutputsParams, check_limits, knob, short

LOGPROBS = "message.output_text.logprobs"  # the one thing that `include` may ask for
FORMATS = ("text", "json_object", "json_schema")
MAX_LABEL_CHARS = 512
MAX_METADATA, MAX_METADATA_KEY_CHARS, MAX_METADATA_CHARS = 16, 64, 512

# Fields of the OpenAI and vLLM APIs that are not implemented, and the values with which they ask for nothing.
UNSUPPORTED: dict[str, tuple] = {
    "access_programs": (),
    "background_options": (),
    "cache_salt": (),
    "context_management": ([],),
    "conversation": (),
    "enable_response_messages": (False,),
    "image": (),
    "kv_transfer_params": (),
    "max_tool_calls": (),
    "mm_processor_kwargs": ({},),
    "moderation": (),
    "n": (1,),
    "personality": (),
    "previous_input_messages": (),
    "prompt": (),
    "prompt_cache_options": (),
    "request_id": (),
    "service_tier": ("auto", "default"),
    "session_id": (),
    "vllm_xargs": ({},),
}


NULL = {"type": "null"}
FORMAT: dict[str, Any] = {
    "anyOf": [
        NULL,
        {
            "type": "object",
            "properties": {"type": {"enum": ["text", "json_object"]}},
            "required": ["type"],
            "additionalProperties": NULL,
        },
        {
            "type": "object",
            "properties": {
                "type": {"const": "json_schema"},
                "name": {"type": "string"},
                "description": {"type": ["string", "null"]},
                "strict": {"type": ["boolean", "null"]},
                "schema": {"type": "object"},
            },
            "required": ["type", "name", "schema"],
            "additionalProperties": NULL,
        },
    ]
}
_NAMED = {
    "type": "object",
    "properties": {"type": {"const": "function"}, "name": {"type": "string"}},
    "required": ["type", "name"],
}
TOOL_CHOICE = {
    "anyOf": [{"enum": ["none", "auto", "required", None]}, _NAMED, allowed_tools_schema(_NAMED, nested=False)]
}


def _object_schema(**properties: dict[str, Any]) -> dict[str, Any]:
    """What _check_fields takes."""
    return {"type": ["object", "null"], "properties": properties, "additionalProperties": NULL}


def _if_kept(facts: Facts) -> dict[str, Any]:
    """A flag for servers that keep responses."""
    return {"type": ["boolean", "null"]} if facts.keeps_responses else {"enum": [False, None]}


def _tools_schema(facts: Facts) -> dict[str, Any]:
    """Functions without an object of their own."""
    function = function_schema(facts.ignore_unknown)
    tool = {
        **function,
        "properties": {"type": {"const": "function"}, **function["properties"]},
        "required": ["type", *function["required"]],
    }
    return {"type": ["array", "null"], "maxItems": MAX_TOOLS, "items": tool}


@dataclass(kw_only=True)
class InputTokensBody(Body):
    """POST /v1/responses/input_tokens: the fields that make the prompt."""

    unsupported = UNSUPPORTED

    input: str | list = dataclasses.field(
        metadata={
            "doc": "a user's message, or items of a conversation",
            "schema": lambda facts: input_schema(facts.ignore_unknown),
            "example": "Say hello in French.",
        }
    )
    instructions: str | None = knob(None, "a system message before everything else")
    previous_response_id: str | None = knob(None, "the response that this conversation goes on from")
    reasoning: dict | None = knob(
        None,
        f"effort: {', '.join(EFFORTS)}, as far as the chat template knows it",
        schema=_object_schema(effort={"enum": [*EFFORTS, None]}),
    )
    text: dict | None = knob(
        None,
        "format: of type text, json_object or json_schema",
        schema=_object_schema(format=FORMAT, verbosity={"enum": ["medium", None]}),
    )
    tools: list = knob([], "functions that the model may call", schema=_tools_schema)
    tool_choice: str | dict = knob("auto", "none, auto, required, or the function to call", schema=TOOL_CHOICE)
    parallel_tool_calls: bool = knob(True, "allow more than one call")
    truncation: str = knob(
        "disabled",
        "auto: leave out the oldest turns of a conversation that is too long",
        schema={"enum": ["auto", "disabled", None]},
    )
    chat_template_kwargs: dict | None = template_kwargs_field()

    def check(self) -> None:
        super().check()
        _check_choice("truncation", self.truncation, ("auto", "disabled"))
        if (summary := (self.reasoning or {}).get("summary")) is not None:
            # Nothing here summarises, and the reasoning itself is sent whole: to call that a summary would be a lie.
            message = f"reasoning.summary may only be null: the reasoning is sent as it is, got {short(summary)}"
            raise RequestError(message, param="reasoning.summary")
        reasoning = _check_fields("reasoning", self.reasoning, {"effort": str})
        if "effort" in reasoning:
            _check_choice("reasoning.effort", reasoning["effort"], EFFORTS)
        text = _check_fields("text", self.text, {"format": dict, "verbosity": str})
        if text.get("verbosity", "medium") != "medium":
            raise RequestError("text.verbosity is not supported yet; it may be 'medium'", param="text.verbosity")
        if "format" in text:
            kind = text["format"].get("type")
            _check_choice("text.format.type", kind if isinstance(kind, str) else "", FORMATS)

    @property
    def effort(self) -> str | None:
        return (self.reasoning or {}).get("effort")

    @property
    def text_format(self) -> dict[str, Any]:
        return (self.text or {}).get("format") or {"type": "text"}

    # The same things as a chat says them.

    @property
    def response_format(self) -> dict[str, Any]:
        given = {name: value for name, value in self.text_format.items() if value is not None}
        if given["type"] != "json_schema":
            return given
        return {"type": given.pop("type"), "json_schema": given}

    @property
    def chat_tools(self) -> list[Any] | None:
        return [_function(tool) for tool in self.tools] or None

    @property
    def chat_tool_choice(self) -> Any:
        if isinstance(self.tool_choice, dict) and self.tool_choice.get("type") == "allowed_tools":
            given = {name: value for name, value in self.tool_choice.items() if name != "type"}
            if isinstance(given.get("tools"), list):
                given["tools"] = [_function(tool) for tool in given["tools"]]
            return {"type": "allowed_tools", "allowed_tools": given}
        if isinstance(self.tool_choice, dict):
            return _function(self.tool_choice)
        return None if self.tool_choice == "auto" else self.tool_choice


def _function(given: Any) -> Any:
    """{"type", "name", ...} -> {"type", "function": {"name", ...}}, unchecked."""
    if not isinstance(given, dict):
        return given
    return {"type": given.get("type"), "function": {name: value for name, value in given.items() if name != "type"}}


# How parts of a chat, by which errors call them, are called here.
_NAMES = (
    (r"^messages\b.*", "input"),
    (r"\bmax_tokens\b", "max_output_tokens"),
    (r"^reasoning_effort\b", "reasoning.effort"),
    (r"^response_format(\.json_schema)?", "text.format"),
    (r"^tool_choice\.allowed_tools\b", "tool_choice"),
    (r"^(tools\.\d+|tool_choice)\.function\b", r"\1"),
)


def renamed(error: RequestError) -> RequestError:
    """What is said of a chat, in the words of a response."""
    old = error.param or ""
    new = old
    for pattern, name in _NAMES:
        new = re.sub(pattern, name, new)
    message = error.info().message
    message = message.replace(old, new) if new != old else message
    for chat_name, name in ((" max_tokens ", " max_output_tokens "), ("response_format ", "text.format ")):
        message = message.replace(chat_name, name)
    return type(error)(message, param=new or None)


@dataclass(kw_only=True)
class ResponseBody(InputTokensBody):
    """POST /v1/responses."""

    sampling_fields = HTTP_SAMPLING - {"n", "max_tokens", "logprobs", "prompt_logprobs"}
    conflicts = (
        Conflict("stream_options", {}, "stream", {"const": False}, needs="stream=true"),
        Conflict("top_logprobs", {"ge": 1}, "include", {"max_items": 0}, needs=f'include=["{LOGPROBS}"]'),
        Conflict("store", {"const": False}, "background", {"const": True}),
    )

    max_output_tokens: int | None = knob(None, "tokens to generate at most, reasoning included", ge=1, context=True)
    top_logprobs: int = knob(0, f"likeliest tokens per position; needs include {LOGPROBS}", ge=0, le=MAX_LOGPROBS)
    include: list[str] = knob(
        [],
        f"{LOGPROBS}: also send the logprobs of the text",
        schema={"type": ["array", "null"], "items": {"const": LOGPROBS}},
    )
    stream: bool = knob(False, "send the answer in pieces, as server-sent events")
    stream_options: dict | None = knob(
        None, "include_obfuscation: false", schema=_object_schema(include_obfuscation={"enum": [False, None]})
    )
    background: bool = knob(False, "answer at once, and generate; the response is got by its id", schema=_if_kept)
    store: bool | None = knob(None, "keep the response; absent: if the server keeps any", schema=_if_kept)
    priority: int = priority_field()
    structured_outputs: dict | None = knob(
        None, "what the output must be: one of json, regex, choice, grammar, ...", like=StructuredOutputsParams
    )
    metadata: dict | None = knob(
        None,
        "texts that come back with the response",
        schema={
            "type": ["object", "null"],
            "maxProperties": MAX_METADATA,
            "propertyNames": {"maxLength": MAX_METADATA_KEY_CHARS},
            "additionalProperties": {"type": "string", "maxLength": MAX_METADATA_CHARS},
        },
    )
    # OpenAI fields that ask for nothing of us.
    user: str | None = knob(None, "comes back with the response", max_length=MAX_LABEL_CHARS)
    safety_identifier: str | None = knob(None, "comes back with the response", max_length=MAX_LABEL_CHARS)
    prompt_cache_key: str | None = knob(None, "comes back with the response", max_length=MAX_LABEL_CHARS)
    prompt_cache_retention: str | None = knob(None, "not used")

    def check(self) -> None:
        super().check()
        for what in self.include:
            if what != LOGPROBS:
                raise RequestError(f"include: {short(what)} is not supported yet; {LOGPROBS} is", param="include")
        if _check_fields("stream_options", self.stream_options, {"include_obfuscation": bool}).get(
            "include_obfuscation"
        ):
            raise RequestError("stream_options.include_obfuscation is not supported yet", param="stream_options")
        self._check_metadata()

    @property
    def may_have_grammar(self) -> bool:
        return bool(self.tools or self.structured_outputs) or self.text_format["type"] != "text"

    @property
    def with_logprobs(self) -> bool:
        return LOGPROBS in self.include

    def _check_metadata(self) -> None:
        metadata = self.metadata or {}
        if len(metadata) > MAX_METADATA:
            raise RequestError(f"metadata takes at most {MAX_METADATA} entries, got {len(metadata)}", param="metadata")
        for key, value in metadata.items():
            _check_chars("metadata", key, MAX_METADATA_KEY_CHARS, what=" in a key")
            place = f"metadata.{key}"
            check_limits(place, value, str, {})
            _check_chars(place, value, MAX_METADATA_CHARS)


def _check_choice(place: str, value: str, choices: Collection[str]) -> None:
    if value not in choices:
        raise RequestError(f"{place} must be one of {', '.join(choices)}, got {short(value)}", param=place)


def _check_chars(place: str, text: str, limit: int, *, what: str = "") -> None:
    if len(text) > limit:
        raise RequestError(f"{place} takes at most {limit} characters{what}, got {len(text)}", param=place)


def _check_fields(place: str, value: dict[str, Any] | None, known: dict[str, type]) -> dict[str, Any]:
    """The fields of an object that are not null, all known. Raises RequestError naming what is not."""
    given = {name: each for name, each in (value or {}).items() if each is not None}
    for name, each in given.items():
        if name not in known:
            names = ", ".join(known)
            raise RequestError(
                f"{place}: unknown field {short(name)}; supported is {names}", param=f"{place}.{name[:64]}"
            )
        check_limits(f"{place}.{name}", each, known[name], {})
    return given

"""Request bodies: bytes -> a typed body, or one RequestError that names field, limit and value.

Sampling fields are those of SamplingParams (name, type, limits: declared there, once); the classes below add what only
HTTP has. Checked in this order: JSON, names and types of fields, the model (404), values, conflicts of fields. null
means the default. json_schema.py turns the same declarations into what /openapi.json says.
"""

import dataclasses
import difflib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, NamedTuple

import msgspec

from jaxserve import structured
from jaxserve.chat import EFFORTS, RESERVED_KWARGS, message_schema
from jaxserve.errors import RequestError
from jaxserve.frontend import Truncation
from jaxserve.parsers import tool_choice_schema, tools_schema
from jaxserve.request import (
    GREEDY_BELOW,
    KINDS,
    MAX_LOGPROBS,
    SamplingParams,
    StructuredOutputsParams,
    check_limits,
    knob,
    short,
)

MAX_PROMPTS = 1024
MAX_INPUTS = 2048  # texts of one call of /v1/embeddings
ENCODING_FORMATS = ("float", "base64")
POOLINGS = ("last", "mean")
COMPLETION_MAX_TOKENS = 16  # of a completion that names none

# Fields of the OpenAI and vLLM APIs that are not implemented, and the values with which they ask for nothing.
UNSUPPORTED: dict[str, tuple] = {
    "audio": (),
    "best_of": (1,),
    "cache_salt": (),
    "detokenize": (True,),
    "documents": ([],),
    "echo": (False,),
    "ec_transfer_params": (),
    "flat_logprobs": (False,),
    "function_call": ("none",),
    "functions": (),
    "guided_choice": (),
    "guided_decoding_backend": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_whitespace_pattern": (),
    "include_reasoning": (True,),
    "kv_transfer_params": (),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "logprob_token_ids": (),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "prediction": (),
    "prompt_embeds": (),
    "reasoning_effort": ("none",),
    "repetition_detection": (),
    "request_id": (),
    "return_assistant_tokens_mask": (False,),
    "return_prompt_text": (False,),
    "service_tier": ("auto", "default"),
    "session_id": (),
    "spaces_between_special_tokens": (True,),
    "store": (False,),
    "stream_interval": (1,),
    "suffix": ("",),
    "thinking_token_budget": (),
    "tool_choice": ("none",),
    "tools": (),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "vllm_xargs": ({},),
    "web_search_options": (),
}

HTTP_SAMPLING = frozenset(f.name for f in dataclasses.fields(SamplingParams) if f.metadata.get("http", True))


# What structured.from_request takes; whether schemas, regexes and grammars are good is told by their compilers.
RESPONSE_FORMAT: dict[str, Any] = {
    "anyOf": [
        {"type": "null"},
        {
            "type": "object",
            "properties": {"type": {"enum": ["text", "json_object"]}},
            "required": ["type"],
            "additionalProperties": {"type": "null"},
        },
        {
            "type": "object",
            "properties": {
                "type": {"const": "json_schema"},
                "json_schema": {
                    "type": "object",
                    "properties": {
                        "name": {"type": "string"},
                        "description": {"type": ["string", "null"]},
                        "strict": {"type": ["boolean", "null"]},
                        "schema": {"type": "object"},
                    },
                    "required": ["name", "schema"],
                    "additionalProperties": False,
                },
            },
            "required": ["type", "json_schema"],
            "additionalProperties": {"type": "null"},
        },
        {"type": "object", "properties": {"type": {"const": "structural_tag"}}, "required": ["type"]},
    ]
}


class Facts(NamedTuple):
    """What only a running server knows of the values that fields may have."""

    model_names: tuple[str, ...]
    vocab_size: int
    max_model_len: int
    has_priorities: bool
    keeps_responses: bool
    hidden_size: int
    matryoshka: bool
    limits_thinking: bool
    ignore_unknown: bool
    defaults: Mapping[str, Any]  # of sampling fields, from the model

    @property
    def token_id(self) -> dict[str, Any]:
        return {"type": "integer", "minimum": 0, "maximum": self.vocab_size - 1}


class Conflict(NamedTuple):
    """Two fields that may not both have a value within these limits (those of knob(), or `const`; {} is any value).

    A field that is absent has its default. The first one is blamed; `needs`: what it asks of the other, for the error.
    """

    field: str
    limits: Mapping[str, Any]
    other: str
    other_limits: Mapping[str, Any]
    needs: str = ""


@dataclass(kw_only=True)
class Body:
    """Fields of every body. `conflicts` of a class come beside those of its bases.

    sampling_fields: those of SamplingParams that it takes, too
    unsupported: known fields that are not implemented, and the values with which they ask for nothing

    Metadata of fields beside that of knob(): `schema`, JSON Schema that replaces what type and limits say, if need be
    a function of the server's Facts; `like`, a dataclass whose fields an object has; `example`, a value to show.
    """

    sampling_fields: ClassVar[frozenset[str]] = frozenset()
    unsupported: ClassVar[Mapping[str, tuple]] = {}
    conflicts: ClassVar[tuple[Conflict, ...]] = ()

    model: str | None = knob(
        None,
        "name of the model; absent or empty: the one served",
        schema=lambda facts: {"enum": [*facts.model_names, "", None]},
    )

    def check(self) -> None:
        """Checks values. Raises RequestError."""
        for f in dataclasses.fields(self):
            check_limits(f.name, getattr(self, f.name), f.type, f.metadata)


def priority_field() -> Any:
    return knob(
        0,
        "lower first, under --scheduling-policy priority",
        ge=-(2**31),
        le=2**31 - 1,
        schema=lambda facts: {} if facts.has_priorities else {"enum": [0, None]},
    )


STREAM_OPTIONS = ("include_usage", "continuous_usage_stats", "include_obfuscation")


@dataclass(kw_only=True)
class GenerateBody(Body):
    """Fields of every body that asks for generated text."""

    sampling_fields = HTTP_SAMPLING
    unsupported = UNSUPPORTED

    conflicts = (
        Conflict("stream_options", {}, "stream", {"const": False}, needs="stream=true"),
        Conflict("prompt_logprobs", {}, "stream", {"const": True}),
        Conflict("n", {"ge": 2}, "temperature", {"lt": GREEDY_BELOW}),
        Conflict("truncation_side", {}, "truncate_prompt_tokens", {"const": None}, needs="truncate_prompt_tokens"),
    )

    stream: bool = knob(False, "send the answer in pieces, as server-sent events")
    stream_options: dict | None = knob(
        None,
        "include_usage: the usage in a last event; continuous_usage_stats: the usage so far in every event",
        schema={
            "type": ["object", "null"],
            "properties": {name: {"type": ["boolean", "null"]} for name in STREAM_OPTIONS[:2]}
            | {name: {"enum": [False, None]} for name in STREAM_OPTIONS[2:]},
            "additionalProperties": False,
        },
    )
    priority: int = priority_field()
    response_format: dict | None = knob(
        None, "what the output must be, as OpenAI says it: type and json_schema", schema=RESPONSE_FORMAT
    )
    structured_outputs: dict | None = knob(
        None, "what the output must be: one of json, regex, choice, grammar, ...", like=StructuredOutputsParams
    )
    return_token_ids: bool = knob(False, "also send the ids of the prompt's and the output's tokens")
    return_tokens_as_token_ids: bool = knob(False, "name tokens as token_id:N in logprobs")
    truncate_prompt_tokens: int | None = knob(
        None,
        "cut the prompt to so many tokens; -1: to what leaves room for max_tokens",
        ge=-1,
        schema=lambda facts: {
            "type": ["integer", "null"],
            "minimum": -1,
            "maximum": facts.max_model_len,
            "not": {"const": 0},
        },
    )
    truncation_side: str | None = knob(
        None,
        "what is cut off: left (the beginning; the default) or right",
        schema={"enum": ["left", "right", None]},
    )
    # OpenAI fields that ask for nothing of us.
    user: str | None = knob(None, "not used")
    metadata: dict | None = knob(None, "not used")
    safety_identifier: str | None = knob(None, "not used")
    prompt_cache_key: str | None = knob(None, "not used")
    prompt_cache_retention: str | None = knob(None, "not used")
    parallel_tool_calls: bool | None = knob(None, "false: at most one call of a tool")

    def check(self) -> None:
        super().check()
        self._check_truncation()
        for name, value in (self.stream_options or {}).items():
            if name not in STREAM_OPTIONS:
                raise RequestError(f"unknown field {short(name)} in stream_options", param="stream_options")
            if not isinstance(value, bool | None):
                raise RequestError(
                    f"stream_options.{name} must be a boolean, got {short(value)}", param="stream_options"
                )
        if (self.stream_options or {}).get("include_obfuscation"):
            raise RequestError("stream_options.include_obfuscation is not supported yet", param="stream_options")

    def _check_truncation(self) -> None:
        if self.truncate_prompt_tokens == 0:
            raise RequestError(
                "truncate_prompt_tokens must be at least 1, or -1, got 0", param="truncate_prompt_tokens"
            )
        if self.truncation_side not in ("left", "right", None):
            given = short(self.truncation_side)
            raise RequestError(f"truncation_side must be left or right, got {given}", param="truncation_side")

    def truncation(self, max_model_len: int) -> Truncation | None:
        """How to cut the prompt. Raises RequestError if that is more than the context."""
        if self.truncate_prompt_tokens is None:
            return None
        if self.truncate_prompt_tokens > max_model_len:
            raise RequestError(
                f"truncate_prompt_tokens must be at most the model's context of {max_model_len} tokens, got"
                f" {short(self.truncate_prompt_tokens)}",
                param="truncate_prompt_tokens",
            )
        return Truncation(self.truncate_prompt_tokens, "right" if self.truncation_side == "right" else "left")

    @property
    def structured_field(self) -> str:
        """Where the structured output was asked for."""
        kind = (self.response_format or {}).get("type", "text")
        return "structured_outputs" if kind == "text" else "response_format"

    @property
    def include_usage(self) -> bool:
        """A last event with the usage of the whole call."""
        return bool((self.stream_options or {}).get("include_usage"))

    @property
    def continuous_usage(self) -> bool:
        """The usage so far in every event."""
        return bool((self.stream_options or {}).get("continuous_usage_stats"))


def _prompt_schema(facts: Facts, limit: int = MAX_PROMPTS) -> dict[str, Any]:
    """The four forms of split_prompts()."""
    text = {"type": "string", "minLength": 1}
    ids = {"type": "array", "minItems": 1, "maxItems": facts.max_model_len - 1, "items": facts.token_id}
    several = {"type": "array", "minItems": 1, "maxItems": limit}
    return {"anyOf": [text, ids, several | {"items": text}, several | {"items": ids}]}


@dataclass(kw_only=True)
class CompletionBody(GenerateBody):
    """POST /v1/completions."""

    conflicts = (
        Conflict("max_tokens", {"le": 0}, "echo", {"const": False}, needs="echo=true"),
        Conflict("min_tokens", {"ge": 1}, "max_tokens", {"const": 0}),
        Conflict("best_of", {"ge": 2}, "stream", {"const": True}),
        Conflict("suffix", {"min_length": 1}, "echo", {"const": True}),
        Conflict("suffix", {"min_length": 1}, "truncate_prompt_tokens", {}),
    )

    prompt: str | list = dataclasses.field(
        metadata={
            "doc": "a text, token ids, or a list of either",
            "schema": _prompt_schema,
            "example": "The capital of France is",
        }
    )
    max_tokens: int | None = knob(
        None,
        f"tokens to generate at most; absent: {COMPLETION_MAX_TOKENS}; 0, with echo: only score the prompt",
        ge=0,
        context=True,
    )
    echo: bool = knob(False, "begin the output with the prompt")
    best_of: int | None = knob(None, "generate so many, and send the n of the highest logprob per token", ge=1, le=128)
    suffix: str | None = knob(None, "text after the output, for models that fill in the middle; empty: none")
    add_special_tokens: bool = knob(True, "let the tokenizer add its special tokens, such as BOS, to a text")

    def prompts(self) -> list[str | list[int]]:
        return split_prompts(self.prompt)


def template_kwargs_field() -> Any:
    return knob(
        None,
        "more arguments of the template",
        schema={"type": ["object", "null"], "propertyNames": {"not": {"enum": sorted(RESERVED_KWARGS)}}},
    )


MESSAGES = {
    "doc": "the conversation",
    "schema": lambda facts: {"type": "array", "minItems": 1, "items": message_schema(facts.ignore_unknown)},
    "example": [{"role": "user", "content": "Say hello in French."}],
}


@dataclass(kw_only=True)
class TemplateBody(Body):
    """Fields of a body that holds a conversation."""

    unsupported = UNSUPPORTED
    conflicts = (Conflict("continue_final_message", {"const": True}, "add_generation_prompt", {"const": True}),)

    messages: list = dataclasses.field(metadata=MESSAGES)
    add_special_tokens: bool = knob(False, "let the tokenizer add special tokens to those of the template")
    add_generation_prompt: bool = knob(True, "end the prompt with the beginning of an assistant message")
    continue_final_message: bool = knob(False, "let the model go on with the last message")
    chat_template: str | None = knob(None, "refused: only the server may choose the template", schema={"type": "null"})
    chat_template_kwargs: dict | None = template_kwargs_field()
    tools: list | None = knob(
        None, "functions that the model may call", schema=lambda facts: tools_schema(facts.ignore_unknown)
    )

    def check(self) -> None:
        super().check()
        if self.chat_template is not None:
            raise RequestError(
                "chat_template may not be given in a request; start the server with --chat-template FILE",
                param="chat_template",
            )


@dataclass(kw_only=True)
class ChatBody(GenerateBody, TemplateBody):
    """POST /v1/chat/completions."""

    conflicts = (Conflict("top_logprobs", {"ge": 1}, "logprobs", {"const": False}, needs="logprobs=true"),)

    max_tokens: int | None = knob(
        None, "tokens to generate at most; absent: the model's default, or what the context takes", ge=1, context=True
    )
    max_completion_tokens: int | None = knob(
        None, "tokens to generate at most; wins over max_tokens", ge=1, context=True
    )
    logprobs: bool = knob(False, "send the logprob of each token")
    top_logprobs: int | None = knob(None, "likeliest tokens per position; needs logprobs", ge=0, le=MAX_LOGPROBS)
    tool_choice: str | dict | None = knob(
        None, "none, auto, required, or a function by name; absent: auto with tools", schema=tool_choice_schema()
    )
    reasoning_effort: str | None = knob(
        None, "how much the model reasons, if its template knows of it", schema={"enum": [*EFFORTS, None]}
    )
    include_reasoning: bool = knob(True, "send the reasoning, and its tokens")
    thinking_token_budget: int | None = knob(
        None,
        "tokens of reasoning at most, after which the answer must begin; 0: no reasoning",
        ge=0,
        schema=lambda facts: {"type": ["integer", "null"], "minimum": 0} if facts.limits_thinking else {"type": "null"},
    )


@dataclass(kw_only=True)
class TokenizeBody(Body):
    """POST /tokenize with a text."""

    prompt: str = dataclasses.field(metadata={"doc": "the text", "example": "Hello, world"})
    add_special_tokens: bool = knob(True, "let the tokenizer add its special tokens, such as BOS, to a text")
    return_token_strs: bool = knob(False, "also send each token as text")


@dataclass(kw_only=True)
class TokenizeChatBody(TemplateBody):
    """POST /tokenize with a conversation."""

    return_token_strs: bool = knob(False, "also send each token as text")


@dataclass(kw_only=True)
class DetokenizeBody(Body):
    """POST /detokenize."""

    tokens: list = dataclasses.field(
        metadata={
            "doc": "token ids",
            "schema": lambda facts: {"type": "array", "items": facts.token_id},
            "example": [1, 2, 3],
        }
    )

    def check(self) -> None:
        super().check()
        check_token_ids(self.tokens, "tokens")


@dataclass(kw_only=True)
class EmbeddingBody(Body):
    """POST /v1/embeddings."""

    input: str | list = dataclasses.field(
        metadata={
            "doc": "a text, token ids, or a list of either",
            "schema": lambda facts: _prompt_schema(facts, MAX_INPUTS),
            "example": "Hello, world",
        }
    )
    encoding_format: str = knob(
        "float",
        "float: numbers; base64: the bytes of little-endian float32",
        schema={"enum": [*ENCODING_FORMATS, None]},
    )
    dimensions: int | None = knob(
        None,
        "numbers to keep, of a model trained for it (Matryoshka)",
        ge=1,
        schema=lambda facts: (
            {"type": ["integer", "null"], "minimum": 1, "maximum": facts.hidden_size}
            if facts.matryoshka
            else {"enum": [facts.hidden_size, None]}
        ),
    )
    pooling: str = knob(
        "last",
        "last: the hidden state of the last token; mean: the mean over all tokens",
        schema={"enum": [*POOLINGS, None]},
    )
    add_special_tokens: bool = knob(True, "let the tokenizer add its special tokens, such as EOS, to a text")
    priority: int = priority_field()
    user: str | None = knob(None, "not used")

    def check(self) -> None:
        super().check()
        for name, known in (("encoding_format", ENCODING_FORMATS), ("pooling", POOLINGS)):
            if getattr(self, name) not in known:
                given = short(getattr(self, name))
                raise RequestError(f"{name} must be {' or '.join(known)}, got {given}", param=name)

    def prompts(self) -> list[str | list[int]]:
        return split_prompts(self.input, "input", MAX_INPUTS)


@dataclass(kw_only=True)
class AbortBody(Body):
    """POST /abort_requests."""

    request_ids: list[str] | None = knob(
        None, "chatcmpl-..., cmpl-..., or X-Request-Id; none: all", example=["chatcmpl-0123456789abcdef"]
    )


class FieldSpec(NamedTuple):
    type: Any
    required: bool
    sampling: bool  # belongs to SamplingParams
    default: Any
    metadata: Mapping[str, Any]


@cache
def field_specs(cls: type[Body]) -> Mapping[str, FieldSpec]:
    """Every field that a body of this class may have."""
    specs = {
        f.name: FieldSpec(f.type, False, True, f.default, f.metadata)
        for f in dataclasses.fields(SamplingParams)
        if f.name in cls.sampling_fields
    }
    for f in dataclasses.fields(cls):
        required = f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        made = f.default if f.default_factory is dataclasses.MISSING else f.default_factory()
        specs[f.name] = FieldSpec(f.type, required, False, None if required else made, f.metadata)
    return specs


@cache
def conflicts(cls: type[Body]) -> tuple[Conflict, ...]:
    """Those of the class and its bases."""
    return tuple(conflict for base in cls.__mro__ for conflict in base.__dict__.get("conflicts", ()))


def _number(text: str) -> int | float:
    """A JSON number that is not written as an integer: 5.0 is one all the same, as JSON and its Schema have it."""
    value = float(text)
    return int(value) if value.is_integer() and abs(value) < 2**53 else value


# Escapes one after the other; group 1: half of a character, without its other half.
_ESCAPE = re.compile(
    rb"\\(?:u[dD][89abAB][\da-fA-F]{2}\\u[dD][c-fC-F][\da-fA-F]{2}|(u[dD][89a-fA-F][\da-fA-F]{2})|.)", re.DOTALL
)


def _why_not_json(body: bytes) -> str | None:
    """What is wrong with a body, where the decoder would say of whole ones that they are cut off."""
    if not body.strip():
        return "it is empty"
    for escape in _ESCAPE.finditer(body):
        if half := escape[1]:
            return f"\\{half.decode()} is half of a surrogate pair, and no character (byte {escape.start()})"
    return None


_DECODER = msgspec.json.Decoder(float_hook=_number)


def decode_object(body: bytes) -> dict[str, Any]:
    """The JSON object in a request body. Raises RequestError."""
    try:
        raw = _DECODER.decode(body)
    except msgspec.MsgspecError as error:
        raise RequestError(f"the request body is not valid JSON: {_why_not_json(body) or error}") from None
    except RecursionError:
        raise RequestError("the request body is nested too deeply") from None
    if not isinstance(raw, dict):
        raise RequestError(f"the request body must be a JSON object, got {short(raw)}")
    return raw


def parse[B: Body](
    cls: type[B], raw: dict[str, Any], *, check_model: Callable[[str | None], object], ignore_unknown: bool
) -> tuple[B, dict[str, Any]]:
    """A typed body with everything but its sampling fields checked, and those fields. Raises RequestError, NotFound."""
    given = _known_fields(cls, raw, ignore_unknown)
    specs = field_specs(cls)
    for name, value in given.items():
        check_limits(name, value, specs[name].type, {})
    for name, spec in specs.items():
        if spec.required and name not in given:
            raise RequestError(f"{name} is required", param=name)
    check_model(given.get("model"))
    body = cls(**{name: value for name, value in given.items() if not specs[name].sampling})
    body.check()
    check_conflicts(cls, given)
    sampling = {name: value for name, value in given.items() if specs[name].sampling}
    if isinstance(body, GenerateBody):
        wanted = structured.from_request(body.response_format, body.structured_outputs)
        sampling |= {"structured_outputs": wanted} if wanted else {}
    if "logit_bias" in sampling:
        sampling["logit_bias"] = _logit_bias(sampling["logit_bias"])
    return body, sampling


def within(value: Any, limits: Mapping[str, Any]) -> bool:
    """Whether a value that is of the right type, or None, is within the limits of a Conflict."""
    if value is None:
        return limits.get("const", ...) is None
    if "const" in limits:
        return value == limits["const"]
    try:
        check_limits("", value, type(value), limits)
    except RequestError:
        return False
    return True


def check_conflicts(cls: type[Body], given: Mapping[str, Any]) -> None:
    """Raises RequestError naming both fields."""
    specs = field_specs(cls)
    for conflict in conflicts(cls):
        if conflict.field not in given and conflict.other not in given:
            continue  # defaults agree
        pairs = ((conflict.field, conflict.limits), (conflict.other, conflict.other_limits))
        values = [given.get(name, specs[name].default) for name, _ in pairs]
        if all(within(value, limits) for value, (_, limits) in zip(values, pairs, strict=True)):
            value, other_value = map(short, values)
            if conflict.needs:
                raise RequestError(f"{conflict.field}={value} needs {conflict.needs}", param=conflict.field)
            raise RequestError(
                f"{conflict.field} may not be combined with {conflict.other}={other_value}, got {value}",
                param=conflict.field,
            )


def _known_fields(cls: type[Body], raw: dict[str, Any], ignore_unknown: bool) -> dict[str, Any]:
    """The fields of `raw` that are not null, all known. Raises RequestError naming what is not."""
    specs = field_specs(cls)
    given, unknown = {}, []
    for name, value in raw.items():
        if name in specs:
            if value is not None:
                given[name] = value
        elif name in cls.unsupported:
            _check_unsupported(name, value, cls.unsupported[name])
        else:
            unknown.append(name)
    if unknown and not ignore_unknown:
        close = difflib.get_close_matches(unknown[0][:64], specs, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        names = ", ".join(short(name) for name in unknown[:5])
        raise RequestError(f"unknown field{'s' * (len(unknown) > 1)} {names}{hint}", param=unknown[0][:64])
    return given


def _check_unsupported(name: str, value: Any, harmless: tuple) -> None:
    if value is None or any(value == each and type(value) is type(each) for each in harmless):
        return
    but = f"; it may be {' or '.join(map(short, harmless))}" if harmless else ""
    if (kind := name.removeprefix("guided_")) in ("choice", "grammar", "json", "regex"):
        but = f", structured_outputs.{kind} is"
    raise RequestError(f"{name} is not supported yet{but}, got {short(value)}", param=name)


def _logit_bias(raw: dict[str, Any]) -> dict[int, float]:
    bias = {}
    for key, value in raw.items():
        if not (key.isascii() and key.isdigit() and len(key) < 12):
            raise RequestError(f"logit_bias: keys must be token ids, got {short(key)}", param="logit_bias")
        check_limits(f"logit_bias[{key}]", value, float, {})
        bias[int(key)] = float(value)
    return bias


def split_prompts(prompt: str | list, field: str = "prompt", limit: int = MAX_PROMPTS) -> list[str | list[int]]:
    """One text, one list of token ids, or a list of either -> a list of prompts."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise RequestError(f"{field} may not be empty", param=field)
    kinds = set(map(type, prompt))
    if kinds == {int}:
        return [prompt]
    if kinds not in ({str}, {list}):
        given = " and ".join(sorted(KINDS[kind] for kind in kinds))
        message = f"{field} must be a text, a list of token ids, or a list of either; got a list with {given} in it"
        raise RequestError(message, param=field)
    if len(prompt) > limit:
        raise RequestError(f"{field} takes at most {limit} entries, got {len(prompt)}", param=field)
    for i, ids in enumerate(prompt):
        if isinstance(ids, list):
            check_token_ids(ids, f"{field}.{i}")
    return prompt


def check_token_ids(ids: list, place: str) -> None:
    """Raises RequestError unless all are integers (quick: there may be millions)."""
    if not set(map(type, ids)) <= {int}:
        bad = next(item for item in ids if type(item) is not int)
        raise RequestError(f"{place} must hold token ids, got {short(bad)}", param=place)

"""Structured outputs: what a client asks for -> the llguidance grammar that the output must match. Never imports jax.

    response_format    ──┐
    structured_outputs ──┴► StructuredOutputsParams ──► compile_grammar() ──► text, which the engine applies

Everything is checked here, with llguidance itself, so that a bad schema, regex or grammar is refused before any work.
"""

import json
from collections.abc import Mapping
from dataclasses import fields
from functools import lru_cache
from typing import Any

import msgspec

from jaxserve.errors import RequestError
from jaxserve.request import KINDS, STRUCTURED_KINDS, StructuredOutputsParams, check_limits, short

# Between the tokens of JSON: nothing, a space, or a line break with its indentation. Without an end to it, small models
# write white space until max_tokens.
WHITESPACE = r"[ ]|\n[ ]{0,40}"
MAX_GRAMMAR_CHARS = 1_000_000


def from_request(response_format: Any, structured_outputs: Any) -> StructuredOutputsParams | None:
    """The two fields of a request body, already known to be objects or None. Raises RequestError.

    A response_format takes the place of structured_outputs of the same kind; two kinds together are refused.
    """
    wanted = _from_response_format(response_format) if response_format is not None else None
    if structured_outputs is None:
        return StructuredOutputsParams(**wanted) if wanted else None
    known = {f.name: f for f in fields(StructuredOutputsParams)}
    for name, value in structured_outputs.items():
        if name not in known:
            raise RequestError(f"unknown field {short(name)} in structured_outputs", param="structured_outputs")
        if value is not None:
            check_limits(f"structured_outputs.{name}", value, known[name].type, {})
    given = {name: value for name, value in structured_outputs.items() if value is not None}
    if wanted:
        kinds = {name for name in given if name in STRUCTURED_KINDS}
        if kinds - set(wanted):
            raise RequestError(
                f"response_format asks for {next(iter(wanted))}, structured_outputs for {min(kinds - set(wanted))}: "
                "give one of them",
                param="structured_outputs",
            )
        given |= wanted
    return StructuredOutputsParams(**given)


def _from_response_format(given: dict[str, Any]) -> dict[str, Any] | None:
    place = "response_format"
    kind = given.get("type")
    known = {"text": (), "json_object": (), "json_schema": ("json_schema",), "structural_tag": None}
    if not isinstance(kind, str) or kind not in known:
        raise RequestError(f"{place}.type must be one of {', '.join(known)}", param=f"{place}.type")
    if kind == "structural_tag":
        return {"structural_tag": {name: value for name, value in given.items() if value is not None}}
    if extra := [n for n, v in given.items() if n not in ("type", *known[kind]) and v is not None]:
        raise RequestError(f"unknown field {short(extra[0])} in {place} of type {kind}", param=place)
    if kind == "json_object":
        return {"json_object": True}
    return {"json": _schema_of(given.get("json_schema"))} if kind == "json_schema" else None


def _schema_of(given: Any) -> dict:
    place = "response_format.json_schema"
    if not isinstance(given, dict):
        raise RequestError(f"{place} must be an object with name and schema", param=place)
    for name, kind in (("name", str), ("description", str), ("strict", bool), ("schema", dict)):
        if given.get(name) is not None and not isinstance(given[name], kind):
            raise RequestError(f"{place}.{name} must be {KINDS[kind]}", param=f"{place}.{name}")
    if extra := [n for n in given if n not in ("name", "description", "strict", "schema")]:
        raise RequestError(f"unknown field {short(extra[0])} in {place}", param=place)
    for name in ("name", "schema"):
        if given.get(name) is None:
            raise RequestError(f"{place}.{name} is required", param=f"{place}.{name}")
    return given["schema"]


def compile_grammar(params: StructuredOutputsParams, field: str = "structured_outputs") -> str:
    """The grammar as text, known to be good. Raises RequestError naming what is wrong with it, as found in `field`."""
    kind = params.kinds()[0]
    place = f"{field}.{kind}" if field == "structured_outputs" else field
    try:
        grammar = _MAKERS[kind](params)
    except RequestError:
        raise
    except (ValueError, TypeError, RecursionError) as error:
        raise RequestError(f"{place} is bad: {_one_line(error)}", param=place) from None
    check_grammar(grammar, place)
    return grammar


def check_grammar(grammar: str, place: str) -> None:
    """Raises RequestError if llguidance refuses the grammar."""
    if len(grammar) > MAX_GRAMMAR_CHARS:
        message = f"{place} takes at most {MAX_GRAMMAR_CHARS} characters, got {len(grammar)}"
        raise RequestError(message, param=place)
    if problem := _problem(grammar):
        raise RequestError(f"{place} is bad: {_one_line(problem)}", param=place)


@lru_cache(maxsize=256)
def _problem(grammar: str) -> str:
    from llguidance import LLMatcher

    return LLMatcher.validate_grammar(grammar)


def _json(params: StructuredOutputsParams) -> str:
    schema = params.json
    if isinstance(schema, str):
        schema = msgspec.json.decode(schema)
        if not isinstance(schema, dict | bool):
            raise ValueError("a schema is an object")
    return _schema_grammar(schema, params)


def _json_object(params: StructuredOutputsParams) -> str:
    return _schema_grammar({"type": "object"}, params)


def _schema_grammar(schema: Any, params: StructuredOutputsParams) -> str:
    from llguidance import LLMatcher

    if params.disable_additional_properties:
        schema = _closed(schema)
    if schema is True:  # llguidance wants an object
        schema = {}
    options: Any = {"whitespace_pattern": params.whitespace_pattern or WHITESPACE}
    if params.disable_any_whitespace:
        options = {"whitespace_flexible": False}
    return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=options)


def _closed(schema: Any) -> Any:
    """The schema, in which no object has properties that are not named."""
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    closed = {name: _closed(each) for name, each in schema.items()}
    if isinstance(schema.get("properties"), Mapping):
        closed["additionalProperties"] = False
    return closed


def _regex(params: StructuredOutputsParams) -> str:
    from llguidance import LLMatcher

    assert params.regex is not None
    if not params.regex or "\0" in params.regex:
        raise ValueError("it is empty" if not params.regex else "it contains a NUL character")
    return LLMatcher.grammar_from_regex(params.regex)


def _choice(params: StructuredOutputsParams) -> str:
    from llguidance import grammar_from

    return grammar_from("choice", json.dumps(params.choice))


def _grammar(params: StructuredOutputsParams) -> str:
    from llguidance import grammar_from

    assert params.grammar is not None
    if not params.grammar.strip():
        raise ValueError("it is empty")
    return grammar_from("gbnf" if "::=" in params.grammar else "lark", params.grammar)


def _structural_tag(params: StructuredOutputsParams) -> str:
    """structures: [{begin, schema, end}], triggers: [text]: each begin starts with a trigger. Other text is free."""
    from llguidance import StructTag

    given = params.structural_tag
    given = msgspec.json.decode(given) if isinstance(given, str) else given
    if not isinstance(given, dict) or not isinstance(given.get("structures"), list) or not given["structures"]:
        raise ValueError("it needs structures, a list of objects with begin, schema and end")
    if unknown := [name for name in given if name not in ("type", "structures", "triggers")]:
        raise ValueError(f"unknown field {short(unknown[0])}")
    triggers = given.get("triggers")
    if not isinstance(triggers, list) or not all(isinstance(t, str) and t for t in triggers):
        raise ValueError("it needs triggers, a list of texts")
    tags = []
    for i, structure in enumerate(given["structures"]):
        if not isinstance(structure, dict) or not all(isinstance(structure.get(n), str) for n in ("begin", "end")):
            raise ValueError(f"structures.{i} needs begin and end, both texts")
        if unknown := [name for name in structure if name not in ("begin", "schema", "end")]:
            raise ValueError(f"unknown field {short(unknown[0])} in structures.{i}")
        schema = structure.get("schema", {})
        if not isinstance(schema, dict | str):
            raise ValueError(f"structures.{i}.schema must be an object")
        trigger = next((t for t in triggers if structure["begin"].startswith(t)), None)
        if trigger is None:
            raise ValueError(f"structures.{i}.begin starts with none of the triggers")
        schema = msgspec.json.decode(schema) if isinstance(schema, str) else schema
        tags.append(StructTag(trigger=trigger, begin=structure["begin"], grammar=schema, end=structure["end"]))
    if idle := [t for t in triggers if not any(tag.begin.startswith(t) for tag in tags)]:
        raise ValueError(f"no structure begins with the trigger {short(idle[0])}")
    return StructTag.to_grammar(tags, assume_special=False)


_MAKERS = {
    "json": _json,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
    "json_object": _json_object,
    "structural_tag": _structural_tag,
}


def _one_line(problem: object, limit: int = 300) -> str:
    """An error of llguidance without its picture of the place, short enough for a message."""
    text = " ".join(str(problem).split())
    return text if len(text) <= limit else text[: limit - 1] + "…"

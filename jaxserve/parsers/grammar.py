"""Grammars in which a model's tool calls can only come out right: Lark text for llguidance.

Each format says how a call looks (`ToolFormat.call_grammar`); here this becomes the grammar of a whole answer:

    required, named    thinking? call+
    auto, strict       thinking? (free text up to a call's first marker, call)* free text
    an answer's form   thinking? call* answer
"""

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from jaxserve.parsers.tools import Tool

# The spacing of Python's json.dumps, which models were trained on; and no way to write white space without end.
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_MAY_NAME_MORE = {"additionalProperties", "patternProperties", "$ref", "allOf", "anyOf", "oneOf", "if"}
_MAIN = "%llguidance {}\n"


class Lark:
    """Rules of a grammar in the making, and expressions to make them of."""

    def __init__(self, token_id: Callable[[str], int | None]):
        """`token_id`: of a marker that is one token of its own."""
        self._token_id = token_id
        self._rules: list[str] = []
        self._no_text = ""

    def text(self, literal: str) -> str:
        return json.dumps(literal, ensure_ascii=False)

    def marker(self, marker: str) -> str:
        """A marker, as its token or letter by letter: special tokens never match letters."""
        token_id = self._token_id(marker)
        return self.text(marker) if token_id is None else f"({self.text(marker)} | <[{token_id}]>)"

    def token_ids(self, markers: Sequence[str]) -> list[int] | None:
        """Of markers that all are tokens of their own."""
        ids = [i for i in map(self._token_id, markers) if i is not None]
        return ids if len(ids) == len(markers) else None

    def forbid_text(self, markers: Sequence[str]) -> None:
        """No TEXT may begin with one of the markers."""
        marks = "|".join(map(_escaped, markers))
        self._no_text = f" & ~/[ \\n]*({marks})(.|\\n)*/"

    def until(self, marker: str) -> str:
        """Any text, up to and with the first `marker`."""
        lazy = self.rule(f"TEXT {self.text(marker)}", options="[lazy]")
        token_id = self._token_id(marker)
        return lazy if token_id is None else f"({lazy} | TEXT <[{token_id}]>)"

    def json(self, schema: Any, defs: dict[str, Any] | None = None) -> str:
        """A JSON value. `defs`: the schema that this one was taken from, for its `$ref`s."""
        if schema is True:
            schema = {}
        if isinstance(schema, dict):
            kept = {name: defs[name] for name in ("$defs", "definitions") if defs and name in defs}
            schema = {**kept, **schema, "x-guidance": _SPACING}
        return f"%json {json.dumps(schema)}"

    def arguments(self, tool: Tool) -> str:
        """The object of a call's arguments: only with properties that are named, where the schema leaves that open."""
        schema = tool.parameters
        if "properties" in schema and not schema.keys() & _MAY_NAME_MORE:
            schema = {**schema, "additionalProperties": False}
        return self.json(schema)

    def rule(self, body: str, *, options: str = "") -> str:
        """A new rule; returns its name."""
        name = f"rule_{len(self._rules)}"
        self._rules.append(f"{name}{options}: {body}")
        return name

    def terminal(self, pattern: str) -> str:
        """A new terminal; returns its name."""
        name = f"TERMINAL_{len(self._rules)}"
        self._rules.append(f"{name}: {pattern}")
        return name

    def either(self, bodies: Sequence[str]) -> str:
        """A rule for each of `bodies`, and one that is any of them."""
        return self.rule(" | ".join(self.rule(body) for body in bodies))

    def grammar(self, start: str) -> str:
        rules = [f"start: {start}", *self._rules, f"TEXT: /(.|\\n)*/{self._no_text}", "GAP: /[ \\n]{0,4}/"]
        return _MAIN + "\n".join(rules) + "\n"


def _escaped(literal: str) -> str:
    """For a regular expression between slashes."""
    return re.escape(literal).replace("/", r"\/")


def schema_grammar(schema: dict[str, Any]) -> str:
    """The grammar of a schema alone, to tell whether it is good."""
    return json.dumps({"grammars": [{"json_schema": schema}]})


def with_answer(lark_text: str, answer: str) -> str:
    """A grammar whose rule `@answer` is another whole grammar."""
    answers = _as_list(answer)
    answers[0] = {**answers[0], "name": "answer"}
    return json.dumps({"grammars": [{"name": "message", "lark_grammar": lark_text}, *answers]})


def _as_list(grammar: str) -> list[dict[str, Any]]:
    if grammar.lstrip().startswith("{"):
        return json.loads(grammar)["grammars"]
    return [{"lark_grammar": grammar}]


def loosened(tools: Sequence[Tool]) -> list[Tool]:
    """The tools, of which only strict ones keep their schema."""
    return [tool if tool.strict else Tool(tool.name, {"type": "object"}) for tool in tools]

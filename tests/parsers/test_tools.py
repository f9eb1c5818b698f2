"""Tools and tool_choice: what is taken, and that what is not is refused by place."""

import pytest

from jaxserve.errors import RequestError
from jaxserve.parsers import check_tool_choice, check_tools

F = {"name": "f", "description": "d", "parameters": {"properties": {"x": {"type": "integer"}}}, "strict": True}


DEEP: dict = {}
for _ in range(100):
    DEEP = {"items": DEEP}


def tool(**fields) -> dict:
    return {"type": "function", "function": {"name": "f", **fields}}


def test_what_templates_see():
    full, bare = check_tools([{"type": "function", "function": F}, tool(name="g", description=None)])
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}}
    shown = {"type": "function", "function": {"name": "f", "description": "d", "parameters": schema}}
    assert full.for_template() == shown and full.strict
    empty = {"type": "object", "properties": {}}
    assert bare.for_template() == {"type": "function", "function": {"name": "g", "parameters": empty}}


@pytest.mark.parametrize(
    ("raw", "param"),
    [
        ([], "tools"),
        ("f", "tools"),
        ([tool()] * 513, "tools"),
        ([5], "tools.0"),
        ([{"function": F}], "tools.0.type"),
        ([{"type": "web_search"}], "tools.0.type"),
        ([{"type": "function"}], "tools.0.function"),
        ([{**tool(), "x": 1}], "tools.0"),
        ([tool(), tool(name="a b")], "tools.1.function.name"),
        ([tool(name="n" * 65)], "tools.0.function.name"),
        ([tool(name="é")], "tools.0.function.name"),
        ([tool(name=None)], "tools.0.function.name"),
        ([tool(), tool()], "tools.1.function.name"),
        ([tool(nonsense=1)], "tools.0.function"),
        ([tool(description=5)], "tools.0.function.description"),
        ([tool(strict="yes")], "tools.0.function.strict"),
        ([tool(parameters=[])], "tools.0.function.parameters"),
        ([tool(parameters={"type": "string"})], "tools.0.function.parameters.type"),
        ([tool(parameters={"properties": []})], "tools.0.function.parameters.properties"),
        ([tool(parameters={"properties": {"x": 5}})], "tools.0.function.parameters.properties.x"),
        ([tool(parameters=DEEP)], "tools.0.function.parameters"),
        ([tool(parameters={"required": "x"})], "tools.0.function.parameters.required"),
    ],
)
def test_bad_tools(raw, param: str):
    with pytest.raises(RequestError) as caught:
        check_tools(raw)
    assert caught.value.param == param and param in caught.value.message


def test_unknown_fields_may_be_dropped():
    assert check_tools([{**tool(extra=1), "cache_control": {}}], ignore_unknown=True)[0].name == "f"


def test_choices():
    f, g = tools = check_tools([tool(), tool(name="g")])
    assert check_tool_choice(None, []).mode == "none" == check_tool_choice("none", tools).mode
    assert not check_tool_choice("none", tools).offered
    for raw, mode in ((None, "auto"), ("auto", "auto"), ("required", "required")):
        choice = check_tool_choice(raw, tools)
        assert (choice.mode, choice.tools, choice.offered) == (mode, (f, g), (f, g))
    named = check_tool_choice({"type": "function", "function": {"name": "g"}}, tools)
    assert (named.mode, named.tools, named.offered) == ("named", (g,), (f, g))


@pytest.mark.parametrize(
    ("raw", "param"),
    [
        ("f", "tool_choice"),
        (5, "tool_choice"),
        ({}, "tool_choice.type"),
        ({"type": "allowed_tools"}, "tool_choice.allowed_tools"),
        ({"type": "custom"}, "tool_choice.type"),
        ({"type": "function"}, "tool_choice.function"),
        ({"type": "function", "function": {}}, "tool_choice.function.name"),
        ({"type": "function", "function": {"name": "h"}}, "tool_choice.function.name"),
    ],
)
def test_bad_choices(raw, param: str):
    with pytest.raises(RequestError) as caught:
        check_tool_choice(raw, check_tools([tool()]))
    assert caught.value.param == param and param in caught.value.message


@pytest.mark.parametrize("raw", ["auto", "required", {"type": "function", "function": {"name": "f"}}])
def test_a_choice_needs_tools(raw):
    with pytest.raises(RequestError, match="tool_choice"):
        check_tool_choice(raw, [])

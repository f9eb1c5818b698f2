"""Which formats a template shows, and that options, formats and signs name the same ones."""

import pytest
from chat_templates import HERMES, MISTRAL, MISTRAL_BY_NAME, SHOWN

from jaxserve.config import REASONING_PARSERS, TOOL_CALL_PARSERS
from jaxserve.parsers import REASONING_FORMATS, TOOL_FORMATS, find_formats


def test_the_options_name_all_formats():
    assert sorted(TOOL_FORMATS) == sorted(TOOL_CALL_PARSERS)
    assert sorted(REASONING_FORMATS) == sorted(REASONING_PARSERS)


@pytest.mark.parametrize("name", SHOWN)
def test_what_a_template_shows(name: str):
    template, tools, reasoning = SHOWN[name]
    formats = find_formats("auto", "auto", template)
    assert (formats.tools_name, formats.reasoning_name) == (tools, reasoning)
    assert (formats.tools is None) == (tools == "none") and formats.reasons == (reasoning != "none")


def test_a_name_wins_over_the_template():
    formats = find_formats("pythonic", "none", HERMES)
    assert formats.tools is TOOL_FORMATS["pythonic"] and not formats.reasons
    assert find_formats("none", "auto", HERMES).tools is None
    assert find_formats("auto", "openai_gptoss", HERMES) == find_formats("openai", "none", None)
    assert find_formats("auto", "auto", None).tools is None


def test_mistral_has_two_forms():
    old, new = find_formats("auto", "auto", MISTRAL).tools, find_formats("mistral", "auto", MISTRAL_BY_NAME).tools
    assert old and new and (old.between, new.between) == (None, "")


def test_markers_of_calls_are_only_read_with_tools():
    formats = find_formats("mistral", "mistral", None)
    assert formats.markers(with_tools=False) == {"[THINK]", "[/THINK]"}
    assert "[TOOL_CALLS]" in formats.markers(with_tools=True)
    assert "<|channel|>" in find_formats("openai", "none", None).markers(with_tools=False)

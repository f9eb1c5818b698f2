"""What a model writes -> reasoning, text and tool calls. Pure text, in pieces cut anywhere; never imports jax.

    formats.py        names -> formats; which ones a chat template speaks
    message_parser.py one per answer: text in, MessageDelta out; the grammar of an answer
    tools.py          tools and tool_choice as clients send them
    reader.py         text that arrives in pieces, read as if it were whole
    message.py        what parsers write to

One file per kind of format: tool_formats.py (JSON), qwen3_coder.py, pythonic.py, harmony.py, reasoning.py.
"""

from jaxserve.parsers.formats import REASONING_FORMATS, TOOL_FORMATS, Formats, find_formats
from jaxserve.parsers.grammar import schema_grammar
from jaxserve.parsers.message import MessageDelta, ToolCallDelta
from jaxserve.parsers.message_parser import (
    MessageParser,
    check_budget,
    make_grammar,
    make_parser,
    thinking_grammar,
    thinking_limiter,
)
from jaxserve.parsers.reasoning import ThinkingBudget
from jaxserve.parsers.tools import (
    MAX_TOOLS,
    Tool,
    ToolChoice,
    allowed_tools_schema,
    check_tool_choice,
    check_tools,
    function_schema,
    tool_choice_schema,
    tools_schema,
)

__all__ = [
    "MAX_TOOLS", "REASONING_FORMATS", "TOOL_FORMATS", "Formats", "MessageDelta", "MessageParser", "ThinkingBudget",
    "Tool", "ToolCallDelta", "ToolChoice", "allowed_tools_schema", "check_budget", "check_tool_choice", "check_tools",
    "find_formats", "function_schema", "make_grammar", "make_parser", "schema_grammar", "thinking_grammar",
    "thinking_limiter", "tool_choice_schema", "tools_schema",
]  # fmt: skip

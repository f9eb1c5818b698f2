"""The formats by name, and which of them a chat template speaks."""

from collections.abc import Callable
from dataclasses import dataclass

from jaxserve.parsers.harmony import HARMONY
from jaxserve.parsers.pythonic import Pythonic
from jaxserve.parsers.qwen3_coder import Qwen3Coder
from jaxserve.parsers.reasoning import Thinking
from jaxserve.parsers.tool_formats import (
    GRANITE,
    HERMES,
    PHI4_MINI,
    PHI4_MINI_MARKED,
    DeepSeek,
    Llama3Json,
    Mistral,
    ToolFormat,
)

_QWEN3_CODER = Qwen3Coder()
_MISTRAL = {by_name: Mistral(by_name) for by_name in (False, True)}

TOOL_FORMATS: dict[str, ToolFormat] = {
    "deepseek_v3": DeepSeek(fenced=True),
    "deepseek_v31": DeepSeek(fenced=False),
    "granite": GRANITE,
    "hermes": HERMES,
    "llama3_json": Llama3Json(),
    "mistral": _MISTRAL[False],  # or the newer form, by the template
    "openai": HARMONY,
    "phi4_mini_json": PHI4_MINI,  # or in marks, by the template
    "pythonic": Pythonic(),
    "qwen3_coder": _QWEN3_CODER,
    "qwen3_xml": _QWEN3_CODER,
}
REASONING_FORMATS: dict[str, Thinking | None] = {
    "deepseek_r1": Thinking(("<think>",), ("</think>",), always=True),
    "granite": Thinking(  # of versions 3.2 and 3.3
        ("Here is my thought process:", "Here's my thought process:", "<think>"),
        ("Here is my response:", "Here's my response:", "Here is your response:", "Here's your response:", "</think>"),
        around=("<response>", "</response>"),
    ),
    "mistral": Thinking(("[THINK]",), ("[/THINK]",)),
    "openai": None,  # harmony reads it together with calls
    "openai_gptoss": None,  # vLLM's name of it
    "qwen3": Thinking(("<think>",), ("</think>",)),
}
# What the templates of a format contain, all of it.
_TOOL_SIGNS: list[tuple[str, tuple[str, ...]]] = [
    ("deepseek_v3", ("<｜tool▁calls▁begin｜>", "```json")),
    ("deepseek_v31", ("<｜tool▁calls▁begin｜>",)),
    ("granite", ("<|tool_call|>", "<|start_of_role|>")),
    ("hermes", ("<tool_call>", '"name"', '"arguments"')),
    ("llama3_json", ("<|start_header_id|>", '"parameters": ', "tools")),
    ("mistral", ("[TOOL_CALLS]",)),
    ("openai", ("<|channel|>", "<|message|>", "functions.")),
    ("phi4_mini_json", ("functools[",)),
    ("phi4_mini_json", ("<|tool_call|>", "<|/tool_call|>")),
    ("qwen3_coder", ("<tool_call>", "<function=", "<parameter=")),
]
_REASONING_SIGNS: list[tuple[str, tuple[str, ...]]] = [
    ("deepseek_r1", ("<think>", "<｜Assistant｜>")),
    ("granite", ("Here is my thought process:",)),
    ("granite", ("<think></think>", "<response></response>")),
    ("mistral", ("[THINK]", "[/THINK]")),
    ("openai", ("<|channel|>", "<|message|>")),
    ("qwen3", ("<think>", "</think>", "<|im_start|>")),
    ("qwen3", ("<think>", "</think>", "thinking is defined")),  # DeepSeek V3.1: reasoning can be switched off
]
# Where the signs of the second are there, too, it is that one.
_SHADOWED = {"deepseek_r1": "qwen3", "qwen3": "granite", "deepseek_v31": "deepseek_v3", "hermes": "qwen3_coder"}


@dataclass(frozen=True, slots=True)
class Formats:
    """How the served model writes calls and reasoning; None: it is not known to."""

    tools: ToolFormat | None = None
    reasoning: Thinking | None = None
    harmony: bool = False  # both are read as one
    tools_name: str = "none"
    reasoning_name: str = "none"

    @property
    def reasons(self) -> bool:
        """Whether reasoning is told from the answer."""
        return self.harmony or self.reasoning is not None

    def limits_thinking(self, token_id: Callable[[str], int | None]) -> bool:
        """Whether a ThinkingBudget can be kept. `token_id`: of a marker that is a token of its own."""
        return self.reasoning is not None and None not in map(token_id, self.reasoning.markers)

    def markers(self, *, with_tools: bool) -> frozenset[str]:
        """Texts that must be read also where they are special tokens; those of calls only where tools may be called."""
        markers = set(self.reasoning.markers if self.reasoning else ())
        if self.tools and (with_tools or self.harmony):
            markers.update(self.tools.markers)
            if self.tools.begin:
                markers.add(self.tools.begin)
        return frozenset(markers)


def find_formats(tools: str, reasoning: str, template: str | None) -> Formats:
    """By name, "none", or "auto": what the chat template shows, if it shows exactly one."""
    tools_name = _name(tools, _TOOL_SIGNS, template)
    reasoning_name = _name(reasoning, _REASONING_SIGNS, template)
    if {"openai", "openai_gptoss"} & {tools_name, reasoning_name}:
        return Formats(HARMONY, None, True, "openai", "openai")
    tool_format = TOOL_FORMATS[tools_name] if tools_name else None
    if tools_name == "mistral":
        tool_format = _MISTRAL[template is not None and "[ARGS]" in template]
    if tools_name == "phi4_mini_json" and "<|/tool_call|>" in (template or "") and "functools" not in (template or ""):
        tool_format = PHI4_MINI_MARKED
    reasoning_format = REASONING_FORMATS[reasoning_name] if reasoning_name else None
    return Formats(tool_format, reasoning_format, False, tools_name or "none", reasoning_name or "none")


def _name(given: str, signs: list[tuple[str, tuple[str, ...]]], template: str | None) -> str | None:
    if given != "auto":
        return None if given == "none" else given
    source = (template or "").replace('\\"', '"')
    fitting = {name for name, texts in signs if all(text in source for text in texts)}
    fitting = {name for name in fitting if _SHADOWED.get(name) not in fitting}
    return fitting.pop() if len(fitting) == 1 else None

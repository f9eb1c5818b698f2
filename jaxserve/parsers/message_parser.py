"""One answer: its text in pieces -> what each piece adds to the message; and the grammar that the text is held to."""

from collections.abc import Callable, Sequence
from typing import Any

from jaxserve.errors import RequestError
from jaxserve.parsers.formats import Formats, find_formats
from jaxserve.parsers.grammar import Lark, loosened, with_answer
from jaxserve.parsers.harmony import Harmony
from jaxserve.parsers.message import Message, MessageDelta, call_id
from jaxserve.parsers.pythonic import Pythonic
from jaxserve.parsers.reader import Reader, Steps
from jaxserve.parsers.reasoning import Begun, ThinkingBudget
from jaxserve.parsers.tool_formats import Llama3Json
from jaxserve.parsers.tools import Tool, ToolChoice
from jaxserve.tokenizer import Tokenizer


class MessageParser:
    """Reads one sequence. Made by `make_parser`."""

    def __init__(self, formats: Formats, choice: ToolChoice, begun: Begun, *, parallel: bool):
        self._formats = formats
        self._named = choice.mode == "named"
        make_id = formats.tools.make_id if formats.tools else call_id
        tools = {tool.name: tool for tool in choice.tools}
        self._reader = Reader()
        self._message = Message(tools, max_calls=None if parallel and not self._named else 1, make_id=make_id)
        self._steps = self._read(begun)

    def push(self, text: str, *, finished: bool) -> MessageDelta:
        """Takes the next piece of text; `finished`: it is the last."""
        self._reader.feed(text, ended=finished)
        next(self._steps, None)
        return self._message.take(finished=finished)

    @property
    def called(self) -> bool:
        """A complete tool call has been sent."""
        return self._message.complete_calls > 0

    def finish_reason(self, reason: str | None) -> str | None:
        """What OpenAI's API calls the end: "stop" after whole calls that the model chose to make is "tool_calls"."""
        if reason == "stop" and self.called and not self._message.cut and not self._named:
            return "tool_calls"
        return reason

    @property
    def has_reasoned(self) -> bool:
        """Whether any of it so far is reasoning."""
        return bool(self._message.reasoning_spans)

    def is_reasoning(self, at: int) -> bool:
        """Whether the character `at` of the output belongs to the reasoning, marks included."""
        return any(begin <= at < end for begin, end in self._message.reasoning_spans)

    def _read(self, begun: Begun) -> Steps[None]:
        reader, message, formats = self._reader, self._message, self._formats
        if formats.reasoning:
            yield from formats.reasoning.read(reader, message, begun)
        if formats.tools and (message.tools or formats.harmony):
            yield from formats.tools.read(reader, message)
        while True:  # what is left is text
            message.content(reader.rest())
            if not (yield from reader.more()):
                return


def make_parser(
    formats: Formats,
    choice: ToolChoice,
    *,
    prompt: str,
    continued: str | None = None,
    parallel: bool = True,
) -> MessageParser:
    """A parser of one answer. `prompt`: its text; `continued`: the text of the message that the answer goes on with."""
    return MessageParser(formats, choice, _begun(formats, prompt, continued), parallel=parallel)


def _begun(formats: Formats, prompt: str, continued: str | None) -> Begun:
    if formats.reasoning is None:
        return Begun.CLOSED
    return formats.reasoning.begun(prompt) if continued is None else formats.reasoning.begun_in(continued)


def make_grammar(
    formats: Formats,
    choice: ToolChoice,
    *,
    token_id: Callable[[str], int | None],
    prompt: str,
    continued: str | None = None,
    parallel: bool = True,
    answer: str | None = None,
    budget: ThinkingBudget | None = None,
) -> str | None:
    """The llguidance grammar of the answer; None if it may be anything.

    token_id   of a marker that is a token of its own
    answer     a grammar that the text after the reasoning must match, where no tool is called
    budget     of the reasoning. Where the rest may be anything, it has a grammar of its own: thinking_grammar()
    """
    forced = choice.mode in ("required", "named")
    strict = choice.mode == "auto" and any(tool.strict for tool in choice.tools)
    if not forced and not strict and answer is None:
        return None
    if answer is not None and not choice.tools and not formats.reasons:
        return answer
    lark = Lark(token_id)
    many = parallel and choice.mode != "named"
    if formats.harmony:
        start = _harmony(lark, choice, forced, answer)
    else:
        begun = _begun(formats, prompt, continued)
        prefix = formats.reasoning.prefix(lark, begun, budget) if formats.reasoning else ""
        start = f"{prefix} {lark.rule(_body(formats, lark, choice, forced, many, answer))}"
    text = lark.grammar(start)
    return text if forced or answer is None else with_answer(text, answer)


def thinking_limiter(
    tokenizer: Tokenizer, reasoning_parser: str
) -> Callable[[str, int, Sequence[int], str | None], tuple[str | None, bool]]:
    """What Frontend keeps SamplingParams.thinking_token_budget with: see frontend.LimitThinking."""
    formats = find_formats("none", reasoning_parser, tokenizer.template_for(tools=False))

    def limit(prompt_end: str, tokens: int, ends: Sequence[int], answer: str | None) -> tuple[str | None, bool]:
        budget = ThinkingBudget(tokens, tuple(ends))
        options: dict[str, Any] = {"prompt": prompt_end, "token_id": tokenizer.added_token_id}
        if answer is None:
            return thinking_grammar(formats, budget, **options), True
        check_budget(formats, tokenizer.added_token_id)
        return make_grammar(formats, ToolChoice(), answer=answer, budget=budget, **options), False

    return limit


def thinking_grammar(
    formats: Formats,
    budget: ThinkingBudget,
    *,
    token_id: Callable[[str], int | None],
    prompt: str,
    continued: str | None = None,
) -> str | None:
    """The grammar of the reasoning, after which the answer may be anything; None if the prompt has ended it."""
    check_budget(formats, token_id)
    begun = _begun(formats, prompt, continued)
    if formats.reasoning is None or begun is Begun.CLOSED:
        return None
    lark = Lark(token_id)
    return lark.grammar(formats.reasoning.beginning(lark, begun, budget))


def check_budget(formats: Formats, token_id: Callable[[str], int | None]) -> None:
    """Raises RequestError if it is not known where the model's reasoning ends, or no token tells it."""
    if formats.limits_thinking(token_id):
        return
    if formats.reasoning is not None:
        marks = " and ".join(repr(mark[0]) for mark in (formats.reasoning.begin, formats.reasoning.end))
        message = f"thinking_token_budget needs single tokens as the marks of the reasoning; this model has {marks}"
    else:
        message = (
            "thinking_token_budget is not supported for this model's format of reasoning (openai)"
            if formats.harmony
            else "thinking_token_budget needs to know how the model writes its reasoning: set --reasoning-parser NAME"
        )
    raise RequestError(message, param="thinking_token_budget")


def _harmony(lark: Lark, choice: ToolChoice, forced: bool, answer: str | None) -> str:
    harmony = Harmony()
    tools = choice.tools if forced else loosened(choice.tools)
    if forced:
        return harmony.call_grammar(lark, tools, False)
    text = harmony.answer_grammar(lark, "TEXT" if answer is None else "@answer")
    return f"{harmony.call_grammar(lark, tools, False)} | {text}" if tools else text


def _body(formats: Formats, lark: Lark, choice: ToolChoice, forced: bool, many: bool, answer: str | None) -> str:
    """What comes after the reasoning."""
    if not choice.tools:
        return "@answer"
    assert formats.tools is not None, "tools were refused otherwise"
    begin = formats.tools.begin
    tools: Sequence[Tool] = choice.tools if forced else loosened(choice.tools)
    group = formats.tools.call_grammar(lark, tools, many)
    if not forced and answer is None:
        if begin is None:
            assert isinstance(formats.tools, Llama3Json | Pythonic), "the calls of others have a mark"
            return f"{group} | {formats.tools.text_grammar(lark, tools)}"
        return f"({lark.until(begin)} {group})* TEXT"
    calls = group
    if begin is not None:
        one = lark.rule(f"{lark.marker(begin)} {group}")
        between = formats.tools.between
        calls = one if between is None or not many else f"{one} ({lark.text(between)} {one})*"
    return calls if forced else f"{lark.rule(calls)} | @answer"

"""Conversations with tools and reasoning: what goes to the model, and what its text says.

prepare()      messages, tools and choice -> the prompt, the grammar of the answer, what reads the answer
MessageText    the text deltas of one sequence -> what each adds to the assistant's message
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from jaxserve import chat
from jaxserve.detokenize import TextDelta
from jaxserve.errors import RequestError
from jaxserve.http.state import Server
from jaxserve.parsers import (
    MessageDelta,
    MessageParser,
    ThinkingBudget,
    ToolChoice,
    check_budget,
    check_tool_choice,
    check_tools,
    make_grammar,
    make_parser,
    schema_grammar,
    thinking_grammar,
)
from jaxserve.structured import check_grammar


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation made ready."""

    prompt: str
    grammar: str | None  # that the answer must match
    free_after_grammar: bool  # only its beginning must
    shown_ids: frozenset[int]  # special tokens that the parser reads: for Frontend.text
    parser: Callable[[], MessageParser]  # makes one per sequence


def prepare(
    server: Server,
    raw_messages: Any,
    *,
    tools: Any = None,
    tool_choice: Any = None,
    parallel_tool_calls: bool = True,
    reasoning_effort: str | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    template_kwargs: dict[str, Any] | None = None,
    answer_grammar: str | None = None,
    thinking_token_budget: int | None = None,
) -> Conversation:
    """Checks everything and renders the prompt. Raises RequestError.

    answer_grammar: that the text must match; it begins after the reasoning, and tools may be called instead.

    thinking_token_budget: the most tokens of the reasoning.
    """
    choice = _choice(server, tools, tool_choice)
    tokenizer, formats = server.frontend.tokenizer, server.formats
    messages = chat.check_messages(raw_messages, ignore_unknown=server.config.ignore_unknown_fields)
    prompt = chat.render(
        tokenizer,
        messages,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        template_kwargs=template_kwargs,
        tools=[tool.for_template() for tool in choice.offered] or None,
        reasoning_effort=reasoning_effort,
    )
    options: dict[str, Any] = {
        "prompt": prompt[-200:],
        "continued": _text_of(messages[-1]) if continue_final_message else None,
        "parallel": parallel_tool_calls,
    }
    budget, token_id = None, tokenizer.added_token_id
    if thinking_token_budget is not None:
        tokens = min(thinking_token_budget, server.frontend.info.max_model_len)
        budget = ThinkingBudget(tokens, tuple(server.frontend.eos_ids))
        check_budget(formats, token_id)
    grammar = make_grammar(formats, choice, token_id=token_id, answer=answer_grammar, budget=budget, **options)
    free_after_grammar = grammar is None and budget is not None
    if grammar is None and budget is not None:
        place = {name: options[name] for name in ("prompt", "continued")}
        grammar = thinking_grammar(formats, budget, token_id=token_id, **place)
    if grammar is not None and choice.tools:
        _check_schemas(choice, tools)
        check_grammar(grammar, "tools")
    markers = formats.markers(with_tools=bool(choice.tools))
    ids = {tokenizer.added_token_id(marker) for marker in markers}
    shown_ids = frozenset(i for i in ids if i is not None)
    return Conversation(
        prompt, grammar, free_after_grammar, shown_ids, partial(make_parser, formats, choice, **options)
    )


def _choice(server: Server, tools: Any, tool_choice: Any) -> ToolChoice:
    checked = [] if tools is None else check_tools(tools, ignore_unknown=server.config.ignore_unknown_fields)
    choice = check_tool_choice(tool_choice, checked)
    if choice.tools and server.formats.tools is None:
        tokenizer = server.frontend.tokenizer
        if (template := tokenizer.template_for(tools)) is not None:
            chat.check_takes_tools(tokenizer.template(template))
        message = "it is not known how this model writes tool calls: start the server with --tool-call-parser NAME"
        raise RequestError(message, param="tools")
    return choice


def _check_schemas(choice: ToolChoice, raw_tools: list[dict[str, Any]]) -> None:
    """Raises RequestError naming the tool whose schema no grammar can be made of."""
    places = {raw["function"]["name"]: f"tools.{i}.function.parameters" for i, raw in enumerate(raw_tools)}
    for tool in choice.tools:
        if tool.strict or choice.mode != "auto":
            check_grammar(schema_grammar(tool.parameters), places[tool.name])


def _text_of(message: dict[str, Any]) -> str:
    content = message["content"] or ""
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


@dataclass(slots=True)
class Piece:
    """What may be sent now; false if nothing. `tokens`: those of it, and the end, as a text delta has them."""

    message: MessageDelta
    tokens: TextDelta

    def __bool__(self) -> bool:
        return bool(self.message or self.tokens.finish_reason)


class MessageText:
    """One sequence. Tokens of text that the parser holds back come with the next piece; none is lost.

    Text deltas that are pushed become its own.
    """

    def __init__(self, parser: MessageParser, *, include_reasoning: bool = True):
        self._parser = parser
        self._include_reasoning = include_reasoning
        self._held: TextDelta | None = None
        self.reasoning_tokens = 0

    def push(self, delta: TextDelta) -> Piece:
        held = delta
        if self._held:
            held = self._held
            held.token_ids += delta.token_ids
            held.logprobs += delta.logprobs
            held.offsets += delta.offsets
        message = self._parser.push(delta.text, finished=delta.finish_reason is not None)
        end = self._parser.finish_reason(delta.finish_reason)
        tokens = TextDelta(delta.index, finish_reason=end, stop_reason=delta.stop_reason)
        if message or end:
            self._held = None
            self._release(held, tokens)
        else:
            self._held = held
        if not self._include_reasoning:
            message.reasoning = ""
        return Piece(message, tokens)

    def _release(self, held: TextDelta, tokens: TextDelta) -> None:
        """Moves the held tokens; without their reasoning, if that is not asked for."""
        if not self._parser.has_reasoned:
            tokens.token_ids, tokens.offsets, tokens.logprobs = held.token_ids, held.offsets, held.logprobs
            return
        reasoning = [self._parser.is_reasoning(offset) for offset in held.offsets]
        self.reasoning_tokens += sum(reasoning)
        kept = [i for i, hidden in enumerate(reasoning) if self._include_reasoning or not hidden]
        tokens.token_ids = [held.token_ids[i] for i in kept]
        tokens.offsets = [held.offsets[i] for i in kept]
        tokens.logprobs = [held.logprobs[i] for i in kept] if held.logprobs else []

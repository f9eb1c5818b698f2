"""One Jinja chat template: messages in, prompt text out, with the rules of transformers' apply_chat_template.

Templates come with models, so they run in Jinja's sandbox; whatever they raise on some messages is the request's error.
"""

import json
from collections.abc import Mapping
from datetime import datetime
from functools import cached_property
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jaxserve.errors import ConfigError, RequestError

_MARK = "CONTINUE_FINAL_MESSAGE_MARK "  # its blank tells whether the template strips content


class ChatTemplate:
    """A compiled template. Raises ConfigError if it is not valid Jinja."""

    def __init__(self, source: str):
        self._environment = _environment()
        self._source = source
        try:
            self._template = self._environment.from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise ConfigError(f"the chat template is not valid Jinja: {error}", param="chat_template") from None

    def render(
        self,
        messages: list[dict],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        variables: Mapping[str, Any],
    ) -> str:
        """The prompt. Raises RequestError (param "messages") for whatever the template does not take."""
        if not messages:
            raise RequestError("messages may not be empty", param="messages")
        if add_generation_prompt and continue_final_message:
            raise RequestError(
                "add_generation_prompt and continue_final_message exclude each other", param="continue_final_message"
            )
        # A null field is an absent one: templates would print None. But some ask whether content is none.
        messages = [
            {k: v for k, v in message.items() if v is not None or k == "content" and self.tests_content}
            for message in messages
        ]
        if continue_final_message:
            messages = [*messages[:-1], _marked(messages[-1])]
        try:
            text = self._template.render(
                **{**variables, "messages": messages, "add_generation_prompt": add_generation_prompt}
            )
        except Exception as error:  # template code is foreign: a TypeError in it is as good as raise_exception()
            raise RequestError(f"the chat template refused the messages: {error}", param="messages") from None
        return _cut_at_mark(text) if continue_final_message else text

    @cached_property
    def names(self) -> frozenset[str]:
        """The variables that it reads."""
        tree = self._environment.parse(self._source)
        return frozenset(node.name for node in tree.find_all(nodes.Name) if node.ctx == "load")

    @cached_property
    def fields(self) -> frozenset[str]:
        """The fields that it reads of messages or of anything else: `message.name` or `message["name"]`."""
        tree = self._environment.parse(self._source)
        items = (node.arg.value for node in tree.find_all(nodes.Getitem) if isinstance(node.arg, nodes.Const))
        return frozenset(
            {node.attr for node in tree.find_all(nodes.Getattr)} | {i for i in items if isinstance(i, str)}
        )

    def mentions(self, text: str) -> bool:
        return text in self._source

    @cached_property
    def tests_content(self) -> bool:
        """Whether it asks if a message's content is none, as a message that only calls tools has it."""
        tree = self._environment.parse(self._source)
        return any(test.name == "none" and _is_content(test.node, frozenset()) for test in tree.find_all(nodes.Test))

    @cached_property
    def wants_parts(self) -> bool:
        """Whether it loops over a message's content: `for part in message['content']`, also through a variable."""
        tree = self._environment.parse(self._source)
        aliases = {
            node.target.name
            for node in tree.find_all(nodes.Assign)
            if isinstance(node.target, nodes.Name) and _is_content(node.node, frozenset())
        }
        return any(_is_content(loop.iter, frozenset(aliases)) for loop in tree.find_all(nodes.For))


def _is_content(node: nodes.Node, aliases: frozenset[str]) -> bool:
    """Whether an expression is message.content, message['content'], or a variable that was set to it."""
    if isinstance(node, (nodes.Filter, nodes.Test)) and node.node is not None:
        return _is_content(node.node, aliases)
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    return isinstance(node, nodes.Name) and node.name in aliases


def _marked(message: dict) -> dict:
    """The message with the mark after its text, so that whatever the template writes after it can be cut off."""
    content = message.get("content")
    if isinstance(content, str):
        return message | {"content": content + _MARK}
    if isinstance(content, list):
        for i in reversed(range(len(content))):
            if isinstance(content[i].get("text"), str):
                part = content[i] | {"text": content[i]["text"] + _MARK}
                return message | {"content": [*content[:i], part, *content[i + 1 :]]}
    raise RequestError("continue_final_message needs text in the last message", param="continue_final_message")


def _cut_at_mark(text: str) -> str:
    at = text.rfind(_MARK.strip())
    if at < 0:
        raise RequestError(
            "continue_final_message: the chat template leaves out the last message", param="continue_final_message"
        )
    stripped = text[at : at + len(_MARK)] != _MARK  # the template strips content: so is what we continue
    return text[:at].rstrip() if stripped else text[:at]


class _Generation(jinja2.ext.Extension):
    """{% generation %}...{% endgeneration %} marks what the assistant wrote, for training: here just its body."""

    tags = {"generation"}

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    return environment


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Plain JSON: Jinja's own filter escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)

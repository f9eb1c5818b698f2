"""The grammars: what they let pass is read back as just the calls that it is, and nothing else passes."""

import pytest
from llguidance import LLMatcher, LLTokenizer
from parser_cases import ANALYSIS, NOW, PARIS, TOOLS, WEATHER, message_of
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from jaxserve.errors import RequestError
from jaxserve.parsers import (
    REASONING_FORMATS,
    TOOL_FORMATS,
    Formats,
    ThinkingBudget,
    Tool,
    ToolChoice,
    find_formats,
    make_grammar,
    make_parser,
    thinking_grammar,
)

SPECIAL = [
    "<eos>", "<think>", "</think>", "[THINK]", "[/THINK]", "[TOOL_CALLS]", "[ARGS]", "<|tool_call|>", "<|python_tag|>", "<|channel|>",
    "<|message|>", "<|constrain|>", "<|start|>", "<|end|>", "<|call|>", "<|return|>",
]  # fmt: skip
PLAIN = ["<tool_call>", "</tool_call>", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"]
ONE = WEATHER.name


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return make_tokenizer(SPECIAL, PLAIN)


def make_tokenizer(special: list[str], plain: list[str]) -> Tokenizer:
    """Bytes, and markers as special and as ordinary tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(special)
    backend.add_tokens([AddedToken(text, special=False, normalized=False) for text in plain])
    return backend


class Held:
    """A grammar, and what texts it lets pass."""

    def __init__(self, tokenizer: Tokenizer, formats: Formats, choice: ToolChoice, **options):
        token_id = {token: tokenizer.token_to_id(token) for token in SPECIAL + PLAIN}.get
        self.formats, self.choice, self.prompt = formats, choice, options.pop("prompt", "")
        grammar = make_grammar(formats, choice, token_id=token_id, prompt=self.prompt, **options)
        if grammar is None:
            grammar = thinking_grammar(formats, options["budget"], token_id=token_id, prompt=self.prompt)
        assert grammar is not None
        assert LLMatcher.validate_grammar(grammar) == ""
        self._tokenizer = tokenizer
        self._matcher = LLMatcher(LLTokenizer(tokenizer.to_str(), eos_token=tokenizer.token_to_id("<eos>")), grammar)

    def takes(self, text: str) -> bool:
        """Whether the whole text passes, and may end there."""
        self._matcher.reset()
        ids = self._tokenizer.encode(text).ids
        taken = self._matcher.try_consume_tokens(ids)
        assert not self._matcher.is_error(), self._matcher.get_error()
        return taken == len(ids) and self._matcher.is_accepting()

    @property
    def complete(self) -> bool:
        return self._matcher.is_stopped()

    def forced(self, text: str) -> list[int]:
        """The tokens that must follow the longest beginning of a text that passes."""
        self._matcher.reset()
        self._matcher.try_consume_tokens(self._tokenizer.encode(text).ids)
        return self._matcher.compute_ff_tokens()

    def calls(self, text: str) -> list[tuple[str, str]]:
        assert self.takes(text), text
        parser = make_parser(self.formats, self.choice, prompt=self.prompt)
        content, _, calls = message_of([parser.push(text, finished=True)])
        assert not content and parser.finish_reason("stop") == ("stop" if self.choice.mode == "named" else "tool_calls")
        return calls


def text_in(name: str, arguments: str, tool: str = ONE) -> tuple[str, str]:
    """A call as the grammar writes it, and what stands between two of them."""
    fence = "\n```json\n{0}\n```" if name == "deepseek_v3" else "{0}"
    deepseek = f"<｜tool▁call▁begin｜>{'function<｜tool▁sep｜>' if name == 'deepseek_v3' else ''}{tool}{'' if name == 'deepseek_v3' else '<｜tool▁sep｜>'}{fence.format(arguments)}<｜tool▁call▁end｜>"
    plain = f'{{"name": "{tool}", "arguments": {arguments}}}'
    python = {"{}": "", PARIS: 'city="Paris", days=3'}.get(arguments, f"city={arguments}")
    values = {"{}": {}, PARIS: {"city": "Paris", "days": 3}}.get(arguments, {"city": arguments})
    tags = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    coder = f"<tool_call>\n<function={tool}>\n{tags}</function>\n</tool_call>"
    return {
        "deepseek_v3": (deepseek, "\n"),
        "deepseek_v31": (deepseek, ""),
        "granite": (plain, ", "),
        "hermes": (f"<tool_call>\n{plain}\n</tool_call>", "\n"),
        "llama3_json": (plain.replace("arguments", "parameters"), "; "),
        "mistral": (plain, ", "),
        "openai": (f"<|channel|>commentary to=functions.{tool} <|constrain|>json<|message|>{arguments}", ""),
        "phi4_mini_json": (plain, ", "),
        "pythonic": (f"{tool}({python})", ", "),
        "qwen3_coder": (coder, "\n"),
        "qwen3_xml": (coder, "\n"),
    }[name]


def around(name: str, calls: str) -> str:
    begin, end = {
        "deepseek_v3": ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        "deepseek_v31": ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        "granite": ("<|tool_call|>[", "]"),
        "mistral": ("[TOOL_CALLS][", "]"),
        "phi4_mini_json": ("functools[", "]"),
        "pythonic": ("[", "]"),
    }.get(name, ("", ""))
    return begin + calls + end


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_required_calls(name: str, tokenizer: Tokenizer):
    held = Held(tokenizer, find_formats(name, "none", None), ToolChoice("required", tuple(TOOLS)))
    first, between = text_in(name, PARIS)
    second, _ = text_in(name, "{}", NOW.name)
    assert held.calls(around(name, first)) == [(ONE, PARIS)]
    assert held.calls(around(name, second)) == [(NOW.name, "{}")]
    for bad in (
        "",
        "Hello",
        around(name, first).replace("get_weather", "get"),
        around(name, first).replace("days", "x"),
    ):
        assert not held.takes(bad)
    if name != "openai":  # stops after each call
        assert held.calls(around(name, first + between + second)) == [(ONE, PARIS), (NOW.name, "{}")]
        one = Held(tokenizer, held.formats, held.choice, parallel=False)
        assert one.takes(around(name, first)) and not one.takes(around(name, first + between + second))


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_a_named_call(name: str, tokenizer: Tokenizer):
    held = Held(tokenizer, find_formats(name, "none", None), ToolChoice("named", (WEATHER,)))
    text, between = text_in(name, PARIS)
    assert held.calls(around(name, text)) == [(ONE, PARIS)]
    assert not held.takes(around(name, text_in(name, "{}", NOW.name)[0]))
    if name != "openai":
        assert not held.takes(around(name, text + between + text))


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_auto_with_a_strict_tool(name: str, tokenizer: Tokenizer):
    strict = Tool(ONE, WEATHER.parameters, strict=True)
    held = Held(tokenizer, find_formats(name, "none", None), ToolChoice("auto", (strict, NOW)))
    call, text = around(name, text_in(name, PARIS)[0]), "Hello <you>, [1] {"
    final = "<|channel|>final<|message|>" if name == "openai" else ""
    assert held.takes(final + text) and held.calls(call) == [(ONE, PARIS)]
    assert not held.takes(call.replace("days", "x"))
    if name not in ("openai", "llama3_json", "pythonic"):
        assert held.takes(f"{text}\n{call}") and held.takes(f"{call}{text}")
        assert not held.takes(text + call.replace("days", "x"))


def test_phi4s_marked_form(tokenizer: Tokenizer):
    formats = find_formats("phi4_mini_json", "none", "{{ '<|tool_call|>' }}{{ '<|/tool_call|>' }}")
    held = Held(tokenizer, formats, ToolChoice("required", tuple(TOOLS)))
    call, now = (
        f'<|tool_call|>{{"name": "{name}", "arguments": {arguments}}}<|/tool_call|>'
        for name, arguments in ((ONE, PARIS), ("now", "{}"))
    )
    assert held.calls(call + now) == [(ONE, PARIS), ("now", "{}")] and held.calls(now) == [("now", "{}")]
    assert not held.takes(call.replace("days", "x")) and not held.takes("functools[]")
    parser = make_parser(formats, held.choice, prompt="")
    text = f"So {call}{now} and functools[{call[13:-14]}] ok"
    content, _, calls = message_of([parser.push(text, finished=True)])
    assert (content, calls) == ("So and ok", [(ONE, PARIS), ("now", "{}"), (ONE, PARIS)])


def test_strict_calls_amid_a_text_that_have_no_mark(tokenizer: Tokenizer):
    strict = Tool(ONE, WEATHER.parameters, strict=True)
    held = Held(tokenizer, find_formats("llama3_json", "none", None), ToolChoice("auto", (strict, NOW)))
    call, now = f'{{"name": "get_weather", "parameters": {PARIS}}}', '{"name": "now", "parameters": {}}'
    for text in ("So:\n\n{}", "So {{\n{}\n{}\nMore?", "a\n{}", "So:\n```json\n{}\n```\n"):
        assert held.takes(text.format(call, now)), text
        assert not held.takes(text.format(call.replace("days", "x"), now)), text
        assert not held.takes(text.format(call.replace(": ", " :\n ", 1), now)), "in no other spacing"
    parser = make_parser(held.formats, held.choice, prompt="")
    content, _, calls = message_of([parser.push(f"So:\n{call}\nAnd\n{now}", finished=True)])
    assert (content, calls) == ("So:\nAnd", [(ONE, PARIS), ("now", "{}")])
    for text in (
        'x {"name": "get_weather"}',
        'x\n{"name": "Bob"}',
        'x\n{\n  "parameters": {}}',
        'x\n{"name": "nowhere"}',
        'x\n{"type": "object", "name": "now"}',
        "x\n{'name': 'nowhere'}",
        "x\n{'type': 'function'}",
    ):
        assert held.takes(text), text
    for text in (  # which are read as calls, and follow no schema
        'x\n{"type":"function","name":"now","parameters":{}}',
        'x\n{ "type" : "function" , "name" : "now"}',
        "x\n{'name': 'now', 'parameters': {}}",
        "x\n{'type': 'function', 'name': 'now'}",
    ):
        assert message_of([make_parser(held.formats, held.choice, prompt="").push(text, finished=True)])[2], text
        assert not held.takes(text), text


def test_mistrals_newer_form(tokenizer: Tokenizer):
    formats = find_formats("mistral", "none", "[ARGS]")
    held = Held(tokenizer, formats, ToolChoice("required", tuple(TOOLS)))
    text = f"[TOOL_CALLS]get_weather[ARGS]{PARIS}[TOOL_CALLS]now[ARGS]{{}}"
    assert held.calls(text) == [(ONE, PARIS), ("now", "{}")]
    assert not held.takes("[TOOL_CALLS]get_weather[ARGS]{}")


@pytest.mark.parametrize(
    ("prompt", "good", "bad"),
    [
        ("<think>\n", ["Hm <you> [x]</think>\n\n{}"], ["{}", "Hm"]),
        ("<think>\n\n</think>\n\n", ["{}"], ["<think>x</think>{}"]),
        ("", ["{}", "<think>x</think>{}"], ["Hm {}"]),
    ],
)
def test_reasoning_passes_before_a_forced_call(tokenizer: Tokenizer, prompt: str, good: list[str], bad: list[str]):
    formats = find_formats("hermes", "qwen3", None)
    held = Held(tokenizer, formats, ToolChoice("required", (WEATHER,)), prompt=prompt)
    call = text_in("hermes", PARIS)[0]
    for text in good:
        assert held.calls(text.replace("{}", call)) == [(ONE, PARIS)]
    assert not any(held.takes(text.replace("{}", call)) for text in bad)


@pytest.mark.parametrize("answer", ["%llguidance {}\nstart: /[0-9]+/", LLMatcher.grammar_from_regex("[0-9]+")])
def test_an_answers_own_grammar_begins_after_the_reasoning_and_beside_calls(tokenizer: Tokenizer, answer: str):
    formats = find_formats("hermes", "qwen3", None)
    held = Held(tokenizer, formats, ToolChoice(), answer=answer)
    assert held.takes("17") and held.takes("<think>Hm</think>\n17") and not held.takes("x")
    held = Held(tokenizer, formats, ToolChoice("auto", tuple(TOOLS)), answer=answer)
    call = text_in("hermes", PARIS)[0]
    assert held.takes("17") and held.takes(call) and held.takes(f"<think>Hm</think>{call}") and not held.takes("x")
    held = Held(tokenizer, find_formats("openai", "openai", None), ToolChoice(), answer=answer)
    assert held.takes(f"{ANALYSIS}<|channel|>final<|message|>17") and not held.takes("<|channel|>final<|message|>x")


def test_values_between_tags_are_held_to_their_types(tokenizer: Tokenizer):
    held = Held(tokenizer, find_formats("qwen3_coder", "none", None), ToolChoice("required", (WEATHER,)))

    def call(**values: str) -> str:
        tags = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
        return f"<tool_call>\n<function=get_weather>\n{tags}</function>\n</tool_call>"

    text = call(city='any "text"\nat all', days="3", units="metric", where="null", tags='["a"]')
    arguments = r'{"city": "any \"text\"\nat all", "days": 3, "units": "metric", "where": null, "tags": ["a"]}'
    assert held.calls(text) == [(ONE, arguments)]
    for bad in (call(days="3"), call(city="x", days="many"), call(city="x", units="miles"), call(city="x", x="y")):
        assert not held.takes(bad)


def test_references_reach_the_definitions_of_the_whole_schema(tokenizer: Tokenizer):
    schema = {
        "type": "object",
        "properties": {"at": {"$ref": "#/$defs/point"}},
        "required": ["at"],
        "$defs": {"point": {"type": "array", "items": {"type": "integer"}}},
    }
    for name, text in (
        ("pythonic", "[go(at=[1, 2])]"),
        ("hermes", '<tool_call>\n{"name": "go", "arguments": {"at": [1, 2]}}\n</tool_call>'),
        ("qwen3_coder", "<tool_call>\n<function=go>\n<parameter=at>\n[1, 2]\n</parameter>\n</function>\n</tool_call>"),
    ):
        held = Held(tokenizer, find_formats(name, "none", None), ToolChoice("required", (Tool("go", schema),)))
        assert held.calls(text) == [("go", '{"at": [1, 2]}')]


def test_no_grammar_where_anything_goes():
    formats = find_formats("hermes", "qwen3", None)
    for choice in (ToolChoice(), ToolChoice("auto", tuple(TOOLS))):
        assert make_grammar(formats, choice, token_id=lambda text: None, prompt="") is None


# ------------------------------------------------------------------------------------------------ budget of reasoning

THINKING = [(name, form) for name, form in REASONING_FORMATS.items() if form and name != "granite"]


def limited(
    tokenizer: Tokenizer, name: str, tokens: int, choice: ToolChoice | None = None, tools: str = "none", **options
):
    ends = (tokenizer.token_to_id("<eos>"),)
    budget, formats = ThinkingBudget(tokens, ends), find_formats(tools, name, None)
    return Held(tokenizer, formats, choice or ToolChoice(), budget=budget, **options)


@pytest.mark.parametrize("prompt", ["", "OPEN"])
@pytest.mark.parametrize(("name", "form"), THINKING)
@pytest.mark.parametrize("tokens", [0, 1, 5, 4000])
def test_reasoning_ends_when_its_budget_is_used_up(name, form, tokens, prompt, tokenizer: Tokenizer):
    begin, end = form.begin[0], form.end[0]
    held = limited(tokenizer, name, tokens, prompt=prompt and f"text {begin}\n")
    begin = "" if prompt else begin
    for count in {0, tokens // 2, tokens}:
        assert held.takes(f"{begin}{'x' * count}{end}")
        assert held.complete, "what follows is free"
        assert not held.takes(f"{begin}{'x' * count}"), "it must end"
        assert not held.takes(f"{begin}{'x' * count}<eos>"), "the answer must follow"
    assert not held.takes(f"{begin}{'x' * (tokens + 1)}{end}")
    assert held.forced(f"{begin}{'日' * tokens}") == [tokenizer.token_to_id(end)], "also amid a character"
    if not prompt:
        assert (held.takes("A") and held.complete) is not form.always, "an answer that does not reason"


def test_what_has_ended_or_does_not_reason_has_no_grammar(tokenizer: Tokenizer):
    formats, budget = find_formats("none", "qwen3", None), ThinkingBudget(3)
    options = {"token_id": tokenizer.token_to_id}
    assert thinking_grammar(formats, budget, prompt="<think>\n\n</think>\n\n", **options) is None
    for name, words in (("none", "reasoning-parser"), ("openai", "openai"), ("granite", "single tokens")):
        with pytest.raises(RequestError, match=words) as caught:
            thinking_grammar(find_formats("none", name, None), budget, prompt="", **options)
        assert caught.value.param == "thinking_token_budget"


@pytest.mark.parametrize("prompt", ["", "<think>"])
@pytest.mark.parametrize("special", [True, False])
def test_a_form_and_calls_come_after_the_budget(prompt, special):
    tokenizer = make_tokenizer(*(SPECIAL, PLAIN) if special else (SPECIAL[:1] + SPECIAL[3:], PLAIN + SPECIAL[1:3]))
    begin = "" if prompt else "<think>"
    held = limited(tokenizer, "qwen3", 3, answer='start: "yes" | "no"', prompt=prompt)
    assert held.takes(f"{begin}xyz</think>\n\nyes") and held.takes(f"{begin}</think>no")
    assert not held.takes(f"{begin}xyz</think>maybe") and not held.takes(f"{begin}vxyz</think>no")
    call, _ = text_in("hermes", PARIS)
    strict = Tool(WEATHER.name, WEATHER.parameters, strict=True)
    for choice in (ToolChoice("required", tuple(TOOLS)), ToolChoice("auto", (strict,))):
        held = limited(tokenizer, "qwen3", 3, choice, "hermes", prompt=prompt)
        assert held.takes(f"{begin}xyz</think>\n\n{call}") and held.takes(f"{begin}</think>{call}")
        assert not held.takes(f"{begin}vxyz</think>{call}") and not held.takes(f" {begin}vxyz</think>{call}")
        assert prompt or held.takes(call)

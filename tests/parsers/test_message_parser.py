"""Every format, whole and in pieces: wherever the text is cut, the deltas join to the same message."""

import json

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from parser_cases import CASES, ODD_TYPES, PARIS, TOOLS, Case, hermes, message_of

from jaxserve.detokenize import SequenceText
from jaxserve.parsers import (
    REASONING_FORMATS,
    TOOL_FORMATS,
    MessageDelta,
    MessageParser,
    Tool,
    ToolChoice,
    find_formats,
    make_parser,
)
from jaxserve.request import SamplingParams, SequenceDelta
from jaxserve.tokenizer import Tokenizer

pytestmark = pytest.mark.filterwarnings("error")  # what a model writes is no reason for one

BYTES = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
AUTO = ToolChoice("auto", tuple(TOOLS))


def parser_of(case: Case, choice: ToolChoice = AUTO, **options) -> MessageParser:
    formats = find_formats(case.name, case.thinks, None)
    return make_parser(formats, choice, prompt=case.prompt, **options)


def read(parser: MessageParser, pieces: list[str]) -> list[MessageDelta]:
    return [parser.push(piece, finished=i == len(pieces) - 1) for i, piece in enumerate(pieces)]


def names(case: Case) -> str:
    return f"{case.name}-{case.thinks}-{case.id or case.text[:30]}"


@pytest.mark.parametrize("case", CASES, ids=names)
def test_a_whole_text(case: Case):
    parser = parser_of(case)
    content, reasoning, calls = message_of(read(parser, [case.text]))
    assert (content, reasoning, calls) == (case.content, case.reasoning, case.calls)
    if not case.cut:
        assert all(json.loads(arguments) is not None for _, arguments in calls), "the arguments are JSON"
    assert parser.called == (len(calls) > case.cut)
    assert parser.finish_reason("stop") == ("tool_calls" if calls and not case.cut else "stop")
    assert parser.finish_reason("length") == "length" and parser.finish_reason(None) is None


@pytest.mark.parametrize("case", CASES, ids=names)
def test_every_single_cut(case: Case):
    for at in range(len(case.text) + 1):
        got = message_of(read(parser_of(case), [case.text[:at], case.text[at:]]))
        assert got == (case.content, case.reasoning, case.calls), f"cut at {at}"
    letters = message_of(read(parser_of(case), [*case.text, ""]))
    assert letters == (case.content, case.reasoning, case.calls)


@pytest.mark.parametrize("per_delta", [1, 3])
@pytest.mark.parametrize("case", CASES, ids=names)
def test_marks_that_are_special_tokens(case: Case, per_delta: int):
    """Through the detokenizer, a byte or a mark at a time: ends of calls are special tokens that it does not show."""
    formats = find_formats(case.name, case.thinks, None)
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({char: i for i, char in enumerate(BYTES)}, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    marks = [mark for mark in formats.markers(with_tools=True) if " " not in mark]  # those of Granite 3.2 are text
    backend.add_special_tokens(sorted({*marks, "</tool_call>", "<|/tool_call|>"} - {"functools"}))
    tokenizer = Tokenizer(backend, bos_token_id=None, eos_token_ids=[])
    shown = frozenset(i for mark in marks if (i := tokenizer.added_token_id(mark)) is not None)
    text, parser = SequenceText(0, tokenizer, SamplingParams(), shown_ids=shown), parser_of(case)
    ids, deltas = backend.encode(case.text).ids, []
    for at in range(0, len(ids), per_delta):
        piece = text.push(SequenceDelta("r", 0, ids[at : at + per_delta])).text
        deltas.append(parser.push(piece, finished=False))
    deltas.append(parser.push(text.push(SequenceDelta("r", 0, [], finish_reason="stop")).text, finished=True))
    content, reasoning, calls = message_of(deltas)
    expected = case.content
    for end in {"</tool_call>", "<|/tool_call|>"} - set(marks):  # where it is content, it is not shown
        expected = expected.replace(end, "")
    assert (content, reasoning, calls) == (expected, case.reasoning, case.calls)


@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_random_cuts_of_random_texts(data: st.DataObject):
    """Also of texts that no model should write: pieces of the cases, mixed, in any format."""
    name = data.draw(st.sampled_from(sorted(TOOL_FORMATS)))
    thinks = data.draw(st.sampled_from(["none", *REASONING_FORMATS]))
    fitting = [case.text for case in CASES if case.name in (name, "none")]
    part = st.sampled_from(fitting).flatmap(lambda text: st.integers(0, len(text)).map(lambda at: text[at:]))
    parts = st.one_of(part, part.map(lambda text: text[:7]), st.text(max_size=5), st.sampled_from(list('{}[]()"\\,:=')))
    text = "".join(data.draw(st.lists(parts, max_size=6)))
    case = Case(name, text, thinks=thinks)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[i:j] for i, j in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole, cut = parser_of(case), parser_of(case)
    assert message_of(read(cut, pieces)) == message_of(read(whole, [text]))
    assert (cut.called, cut.finish_reason("stop")) == (whole.called, whole.finish_reason("stop"))
    assert [cut.is_reasoning(i) for i in range(len(text))] == [whole.is_reasoning(i) for i in range(len(text))]


def test_arguments_come_as_they_are_written():
    parser = parser_of(Case("hermes", ""))
    read(parser, ['<tool_call>{"name": "get_weather", "arguments": {"city": "Pa', "x"][:1])
    parser = parser_of(Case("hermes", ""))
    first = parser.push('<tool_call>{"name": "get_weather", "argu', finished=False)
    assert first.tool_calls[0].name == "get_weather" and not first.tool_calls[0].arguments
    assert parser.push('ments": {"city": "Pa', finished=False).tool_calls[0].arguments == '{"city": "Pa'
    assert parser.push("r\\", finished=False).tool_calls[0].arguments == "r\\"
    assert not parser.called and parser.finish_reason("length") == "length"


def test_text_is_held_back_only_where_it_must_be():
    parser = parser_of(Case("hermes", ""))
    assert parser.push("a < b <tool", finished=False).content == "a < b"
    assert parser.push("box", finished=False).content == " <toolbox"


def test_a_named_choice_is_one_call_and_stops():
    parser = parser_of(Case("hermes", ""), ToolChoice("named", (TOOLS[0],)))
    _, _, calls = message_of(read(parser, [hermes(PARIS) + hermes(PARIS)]))
    assert calls == [("get_weather", PARIS)] and parser.finish_reason("stop") == "stop"


def test_without_parallel_calls_the_first_is_sent():
    parser = parser_of(Case("hermes", ""), parallel=False)
    content, _, calls = message_of(read(parser, [f"a{hermes(PARIS)}{hermes('{')}"]))
    assert (content, calls) == ("a", [("get_weather", PARIS)]) and parser.finish_reason("stop") == "tool_calls"


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_without_tools_everything_is_text(name: str):
    if name == "openai":
        pytest.skip("harmony is more than calls: see below")
    text = hermes(PARIS) + " [TOOL_CALLS][] \n"
    parser = parser_of(Case(name, ""), ToolChoice())
    assert message_of(read(parser, [text])) == (text, "", [])


def test_harmony_is_read_without_tools():
    case = Case("none", "", thinks="openai")
    text = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes. "
    assert message_of(read(parser_of(case, ToolChoice()), [text])) == ("Yes. ", "Hm.", [])


@pytest.mark.parametrize("schema", ODD_TYPES, ids=str)
@pytest.mark.parametrize("value", ["5", "null", "None", "x", "1e999", "NaN", "(1, 2)", "{1: (2,)}", "[" * 5000])
def test_values_between_tags_are_json_whatever_their_schema(schema, value: str):
    loop = {"$defs": {"loop": {"$ref": "#/$defs/loop"}}}
    tool = Tool("f", {"type": "object", "properties": {"x": schema}, **loop})
    parser = parser_of(Case("qwen3_coder", ""), ToolChoice("auto", (tool,)))
    text = f"<tool_call>\n<function=f>\n<parameter=x>\n{value}\n</parameter>\n</function>\n</tool_call>"
    [(_, arguments)] = message_of(read(parser, [text]))[2]
    assert set(json.loads(arguments)) == {"x"} and "NaN" not in arguments.replace('"NaN"', "")


def test_half_a_character_is_replaced():
    """No answer could hold it: the encoder of JSON would fail in the middle of a stream."""
    for name, text in (
        ("pythonic", r"[get_weather(city='\ud83d')]"),
        ("hermes", hermes(json.dumps(r'{"city": "\ud83d"}').replace("\\\\", "\\"))),
    ):
        [(_, arguments)] = message_of(read(parser_of(Case(name, "")), [text]))[2]
        assert json.loads(arguments) == {"city": "\ufffd"} and arguments.encode()


def test_ids_are_distinct_and_of_the_familys_form():
    for name, length in (("hermes", 29), ("mistral", 9)):
        text = f"[TOOL_CALLS]{'[{}, {}]'.format(*['{"name": "now"}'] * 2)}" if length == 9 else hermes("{}") * 2
        calls = read(parser_of(Case(name, "")), [text])[0].tool_calls
        assert len({call.id for call in calls}) == 2 and {len(call.id or "") for call in calls} == {length}


def test_a_continued_message_may_have_begun_to_reason():
    formats = find_formats("none", "qwen3", None)
    for begun, text, message in (
        ("<think>Hm", "m.</think>Yes", ("Yes", "m.", [])),
        ("<think>Hm.</think>Y", "es", ("es", "", [])),
        ("Ye", "s <think>", ("s <think>", "", [])),
    ):
        parser = make_parser(formats, ToolChoice(), prompt=f"...{begun}", continued=begun)
        assert message_of(read(parser, [text])) == message


def test_where_the_reasoning_is():
    parser = parser_of(Case("none", "", thinks="qwen3"))
    read(parser, ["<think>a</think>b"])
    assert "".join(str(int(parser.is_reasoning(i))) for i in range(18)) == "111111111111111100"

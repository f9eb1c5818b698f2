"""Incremental detokenising and stop strings: whatever the tokens, the streamed text is the offline one."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.detokenize import Detokenizer, SequenceText, StopMatcher, TextDelta, prompt_text, token_text
from jaxserve.request import SamplingParams, SequenceDelta, TokenLogprobs

SPECIAL = -1


class Pieces:
    """A tokenizer whose token i stands for the bytes pieces[i]; token -1 is special."""

    special_ids = frozenset([SPECIAL])

    def __init__(self, pieces: Sequence[bytes]):
        self.pieces = pieces

    def token_bytes(self, token_id: int) -> bytes:
        return b"<|special|>" if token_id == SPECIAL else self.pieces[token_id]


def text_of(
    pieces: Sequence[bytes], ids: Sequence[int] | None = None, *, per_delta: int = 1, **knobs
) -> list[TextDelta]:
    """Every delta that is shown for these tokens, pushed `per_delta` at a time."""
    params = SamplingParams(max_tokens=None, **knobs)
    stops = StopMatcher(params.stop) if params.stop else None
    sequence = SequenceText(0, Pieces(pieces), params, stops)
    ids = list(range(len(pieces))) if ids is None else list(ids)
    shown = []
    for at in range(0, len(ids) or 1, per_delta):
        last = at + per_delta >= len(ids)
        delta = SequenceDelta("r", 0, ids[at : at + per_delta], finish_reason="length" if last else None)
        if part := sequence.push(delta):
            shown.append(part)
        if sequence.finished:
            break
    return shown


def join(deltas: list[TextDelta]) -> str:
    return "".join(delta.text for delta in deltas)


def offline(
    data: bytes, stops: Sequence[str], *, include: bool = False, ignored_chars: int = 0
) -> tuple[str, str | None]:
    """The definition: cut at the stop string that is completed first (the longest of those that end there)."""
    text = data.decode(errors="replace")
    for end in range(ignored_chars + 1, len(text) + 1):
        hits = [stop for stop in stops if text[:end].endswith(stop)]
        if hits:
            hit = max(hits, key=len)
            return text[:end] if include else text[: end - len(hit)], hit
    return text, None


@st.composite
def split_texts(draw) -> tuple[str, list[bytes]]:
    """A text over few characters (so that stop strings occur) of one to four bytes, cut anywhere into tokens."""
    text = draw(st.text(st.sampled_from("ab#é日😀\n"), max_size=24) | st.text(max_size=12))
    data = text.encode()
    cuts = sorted(draw(st.sets(st.integers(0, len(data)), max_size=len(data))))
    bounds = [0, *cuts, len(data)]
    return text, [data[i:j] for i, j in zip(bounds, bounds[1:], strict=False)]


stop_lists = st.lists(st.text(st.sampled_from("ab#é日😀\n"), min_size=1, max_size=4), max_size=3)


@settings(max_examples=100, deadline=None)
@given(split_texts(), stop_lists, st.booleans(), st.integers(1, 4))
def test_any_split_streams_to_the_offline_text(case, stops, include, per_delta):
    text, pieces = case
    shown = text_of(pieces, per_delta=per_delta, stop=stops, include_stop_str_in_output=include)
    expected, hit = offline(text.encode(), stops, include=include)
    assert join(shown) == expected
    assert shown[-1].stop_reason == hit
    assert shown[-1].finish_reason == ("stop" if hit else "length")
    assert all(delta.text for delta in shown[:-1]), "an empty delta was shown before the end"


@settings(max_examples=100, deadline=None)
@given(st.lists(st.binary(max_size=5), max_size=12), stop_lists)
def test_bytes_that_are_no_text_stream_to_the_offline_text(pieces, stops):
    assert join(text_of(pieces, stop=stops)) == offline(b"".join(pieces), stops)[0]


@settings(max_examples=100, deadline=None)
@given(split_texts(), stop_lists, st.integers(0, 6))
def test_stop_strings_count_after_min_tokens(case, stops, min_tokens):
    text, pieces = case
    early = b"".join(pieces[:min_tokens]).decode(errors="ignore")  # characters completed by the first tokens
    shown = text_of(pieces, stop=stops, min_tokens=min_tokens)
    assert join(shown) == offline(text.encode(), stops, ignored_chars=len(early))[0]


@settings(max_examples=100, deadline=None)
@given(split_texts(), stop_lists)
def test_exactly_what_may_become_a_stop_string_is_held_back(case, stops):
    text, _ = case
    expected, hit = offline(text.encode(), stops)
    if hit:
        return
    detokenizer = Detokenizer(Pieces([text.encode()]), stops=StopMatcher(stops) if stops else None)
    detokenizer.push(0)
    beginnings = [n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])]
    assert detokenizer.take() == text[: len(text) - max(beginnings, default=0)]


@settings(max_examples=100, deadline=None)
@given(split_texts(), stop_lists, st.integers(1, 3))
def test_each_token_comes_with_the_text_that_ends_it(case, stops, per_delta):
    _, pieces = case
    shown = text_of(pieces, per_delta=per_delta, stop=stops)
    ids = [i for delta in shown for i in delta.token_ids]
    assert ids == list(range(len(ids))), "tokens are lost, doubled or out of order"
    if shown[-1].finish_reason == "length":
        assert len(ids) == len(pieces)
    length, total = 0, len(join(shown))
    for delta in shown:
        length += len(delta.text)
        assert all(offset <= length for offset in delta.offsets)
        if delta is not shown[-1] and delta.token_ids:
            assert len(b"".join(pieces[: delta.token_ids[-1] + 1]).decode(errors="ignore")) <= length
    offsets = [offset for delta in shown for offset in delta.offsets]
    assert offsets == [min(len(b"".join(pieces[:i]).decode(errors="ignore")), total) for i in ids]


@settings(max_examples=100, deadline=None)
@given(split_texts(), st.data())
def test_a_prompt_cut_inside_a_character_is_completed_by_the_output(case, data):
    text, pieces = case
    cut = data.draw(st.integers(0, len(pieces)))
    tokenizer = Pieces(pieces)
    prompt, _ = prompt_text(tokenizer, range(cut))
    output = Detokenizer(tokenizer, prompt_token_ids=range(cut))
    for i in range(cut, len(pieces)):
        output.push(i)
    output.finish()
    assert prompt + output.take() == text


@pytest.mark.parametrize(
    ("pieces", "stops", "text", "stop"),
    [
        (["a#", "b##", "c###d"], ["###"], "a#b##c", "###"),
        (["##", "##"], ["###"], "", "###"),  # across tokens; the fourth is dropped
        (["x\n", "\n", "y"], ["\n\n"], "x", "\n\n"),
        (["abcd"], ["bc", "abcd"], "a", "bc"),  # completed first
        (["xab"], ["b", "ab"], "x", "ab"),  # ends at the same character: the longest
        (["aab"], ["ab"], "a", "ab"),  # a false start
        (["aaaa"], ["aaab"], "aaaa", None),
        (["日", "本"], ["本"], "日", "本"),
    ],
)
def test_stop_strings(pieces, stops, text, stop):
    shown = text_of([piece.encode() for piece in pieces], stop=stops)
    assert (join(shown), shown[-1].stop_reason) == (text, stop)


def test_the_cut_is_at_the_hit_and_not_at_an_earlier_occurrence():
    shown = text_of([b"END a", b" b", b" END", b" c"], stop=["END"], min_tokens=2)
    assert join(shown) == "END a b "


def test_a_stop_string_may_begin_before_min_tokens_are_reached():
    assert join(text_of([b"aE", b"N", b"D b"], stop=["END"], min_tokens=2)) == "a"


def test_tokens_up_to_the_one_that_completed_the_stop_are_kept():
    shown = text_of([b"ab", b"c#", b"#", b"#d", b"e"], per_delta=4, stop=["###"])
    assert [i for delta in shown for i in delta.token_ids] == [0, 1, 2, 3]
    assert [offset for delta in shown for offset in delta.offsets] == [0, 2, 3, 3]
    assert shown[-1].stopped, "the engine is to be told"


def test_the_engine_need_not_be_told_what_it_knows():
    assert not text_of([b"a#"], stop=["#"])[-1].stopped  # its last token anyway


def test_special_tokens_are_skipped_or_shown():
    assert join(text_of([b"a", b"b"], [0, SPECIAL, 1])) == "ab"
    assert join(text_of([b"a", b"b"], [0, SPECIAL, 1], skip_special_tokens=False)) == "a<|special|>b"


@pytest.mark.parametrize(("include", "text"), [(False, "a"), (True, "ab")])
def test_a_stop_id_has_no_text_unless_asked_for(include, text):
    params = SamplingParams(include_stop_str_in_output=include)
    sequence = SequenceText(0, Pieces([b"a", b"b"]), params, stop_ids=[1])
    shown = sequence.push(SequenceDelta("r", 0, [0, 1], finish_reason="stop", stop_reason=1))
    assert (shown.text, shown.token_ids, shown.stop_reason) == (text, [0, 1], 1)


def test_the_last_token_of_a_complete_grammar_has_text():
    sequence = SequenceText(0, Pieces([b"{", b"}"]), SamplingParams(), stop_ids=[2])
    shown = sequence.push(SequenceDelta("r", 0, [0, 1], finish_reason="stop"))
    assert (shown.text, shown.finish_reason) == ("{}", "stop")


def test_a_half_character_waits_and_is_flushed_at_the_end():
    smile = "😀".encode()
    shown = text_of([b"a", smile[:2], smile[2:], smile[:3]])
    assert [delta.text for delta in shown] == ["a", "😀", "\ufffd"]
    assert [delta.token_ids for delta in shown] == [[0], [1, 2], [3]]


def test_a_character_that_the_prompt_breaks_off_is_not_in_the_output():
    half, params = "😀".encode()[:2], SamplingParams()
    sequence = SequenceText(0, Pieces([half, b"left", b"\xef\xbf\xbd"]), params, prompt_token_ids=[0])
    assert sequence.push(SequenceDelta("r", 0, [1])).text == "left"
    assert sequence.push(SequenceDelta("r", 0, [0])).text == ""
    assert sequence.push(SequenceDelta("r", 0, [1])).text == "\ufffdleft"  # this half is the output's own


def test_what_would_have_completed_the_prompts_character_does_not_do_so_later():
    smile = "😀".encode()
    sequence = SequenceText(0, Pieces([smile[:2], b"left", smile[2:]]), SamplingParams(), prompt_token_ids=[0])
    assert sequence.push(SequenceDelta("r", 0, [1])).text == "left"
    assert sequence.push(SequenceDelta("r", 0, [2])).text == "\ufffd\ufffd"


def test_nothing_is_shown_after_the_end():
    sequence = SequenceText(0, Pieces([b"a"]), SamplingParams(stop=["a"]), StopMatcher(["a"]))
    assert sequence.push(SequenceDelta("r", 0, [0])).stopped
    assert not sequence.push(SequenceDelta("r", 0, [0]))
    assert not sequence.push(SequenceDelta("r", 0, finish_reason="abort"))
    assert (sequence.whole.text, sequence.whole.finish_reason, sequence.num_tokens) == ("", "stop", 1)


def test_without_detokenizing_tokens_come_at_once():
    sequence = SequenceText(0, Pieces([]), SamplingParams(detokenize=False))
    assert sequence.push(SequenceDelta("r", 0, [5])).token_ids == [5]
    assert sequence.push(SequenceDelta("r", 0, [6], finish_reason="length")).token_ids == [6]
    assert (sequence.whole.token_ids, sequence.whole.text) == ([5, 6], "")


def test_logprobs_travel_with_their_tokens():
    def entry(i: int) -> TokenLogprobs:
        return TokenLogprobs(i, -1.0, 1, [], [])

    sequence = SequenceText(0, Pieces([b"a#", b"b"]), SamplingParams(logprobs=0, stop=["##"]), StopMatcher(["##"]))
    first = sequence.push(SequenceDelta("r", 0, [0], [entry(0)]))
    assert (first.text, first.logprobs) == ("a", [])  # its last character is held back, and so is the token
    second = sequence.push(SequenceDelta("r", 0, [1], [entry(1)]))
    assert (second.text, [e.token_id for e in second.logprobs]) == ("#b", [0, 1])


def test_pieces_of_characters_have_distinct_names():
    data = "日".encode()
    names = [token_text(data[i : i + 1]) for i in range(3)] + [token_text(data), token_text(b"a")]
    assert names == ["bytes:\\xe6", "bytes:\\x97", "bytes:\\xa5", "日", "a"]


def test_sequences_of_one_request_do_not_share_a_matcher_state():
    matcher = StopMatcher(["ab"])
    one, two = matcher.fork(), matcher.fork()
    assert one.feed("a", active=True) is None
    assert two.feed("b", active=True) is None
    assert one.feed("b", active=True) == (1, "ab")

"""Tokens in, text out: never half a character, never a piece of a stop string. Never imports jax.

    token id -> bytes -> UTF-8 decoder -> text | held back
                         (half characters      (a beginning of a stop string: exactly the longest suffix
                          wait here)             of the text that is one, and nothing more)

Everything here is independent of how the tokens arrive: one by one or many at a time, the text is the same.
"""

import codecs
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from jaxserve.request import SamplingParams, SequenceDelta, TokenLogprobs
from jaxserve.tokenizer import Tokenizer

MAX_CHAR_BYTES = 4  # of one character in UTF-8


def token_text(data: bytes) -> str:
    r"""A token as text; a piece of a character as `bytes:\xf0\x9f`, so that different pieces stay different."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


class StopMatcher:
    """Finds the first of several stop strings to be completed, in text that arrives in pieces (Knuth, Morris, Pratt).

    `held` counts the last characters of the text so far that may still become a stop string:

        ...the answer is 4.#|    stop "###" -> held = 1
    """

    def __init__(self, stops: Sequence[str]):
        self._tables = [(stop, _fallbacks(stop)) for stop in stops]
        self._firsts = frozenset(stop[0] for stop in stops)
        self._matched = [0] * len(stops)
        self.held = 0

    def fork(self) -> "StopMatcher":
        """A matcher of the same strings at the beginning of another text."""
        twin = StopMatcher(())
        twin._tables, twin._firsts, twin._matched = self._tables, self._firsts, [0] * len(self._tables)
        return twin

    def feed(self, text: str, *, active: bool) -> tuple[int, str] | None:
        """Reads `text` on. At the first hit stops and returns (characters of `text` read, stop string).

        Of several strings that end at the same character the longest wins. While not `active` nothing is a hit, but
        what was read may be the beginning of one.
        """
        if not self.held and self._firsts.isdisjoint(text):
            return None
        for i, char in enumerate(text):
            if (hit := self._step(char)) and active:
                return i + 1, hit
        self.held = max(self._matched, default=0)
        return None

    def _step(self, char: str) -> str | None:
        hit = None
        for j, (stop, fallbacks) in enumerate(self._tables):
            matched = self._matched[j]
            while matched and stop[matched] != char:
                matched = fallbacks[matched - 1]
            matched += stop[matched] == char
            if matched == len(stop):
                hit = stop if hit is None else max(hit, stop, key=len)
                matched = fallbacks[matched - 1]
            self._matched[j] = matched
        return hit


def _fallbacks(stop: str) -> list[int]:
    """For each prefix of `stop`: the length of its longest proper suffix that is also a prefix."""
    table = [0] * len(stop)
    k = 0
    for i in range(1, len(stop)):
        while k and stop[i] != stop[k]:
            k = table[k - 1]
        k += stop[i] == stop[k]
        table[i] = k
    return table


class Detokenizer:
    """The text of one sequence as its tokens come."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stops: StopMatcher | None = None,
        min_tokens: int = 0,
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        prompt_token_ids: Sequence[int] = (),
        shown_ids: frozenset[int] = frozenset(),
    ):
        """`prompt_token_ids`: if the prompt ends inside a character, the first tokens complete it.

        shown_ids: special tokens that are not skipped, since a parser reads them.
        """
        self._tokenizer = tokenizer
        self._stops = stops
        self._min_tokens = min_tokens
        self._include_stop = include_stop
        self._hidden = tokenizer.special_ids - shown_ids if skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        tail = [i for i in prompt_token_ids[-2 * MAX_CHAR_BYTES :] if i not in self._hidden]
        self.in_character = False  # whether the last token left a character unfinished
        self._decode(b"".join(map(tokenizer.token_bytes, tail)))
        self._in_prompts_character = self.in_character
        self._pending = ""  # decoded, not taken yet
        self._num_tokens = 0
        self.num_taken = 0  # characters
        self.stopped_by: str | None = None

    @property
    def num_decoded(self) -> int:
        """Characters so far: those taken and those still held back."""
        return self.num_taken + len(self._pending)

    def _decode(self, data: bytes, *, final: bool = False) -> str:
        if not self.in_character and data.isascii():  # most tokens are
            return data.decode("ascii")
        text = self._decoder.decode(data, final)
        self.in_character = bool(self._decoder.getstate()[0])
        return text

    def push(self, token_id: int, *, silent: bool = False) -> bool:
        """Adds a token (a `silent` one has no text). True if it completed a stop string; push no more then."""
        self._num_tokens += 1
        if silent or token_id in self._hidden:
            return False
        return self._add(self._decode(self._tokenizer.token_bytes(token_id)))

    def take_plain(self, token_id: int) -> str | None:
        """push() and take() at once, of a token for which nothing is held back: ASCII, and no stop strings. None: of
        another one, and nothing has happened.

        Most tokens are plain ones, and each is an event of a stream: this is a third of what all the steps cost.
        """
        if self._stops is not None or self._pending or self.in_character or token_id in self._hidden:
            return None
        data = self._tokenizer.token_bytes(token_id)
        if not data or not data.isascii():
            return None
        self._num_tokens += 1
        self.num_taken += len(data)
        return data.decode("ascii")

    def finish(self) -> bool:
        """Ends the text: a half character becomes U+FFFD. True if that completed a stop string."""
        stopped = self._add(self._decode(b"", final=True))
        self._stops = None  # nothing more is held back
        return stopped

    def _add(self, text: str) -> bool:
        if text and self._in_prompts_character:  # the output completes it, or else it was the prompt that was broken
            text, self._in_prompts_character = text.removeprefix("\ufffd"), False
        hit = self._stops.feed(text, active=self._num_tokens > self._min_tokens) if self._stops and text else None
        if not hit:
            self._pending += text
            return False
        read, self.stopped_by = hit
        self._pending += text[:read]
        if not self._include_stop:
            self._pending = self._pending[: len(self._pending) - len(self.stopped_by)]
        self._stops = None
        return True

    def take(self) -> str:
        """The text that may be shown and was not yet taken."""
        end = len(self._pending) - (self._stops.held if self._stops else 0)
        taken, self._pending = self._pending[:end], self._pending[end:]
        self.num_taken += len(taken)
        return taken


@dataclass(slots=True)
class TextDelta:
    """What one step added to the text of one sequence. Every token comes with the text that its last character is in.

    offsets: the character at which each token begins, in the whole text of the sequence.
    stopped: a stop string ended the sequence here; the engine does not know yet and is to be told.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # empty unless asked for
    offsets: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    stopped: bool = False

    def __bool__(self) -> bool:
        """Whether there is anything to show."""
        return bool(self.text or self.token_ids or self.finish_reason)


class SequenceText:
    """One sequence: engine deltas in, text deltas out. `whole` is the sum of all deltas so far."""

    def __init__(
        self,
        index: int,
        tokenizer: Tokenizer,
        params: SamplingParams,
        stops: StopMatcher | None = None,
        prompt_token_ids: Sequence[int] = (),
        stop_ids: Collection[int] = (),
        shown_ids: frozenset[int] = frozenset(),
    ):
        """stop_ids: tokens that have no text where they end the sequence."""
        self._params = params
        self._stop_ids = stop_ids
        self._text: Detokenizer | None = None
        if params.detokenize:
            self._text = Detokenizer(
                tokenizer,
                stops=stops.fork() if stops else None,
                min_tokens=params.min_tokens,
                include_stop=params.include_stop_str_in_output,
                skip_special_tokens=params.skip_special_tokens,
                prompt_token_ids=prompt_token_ids,
                shown_ids=shown_ids,
            )
        self._waiting: list[tuple[int, TokenLogprobs | None, int, int]] = []  # token, logprobs, begin, end
        self._parts: list[str] = []
        self.num_tokens = 0
        self._whole = TextDelta(index)

    @property
    def finished(self) -> bool:
        return self._whole.finish_reason is not None

    @property
    def whole(self) -> TextDelta:
        self._whole.text = "".join(self._parts)
        self._parts = [self._whole.text]
        return self._whole

    def push(self, delta: SequenceDelta) -> TextDelta:
        """What may be shown now; empty if nothing, and always after the end."""
        if self.finished:
            return TextDelta(delta.index)
        if self._text and len(delta.token_ids) == 1 and not (delta.finish_reason or self._waiting):
            begin = self._text.num_taken
            if text := self._text.take_plain(delta.token_ids[0]):
                shown = TextDelta(delta.index, text, delta.token_ids, delta.logprobs or [], [begin])
                self.num_tokens += 1
                self._remember(shown)
                return shown
        shown = TextDelta(delta.index)
        shown.stopped = self._read(delta) and delta.finish_reason is None
        if self._text and self._text.stopped_by is not None:
            shown.finish_reason, shown.stop_reason = "stop", self._text.stopped_by
        else:
            shown.finish_reason, shown.stop_reason = delta.finish_reason, delta.stop_reason
        shown.text = self._text.take() if self._text else ""
        if shown.text or shown.finish_reason or not self._text:
            self._release(shown)
            self._remember(shown)
        return shown

    def _read(self, delta: SequenceDelta) -> bool:
        """Takes in the tokens; True if a stop string was completed (the tokens after it are dropped)."""
        logprobs = delta.logprobs or []
        silent_end = delta.finish_reason == "stop" and not self._params.include_stop_str_in_output
        last = len(delta.token_ids) - 1
        stopped = False
        for i, token_id in enumerate(delta.token_ids):
            begin = end = 0
            if self._text:
                begin = self._text.num_decoded
                stopped = self._text.push(token_id, silent=silent_end and i == last and token_id in self._stop_ids)
                end = self._text.num_decoded + self._text.in_character
            self._waiting.append((token_id, logprobs[i] if logprobs else None, begin, end))
            self.num_tokens += 1
            if stopped:
                return True
        return bool(delta.finish_reason and self._text and self._text.finish())

    def _release(self, shown: TextDelta) -> None:
        """Moves the waiting tokens whose text is out into `shown`; all of them at the end."""
        limit = self._text.num_taken if self._text else 0
        for token_id, logprobs, begin, end in self._waiting:
            if end > limit and not shown.finish_reason:
                break
            shown.token_ids.append(token_id)
            shown.offsets.append(min(begin, limit))
            if logprobs:
                shown.logprobs.append(logprobs)
        del self._waiting[: len(shown.token_ids)]

    def _remember(self, shown: TextDelta) -> None:
        self._parts.append(shown.text)
        self._whole.token_ids += shown.token_ids
        self._whole.logprobs += shown.logprobs
        self._whole.offsets += shown.offsets
        self._whole.finish_reason, self._whole.stop_reason = shown.finish_reason, shown.stop_reason


def prompt_text(
    tokenizer: Tokenizer, token_ids: Iterable[int], *, skip_special_tokens: bool = True
) -> tuple[str, list[int]]:
    """The text of a prompt and the character at which each token begins.

    A half character at the end is left out: it is shown with the output that completes it.
    """
    text = Detokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
    offsets = []
    for token_id in token_ids:
        offsets.append(text.num_decoded)
        text.push(token_id)
    return text.take(), offsets

"""Text that arrives in pieces, read as if it were whole.

A parser is a generator that reads on and yields whenever it needs more text, so it can be written as straight code:

    while (yield from reader.until("<tool_call>", emit=message.content)):
        yield from read_call(...)

Every decision here waits until no further text can change it, so where the pieces were cut never shows.
"""

import re
from collections.abc import Callable, Generator
from functools import lru_cache

type Steps[T] = Generator[None, None, T]  # yields when it needs more text; returns T
type Emit = Callable[[str], object]

_SPACE = re.compile(r"[ \t\r\n]*")


class Reader:
    """A cursor in a growing text."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._ended = False
        self._dropped = 0  # characters that are no longer in _text
        self._kept: list[str] | None = None

    def feed(self, text: str, *, ended: bool) -> None:
        self._text = self._text[self._at :] + text
        self._dropped += self._at
        self._at = 0
        self._ended = ended

    @property
    def position(self) -> int:
        """Characters read so far."""
        return self._dropped + self._at

    def keep(self, before: str = "") -> None:
        """From now on remembers what is read, after `before`: `kept` has it, should it turn out to be plain text."""
        self._kept = [before]

    def kept(self) -> str:
        """What was read since keep()."""
        kept, self._kept = "".join(self._kept or ()), None
        return kept

    def more(self) -> Steps[bool]:
        """Waits for more text. False: there will be none."""
        if self._ended:
            return False
        yield
        return True

    def take(self, count: int) -> str:
        """Reads `count` characters, which are there."""
        taken = self._text[self._at : self._at + count]
        self._at += count
        if self._kept is not None:
            self._kept.append(taken)
        return taken

    def rest(self) -> str:
        """Reads all that is there."""
        return self.take(len(self._text) - self._at)

    def peek(self) -> Steps[str]:
        """The next character, not read; "" at the end."""
        while self._at == len(self._text):
            if not (yield from self.more()):
                return ""
        return self._text[self._at]

    def peek_after(self, pattern: re.Pattern[str]) -> Steps[str]:
        """The character behind what `pattern` (which goes character by character) matches here; nothing is read."""
        while True:
            match = pattern.match(self._text, self._at)
            if match is None or match.end() < len(self._text) or not (yield from self.more()):
                return self._text[match.end() : match.end() + 1] if match else ""

    def skip(self, literal: str) -> Steps[bool]:
        """Reads `literal` if that comes next. Otherwise nothing is read."""
        while not self._text.startswith(literal, self._at):
            if not literal.startswith(self._text[self._at :]) or not (yield from self.more()):
                return False
        self.take(len(literal))
        return True

    def skip_any(self, literals: tuple[str, ...]) -> Steps[str | None]:
        """Reads the first of `literals` that comes next and returns it."""
        for literal in literals:
            if (yield from self.skip(literal)):
                return literal
        return None

    def span(self, pattern: re.Pattern[str]) -> Steps[str]:
        """Reads as far as `pattern`, which matches the empty text and goes character by character, goes."""
        parts = []
        while True:
            match = pattern.match(self._text, self._at)
            assert match is not None, "the pattern matches the empty text"
            parts.append(self.take(match.end() - self._at))
            if self._at < len(self._text) or not (yield from self.more()):
                return "".join(parts)

    def space(self) -> Steps[str]:
        """Reads white space."""
        return self.span(_SPACE)

    def available(self, pattern: re.Pattern[str]) -> str:
        """Reads as far as `pattern` goes in what is there."""
        match = pattern.match(self._text, self._at)
        return self.take(match.end() - self._at) if match else ""

    def find(self, pattern: re.Pattern[str]) -> str:
        """Where `pattern` next matches, what comes before it; else all that is there. Nothing is read."""
        match = pattern.search(self._text, self._at)
        return self._text[self._at : match.start() if match else len(self._text)]

    def until(self, *markers: str, emit: Emit, leave: tuple[str, ...] = ()) -> Steps[str | None]:
        """Reads up to and with the first of `markers`, emits what comes before it, as it comes, and returns the marker.

        None: the text ended first, and all of it was emitted. Markers in `leave` are found, but not read. A marker may
        lie inside another only at its end.
        """
        pattern = _any_of(markers)
        while True:
            if match := pattern.search(self._text, self._at):
                emit(self.take(match.start() - self._at))
                return match[0] if match[0] in leave else self.take(len(match[0]))
            emit(self.take(len(self._text) - self._at - self._begun(markers)))
            if not (yield from self.more()):
                emit(self.take(len(self._text) - self._at))
                return None

    def _begun(self, markers: tuple[str, ...]) -> int:
        """Characters at the end that may be the beginning of a marker."""
        size = len(self._text)
        start = max(self._at, size - max(map(len, markers)) + 1)
        while first := _first_of(markers).search(self._text, start):
            end = self._text[first.start() :]
            if any(marker.startswith(end) for marker in markers):
                return len(end)
            start = first.end()
        return 0


@lru_cache(maxsize=256)
def _first_of(markers: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(re.escape(marker[0]) for marker in markers))


@lru_cache(maxsize=256)
def _any_of(markers: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, markers)))

"""Grammars in the engine: compiled off the loop, one state per sequence, token masks. Never imports jax.

GrammarCompiler    text of a grammar ──► a GrammarState at its beginning, in a thread; kept by text
GrammarState       where one sequence stands: which ids may follow, which must, whether it is complete

Parsing and masks are llguidance's; structured.py makes the texts.
"""

import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLTokenizer
from llguidance.numpy import fill_next_token_bitmask_par
from tokenizers import Tokenizer

from jaxserve.errors import EngineError, JaxserveError, RequestError
from jaxserve.shapes import ceil_div
from jaxserve.tokenizer import Vocabulary

CACHED_GRAMMARS = 256
# Tokens that only one text can go on with are appended without a forward pass each, from this many on: they then are a
# chunk of the next step, whose smallest bucket costs as much as a few steps of one token.
JUMP_FROM = 6


@contextmanager
def as_engine_error(what: str) -> Iterator[None]:
    """Makes an EngineError of whatever comes out of Rust: a panic there is not even an Exception here."""
    try:
        yield
    except (JaxserveError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise EngineError(f"{what}: {type(error).__name__}: {error}") from error


class GrammarState:
    """Where one sequence stands in its grammar. Not thread-safe."""

    def __init__(self, matcher: LLMatcher):
        self.matcher = matcher

    def copy(self) -> "GrammarState":
        return GrammarState(self.matcher.deep_copy())

    def accept(self, token: int) -> bool:
        """Goes on with a token. False: it does not match, or llguidance has reached a limit; the state is then dead."""
        return self.matcher.consume_token(token)

    @property
    def complete(self) -> bool:
        """Whether nothing may follow."""
        return self.matcher.is_stopped()

    @property
    def problem(self) -> str:
        """Why the state is dead; "" if it is not."""
        return self.matcher.get_error()[:300]

    def forced(self) -> list[int]:
        """The tokens that must follow, as far as there is no choice."""
        return self.matcher.compute_ff_tokens()


class GrammarCompiler:
    """Compiles grammars for one vocabulary, in a thread of its own; the latest are kept."""

    def __init__(self, vocabulary: Vocabulary, vocab_size: int):
        """vocab_size: of the model; the tokenizer may have more ids or fewer. Takes a second for a large vocabulary."""
        known = Tokenizer.from_str(vocabulary.tokenizer_json).get_vocab_size()
        eos = vocabulary.eos_token_ids
        self._tokenizer = LLTokenizer(vocabulary.tokenizer_json, n_vocab=max(known, vocab_size), eos_token=eos)
        self._thread = ThreadPoolExecutor(1, "grammar")
        self._executor = LLExecutor()
        self._known: OrderedDict[str, Future[GrammarState]] = OrderedDict()
        self._lock = threading.Lock()
        self._words = ceil_div(vocab_size, 32)

    def compile(self, grammar: str) -> Future[GrammarState]:
        """The state at the beginning of a grammar, to be copied. The future raises RequestError if it is bad,
        EngineError if that cannot be told.
        """
        with self._lock:
            future = self._known.get(grammar)
            if future is None:
                future = self._known[grammar] = self._thread.submit(self._compile, grammar)
                if len(self._known) > CACHED_GRAMMARS:
                    self._known.popitem(last=False)
            self._known.move_to_end(grammar)
            return future

    def _compile(self, grammar: str) -> GrammarState:
        with as_engine_error("the grammar cannot be compiled"):
            matcher = LLMatcher(self._tokenizer, grammar, log_level=0)
            if not matcher.is_error():
                matcher.compute_bitmask()  # the first one builds what the others use
        if matcher.is_error():
            what = matcher.get_error().split("\n<state>")[0]  # behind it: the parser's insides
            what = "it matches nothing" if what == "NoExtensionBias" else what[:300]
            raise RequestError(f"the grammar is bad: {what}", param="structured_outputs")
        return GrammarState(matcher)

    def masks(self, states: Sequence[GrammarState]) -> np.ndarray:
        """i32[states, V/32]: bit i % 32 of word i // 32 says whether id i may follow. All at once, on several cores."""
        masks = np.empty((len(states), ceil_div(self._tokenizer.vocab_size, 32)), np.int32)
        if states:
            fill_next_token_bitmask_par(self._executor, [(s.matcher, i) for i, s in enumerate(states)], masks)
        return masks[:, : self._words]

"""Beam search: the likeliest continuations of a prompt, by their whole log-probability. Never imports jax.

    beams          each gets its likeliest next tokens        kept
    ┌ "The cat"  ─►  "The cat sat"  "The cat."                 the beam_width best
    └ "The dog"  ─►  "The dog ran"  "The dog" EOS ──► ended    of those that go on

Each step every beam is one request for one token to the engine, whose prefix cache holds what the beams share. Results
are those of looking at all steps up to max_tokens; but the search ends where no beam can still come among the best.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

from jaxserve.errors import RequestError
from jaxserve.request import MAX_LOGPROBS, Logprob, SamplingParams, check_limits, knob, short

MAX_BEAM_WIDTH = MAX_LOGPROBS // 2
CANDIDATES_PER_BEAM = 2  # times beam_width: enough beams go on even if half of the candidates end


@dataclass(slots=True)
class BeamSearchParams:
    """How to search. Names and rules are those of vLLM's class of the same name.

    A sequence's score is cum_logprob / length ** length_penalty; its length counts the prompt, and no stop token.
    Raises RequestError (a ValueError) naming field, limit and value.
    """

    beam_width: int = field(metadata={"doc": "sequences kept at each step, and returned", "ge": 1})
    max_tokens: int = field(metadata={"doc": "tokens to generate at most", "ge": 1})
    ignore_eos: bool = knob(False, "go on after an end-of-sequence token")
    temperature: float = knob(0.0, "0 or 1: the search goes by the model's own probabilities", ge=0)
    length_penalty: float = knob(1.0, "above 0 favours longer sequences, below 0 shorter ones", ge=-10, le=10)
    include_stop_str_in_output: bool = knob(False, "keep the end-of-sequence token")

    def __post_init__(self) -> None:
        for f in fields(self):
            check_limits(f.name, getattr(self, f.name), f.type, f.metadata)
        if self.beam_width > MAX_BEAM_WIDTH:
            raise RequestError(
                f"beam_width must be at most {MAX_BEAM_WIDTH}: each step looks at {CANDIDATES_PER_BEAM} * beam_width"
                f" candidates, and the engine tells {MAX_LOGPROBS}; got {short(self.beam_width)}",
                param="beam_width",
            )
        if self.temperature not in (0, 1):
            raise RequestError(
                "temperature must be 0 or 1, which both mean the model's own probabilities: beam search with others"
                f" is not supported, got {short(self.temperature)}",
                param="temperature",
            )


@dataclass(slots=True)
class BeamSearchSequence:
    """One continuation. `tokens` and `text` begin with the prompt; `logprobs` has the candidates of each step."""

    tokens: list[int]
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    cum_logprob: float = 0.0
    text: str | None = None
    finish_reason: str | None = None  # "stop" or "length"
    stop_reason: int | None = None  # the end-of-sequence token


@dataclass(slots=True)
class BeamSearchOutput:
    """The answer to one prompt: `beam_width` sequences, or all that there are, best first."""

    sequences: list[BeamSearchSequence]


class BeamSearch:
    """The search for one prompt: extend each of `beams` by a token, tell advance() the candidates, until finished."""

    def __init__(self, prompt_token_ids: Sequence[int], params: BeamSearchParams, stop_ids: Iterable[int]):
        """`stop_ids`: the end-of-sequence tokens; none with ignore_eos."""
        self.beams = [BeamSearchSequence(list(prompt_token_ids))]
        self.ended: list[BeamSearchSequence] = []  # best first
        self._params = params
        self._stop_ids = frozenset(stop_ids)
        self._length = len(prompt_token_ids)  # of every beam
        self._limit = self._length + params.max_tokens

    @property
    def finished(self) -> bool:
        return not self.beams

    def step_params(self) -> SamplingParams:
        """What to ask the engine for, of each beam."""
        width = self._params.beam_width
        count = max(CANDIDATES_PER_BEAM * width, width + len(self._stop_ids))  # `width` go on, even if all others end
        return SamplingParams(temperature=0, max_tokens=1, logprobs=count, ignore_eos=True, detokenize=False)

    def advance(self, candidates: Sequence[Mapping[int, Logprob]]) -> None:
        """Takes the likeliest next tokens of each beam, and keeps the best of what they lead to."""
        grown: list[tuple[float, BeamSearchSequence, int, Mapping[int, Logprob]]] = []
        for beam, step in zip(self.beams, candidates, strict=True):
            for token, entry in step.items():
                if entry.logprob == -math.inf:
                    continue
                cum_logprob = beam.cum_logprob + entry.logprob
                if token in self._stop_ids:
                    self._stop(beam, token, cum_logprob, step)
                else:
                    grown.append((cum_logprob, beam, token, step))
        grown.sort(key=lambda item: -item[0])
        self.beams = [_grown(*item) for item in grown[: self._params.beam_width]]
        self._length += 1
        if self._length == self._limit:
            self.ended += [replace(beam, finish_reason="length") for beam in self.beams]
        self.ended.sort(key=lambda beam: -self._score(beam))
        del self.ended[self._params.beam_width :]
        if self._length == self._limit or self._is_decided():
            self.beams = []

    def _stop(self, beam: BeamSearchSequence, token: int, cum_logprob: float, step: Mapping[int, Logprob]) -> None:
        ended = _grown(cum_logprob, beam, token, step)
        if not self._params.include_stop_str_in_output:
            ended.tokens.pop()
        ended.finish_reason, ended.stop_reason = "stop", token
        self.ended.append(ended)

    def _score(self, beam: BeamSearchSequence) -> float:
        kept = beam.finish_reason == "stop" and self._params.include_stop_str_in_output
        return beam.cum_logprob / (len(beam.tokens) - kept) ** self._params.length_penalty

    def _is_decided(self) -> bool:
        """Whether no beam can still come among the best: a log-probability only falls, a length has its limits."""
        if not self.beams or len(self.ended) < self._params.beam_width:
            return False
        penalty = self._params.length_penalty
        return self.beams[0].cum_logprob / max(self._length**penalty, self._limit**penalty) <= self._score(
            self.ended[-1]
        )


def _grown(cum_logprob: float, beam: BeamSearchSequence, token: int, step: Mapping[int, Logprob]) -> BeamSearchSequence:
    return BeamSearchSequence([*beam.tokens, token], [*beam.logprobs, dict(step)], cum_logprob)

"""What a client asked for, what the engine answers, and the seam between the two. Never imports jax.

SamplingParams   how to turn logits into tokens; every knob is declared once here
Request          one accepted prompt with its resolved params, as the engine sees it
SequenceDelta    what one step added to one sequence of a request
RequestOutput    the answer, or a part of it, as the offline API returns it
EngineClient     the seam: submit a request, iterate its deltas
"""

import math
import operator
import reprlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any, Protocol

from jaxserve.control import Command
from jaxserve.errors import FALSE, NONE, TRUE, ErrorInfo, RequestError

MAX_LOGPROBS = 20  # candidates returned per token at most
MAX_STOP_IDS = 64  # stop_token_ids plus EOS ids, per request: the device masks them until there are min_tokens
MAX_EOS_IDS = 8  # of them, the model's own
MAX_LOGIT_BIAS = 1024  # entries of logit_bias, per request
MAX_BAD_WORDS = 128  # strings in bad_words
MAX_BAD_WORD_TOKENS = 16  # tokens of one bad word
MAX_STOP_STRINGS = 4
MAX_CHOICES = 10_000  # of structured_outputs.choice
STRUCTURED_KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
MAX_STOP_CHARS = 4096  # of one stop string
MAX_BAD_WORD_CHARS = 1024  # of one bad word, before it is known how many tokens that is
NOT_FINITE, NOTHING_ALLOWED = -1, -2  # drawn in place of a token id: by a broken model, by a request that forbids all
GREEDY_BELOW = 1e-5  # temperatures under this mean argmax


def knob(default: Any, doc: str, **limits: Any) -> Any:
    """Declares one field of a request: default, doc and limits, from which checks and the API's schema derive.

    ge, gt, le, lt         of a number
    min_items, max_items   of a list or an object
    instead                what to do where max_items are not enough, for the error
    min_length, max_length of a text, in characters
    items                  the limits of each item of a list, also of one given without its list
    token_ids=True         holds token ids: they must be of the vocabulary
    context=True           counts tokens of output, of which the model's context is the limit
    http=False             keeps a sampling knob offline only
    pack="f32" or "i32"    sends it to the device with every step of the sequence, in declaration order
    """
    metadata = {"doc": doc, **limits}
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


class RequestOutputKind(Enum):
    """What each RequestOutput of a stream (AsyncLLM) holds. LLM returns one per prompt: all three are equal there."""

    CUMULATIVE = 0  # all so far
    DELTA = 1  # what came since the one before
    FINAL_ONLY = 2  # all, once it is finished


@dataclass(slots=True, kw_only=True)
class StructuredOutputsParams:
    """What the output must be: exactly one of the first six. Names and meanings are those of vLLM's class.

    Raises RequestError. Whether schema, regex or grammar are good is told when a request is made (structured.py).
    """

    json: str | dict | None = knob(None, "a value of this JSON schema")
    regex: str | None = knob(None, "a text that this regular expression (Rust's syntax) matches as a whole")
    choice: list[str] | None = knob(
        None, "one of these texts", min_items=1, max_items=MAX_CHOICES, items={"min_length": 1}
    )
    grammar: str | None = knob(None, "a text of this grammar: Lark, or EBNF in llama.cpp's form (GBNF)")
    json_object: bool | None = knob(None, "true: any JSON object", schema={"enum": [True, None]})
    structural_tag: str | dict | None = knob(None, "free text, in which what follows a trigger has a schema")
    disable_any_whitespace: bool = knob(False, "no white space between the tokens of JSON")
    disable_additional_properties: bool = knob(False, "objects have only the properties that the schema names")
    whitespace_pattern: str | None = knob(None, "regular expression of what may stand between the tokens of JSON")

    def __post_init__(self) -> None:
        for f in fields(self):
            check_limits(f"structured_outputs.{f.name}", getattr(self, f.name), f.type, f.metadata)
        given = self.kinds()
        if len(given) != 1:
            one_of, got = ", ".join(STRUCTURED_KINDS), " and ".join(given) or "none of them"
            raise RequestError(
                f"structured_outputs takes exactly one of {one_of}; got {got}", param="structured_outputs"
            )
        if self.json_object is False:
            raise RequestError("structured_outputs.json_object may only be true", param="structured_outputs")
        if self.whitespace_pattern is not None and self.disable_any_whitespace:
            message = "structured_outputs takes whitespace_pattern or disable_any_whitespace, not both"
            raise RequestError(message, param="structured_outputs")

    def kinds(self) -> list[str]:
        """Those of the first six that are given."""
        return [name for name in STRUCTURED_KINDS if getattr(self, name) is not None]


@dataclass(slots=True, kw_only=True)
class SamplingParams:
    """How to turn logits into tokens. Names and rules are those of vLLM's class of the same name.

    Raises RequestError (a ValueError) naming field, limit and value.
    """

    n: int = knob(1, "sequences to generate for the prompt", ge=1, le=128)
    max_tokens: int | None = knob(16, "tokens to generate at most; None: up to the context limit", ge=1, context=True)
    min_tokens: int = knob(0, "tokens before EOS, stop ids and stop strings count", ge=0, context=True)
    temperature: float = knob(1.0, "0 is greedy", ge=0, le=2, pack="f32")
    top_p: float = knob(1.0, "smallest set of tokens whose probabilities add up to this", gt=0, le=1, pack="f32")
    top_k: int = knob(0, "most likely tokens considered; 0 or -1: all", ge=-1, pack="i32")
    min_p: float = knob(0.0, "least probability considered, relative to the likeliest", ge=0, le=1, pack="f32")
    presence_penalty: float = knob(0.0, "subtracted once from tokens already generated", ge=-2, le=2, pack="f32")
    frequency_penalty: float = knob(0.0, "subtracted per earlier generation of the token", ge=-2, le=2, pack="f32")
    repetition_penalty: float = knob(1.0, "divides logits of tokens in prompt or output", gt=0, le=100, pack="f32")
    logit_bias: dict[int, float] | None = knob(
        None, "added to the logits of these token ids, clamped to +-100", max_items=MAX_LOGIT_BIAS, token_ids=True
    )
    allowed_token_ids: list[int] | None = knob(
        None, "the only token ids that may be generated", min_items=1, items={"ge": 0}, token_ids=True
    )
    bad_words: list[str] | None = knob(
        None,
        "strings that may not be generated",
        max_items=MAX_BAD_WORDS,
        items={"min_length": 1, "max_length": MAX_BAD_WORD_CHARS},
    )
    seed: int | None = knob(None, "same seed, same text; None or -1: drawn by the engine", ge=-1, le=2**63 - 1)
    stop: list[str] | str | None = knob(
        None,
        "strings that end the generation",
        max_items=MAX_STOP_STRINGS,
        items={"min_length": 1, "max_length": MAX_STOP_CHARS},
    )
    stop_token_ids: list[int] | None = knob(
        None,
        "token ids that end the generation",
        max_items=MAX_STOP_IDS - MAX_EOS_IDS,
        instead=f"the device keeps {MAX_STOP_IDS} ids that end a sequence, {MAX_EOS_IDS} of them for the model's own;"
        " stop strings (stop) end it at any token that has their text",
        items={"ge": 0},
        token_ids=True,
    )
    ignore_eos: bool = knob(False, "go on after an end-of-sequence token")
    include_stop_str_in_output: bool = knob(False, "keep the stop string in the text")
    logprobs: int | None = knob(None, "candidates per generated token, beside the sampled one", ge=0, le=MAX_LOGPROBS)
    prompt_logprobs: int | None = knob(None, "candidates per prompt token", ge=0, le=MAX_LOGPROBS)
    detokenize: bool = knob(True, "produce text, not only token ids", http=False)
    skip_special_tokens: bool = knob(True, "leave special tokens out of the text")
    thinking_token_budget: int | None = knob(
        None, "tokens of reasoning at most, after which the answer must begin; 0: no reasoning", ge=0, http=False
    )
    structured_outputs: StructuredOutputsParams | None = knob(None, "what the output must be", http=False)
    output_kind: RequestOutputKind = knob(
        RequestOutputKind.CUMULATIVE, "what each output of a stream holds", http=False
    )

    def __post_init__(self) -> None:
        for f in fields(self):
            check_limits(f.name, getattr(self, f.name), f.type, f.metadata)
        self.top_k = min(max(self.top_k, 0), 2**31 - 1)
        self.seed = None if self.seed == -1 else self.seed
        self.stop = [self.stop] if isinstance(self.stop, str) else list(self.stop or [])
        self.stop_token_ids = list(dict.fromkeys(self.stop_token_ids or []))
        self.bad_words = list(self.bad_words or [])
        self._clamp_bias()
        if self.stop and not self.detokenize:
            raise RequestError("stop needs detokenize=True", param="stop")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens must be at most max_tokens ({self.max_tokens}), got {self.min_tokens}", param="min_tokens"
            )
        if self.greedy and self.n > 1:
            raise RequestError(f"n must be 1 with greedy sampling (temperature 0), got {self.n}", param="n")

    def _clamp_bias(self) -> None:
        if self.logit_bias:
            for token_id, bias in self.logit_bias.items():
                if not math.isfinite(bias):
                    raise RequestError(f"logit_bias[{token_id}] must be finite, got {bias}", param="logit_bias")
            self.logit_bias = {i: min(max(b, -100.0), 100.0) for i, b in self.logit_bias.items()}

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    def check_vocab(self, vocab_size: int) -> None:
        """Raises RequestError if a token id named by a knob is outside the vocabulary."""
        for name in (f.name for f in fields(self) if f.metadata.get("token_ids")):
            if bad := [i for i in getattr(self, name) or () if not 0 <= i < vocab_size]:
                raise RequestError(
                    f"{name}: token id {bad[0]} is outside the vocabulary (0 to {vocab_size - 1})", param=name
                )


def type_names(annotation: Any) -> tuple[type, ...]:
    """The plain Python types that an annotation such as `list[int] | None` admits."""
    args = getattr(annotation, "__args__", None)
    if args is None or hasattr(annotation, "__origin__") and annotation.__origin__ in (list, dict):
        return (getattr(annotation, "__origin__", annotation),)
    return tuple(t for a in args for t in type_names(a))


_COMPARISONS = (
    ("ge", "at least", operator.ge),
    ("gt", "greater than", operator.gt),
    ("le", "at most", operator.le),
    ("lt", "less than", operator.lt),
)

KINDS = {
    str: "a string",
    bool: "a boolean",
    int: "an integer",
    float: "a number",
    list: "a list",
    dict: "an object",
    type(None): "null",
}
"""Types as error messages name them."""


def check_limits(name: str, value: Any, annotation: Any, limits: Any) -> None:
    """Raises RequestError unless `value` has the annotated type and lies within the limits, as knob() declares them."""
    types = type_names(annotation)
    if value is None and type(None) in types:
        return
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    fits = (
        (bool in types and isinstance(value, bool))
        or (float in types and is_number)
        or (int in types and isinstance(value, int) and not isinstance(value, bool))
        or any(t not in (bool, int, float) and isinstance(value, t) for t in types)
    )
    if not fits:
        wanted = " or ".join(KINDS.get(t, t.__name__) for t in types if t is not type(None))
        raise RequestError(f"{name} must be {wanted}, got {short(value)}", param=name)
    if isinstance(value, (int, float)):
        if float in types and not _is_finite(value):
            raise RequestError(f"{name} must be finite, got {short(value)}", param=name)
        _check_number(name, name, value, limits)
    elif isinstance(value, (list, dict)):
        _check_size(name, value, limits)
        if isinstance(value, list):
            _check_items(name, value, annotation, limits.get("items", {}))
    elif isinstance(value, str):
        _check_text(name, name, value, limits if list not in types else limits.get("items", {}))


def _is_finite(value: int | float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an int beyond every float
        return False


def _check_number(name: str, place: str, value: int | float, limits: Any) -> None:
    for key, sign, holds in _COMPARISONS:
        if key in limits and not holds(value, limits[key]):
            raise RequestError(f"{place} must be {sign} {limits[key]}, got {short(value)}", param=name)


def _check_size(name: str, value: list | dict, limits: Any) -> None:
    least, most, size = limits.get("min_items", 0), limits.get("max_items", len(value)), len(value)
    if size < least:
        raise RequestError(f"{name} may not be empty" if least == 1 else f"{name} needs {least} entries", param=name)
    if size > most:
        instead = f": {limits['instead']}" if "instead" in limits else ""
        raise RequestError(f"{name} takes at most {most} entries, got {size}{instead}", param=name)


def _check_text(name: str, place: str, value: str, limits: Any) -> None:
    if not value and limits.get("min_length"):
        raise RequestError(f"{place} may not be an empty string", param=name)
    if (most := limits.get("max_length")) is not None and len(value) > most:
        raise RequestError(f"{place} must have at most {most} characters, got {len(value)}", param=name)


def _check_items(name: str, value: list, annotation: Any, limits: Any) -> None:
    item = item_type(annotation)
    if item is None:
        return
    for i, v in enumerate(value):
        if not isinstance(v, item) or isinstance(v, bool):
            raise RequestError(f"{name}[{i}] must be {KINDS[item]}, got {short(v)}", param=name)
        if limits:
            (_check_text if item is str else _check_number)(name, f"{name}[{i}]", v, limits)


def item_type(annotation: Any) -> type | None:
    """The X of `list[X]` in an annotation such as `list[X] | None`."""
    for each in (annotation, *getattr(annotation, "__args__", ())):
        if getattr(each, "__origin__", None) is list:
            item = each.__args__[0]
            return getattr(item, "__origin__", item)
    return None


class _Words(reprlib.Repr):
    """Python's way to show a value, cut short, but for words that the error chooses, also inside lists and dicts."""

    def repr_NoneType(self, value: None, level: int) -> str:
        return NONE

    def repr_bool(self, value: bool, level: int) -> str:
        return TRUE if value else FALSE


_WORDS = _Words()


def short(value: Any, limit: int = 60) -> str:
    """A value as the message of a JaxserveError may show it (see errors.NONE): never the whole of a large body."""
    text = repr(value[:limit]) if isinstance(value, str) else _WORDS.repr(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"


@dataclass(slots=True, kw_only=True)
class Request:
    """One accepted prompt, as the engine sees it. Built by the front end (frontend.py); the engine never sees text."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    max_tokens: int  # resolved: prompt + max_tokens <= max_model_len
    stop_ids: list[int] = field(default_factory=list)  # EOS ids (unless ignore_eos) and stop_token_ids
    bad_words_ids: list[list[int]] = field(default_factory=list)
    seed: int | None = None  # None: drawn by the engine
    grammar: str | None = None  # of llguidance: what the output must match
    free_after_grammar: bool = False  # only its beginning must: once that is complete, the rest may be anything
    pooling: str | None = None  # "last" or "mean": the prompt's hidden states are wanted, and no tokens
    priority: int = 0  # lower first, under --scheduling-policy priority
    arrival_s: float = 0.0  # time.monotonic()
    deadline_s: float | None = None  # time.monotonic() after which it ends with finish_reason "timeout"


@dataclass(slots=True)
class TokenLogprobs:
    """Log-probabilities at one token position, from the raw logits (before temperature and penalties)."""

    token_id: int
    logprob: float
    rank: int  # 1 is the likeliest
    top_ids: list[int]
    top_logprobs: list[float]


@dataclass(slots=True)
class SequenceDelta:
    """What one step added to one sequence. `index` counts the n sequences of the request.

    finish_reason: None (goes on), "stop" (stop_reason: the id, None for EOS), "length", "abort", "timeout", "error".
    An accepted request first gets one delta with no tokens and index -1; a refused one gets `error` and ends. Logprobs
    of the prompt come once, with the first token of any of the n.
    """

    request_id: str
    index: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    finish_reason: str | None = None
    stop_reason: int | None = None
    cached_tokens: int = 0
    queue_s: float = 0.0  # time spent waiting before the first launch
    embedding: bytes | None = None  # float32, little endian: the pooled hidden states of a request with `pooling`
    error: ErrorInfo | None = None


def join(delta: SequenceDelta, following: SequenceDelta) -> bool:
    """Adds to a delta with tokens the next one of its request, if that only brings more tokens of the same sequence."""
    if (
        following.index != delta.index
        or not (delta.token_ids and following.token_ids)
        or delta.finish_reason
        or following.prompt_logprobs
        or following.error
        or (delta.logprobs is None) != (following.logprobs is None)
    ):
        return False
    delta.token_ids += following.token_ids
    if delta.logprobs is not None and following.logprobs is not None:
        delta.logprobs += following.logprobs
    delta.finish_reason, delta.stop_reason = following.finish_reason, following.stop_reason
    return True


@dataclass(slots=True)
class Logprob:
    logprob: float
    rank: int
    decoded_token: str


@dataclass(slots=True)
class CompletionOutput:
    """One finished or growing sequence, as the offline API returns it."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestStats:
    """When things happened to a request, in seconds of time.monotonic(); None: not yet."""

    arrival_s: float
    queue_s: float = 0.0  # how long it waited before its first launch
    first_token_s: float | None = None  # of any of the n
    finished_s: float | None = None


@dataclass(slots=True)
class RequestOutput:
    """The answer to one prompt: `outputs` has n entries, ordered by index (DELTA: the one that has grown)."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = False
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int = 0
    metrics: RequestStats | None = None


@dataclass(slots=True)
class EmbeddingOutput:
    embedding: list[float]


@dataclass(slots=True)
class EmbeddingRequestOutput:
    """The embedding of one prompt."""

    request_id: str
    outputs: EmbeddingOutput
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    finished: bool = True


@dataclass(slots=True)
class EngineInfo:
    """Fixed facts about a running engine, told to each front end when it connects."""

    model: str
    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    page_size: int
    num_pages: int
    device: str
    dtype: str
    scheduling_policy: str = "fcfs"
    hidden_size: int = 0  # numbers of an embedding
    matryoshka: bool = False  # whether the first numbers of an embedding are one, too (arXiv:2205.13147)
    compiles_later: bool = False  # steps may compile, and so take minutes


@dataclass(slots=True)
class EngineStats:
    """Counters since start, gauges of now; sent to the front end with the deltas and shown by /metrics."""

    running: int = 0
    waiting: int = 0
    pages_used: int = 0
    pages_total: int = 0
    prefix_cache_query_tokens: int = 0
    prefix_cache_hit_tokens: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    steps: int = 0
    compiles_after_warmup: int = 0
    allocated_token_slots: int = 0  # token slots in pages held by running sequences, now
    used_token_slots: int = 0  # of those, holding a token
    paused: bool = False
    sleep_level: int = 0  # 0: awake
    peak_device_memory_bytes: int | None = None  # the most of one device's; None: it does not say (a CPU)


class EngineClient(Protocol):
    """The seam between a front end and an engine: in process, or over a socket."""

    info: EngineInfo
    stats: EngineStats

    async def submit(self, request: Request) -> AsyncIterator[SequenceDelta]:
        """Returns once the engine accepted the request; raises its refusal (QueueFull, RequestError, EngineDead).

        The iterator ends when all n sequences are finished. Closing it early cancels what is left.
        """
        ...

    async def cancel(self, request_id: str, index: int | None = None) -> None:
        """Ends one sequence, or all of the request's."""
        ...

    async def control(self, command: Command) -> EngineStats:
        """Returns, with the state after it, once the command is done. Raises RequestError, EngineError, EngineDead."""
        ...

    def healthy(self) -> bool: ...


def knob_names(pack: str) -> tuple[str, ...]:
    """Names of the knobs that travel to the device as `pack` ("f32" or "i32"), in declaration order."""
    return tuple(f.name for f in fields(SamplingParams) if f.metadata.get("pack") == pack)

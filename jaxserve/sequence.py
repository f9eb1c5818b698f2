"""One growing token list, from waiting to finished. A request with n > 1 makes n of them. Never imports jax.

    token_ids   [ prompt ............ | outputs known on the host | pending: drawn on the device, not here yet ]
                0                                                len(token_ids)                       num_tokens
    computed    ──────────────────────────────────►   tokens whose KV is written by steps planned so far

`computed` chases `num_tokens`. Prefill and decode are sizes of the gap, not modes.
"""

import enum
from dataclasses import dataclass, field

from jaxserve.errors import RequestError
from jaxserve.grammar import GrammarState
from jaxserve.request import Request


class Status(enum.Enum):
    """
    WAITING ──admit──► RUNNING ──last row planned──► DRAINING ──commit──► FINISHED
        ▲──preempt────────┘  └───────commit, cancel────────────────────────►┘
    """

    WAITING = "waiting"  # in the queue, or parked until the first of its n siblings has computed the prompt
    RUNNING = "running"  # holds a slot and pages
    DRAINING = "draining"  # nothing left to plan: its last token is on its way; slot and pages are given back
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """State of one of the n sequences of a request."""

    request: Request
    index: int  # which of n
    serial: int  # which request, in order of arrival at the scheduler
    key: tuple  # order in the waiting queue, lowest first
    token_ids: list[int]  # until it is first admitted the request's own list, shared by all n
    prompt_len: int
    limit: int  # num_tokens at which it ends with "length"
    stop_ids: frozenset[int]
    grammar: GrammarState | None = None  # after token_ids, without what is pending; None: all is allowed
    status: Status = Status.WAITING
    slot: int = -1
    pages: list[int] = field(default_factory=list)
    pending: int = 0
    computed: int = 0
    cached: int = 0  # prompt tokens whose KV was already there when it was first admitted
    hashes: list[bytes] = field(default_factory=list)  # of its full pages, as far as computed
    registered: int = 0  # leading pages that the prefix cache has been told of
    score_prompt: bool = False  # its prompt's logprobs are still to be delivered
    siblings: list["Sequence"] = field(default_factory=list)  # all n, in order of index
    parked: list["Sequence"] = field(default_factory=list)  # siblings that wait for this one's prompt
    forkable: bool = False  # its launched pages hold the whole prompt: siblings may start from them
    started: bool = False  # has been admitted once
    preemptions: int = 0
    finish_reason: str | None = None
    stop_reason: int | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) + self.pending

    @property
    def needs_whole_prompt(self) -> bool:
        """Whether each token of the prompt is to be computed, also those that the prefix cache has."""
        return self.score_prompt or self.request.pooling == "mean"

    @property
    def may_jump(self) -> bool:
        """Whether tokens that the grammar forces may be appended at once: not where each token's step has a result, or
        leaves a trace on the device, that is asked for.
        """
        p = self.request.params
        counted = p.presence_penalty or p.frequency_penalty or p.repetition_penalty != 1
        return not (counted or p.bad_words or p.logprobs is not None)

    @property
    def output_ids(self) -> list[int]:
        return self.token_ids[self.prompt_len :]


def check_servable(request: Request, max_model_len: int, pool_tokens: int) -> None:
    """Raises RequestError if the engine could never compute the prompt and one token of output."""
    prompt_len = len(request.prompt_token_ids)
    if prompt_len == 0:
        raise RequestError("the prompt is empty: it needs 1 token at least", param="prompt")
    if request.max_tokens < 1:
        raise RequestError(f"max_tokens must be at least 1, got {request.max_tokens}", param="max_tokens")
    for limit, what in ((max_model_len, "max_model_len"), (pool_tokens, "the tokens that the KV cache holds")):
        if prompt_len + 1 > limit:
            raise RequestError(
                f"the prompt has {prompt_len} tokens, which with 1 token of output exceeds {what} ({limit})",
                param="prompt",
            )


def make_sequences(
    request: Request, serial: int, policy: str, max_model_len: int, grammar: GrammarState | None = None
) -> list[Sequence]:
    """The n sequences of a request. Those after the first are parked until that one has computed the prompt."""
    prompt_len, stop_ids = len(request.prompt_token_ids), frozenset(request.stop_ids)
    seqs = [
        Sequence(
            request=request,
            index=index,
            serial=serial,
            key=(serial, index) if policy == "fcfs" else (request.priority, request.arrival_s, serial, index),
            token_ids=request.prompt_token_ids,
            prompt_len=prompt_len,
            limit=min(prompt_len + request.max_tokens, max_model_len),
            stop_ids=stop_ids,
            grammar=grammar,
            score_prompt=index == 0 and request.params.prompt_logprobs is not None,
        )
        for index in range(request.params.n)
    ]
    for seq in seqs:
        seq.siblings = seqs
    seqs[0].parked = seqs[1:]
    return seqs

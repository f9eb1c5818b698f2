"""The engine loop: plan a step, launch it, then take in the results of the one before.

    submit, cancel ──► scheduler.plan ──► runner.launch ──► runner.collect (previous) ──► scheduler.commit ──► deltas

Step n+1 is on the device before the ids of step n are looked at; rows that turn out finished are dropped at commit.
With a grammar in it, step n+1 waits half done for the masks that n's ids decide; n+2 is launched right behind those.
"""

import logging
import random
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

import numpy as np

from jaxserve.checkpoint import Checkpoint
from jaxserve.config import EngineConfig, set_memory_share, size_text
from jaxserve.control import Command
from jaxserve.controller import Controller
from jaxserve.errors import DeadlineExceeded, EngineDead, EngineError, JaxserveError, RequestError
from jaxserve.grammar import GrammarCompiler, GrammarState, as_engine_error
from jaxserve.plan import Event, Plan
from jaxserve.request import MAX_LOGPROBS, EngineInfo, EngineStats, Request, SequenceDelta, TokenLogprobs
from jaxserve.scheduler import Scheduler
from jaxserve.sequence import Sequence
from jaxserve.tokenizer import Vocabulary

log = logging.getLogger(__name__)

SHORT_STEP_S = 0.003  # steps shorter than that are launched two ahead: the host takes about as long for one
COMPILE_WAIT_S = 0.005  # an engine with nothing else to do looks this often whether a grammar is ready


class Engine:
    """A model on this process's devices. Not thread-safe: one thread submits and steps.

    Raises ConfigError for options that cannot be honoured, DoesNotFit if memory is short.
    """

    def __init__(self, config: EngineConfig, checkpoint: Checkpoint | None = None, *, checks: bool = False):
        started = time.monotonic()
        devices = _start_jax(config.gpu_memory_utilization, config.tensor_parallel_size)
        from jaxserve.deployment import resolve_deployment
        from jaxserve.device_memory import MORE_FOR_WEIGHTS, room_for
        from jaxserve.models.loading import LoadedModel, load_model, model_shapes
        from jaxserve.programs import Programs
        from jaxserve.runner import Runner
        from jaxserve.sharding import mesh_of
        from jaxserve.tracers import Tracers

        checkpoint = checkpoint or Checkpoint.open(config)
        device, mesh = devices[0], mesh_of(devices)
        deployment = resolve_deployment(config, checkpoint.config, device.platform, device.device_kind)
        model, max_num_seqs = deployment.model, deployment.max_num_seqs

        def load() -> LoadedModel:
            how = {"load_format": config.load_format, "seed": config.seed}
            return load_model(checkpoint, model, deployment.dtype, mesh=mesh, **how)

        programs = Programs(model_shapes(model, deployment.dtype, mesh), deployment, mesh)
        with Tracers(config, checkpoint.config, programs) as tracers:
            if device.platform != "cpu" and config.kv_cache_memory_bytes is None:
                if not config.enforce_eager and not programs.is_profiled():
                    tracers.start(len(programs.keys))  # the pool's size is still open: they get ready
                programs.begin_profile()
            with room_for(f"the {size_text(programs.weight_bytes)} of weights", mesh, MORE_FOR_WEIGHTS):
                loaded = load()
            log.info(
                "weights: %s, %s of %s on %d x %s, %.1f s", checkpoint.name, size_text(loaded.nbytes), deployment.types,
                mesh.size, device.device_kind, time.monotonic() - started,
            )  # fmt: skip
            self._runner = Runner(config, loaded, programs, tracers)
        self.info = EngineInfo(
            model=config.model,
            vocab_size=model.vocab_size,
            max_model_len=self._runner.pool.max_model_len,
            max_num_seqs=max_num_seqs,
            page_size=deployment.page_size,
            num_pages=self._runner.pool.num_pages,
            device=device.device_kind,
            dtype=deployment.dtype,
            scheduling_policy=config.scheduling_policy,
            hidden_size=model.hidden_size,
            matryoshka=bool(checkpoint.config.get("is_matryoshka") or checkpoint.config.get("matryoshka_dimensions")),
            compiles_later=config.enforce_eager,
        )
        self._scheduler = Scheduler(
            num_pages=self._runner.pool.num_pages,
            page_size=deployment.page_size,
            max_num_seqs=max_num_seqs,
            max_model_len=self.info.max_model_len,
            limits=deployment.limits,
            max_prefill_rows=max(b.prefill_rows for b in deployment.buckets),
            max_queue_len=config.max_queue_len,
            policy=config.scheduling_policy,
            prefix_caching=config.enable_prefix_caching,
            checks=checks,
        )
        self._controller = Controller(self._scheduler, self._runner, load)
        self._vocab_size = model.vocab_size
        self._vocabulary: Callable[[], Vocabulary] | None = None
        self._grammars: GrammarCompiler | None = None
        self._no_grammars = ""  # why there can be none
        self._compiling: dict[str, tuple[Request, Future[GrammarState]]] = {}  # requests that wait for their grammar
        self._refused: list[SequenceDelta] = []
        self._timeout_s = config.request_timeout
        self._seeds = random.Random(config.seed)
        self._step_s, self._collected_s = 0.1, 0.0  # from one step's results to the next one's, smoothed
        self._in_flight: deque[Any] = deque()  # launched and not collected, three at most
        self._broken = ""  # what a step raised: the device's state is not to be trusted any more
        self._prompt_logprobs: dict[str, list[TokenLogprobs | None]] = {}
        self._first_launch_s: dict[str, float] = {}
        self._sums: dict[str, np.ndarray] = {}  # of hidden states, of prompts that are being pooled

    # ---------------------------------------------------------------------------------------------- requests

    def use_vocabulary(self, vocabulary: Callable[[], Vocabulary]) -> None:
        """What grammars are compiled for. Made when the first one comes, or by prepare_grammars()."""
        self._vocabulary = vocabulary

    def prepare_grammars(self) -> None:
        """Reads the vocabulary, which takes a second if it is large. If it is of no use, those with grammars fail."""
        assert self._vocabulary is not None, "use_vocabulary() was called"
        try:
            with as_engine_error("no grammar can be compiled for the model's tokenizer"):
                self._grammars = GrammarCompiler(self._vocabulary(), self._vocab_size)
        except EngineError as error:
            log.exception("requests with a grammar will fail")
            self._no_grammars = error.message

    @property
    def _compiler(self) -> GrammarCompiler:
        """Raises EngineError if there can be none."""
        if self._grammars is None and not self._no_grammars:
            self.prepare_grammars()
        if self._grammars is None:
            raise EngineError(self._no_grammars)
        return self._grammars

    def submit(self, request: Request) -> bool:
        """Accepts a request.

        Raises QueueFull, RequestError if it can never be served, EngineError if its grammar cannot be compiled,
        EngineAsleep, EngineDead after a bad step.

        False: its grammar has to be compiled first; a later step() gives a delta that says whether it is accepted.
        """
        self._check_alive()
        self._controller.check_awake()
        if request.seed is None:
            request.seed = self._seeds.getrandbits(63)
        if self._timeout_s and request.deadline_s is None:
            request.deadline_s = time.monotonic() + self._timeout_s
        if request.grammar is None:
            self._scheduler.add(request)
            return True
        if self.knows(request.request_id):
            raise RequestError(f"request_id {request.request_id!r} is already in use", param="request_id")
        future = self._compiler.compile(request.grammar)
        if future.done():
            self._scheduler.add(request, future.result())
            return True
        self._compiling[request.request_id] = request, future
        return False

    def cancel(self, request_id: str, index: int | None = None) -> None:
        """Ends one sequence of a request, or all: each tells so with finish_reason "abort". Unknown ids are ignored."""
        if waiting := self._compiling.pop(request_id, None):
            count = waiting[0].params.n
            self._refused += [SequenceDelta(request_id, i, finish_reason="abort") for i in range(count)]
        self._scheduler.cancel(request_id, index)

    def has_work(self) -> bool:
        """Whether a step is worth while now: not for requests that a pause holds, unless a deadline is over."""
        if self._in_flight or self._scheduler.has_work or self._compiling or self._refused:
            return True
        return self._scheduler.overdue(time.monotonic())

    def knows(self, request_id: str) -> bool:
        """Whether the request still has an unfinished sequence."""
        return request_id in self._scheduler.requests or request_id in self._compiling

    def reset_prefix_cache(self) -> None:
        """Forgets all cached pages."""
        self._scheduler.reset_prefix_cache()

    def control(self, command: Command) -> None:
        """Begins a command of control.py; until it is done `busy` is true, and steps are needed if there is work.

        Raises RequestError or EngineError if it cannot be, EngineDead after a bad step.
        """
        self._check_alive()
        self._controller.begin(command)

    @property
    def busy(self) -> bool:
        return self._controller.busy

    def _check_alive(self) -> None:
        if self._broken:
            raise EngineDead(f"the engine failed: {self._broken}")

    def stats(self) -> EngineStats:
        stats = self._scheduler.stats()
        stats.paused, stats.sleep_level = self._controller.paused, self._controller.sleep_level
        stats.compiles_after_warmup = self._runner.compiles_after_warmup
        stats.peak_device_memory_bytes = self._runner.peak_memory_bytes()
        return stats

    # ------------------------------------------------------------------------------------------------- steps

    def step(self) -> list[SequenceDelta]:
        """Launches the next step, takes in the one before, and returns what that added.

        If it raises, all requests are over and the engine takes no more.
        """
        try:
            deltas = self._step()
        except BaseException as error:
            self._broken = f"{type(error).__name__}: {error}"
            self._in_flight.clear()
            self._compiling.clear()
            for request_id in list(self._scheduler.requests):
                self._scheduler.cancel(request_id, reason="error")
            self._scheduler.in_flight.clear()
            raise
        for delta in deltas:
            if delta.finish_reason and not self.knows(delta.request_id):
                self._prompt_logprobs.pop(delta.request_id, None)
                self._first_launch_s.pop(delta.request_id, None)
                self._sums.pop(delta.request_id, None)
        self._controller.advance()
        return deltas

    def _step(self) -> list[SequenceDelta]:
        self._scheduler.expire(time.monotonic())
        answers = self._take_compiled()
        ahead = self._ahead()
        launched = len(self._in_flight) <= ahead and self._launch()
        deltas = []
        if self._in_flight and (not launched or len(self._in_flight) > ahead):
            deltas = self._commit(self._in_flight.popleft())
        if self._in_flight and (last := self._in_flight[-1]).awaits_masks:
            while len(self._in_flight) > 1:
                deltas += self._commit(self._in_flight.popleft())
            self._runner.draw(last, self._masks(last.plan))
            self._launch()  # the device has little left to do, while the caller is busy with the deltas
        return [*answers, *deltas, *(self._delta(event, None, None) for event in self._scheduler.take_endings())]

    def _ahead(self) -> int:
        """How many steps are on their way to the device while the next is launched: memory is counted for two with
        prompts in them.
        """
        last = self._in_flight[-1] if self._in_flight else None
        alone = last and last.plain and not last.plan.prefill and len(last.plans) == 1
        return 2 if alone and self._step_s < SHORT_STEP_S else 1

    def _launch(self) -> bool:
        """Plans a step and starts it, if there is anything to do, with a few more if those are sure to be like it."""
        plan = self._scheduler.plan()
        if plan is None:
            return False
        following = self._scheduler.plan_again(plan, self._runner.loops(plan) - 1)
        self._in_flight.append(self._runner.launch(plan, *following))
        now = time.monotonic()
        for seq in plan.admitted:
            self._first_launch_s.setdefault(seq.request.request_id, now)
        return True

    def _take_compiled(self) -> list[SequenceDelta]:
        """Gives requests whose grammars are ready to the scheduler. Waits a little if there is nothing else to do."""
        answers, self._refused = self._refused, []
        if self._compiling and not (answers or self._in_flight or self._scheduler.has_work):
            wait([future for _, future in self._compiling.values()], COMPILE_WAIT_S, FIRST_COMPLETED)
        for request, future in [pair for pair in self._compiling.values() if pair[1].done()]:
            del self._compiling[request.request_id]
            answer = SequenceDelta(request.request_id, -1)
            try:
                self._controller.check_awake()
                self._scheduler.add(request, future.result())
            except JaxserveError as error:
                answer.finish_reason, answer.error = "error", error.info()
            answers.append(answer)
        return answers

    def _masks(self, plan: Plan) -> dict[int, np.ndarray]:
        """The ids that may follow, of each row that draws under a grammar."""
        rows = [
            (first + i, seq.grammar)
            for first, region in ((0, plan.decode), (len(plan.decode), plan.prefill))
            for i, seq in enumerate(region.seqs)
            if seq.grammar is not None and region.samples[i] and seq.finish_reason is None
        ]
        masks = self._compiler.masks([grammar for _, grammar in rows])
        return {row: mask for (row, _), mask in zip(rows, masks, strict=True)}

    def _commit(self, launched: Any) -> list[SequenceDelta]:
        results = self._runner.collect(launched)
        now = time.monotonic()
        step_s = min(now - self._collected_s, 0.1) / len(launched.plans)
        self._step_s += 0.2 * (step_s - self._step_s)
        self._collected_s = now
        if results.prompt_logprobs is not None:
            self._take_prompt_logprobs(launched.plan, results.prompt_logprobs)
        if results.pooled is not None:
            self._take_sums(launched.plan, results.pooled)
        deltas = []
        for plan, tokens in zip(launched.plans, results.tokens, strict=True):
            events = self._scheduler.commit(plan, tokens)
            deltas += [self._delta(event, results.logprobs, results.pooled) for event in events]
        return deltas

    def _delta(self, event: Event, logprobs: np.ndarray | None, pooled: np.ndarray | None) -> SequenceDelta:
        seq, request = event.seq, event.seq.request
        delta = SequenceDelta(
            request.request_id, seq.index, finish_reason=event.finish_reason, stop_reason=event.stop_reason
        )
        if event.token is not None:
            delta.token_ids = [event.token, *event.forced]
            if request.params.logprobs is not None and logprobs is not None:
                delta.logprobs = [_unpack_logprobs(logprobs[event.row], event.token, request.params.logprobs)]
            if len(seq.token_ids) == seq.prompt_len + len(delta.token_ids):
                self._add_first_facts(delta, seq)
            if request.pooling is not None and pooled is not None:
                hidden = self._sums.pop(request.request_id, pooled[event.row])
                delta.token_ids, delta.embedding = [], hidden.astype("<f4").tobytes()
        if event.finish_reason == "error":
            delta.error = self._why(event).info()
        elif event.finish_reason == "timeout":
            delta.error = DeadlineExceeded(f"the request took longer than its limit of {self._timeout_s} s").info()
        return delta

    def _why(self, event: Event) -> JaxserveError:
        """What ended a sequence with "error"."""
        grammar = event.seq.grammar
        if self._broken:
            return EngineError(self._broken)
        if grammar is not None and (event.nothing_allowed or event.token is not None):
            return EngineError(f"no token fits its grammar: {grammar.problem or 'other options forbid those that do'}")
        if event.nothing_allowed:
            return RequestError("no token is allowed: allowed_token_ids, bad_words and min_tokens forbid them all")
        return EngineError("the model gave logits that are not finite")

    def _add_first_facts(self, delta: SequenceDelta, seq: Sequence) -> None:
        """What is known with the first token: cached tokens, time in the queue, the prompt's logprobs (once of n)."""
        request = seq.request
        delta.cached_tokens = seq.cached
        delta.queue_s = max(self._first_launch_s[request.request_id] - request.arrival_s, 0.0)
        delta.prompt_logprobs = self._prompt_logprobs.pop(request.request_id, None)

    def _take_sums(self, plan: Plan, pooled: np.ndarray) -> None:
        """Adds up the hidden states of a prompt's chunks, where their mean is wanted."""
        first = len(plan.decode)
        for region, at in ((plan.decode, 0), (plan.prefill, first)):
            for i, seq in enumerate(region.seqs):
                request = seq.request
                if request.pooling == "mean" and seq.finish_reason is None:
                    if region.starts[i] == 0:  # also of a preempted one
                        self._sums.pop(request.request_id, None)
                    before = self._sums.get(request.request_id, np.float32(0))
                    self._sums[request.request_id] = before + pooled[at + i] / np.float32(seq.prompt_len)

    def _take_prompt_logprobs(self, plan: Plan, rows: np.ndarray) -> None:
        """Files the logprobs of a chunk's prompt tokens. Token 0 has none; those of token i stand in row i - 1."""
        prefill, at = plan.prefill, 0
        for seq, start, count in zip(prefill.seqs, prefill.starts, prefill.counts, strict=True):
            if seq.score_prompt and seq.finish_reason is None:
                request = seq.request
                filed = self._prompt_logprobs.setdefault(request.request_id, [None])
                ids = seq.token_ids[start + 1 : min(start + count + 1, seq.prompt_len)]
                del filed[start + 1 :]  # a preempted prompt is scored anew
                filed += [
                    _unpack_logprobs(rows[at + i], t, request.params.prompt_logprobs or 0) for i, t in enumerate(ids)
                ]
            at += count


def _unpack_logprobs(row: np.ndarray, token_id: int, count: int) -> TokenLogprobs:
    """One row of step.py's logprob columns."""
    values = row.view(np.float32)
    return TokenLogprobs(
        token_id=token_id,
        logprob=float(values[0]),
        rank=int(row[1]),
        top_ids=row[2 : 2 + count].tolist(),
        top_logprobs=values[2 + MAX_LOGPROBS : 2 + MAX_LOGPROBS + count].tolist(),
    )


def _start_jax(memory_share: float, num_devices: int = 1) -> list[Any]:
    """The first so many devices. Of a GPU's memory JAX takes `memory_share`, or a line of the log says it does not.

    Raises ConfigError if there are fewer devices.
    """
    from jax._src.xla_bridge import backends_are_initialized  # what no public name tells

    from jaxserve import step_cache
    from jaxserve.sharding import devices

    in_force, who = set_memory_share(memory_share, started=backends_are_initialized())
    step_cache.use_compile_cache()
    found = devices(num_devices)
    if found[0].platform == "gpu" and in_force != memory_share:
        log.warning("--gpu-memory-utilization %g is not in force, but %g: %s", memory_share, in_force, who)
    return found

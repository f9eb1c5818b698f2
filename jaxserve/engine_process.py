"""The engine in a process of its own, and the client that front ends hold of it: one, or several (http_process.py).

    front end                                    engine process
    EngineProcess.start() ── config on stdin ──► main(): Engine(config), warm up
    SocketClient ◄────────── Ready(info) ─────── (ZeroMQ over a socket file in a private directory)
        submit, cancel ───── Submit, Cancel ───► drained before each step
        deltas ◄──────────── StepDone ────────── one message per step and front end: all deltas, the stats
        control ──────────── Control ──────────► pause, sleep, ... (control.py)
        its answer ◄──────── Controlled ──────── once it is done

HTTP, JSON and text stay on the front end's side: the GIL is one lock, and 256 streams of SSE would starve the step.
The engine ends when its stdin closes, so it never outlives its parent. Messages are msgpack, decoded into typed
structs: nothing that arrives can run code.
"""

import asyncio
import contextlib
import itertools
import logging
import shutil
import sys
import tempfile
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from jaxserve.checkpoint import Checkpoint
from jaxserve.child_process import ChildProcess, read_start
from jaxserve.config import EngineConfig, engine_environment
from jaxserve.control import Command
from jaxserve.errors import ConfigError, EngineDead, EngineError, ErrorInfo, JaxserveError
from jaxserve.frontend import Frontend
from jaxserve.parsers import thinking_limiter
from jaxserve.request import EngineInfo, EngineStats, Request, SequenceDelta, join
from jaxserve.tokenizer import Vocabulary

log = logging.getLogger(__name__)

STOP_S = 1.5  # that the engine gets to end: `docker stop` kills 10 s after it asks, see http/app.py
IDLE_POLL_MS = 200  # an idle engine wakes this often to look at deadlines
STATS_PERIOD_S = 1.0
MAX_SILENCE_S = 30.0  # of an engine that compiles nothing: after that it counts as hung
WATCH_PERIOD_S = 1.0


class Hello(msgspec.Struct, tag=True):
    """A front end has connected."""


class UseVocabulary(msgspec.Struct, tag=True):
    """What grammars are compiled for: the engine has no tokenizer of its own."""

    vocabulary: Vocabulary


class Submit(msgspec.Struct, tag=True):
    request: Request


class Cancel(msgspec.Struct, tag=True):
    request_id: str
    index: int | None


class Control(msgspec.Struct, tag=True):
    """A command to the engine as a whole; `number` tells the front end's open ones apart."""

    number: int
    command: Command


class Controlled(msgspec.Struct, tag=True):
    """The answer to Control: the state after the command, or why it cannot be."""

    number: int
    stats: EngineStats
    error: ErrorInfo | None = None


class Ready(msgspec.Struct, tag=True):
    info: EngineInfo


class Failed(msgspec.Struct, tag=True):
    """The engine could not start, or died of an error."""

    error: ErrorInfo
    is_config: bool


class StepDone(msgspec.Struct, tag=True):
    deltas: list[SequenceDelta]
    stats: EngineStats


ToEngine = Hello | UseVocabulary | Submit | Cancel | Control
FromEngine = Ready | Failed | StepDone | Controlled


# ---------------------------------------------------------------------------------------------- front end side


class SocketClient:
    """The EngineClient of a front end in another process. Use `EngineProcess.start()` to get one."""

    def __init__(self, address: str):
        self._socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        self._socket.set_hwm(0)
        self._socket.linger = 0
        self._socket.connect(address)
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(FromEngine).decode
        self._streams: dict[str, _Stream] = {}
        self._controls: dict[int, asyncio.Future[EngineStats]] = {}
        self._numbers = itertools.count()
        self._tasks: list[asyncio.Task] = []
        self._silence_s = 0.0  # since the engine's last message
        self._dead: JaxserveError | None = None
        self.info: EngineInfo
        self.stats = EngineStats()

    async def connect(self) -> None:
        """Waits until the engine is warm. Raises what it failed of: ConfigError, or EngineDead."""
        await self._socket.send(self._encode(Hello()))
        match self._decode(await self._socket.recv()):
            case Ready(info):
                self.info = info
            case Failed(error, is_config):
                raise ConfigError(error.message, param=error.param) if is_config else EngineDead(error.message)
        self._tasks = [asyncio.create_task(self._read())]
        if not self.info.compiles_later:
            self._tasks.append(asyncio.create_task(self._watch()))

    async def use_vocabulary(self, vocabulary: Vocabulary) -> None:
        """Before the first request with a grammar: what grammars are compiled for."""
        await self._socket.send(self._encode(UseVocabulary(vocabulary)))

    async def submit(self, request: Request) -> "_Stream":
        """See EngineClient.submit."""
        if self._dead:
            raise EngineDead(self._dead.message)
        stream = self._streams[request.request_id] = _Stream(self, request)
        try:
            await self._socket.send(self._encode(Submit(request)))
            first = await stream.get()
            if first.error:
                raise first.error.exception()
        except BaseException:
            self._streams.pop(request.request_id, None)
            await asyncio.shield(self.cancel(request.request_id))
            raise
        return stream

    def forget(self, request_id: str, *, cancel: bool) -> None:
        """Ends a stream's life here, and if it is not over, at the engine too. Does not wait: it may be closing."""
        self._streams.pop(request_id, None)
        if cancel and not self._dead:
            self._socket.send(self._encode(Cancel(request_id, None)))  # at once if it can; else zmq.asyncio sees to it

    async def cancel(self, request_id: str, index: int | None = None) -> None:
        """Ends one sequence, or all of the request's: each answers with finish_reason "abort"."""
        if not self._dead:
            await self._socket.send(self._encode(Cancel(request_id, index)))

    async def control(self, command: Command) -> EngineStats:
        """See EngineClient.control."""
        if self._dead:
            raise EngineDead(self._dead.message)
        number = next(self._numbers)
        answer = self._controls[number] = asyncio.get_running_loop().create_future()
        try:
            await self._socket.send(self._encode(Control(number, command)))
            return await answer
        finally:
            del self._controls[number]

    def healthy(self) -> bool:
        return self._dead is None and self._silence_s < MAX_SILENCE_S

    def die(self, error: JaxserveError) -> None:
        """Ends every open stream with the error, and refuses new requests."""
        if self._dead is None:
            self._dead = error
            for stream in self._streams.values():
                stream.put(error)
            for answer in self._controls.values():
                if not answer.done():
                    answer.set_exception(error)

    async def _read(self) -> None:
        try:
            while True:
                self._take(self._decode(await self._socket.recv()))
        except (zmq.ZMQError, msgspec.MsgspecError) as error:
            log.exception("messages from the engine cannot be read")
            self.die(EngineDead(f"messages from the engine cannot be read: {error}"))

    async def _watch(self) -> None:
        """Measures silence: the engine sends stats each second, also when it has nothing to do.

        In steps of its own: what a busy or suspended front end could not hear does not count.
        """
        while True:
            await asyncio.sleep(WATCH_PERIOD_S)
            if self._controls:  # which may take as long as they take
                continue
            was_healthy = self.healthy()
            self._silence_s += WATCH_PERIOD_S
            if was_healthy and not self.healthy():
                log.error("the engine has said nothing for %.0f s: /health says so until it does", self._silence_s)

    def _take(self, message: FromEngine) -> None:
        if self._silence_s >= MAX_SILENCE_S:
            log.warning("the engine answers again, after %.0f s", self._silence_s)
        self._silence_s = 0.0
        match message:
            case StepDone(deltas, stats):
                self.stats = stats
                for delta in deltas:
                    if stream := self._streams.get(delta.request_id):
                        stream.put(delta)
            case Controlled(number, stats, error):
                self.stats = stats
                if (answer := self._controls.get(number)) and not answer.done():
                    answer.set_exception(error.exception()) if error else answer.set_result(stats)
            case Failed(error, _):
                self.die(EngineDead(error.message))

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.die(EngineDead("the engine is being shut down"))
        self._socket.close()


class _Stream(AsyncIterator[SequenceDelta]):
    """The deltas of one request. Closing it early cancels what is left, whether or not it was ever iterated.

    Of a sequence whose reader has fallen behind, what waits comes as one delta: so it catches up.
    """

    def __init__(self, client: SocketClient, request: Request):
        self._client, self._request_id = client, request.request_id
        self._waiting: deque[SequenceDelta | JaxserveError] = deque()
        self._reader: asyncio.Future[None] | None = None  # done as soon as something waits
        self._unfinished = request.params.n

    def put(self, item: SequenceDelta | JaxserveError) -> None:
        self._waiting.append(item)
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def get(self) -> SequenceDelta:
        """What has come next. Raises the error that has ended the stream. One reader at a time: half of asyncio.Queue's
        cost, which for each token of each stream counts.
        """
        if not self._waiting:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        item = self._waiting.popleft()
        if isinstance(item, JaxserveError):
            raise item
        return item

    async def __anext__(self) -> SequenceDelta:
        if not self._unfinished:
            self._client.forget(self._request_id, cancel=False)
            raise StopAsyncIteration
        try:
            delta = await self.get()
        except JaxserveError:
            await self.aclose()
            raise
        waiting = self._waiting
        while waiting and not isinstance(waiting[0], JaxserveError) and join(delta, waiting[0]):
            waiting.popleft()
        self._unfinished -= delta.finish_reason is not None
        return delta

    async def aclose(self) -> None:
        self._client.forget(self._request_id, cancel=self._unfinished > 0)
        self._unfinished = 0


class EngineProcess:
    """A running engine process: `client` speaks to it, `wait()` returns when it ends."""

    def __init__(self, process: ChildProcess, address: str, directory: Path):
        self.address = address
        self.directory = directory  # private, until stop()
        self.client = SocketClient(address)
        self._process = process

    @classmethod
    async def start(cls, config: EngineConfig) -> "EngineProcess":
        """Starts the engine; returns at once. `await ready()` then waits until it is warm."""
        directory = Path(tempfile.mkdtemp(prefix="jaxserve-"))  # mode 0700: nobody else can connect
        address = f"ipc://{directory}/engine.sock"
        options = {f.name: getattr(config, f.name) for f in fields(EngineConfig)}  # not the HTTP ones
        start = {"address": address, "config": options}
        try:
            return cls(ChildProcess("jaxserve.engine_process", start, engine_environment()), address, directory)
        except BaseException:
            shutil.rmtree(directory, ignore_errors=True)
            raise

    async def ready(self) -> None:
        """Waits until the engine is warm. Raises ConfigError or EngineDead if it ends before that."""
        connecting, ended = asyncio.create_task(self.client.connect()), self._process.ended
        await asyncio.wait([connecting, ended], return_when=asyncio.FIRST_COMPLETED)
        if not connecting.done():
            await asyncio.wait([connecting], timeout=1)  # its last words may still be on the way
        if connecting.done():
            return await connecting
        connecting.cancel()
        raise EngineDead(f"the engine process ended with code {ended.result()} before it was ready")

    async def wait(self) -> int:
        """Returns the exit code once the process has ended; open streams then end with EngineDead."""
        code = await asyncio.shield(self._process.ended)
        self.client.die(EngineDead(f"the engine process ended with code {code}"))
        return code

    async def stop(self, grace_s: float = STOP_S) -> None:
        """Ends the engine; kills it if that takes longer than `grace_s` seconds."""
        await self.client.close()
        await self._process.stop(grace_s)
        shutil.rmtree(self.directory, ignore_errors=True)


async def start_engine(
    config: EngineConfig,
    checkpoint: Checkpoint,
    *,
    meanwhile: Callable[["EngineProcess"], object] = lambda engine: None,
) -> tuple[EngineProcess, Frontend]:
    """A warm engine and its front end; none is left if this fails or is cancelled. Raises ConfigError, EngineDead.

    meanwhile: called as soon as the engine begins to start.
    """
    defaults = checkpoint.sampling_defaults(config)
    engine = await EngineProcess.start(config)
    try:
        meanwhile(engine)
        frontend = await make_frontend(config, checkpoint, defaults, engine.client, engine.ready)
        await engine.client.use_vocabulary(frontend.vocabulary())
        return engine, frontend
    except BaseException:
        await engine.stop()
        raise


async def make_frontend(
    config: EngineConfig,
    checkpoint: Checkpoint,
    defaults: dict[str, Any],
    client: SocketClient,
    ready: Callable[[], Awaitable[None]],
) -> Frontend:
    """The front end of an engine, once `ready()` returns; until then it loads the tokenizer."""
    tokenizer = await asyncio.to_thread(checkpoint.load_tokenizer, config)
    await ready()
    return Frontend(tokenizer, client.info, defaults, thinking_limiter(tokenizer, config.reasoning_parser))


# ------------------------------------------------------------------------------------------------- engine side


class EngineServer:
    """Runs an Engine and speaks to the front ends that connect."""

    def __init__(self, address: str):
        self._socket = zmq.Context.instance().socket(zmq.ROUTER)
        self._socket.set_hwm(0)
        self._socket.linger = 1000
        self._socket.bind(address)
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(ToEngine).decode
        self._owners: dict[str, bytes] = {}  # request id -> front end
        self._front_ends: list[bytes] = []
        self._answers: dict[bytes, list[SequenceDelta]] = {}  # to requests, for the front end that sent them
        self._controls: list[tuple[bytes, int]] = []  # begun and not done: front end, number
        self._stats_due_s = 0.0

    def run(self, config: EngineConfig) -> None:
        """Starts the engine and serves until the process ends. Errors go to the front ends before they are raised."""
        try:
            from jaxserve.engine import Engine

            engine = Engine(config)
            self._serve(engine)
        except Exception as error:
            self._fail(error)
            raise

    def _serve(self, engine) -> None:
        self._engine = engine
        while True:
            self._drain(wait=not engine.has_work())
            answers, self._answers = self._answers, {}
            self._send(answers)  # accepted or refused: the front end waits for it before any header
            if engine.has_work():
                self._send(self._by_owner(engine.step()))
            if not engine.busy:
                self._answer_controls()

    def _drain(self, *, wait: bool) -> None:
        """Takes all messages that have come; if `wait`, sleeps until there is one (or the idle poll is over)."""
        if wait and not self._socket.poll(IDLE_POLL_MS):
            return
        while self._socket.poll(0):
            front_end, payload = self._socket.recv_multipart()
            try:
                message = self._decode(payload)
            except msgspec.MsgspecError as error:
                self._refuse(front_end, payload, error)
                continue
            match message:
                case Hello():
                    self._front_ends.append(front_end)
                    self._socket.send_multipart([front_end, self._encode(Ready(self._engine.info))])
                case UseVocabulary(vocabulary):
                    self._engine.use_vocabulary(lambda: vocabulary)
                    self._engine.prepare_grammars()  # now, and not when others wait for their next token
                case Submit(request):
                    self._submit(front_end, request)
                case Cancel(request_id, index):
                    if self._owners.get(request_id) == front_end:  # nobody else's
                        self._engine.cancel(request_id, index)
                case Control(number, command):
                    self._control(front_end, number, command)

    def _control(self, front_end: bytes, number: int, command: Command) -> None:
        try:
            self._engine.control(command)
        except JaxserveError as error:
            answer = Controlled(number, self._engine.stats(), error.info())
            self._socket.send_multipart([front_end, self._encode(answer)])
        else:
            self._controls.append((front_end, number))

    def _answer_controls(self) -> None:
        """Tells who asked for them that commands are done, and before that all others how the engine is now."""
        if not self._controls:
            return
        self._stats_due_s = 0.0
        self._send({})
        for front_end, number in self._controls:
            self._socket.send_multipart([front_end, self._encode(Controlled(number, self._engine.stats()))])
        self._controls = []

    def _refuse(self, front_end: bytes, payload: bytes, error: Exception) -> None:
        """Answers a message that is not what it should be, as far as it says whom to answer. Others go on."""
        log.error("a message from a front end cannot be read: %s", error)
        with contextlib.suppress(msgspec.MsgspecError, KeyError, TypeError):
            request_id = str(msgspec.msgpack.decode(payload)["request"]["request_id"])
            if self._owners.get(request_id) != front_end:
                self._answer(front_end, request_id, EngineError(f"the engine cannot read this request: {error}"))

    def _answer(self, front_end: bytes, request_id: str, refusal: JaxserveError | None = None) -> None:
        """Accepts a request, or refuses it: to the one that has sent it, whoever else has one of this name."""
        answer = SequenceDelta(request_id, -1)
        if refusal:
            answer.finish_reason, answer.error = "error", refusal.info()
        self._answers.setdefault(front_end, []).append(answer)

    def _submit(self, front_end: bytes, request: Request) -> None:
        try:
            accepted = self._engine.submit(request)
        except JaxserveError as error:
            return self._answer(front_end, request.request_id, error)
        self._owners[request.request_id] = front_end
        if accepted:  # if not, a later step will say whether it is
            self._answer(front_end, request.request_id)

    def _by_owner(self, deltas: list[SequenceDelta]) -> dict[bytes, list[SequenceDelta]]:
        by_owner: dict[bytes, list[SequenceDelta]] = {}
        for delta in deltas:
            by_owner.setdefault(self._owners[delta.request_id], []).append(delta)
        for delta in deltas:
            if delta.finish_reason and not self._engine.knows(delta.request_id):
                self._owners.pop(delta.request_id, None)
        return by_owner

    def _send(self, by_owner: dict[bytes, list[SequenceDelta]]) -> None:
        """One message to each front end that has deltas; at times one to all, for the stats."""
        if (now := time.monotonic()) >= self._stats_due_s:
            self._stats_due_s = now + STATS_PERIOD_S
            by_owner = {**dict.fromkeys(self._front_ends, []), **by_owner}
        if by_owner:
            stats = self._engine.stats()
            for front_end, deltas in by_owner.items():
                self._socket.send_multipart([front_end, self._encode(StepDone(deltas, stats))])

    def _fail(self, error: Exception) -> None:
        """Tells every front end, also one whose Hello still waits in the queue, why the engine ends."""
        info = (
            error.info() if isinstance(error, JaxserveError) else EngineDead(f"{type(error).__name__}: {error}").info()
        )
        message = self._encode(Failed(info, isinstance(error, ConfigError)))
        told = set(self._front_ends)
        if told and isinstance(error, ConfigError):  # once it serves, nobody else shows one
            log.error("the engine ends: %s", error.message)
        for front_end in told:
            self._socket.send_multipart([front_end, message])
        deadline_s = time.monotonic() + 0.3
        while time.monotonic() < deadline_s:
            if self._socket.poll(100) and (front_end := self._socket.recv_multipart()[0]) not in told:
                told.add(front_end)
                self._socket.send_multipart([front_end, message])
        self._socket.close()
        zmq.Context.instance().term()


def main() -> None:
    from jaxserve.logs import setup_logging

    setup_logging()
    start = read_start()
    try:
        EngineServer(start["address"]).run(EngineConfig(**start["config"]))
    except ConfigError:
        sys.exit(2)  # the parent shows it
    except KeyboardInterrupt:
        sys.exit(0)


if __name__ == "__main__":
    main()

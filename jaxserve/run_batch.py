"""`jaxserve run-batch`: answers a file of requests in OpenAI's batch format. Never imports jax.

    in   {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "The sky is"}}
    out  {"id": "batch_req_...", "custom_id": "a", "response": {"status_code": 200, "request_id": ..., "body": ...},
          "error": null}

Each line goes through the server's own application, behind a Unix socket in a private directory, so that a body means
here what it means there. Every line of the input gets one line of output, written as soon as it is there: a line that
is no request gets one with an `error`. What has an answer in OUT is not asked again.
"""

import argparse
import asyncio
import contextlib
import os
import resource
import tempfile
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

import aiohttp
import msgspec
from aiohttp import web
from tqdm import tqdm

from jaxserve.checkpoint import Checkpoint
from jaxserve.config import ServeConfig, add_arguments, from_arguments
from jaxserve.engine_process import start_engine
from jaxserve.errors import ConfigError, EngineDead, RequestError
from jaxserve.frontend import Frontend
from jaxserve.http.app import make_app
from jaxserve.http.request_id import HEADER
from jaxserve.http.routes import CONTROL_ROUTES, ROUTES
from jaxserve.logs import setup_logging
from jaxserve.request import EngineClient, short

OF_LISTENING = (  # options of `serve` that mean nothing without a port
    "host", "port", "api_server_count", "api_key", "allowed_origins", "allowed_methods", "allowed_headers",
    "allow_credentials",
)  # fmt: skip
MAX_CONCURRENCY = 4096  # connections that Linux lets wait to be accepted
SPARE_FILES = 256  # beside the connections
URLS = sorted(
    route.path
    for route in ROUTES
    if route.method == "POST" and route not in CONTROL_ROUTES and "{" not in route.path and route.path != "/ping"
)


class Answer(msgspec.Struct):
    status_code: int
    request_id: str
    body: msgspec.Raw


class LineError(msgspec.Struct):
    """Why a line of the input is no request; `line` counts from 1."""

    code: str
    message: str
    line: int


class Record(msgspec.Struct, kw_only=True):
    """One line of the output."""

    id: str = msgspec.field(default_factory=lambda: f"batch_req_{uuid.uuid4().hex}")
    custom_id: str | None
    response: Answer | None = None
    error: LineError | None = None


@dataclass(slots=True)
class Line:
    """A line of the input that is a request."""

    custom_id: str
    url: str
    body: dict[str, Any]


@dataclass(slots=True)
class Done:
    """What the output holds already: ids that were answered, and lines that are no requests."""

    custom_ids: set[str] = field(default_factory=set)
    lines: set[int] = field(default_factory=set)


# ------------------------------------------------------------------------------------------------------------ command


def add_run_batch_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("batch")
    group.add_argument("-i", "--input-file", metavar="IN.jsonl", type=Path, required=True, help="one request per line")
    group.add_argument("-o", "--output-file", metavar="OUT.jsonl", type=Path, required=True, help="one answer per line")
    group.add_argument("--overwrite", action="store_true", help="start anew instead of going on where OUT.jsonl ends")
    group.add_argument(
        "--max-concurrency", metavar="N", type=int, help="lines in work at most (default: twice the engine's sequences)"
    )
    add_arguments(parser, ServeConfig, without=OF_LISTENING)


def run_run_batch(args: argparse.Namespace) -> int:
    config = from_arguments(args, ServeConfig)
    if "max_queue_len" not in vars(args):
        config = replace(config, max_queue_len=2**31 - 1)  # the file is the queue
    if args.max_concurrency is not None and not 1 <= args.max_concurrency <= MAX_CONCURRENCY:
        raise ConfigError(
            f"--max-concurrency must be 1 to {MAX_CONCURRENCY}, got {args.max_concurrency}", param="max_concurrency"
        )
    check_files(args.input_file, args.output_file)
    if not args.overwrite:
        read_done(args.output_file)  # if it cannot be gone on with, that is said now, and not after minutes of warm-up
    setup_logging()
    asyncio.run(_run(config, args.input_file, args.output_file, args.overwrite, args.max_concurrency))
    return 0


def check_files(source: Path, target: Path) -> None:
    """Raises ConfigError if one cannot be read, or the other written."""
    try:
        with source.open("rb"):
            pass
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("ab"):
            pass
    except OSError as error:
        raise ConfigError(f"{error.filename}: {error.strerror}") from None
    if source.samefile(target):
        raise ConfigError(f"-i and -o name the same file: {source}", param="output_file")


async def _run(config: ServeConfig, source: Path, target: Path, overwrite: bool, max_concurrency: int | None) -> None:
    checkpoint = await asyncio.to_thread(Checkpoint.open, config)
    engine, frontend = await start_engine(config, checkpoint)
    try:
        at_once = max_concurrency or min(2 * engine.client.info.max_num_seqs, MAX_CONCURRENCY)
        await answer_file(frontend, engine.client, config, source, target, max_concurrency=at_once, overwrite=overwrite)
    finally:
        await engine.stop()


# -------------------------------------------------------------------------------------------------------------- files


def read_done(target: Path) -> Done:
    """What an earlier run left. Its last line is cut off if it was interrupted amid it. Raises ConfigError."""
    done, decode = Done(), msgspec.json.Decoder(Record).decode
    if not target.exists():
        return done
    with target.open("r+b") as file:
        end = 0
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                break
            end += len(line)
            try:
                record = decode(line)
                if (record.response is None) == (record.error is None):
                    raise msgspec.ValidationError("it has no response and no error, or both")
            except msgspec.MsgspecError as error:
                raise ConfigError(
                    f"{target} line {number} is no answer of run-batch ({error}); --overwrite starts anew",
                    param="output_file",
                ) from None
            if record.error:
                done.lines.add(record.error.line)
            elif record.custom_id is not None:
                done.custom_ids.add(record.custom_id)
        file.truncate(end)
    return done


def read_lines(source: BinaryIO, done: Done) -> Iterator[Line | Record | None]:
    """A request, the record of a line that is none, or None for one that was done before. Blank lines do not count."""
    seen: set[str] = set()
    for number, raw in enumerate(source, 1):
        if not raw.strip():
            continue
        try:
            line = parse_line(raw)
            if line.custom_id in seen:
                raise RequestError(f"custom_id {short(line.custom_id)} is already that of another line")
            seen.add(line.custom_id)
        except RequestError as error:
            bad = Record(custom_id=_custom_id(raw), error=LineError("invalid_line", error.info().message, number))
            yield None if number in done.lines else bad
        else:
            yield None if line.custom_id in done.custom_ids else line


def parse_line(raw: bytes) -> Line:
    """Raises RequestError if this is no request that can be answered."""
    try:
        entry = msgspec.json.decode(raw)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise RequestError(f"the line is not valid JSON: {error}") from None
    if not isinstance(entry, dict):
        raise RequestError(f"the line must be a JSON object, got {short(entry)}")
    if unknown := [name for name in entry if name not in ("custom_id", "method", "url", "body")]:
        raise RequestError(f"unknown field {short(unknown[0])}")
    custom_id, url, body = entry.get("custom_id"), entry.get("url"), entry.get("body")
    if not isinstance(custom_id, str) or not custom_id:
        raise RequestError(f"custom_id must be a text, not empty, got {short(custom_id)}")
    if entry.get("method") != "POST":
        raise RequestError(f"method must be POST, got {short(entry.get('method'))}")
    if url not in URLS:
        raise RequestError(f"url must be one of {', '.join(URLS)}; got {short(url)}")
    if not isinstance(body, dict):
        raise RequestError(f"body must be an object, got {short(body)}")
    if body.get("stream"):
        raise RequestError("body.stream must be false: a line has one answer")
    return Line(custom_id, url, body)


def _custom_id(raw: bytes) -> str | None:
    """The custom_id of a bad line, if it has one."""
    with contextlib.suppress(msgspec.MsgspecError, RecursionError):
        entry = msgspec.json.decode(raw)
        if isinstance(entry, dict) and isinstance(entry.get("custom_id"), str):
            return entry["custom_id"]
    return None


# ------------------------------------------------------------------------------------------------------------ answers


async def answer_file(
    frontend: Frontend,
    client: EngineClient,
    config: ServeConfig,
    source: Path,
    target: Path,
    *,
    max_concurrency: int,
    overwrite: bool = False,
) -> None:
    """Appends to `target` the answer of every line of `source` that has none there. Raises EngineDead, ConfigError."""
    _allow_connections(max_concurrency)
    done = Done() if overwrite else read_done(target)
    with source.open("rb") as file:
        total = sum(bool(line.strip()) for line in file)
        file.seek(0)
        lines = read_lines(file, done)  # all workers take from it
        async with _application(frontend, client, config) as session:
            with target.open("wb" if overwrite else "ab") as out, tqdm(total=total, desc="Batch", unit="line") as bar:

                async def work() -> None:
                    for line in lines:
                        record = await _answer(session, line) if isinstance(line, Line) else line
                        if not client.healthy():
                            raise EngineDead("the engine has died; run the same command again to go on")
                        if record is not None:
                            out.write(msgspec.json.encode(record) + b"\n")
                            out.flush()
                        bar.update()

                try:
                    async with asyncio.TaskGroup() as group:
                        for _ in range(max_concurrency):
                            group.create_task(work())
                except* EngineDead as errors:
                    raise errors.exceptions[0] from None


def _allow_connections(count: int) -> None:
    """Raises the limit of open files to what so many connections need, both ends of which are here."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * count + SPARE_FILES
    if hard != resource.RLIM_INFINITY and wanted > hard:
        raise ConfigError(
            f"--max-concurrency must be at most {(hard - SPARE_FILES) // 2} where a process may open {hard} files"
            f" (ulimit -Hn), got {count}",
            param="max_concurrency",
        )
    if soft != resource.RLIM_INFINITY and wanted > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


async def _answer(session: aiohttp.ClientSession, line: Line) -> Record:
    async with session.post(line.url, json=line.body) as response:
        answer = Answer(response.status, response.headers[HEADER], msgspec.Raw(await response.read()))
    return Record(custom_id=line.custom_id, response=answer)


@asynccontextmanager
async def _application(
    frontend: Frontend, client: EngineClient, config: ServeConfig
) -> AsyncIterator[aiohttp.ClientSession]:
    """A session whose paths are those of the application, which no one else can reach."""
    app = make_app(frontend, client, replace(config, api_key=[], allowed_origins=[]))
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
    with tempfile.TemporaryDirectory(prefix="jaxserve-") as folder:  # mode 0700
        socket = os.path.join(folder, "http.sock")
        await runner.setup()
        try:
            await web.UnixSite(runner, socket, backlog=MAX_CONCURRENCY).start()
            connector = aiohttp.UnixConnector(socket, limit=0)
            timeout = aiohttp.ClientTimeout(total=None)
            async with aiohttp.ClientSession("http://batch", connector=connector, timeout=timeout) as session:
                yield session
        finally:
            await runner.cleanup()

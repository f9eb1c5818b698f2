"""`jaxserve chat` and `jaxserve complete`: talk to a running server from the terminal.

Answers are printed as they come. Ctrl-C stops the answer (the server stops computing it), Ctrl-D leaves.
"""

import argparse
import asyncio
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxserve.api_client import ApiClient
from jaxserve.config import cache_dir, client_api_key
from jaxserve.errors import ConfigError, JaxserveError, RequestError
from jaxserve.request import check_limits

PORT = 8000
HISTORY_LINES = 1000
# Escape sequences in a model's text could reprogram the terminal: control characters are not printed.
UNPRINTED = {i: None for i in (*range(32), *range(127, 160)) if chr(i) not in "\n\t"}


def add_chat_arguments(parser: argparse.ArgumentParser) -> None:
    _add_arguments(parser)
    parser.add_argument("--system-prompt", metavar="TEXT", help="system message that begins the conversation")


def add_complete_arguments(parser: argparse.ArgumentParser) -> None:
    _add_arguments(parser)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--url", default=f"http://localhost:{PORT}", help="server (default: %(default)s), with /v1 or not"
    )
    where.add_argument("--port", metavar="N", type=int, help="the server at this port here")
    parser.add_argument("--api-key", metavar="KEY", help="key to send (default: JAXSERVE_API_KEY or OPENAI_API_KEY)")
    parser.add_argument("--model-name", metavar="NAME", help="model to ask (default: the server's first)")
    parser.add_argument("--max-tokens", metavar="N", type=int, help="tokens of an answer at most")
    parser.add_argument("--temperature", metavar="X", type=float, help="0 is greedy (default: the server's)")
    parser.add_argument("-q", "--quick", metavar="TEXT", help="ask this, print the answer and leave")
    parser.add_argument("--stats", action="store_true", help="print tokens and speed after each answer")


def run_chat(args: argparse.Namespace) -> int:
    system = [{"role": "system", "content": args.system_prompt}] if args.system_prompt else []
    return _run(args, Chat(args, list(system)))


def run_complete(args: argparse.Namespace) -> int:
    return _run(args, Completion(args))


@dataclass
class Completion:
    """Each line is a prompt of its own."""

    args: argparse.Namespace
    name = "complete"
    path = "/completions"

    def body(self, line: str) -> dict[str, Any]:
        return {"prompt": line}

    def text_of(self, choice: dict[str, Any]) -> str:
        return choice.get("text") or ""

    def remember(self, line: str, answer: str) -> None:
        """Prompts do not depend on each other."""


@dataclass
class Chat:
    """A conversation: each line is sent with everything said before."""

    args: argparse.Namespace
    messages: list[dict[str, str]]
    _reasoned: str = ""  # of the answer that is coming
    _said: str = ""
    name = "chat"
    path = "/chat/completions"

    def body(self, line: str) -> dict[str, Any]:
        self._reasoned = self._said = ""
        return {"messages": [*self.messages, {"role": "user", "content": line}]}

    def text_of(self, choice: dict[str, Any]) -> str:
        """The reasoning is shown before the answer, and not remembered."""
        delta = choice.get("delta") or {}
        reasoning, content = delta.get("reasoning") or "", delta.get("content") or ""
        gap = "\n\n" if content and self._reasoned and not self._said else ""
        self._reasoned += reasoning
        self._said += content
        return reasoning + gap + content

    def remember(self, line: str, answer: str) -> None:
        self.messages += [{"role": "user", "content": line}, {"role": "assistant", "content": self._said}]


@dataclass
class Answer:
    """What arrived so far, so that a stopped answer is kept too."""

    text: str = ""
    usage: dict[str, Any] | None = None
    start_s: float = 0.0
    first_s: float | None = None
    end_s: float = 0.0

    def stats(self) -> str:
        tokens = (self.usage or {}).get("completion_tokens")
        first_s = (self.first_s or self.end_s) - self.start_s
        decode_s = self.end_s - (self.first_s or self.end_s)
        speed = f", {(tokens - 1) / decode_s:.1f} tok/s" if tokens and tokens > 1 and decode_s > 0 else ""
        return f"[{tokens if tokens is not None else '?'} tokens, first after {first_s:.2f} s{speed}]"


def _check(args: argparse.Namespace) -> None:
    """Raises ConfigError for what no server takes, or JSON cannot say. How much is too much the server knows."""
    limits = {"port": (int, {"ge": 1, "le": 65535}), "max_tokens": (int, {"ge": 1}), "temperature": (float, {"ge": 0})}
    for name, (kind, limit) in limits.items():
        try:
            check_limits(f"--{name.replace('_', '-')}", getattr(args, name), kind | None, limit)
        except RequestError as error:
            raise ConfigError(error.message, param=name) from None


def _run(args: argparse.Namespace, mode: Completion | Chat) -> int:
    _check(args)
    with asyncio.Runner() as runner:
        client = runner.run(_connect(args))
        try:
            model = args.model_name or runner.run(client.models())[0]["id"]
            if args.quick is not None:
                _ask(runner, client, model, mode, args.quick)
                return 0
            return _repl(runner, client, model, mode)
        finally:
            runner.run(client.close())


async def _connect(args: argparse.Namespace) -> ApiClient:
    url = args.url if args.port is None else f"http://localhost:{args.port}"
    return ApiClient(api_url(url), args.api_key or client_api_key())  # aiohttp wants a running loop


def api_url(url: str) -> str:
    """A URL without a path is that of a server, whose API is under /v1."""
    return re.sub(r"^(https?://[^/]+)/*$", r"\1/v1", url)


def _repl(runner: asyncio.Runner, client: ApiClient, model: str, mode: Completion | Chat) -> int:
    interactive = sys.stdin.isatty()
    if interactive:
        print(f"{model} at {client.base_url}. Ctrl-C stops an answer, Ctrl-D leaves.", file=sys.stderr)
    failed = False
    with _history(cache_dir() / f"history-{mode.name}", interactive):
        while True:
            try:
                line = input("> " if interactive else "")
            except EOFError:
                if interactive:
                    print(file=sys.stderr)
                return int(failed)
            except KeyboardInterrupt:
                if not interactive:
                    raise
                print(file=sys.stderr)
                continue
            if not line.strip():
                continue
            try:
                _ask(runner, client, model, mode, line)
            except JaxserveError as error:
                print(f"jaxserve: error: {error.message}", file=sys.stderr)
                failed = not interactive
            except KeyboardInterrupt:
                if not interactive:
                    raise


def _ask(runner: asyncio.Runner, client: ApiClient, model: str, mode: Completion | Chat, line: str) -> None:
    """Prints the answer to one line and remembers it; a stopped answer is remembered as far as it came."""
    line = line.encode(errors="surrogateescape").decode(errors="replace")  # bytes that the locale does not know: UTF-8
    answer = Answer()
    try:
        runner.run(_stream(client, model, mode, line, answer))
    except KeyboardInterrupt:
        print(" [stopped]")
        mode.remember(line, answer.text)
        raise
    print()
    mode.remember(line, answer.text)
    if mode.args.stats:
        print(answer.stats(), file=sys.stderr)


async def _stream(client: ApiClient, model: str, mode: Completion | Chat, line: str, answer: Answer) -> None:
    body = mode.body(line) | {"model": model, "stream": True, "stream_options": {"include_usage": True}}
    body |= {k: v for k in ("max_tokens", "temperature") if (v := getattr(mode.args, k)) is not None}
    answer.start_s = time.perf_counter()
    async for event in client.stream(mode.path, body):
        answer.usage = event.get("usage") or answer.usage
        text = "".join(mode.text_of(choice) for choice in event.get("choices") or ())
        if text:
            answer.first_s = answer.first_s or time.perf_counter()
            answer.text += text
            print(text.translate(UNPRINTED), end="", flush=True)
    answer.end_s = time.perf_counter()


@contextmanager
def _history(path: Path, interactive: bool) -> Iterator[None]:
    """Line editing, with the lines of earlier sessions; only at a terminal."""
    try:
        import readline
    except ImportError:  # not built into every Python: input() still works, without editing
        readline = None
    if readline is None or not interactive:
        yield
        return
    with suppress(OSError):
        readline.read_history_file(path)
    readline.set_history_length(HISTORY_LINES)
    try:
        yield
    finally:
        with suppress(OSError):  # a read-only home is no reason to fail at the end of a chat
            path.parent.mkdir(parents=True, exist_ok=True)
            readline.write_history_file(path)

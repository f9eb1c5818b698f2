"""What one HTTP process costs per token, without a model: its CPU time while it serves streams of one token per event.

    python scripts/bench_http.py [--route chat] [--streams 256] [--tokens 200] [--step-ms 10] [--profile]

An engine that makes one token per stream and step, and the clients, run in processes of their own; of the HTTP process
(JSON, detokenising, server-sent events, the socket to the engine) wall and CPU time are measured from the first call to
the last. `--step-ms 0` is as fast as it goes: then tokens of a stream that wait for it come as one event.
"""

import argparse
import asyncio
import cProfile
import json
import os
import pstats
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import uvloop

from jaxserve.checkpoint import load_tokenizer
from jaxserve.config import ServeConfig
from jaxserve.engine_process import EngineServer, SocketClient
from jaxserve.frontend import Frontend
from jaxserve.http.app import listening
from jaxserve.request import EngineInfo, EngineStats, Request, SequenceDelta

ROOT = Path(__file__).parent.parent
TOKENIZER = ROOT / "tests" / "goldens" / "vocab" / "smollm.gguf"
TEXT = "The quick brown fox jumps over the lazy dog, and says: naïve café, 3.14! " * 40
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)
ROUTES = {"completions": {"prompt": "hi"}, "chat": {"messages": [{"role": "user", "content": "hi"}]}}


class PacedEngine:
    """Gives each request one token per step, and does a step each `step_s` seconds."""

    busy = False

    def __init__(self, token_ids: list[int], vocab_size: int, step_s: float):
        self.info = EngineInfo("m", vocab_size, 8192, 4096, 16, 8192, "none", "float32")
        self._token_ids, self._step_s = token_ids, step_s
        self._running: dict[str, tuple[Request, int]] = {}
        self._due_s = 0.0

    def has_work(self) -> bool:
        return bool(self._running)

    def knows(self, request_id: str) -> bool:
        return request_id in self._running

    def submit(self, request: Request) -> bool:
        self._running[request.request_id] = request, 0
        return True

    def cancel(self, request_id: str, index: int | None) -> None:
        self._running.pop(request_id, None)

    def use_vocabulary(self, vocabulary) -> None: ...

    def stats(self) -> EngineStats:
        return EngineStats(running=len(self._running))

    def step(self) -> list[SequenceDelta]:
        time.sleep(max(self._due_s - time.perf_counter(), 0))
        self._due_s = max(self._due_s, time.perf_counter() - self._step_s) + self._step_s
        deltas = []
        for name, (request, done) in list(self._running.items()):
            delta = SequenceDelta(name, 0, [self._token_ids[done % len(self._token_ids)]])
            self._running[name] = request, done + 1
            if done + 1 == request.max_tokens:
                delta.finish_reason = "length"
                del self._running[name]
            deltas.append(delta)
        return deltas


def run_engine(address: str, step_ms: float) -> None:
    tokenizer = load_tokenizer(TOKENIZER, [])
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    EngineServer(address)._serve(PacedEngine(ids, tokenizer.vocab_size, step_ms / 1000))


async def run_clients(port: int, route: str, streams: int, tokens: int) -> None:
    """Prints the number of events."""
    body = json.dumps({**ROUTES[route], "max_tokens": tokens, "ignore_eos": True, "stream": True}).encode()
    path = "/v1/chat/completions" if route == "chat" else "/v1/completions"
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"

    async def one() -> int:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head.encode() + body)
        events, end = 0, b""
        while b"[DONE]" not in end:
            data = await reader.read(1 << 16)
            assert data, "the stream ends with [DONE]"
            events += data.count(b"data: {")
            end = (end + data)[-20:]
        writer.close()
        return events

    print(sum(await asyncio.gather(*(one() for _ in range(streams)))))


async def measure(args: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        address = f"ipc://{folder}/engine.sock"
        this = [sys.executable, __file__]
        engine = subprocess.Popen([*this, "--as-engine", address, "--step-ms", str(args.step_ms)], cwd=ROOT)
        client = SocketClient(address)
        await client.connect()
        frontend = Frontend(load_tokenizer(TOKENIZER, []).with_chat_template(TEMPLATE), client.info)
        async with listening(frontend, client, ServeConfig(port=0, model="m"), grace_s=0) as url:
            command = [*this, "--as-clients", url.rsplit(":", 1)[1], "--route", args.route]
            command += ["--streams", str(args.streams), "--tokens", str(args.tokens)]
            before, wall_s = os.times(), time.perf_counter()
            profile = cProfile.Profile(time.thread_time)
            if args.profile:
                profile.enable()
            clients = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=subprocess.PIPE)
            printed, _ = await clients.communicate()
            profile.disable()
            after, wall_s = os.times(), time.perf_counter() - wall_s
        await client.close()
        engine.kill()
    tokens = args.streams * args.tokens
    user_us, kernel_us = (1e6 * (getattr(after, n) - getattr(before, n)) / tokens for n in ("user", "system"))
    print(
        f"{args.route}: {tokens} tokens in {int(printed)} events, {tokens / wall_s:.0f} tokens/s; CPU: {user_us:.1f} us"
        f" each, and {kernel_us:.1f} us in the kernel: {1e6 / (user_us + kernel_us):.0f} tokens/s per core"
    )
    if args.profile:
        pstats.Stats(profile).sort_stats("tottime").print_stats(45)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--route", choices=list(ROUTES), default="completions")
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--step-ms", type=float, default=10)
    parser.add_argument("--profile", action="store_true", help="with cProfile, which makes it slower")
    parser.add_argument("--as-engine", metavar="ADDRESS", help=argparse.SUPPRESS)
    parser.add_argument("--as-clients", metavar="PORT", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.as_engine:
        run_engine(args.as_engine, args.step_ms)
    else:
        clients = args.as_clients and run_clients(args.as_clients, args.route, args.streams, args.tokens)
        uvloop.run(clients or measure(args))


if __name__ == "__main__":
    main()

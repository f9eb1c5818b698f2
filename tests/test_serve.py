"""`jaxserve serve` as users run it: two real processes, a real socket, many clients at once, and what can go wrong."""

import asyncio
import contextlib
import functools
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from transformers import PreTrainedTokenizerFast

from jaxserve.checkpoint import load_tokenizer

sys.path.insert(0, str(Path(__file__).parent / "parsers"))
from chat_templates import QWEN3

ROOT = Path(__file__).parent.parent
TOKENIZER = ROOT / "tests" / "goldens" / "vocab" / "smollm.gguf"
SHAPE = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 1024, "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 320,
}  # fmt: skip
KV_BYTES_PER_TOKEN = 2 * 2 * 2 * 16 * 4
TINY_POOL = ("--kv-cache-memory-bytes", str(KV_BYTES_PER_TOKEN * (320 + 16 * 16)), "--max-num-seqs", "16")
START_S = 240


class Server:
    """A running server process; `log()` is what it printed so far."""

    def __init__(self, process: subprocess.Popen, log: Path):
        self.process, self._log = process, log
        self.url = ""

    def log(self) -> str:
        return self._log.read_text()

    async def wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and self.process.poll() is None:
            if found := re.search(r"http://127\.0\.0\.1:\d+", self.log()):
                self.url = found.group()
                return
            await asyncio.sleep(0.1)
        raise AssertionError(f"not ready:\n{self.log()}")

    def children(self) -> list[int]:
        return [
            int(pid) for pid in Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        ]

    def engine_pid(self) -> int:
        return self.children()[0]

    async def wait_until(self, happened: Callable[[], bool]) -> None:
        async with asyncio.timeout(START_S):
            while not happened():
                assert self.process.poll() is None, self.log()
                await asyncio.sleep(0.01)

    async def wait_until_ended(self) -> int:
        """The exit code. Fails if it takes more than a few seconds."""
        async with asyncio.timeout(15):
            while self.process.poll() is None:
                await asyncio.sleep(0.02)
        return self.process.returncode


@contextlib.asynccontextmanager
async def starting(folder: Path, *options: str) -> AsyncIterator[Server]:
    """A server that has just been started, in a process group of its own."""
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(SHAPE))
    command = [
        sys.executable, "-m", "jaxserve", "serve", "--model", str(folder / "model"), "--load-format", "dummy", "--port",
        "0", "--tokenizer", str(TOKENIZER), "--served-model-name", "tiny", "--dtype", "float32", *options,
    ]  # fmt: skip
    log = folder / "log"
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, cwd=ROOT, start_new_session=True)
    server = Server(process, log)
    try:
        yield server
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            raise AssertionError(f"did not end on SIGTERM:\n{server.log()}") from None


@contextlib.asynccontextmanager
async def serving(folder: Path, *options: str) -> AsyncIterator[Server]:
    async with starting(folder, *options) as server:
        await server.wait_until_ready()
        yield server


def body(i: int, **more) -> dict:
    prompt = [(7 * i + 3 * k) % 500 + 5 for k in range(3 + 5 * i % 90)]
    return {"model": "tiny", "prompt": prompt, "max_tokens": 4 + 3 * i % 50, "ignore_eos": True, "stream": True, **more}


async def stream(
    session: aiohttp.ClientSession, url: str, request: dict, leave_after: int | None = None
) -> dict | None:
    """The last choice, with all of the text, and usage of a streamed completion; None if this client left early."""
    events, last, usage, text = 0, None, None, ""
    async with session.post(f"{url}/v1/completions", json=request) as answer:
        assert answer.status == 200, await answer.text()
        async for line in answer.content:
            if not line.startswith(b"data: ") or line == b"data: [DONE]\n":
                continue
            event = json.loads(line[6:])
            assert "error" not in event, event
            last, usage = (event["choices"] or [last])[0], event.get("usage") or usage
            text += "".join(choice["text"] for choice in event["choices"])
            events += 1
            if events == leave_after:
                return None
    assert last is not None and usage is not None
    return {**last, "text": text, "usage": usage}


async def metrics(session: aiohttp.ClientSession, url: str) -> dict[str, float]:
    async with session.get(f"{url}/metrics") as answer:
        text = await answer.text()
    return {m[1]: float(m[2]) for m in re.finditer(r"^jaxserve:(\w+)(?:\{[^}]*\})? (\S+)$", text, re.MULTILINE)}


async def settled(session: aiohttp.ClientSession, url: str) -> dict[str, float]:
    """Metrics once nothing runs or waits any more."""
    for _ in range(200):
        found = await metrics(session, url)
        if not found["num_requests_running"] and not found["num_requests_waiting"]:
            return found
        await asyncio.sleep(0.1)
    raise AssertionError(f"requests never ended: {found}")


async def test_64_clients_some_leaving_a_tiny_pool(tmp_path: Path):
    async with serving(tmp_path, *TINY_POOL) as server:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(120)) as session:
            options = {"stream_options": {"include_usage": True}}
            extras = [{}, {"temperature": 0.0}, {"top_p": 0.8, "seed": 3}, {"logprobs": 2}, {"presence_penalty": 1.0}]
            requests = [body(i, **options, **extras[i % 5]) for i in range(64)]
            leaving = [2 if i % 7 == 3 else None for i in range(64)]
            answers = await asyncio.gather(
                *(stream(session, server.url, r, n) for r, n in zip(requests, leaving, strict=True))
            )
            for request, answer, left in zip(requests, answers, leaving, strict=True):
                if left is None:
                    assert answer["finish_reason"] == "length"
                    assert answer["usage"]["completion_tokens"] == request["max_tokens"]
            after = await settled(session, server.url)
            assert after["kv_cache_usage_perc"] == 0
            assert after["compiles_after_warmup_total"] == 0
            assert after["num_preemptions_total"] > 0
            alone = [await stream(session, server.url, body(i, **options, temperature=0.0)) for i in (1, 6, 11)]
            together = await asyncio.gather(
                *(stream(session, server.url, body(i, **options, temperature=0.0)) for i in (1, 6, 11))
            )
            assert [a["text"] for a in alone] == [t["text"] for t in together]
        assert not re.search(r"Traceback|ERROR", server.log()), server.log()


async def test_structured_outputs_arrive_whole_beside_others(tmp_path: Path):
    schema = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}}, "required": ["n"],
              "additionalProperties": False}  # fmt: skip
    as_json = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    async with serving(tmp_path, *TINY_POOL) as server:
        client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0)
        ask = functools.partial(client.completions.create, model="tiny", prompt="As JSON:", max_tokens=60, seed=1)
        free, picked, *answers = await asyncio.gather(
            ask(extra_body={"ignore_eos": True}),
            ask(extra_body={"structured_outputs": {"choice": ["left", "right"]}}),
            *(ask(temperature=i / 2 + 0.1, extra_body={"response_format": as_json}) for i in range(4)),
        )
        assert (free.choices[0].finish_reason, free.usage.completion_tokens) == ("length", 60)
        assert picked.choices[0].text in ("left", "right")
        for answer in answers:
            assert answer.choices[0].finish_reason == "stop"
            assert 0 <= json.loads(answer.choices[0].text)["n"] <= 99
        pieces = [
            piece.choices[0].text
            async for piece in await ask(temperature=0.1, stream=True, extra_body={"response_format": as_json})
        ]
        assert "".join(pieces) == answers[0].choices[0].text
        with pytest.raises(openai.BadRequestError, match="regex is bad"):
            await ask(extra_body={"structured_outputs": {"regex": "("}})
        async with aiohttp.ClientSession() as session:
            assert (await settled(session, server.url))["compiles_after_warmup_total"] == 0


async def test_pause_and_sleep_over_the_socket(tmp_path: Path):
    async with serving(tmp_path, "--enforce-eager") as server:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(120)) as session:

            async def post(path: str, request: dict | None = None) -> tuple[int, dict]:
                async with session.post(server.url + path, json=request) as answer:
                    return answer.status, await answer.json()

            async def text() -> str:
                status, answer = await post("/v1/completions", body(2, stream=False, temperature=0.0))
                assert status == 200, answer
                return answer["choices"][0]["text"]

            async def asked(**more) -> list[asyncio.Task]:
                calls = [asyncio.create_task(post("/v1/completions", body(i, stream=False, **more))) for i in range(8)]
                await load(8)
                return calls

            async def load(calls: int) -> None:
                while await (await session.get(f"{server.url}/load")).json() != {"server_load": calls}:
                    await asyncio.sleep(0.01)

            before = await text()
            running = await asked(max_tokens=100)
            assert await post("/pause?mode=wait") == (200, {"status": "paused"})
            held = asyncio.create_task(text())
            assert {(await one)[0] for one in running} == {200}
            await load(1)
            assert await post("/sleep?level=2&mode=wait") == (200, {"is_sleeping": True})
            status, answer = await post("/v1/completions", body(1, stream=False))
            assert (status, answer["error"]["type"]) == (503, "EngineAsleepError")
            async with session.get(f"{server.url}/health") as health:
                assert health.status == 200
            assert await post("/wake_up") == (200, {"is_sleeping": False})
            assert not held.done(), "still paused"
            assert await post("/resume") == (200, {"status": "resumed"})
            assert await held == before == await text()
            assert (await settled(session, server.url))["kv_cache_usage_perc"] == 0
            running = await asked(max_tokens=150)
            pausing = asyncio.create_task(post("/pause?mode=wait"))
            await asyncio.sleep(0.05)
            os.kill(server.engine_pid(), signal.SIGKILL)
            assert {(await one)[0] for one in (*running, pausing)} == {503}
        assert server.process.wait(30) == 1


def test_run_batch_from_the_command_line(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    lines = [
        {"custom_id": f"{i}", "method": "POST", "url": "/v1/completions", "body": body(i, stream=False)}
        for i in range(12)
    ]
    (tmp_path / "in").write_text("\n".join(map(json.dumps, lines)) + "\nnonsense\n")
    command = [
        sys.executable, "-m", "jaxserve", "run-batch", "-i", str(tmp_path / "in"), "-o", str(tmp_path / "out"),
        "--model", str(tmp_path), "--load-format", "dummy", "--tokenizer", str(TOKENIZER), "--served-model-name", "tiny",
        "--enforce-eager",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
    assert len(records) == 13 and sum(record["error"] is not None for record in records) == 1
    assert {record["response"]["status_code"] for record in records if record["response"]} == {200}


async def test_a_dead_engine_ends_requests_with_an_error_and_the_server_with_a_code(tmp_path: Path):
    async with serving(tmp_path, "--enforce-eager") as server:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(120)) as session:
            asking = asyncio.create_task(
                session.post(f"{server.url}/v1/completions", json=body(1, max_tokens=200, stream=False))
            )
            await asyncio.sleep(0.5)
            os.kill(server.engine_pid(), signal.SIGKILL)
            answer = await asking
            assert answer.status == 503
            assert (await answer.json())["error"]["type"] == "ServiceUnavailableError"
        assert server.process.wait(30) == 1
        assert "engine process ended" in server.log()


# -------------------------------------------------------------------------------------------- several HTTP processes

SEVERAL = ("--api-server-count", "3")


def listening_pids(server: Server) -> set[int]:
    """Processes of the server that listen at its port."""
    port = f":{int(server.url.rsplit(':', 1)[1]):04X}"
    rows = [row.split() for row in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    sockets = {f"socket:[{row[9]}]" for row in rows if row[1].endswith(port) and row[3] == "0A"}
    found = set()
    for pid in (server.process.pid, *server.children()):
        with contextlib.suppress(FileNotFoundError):
            if sockets & {os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir() if fd.is_symlink()}:
                found.add(pid)
    return found


async def test_several_http_processes_are_one_server(tmp_path: Path):
    (tmp_path / "template").write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    async with serving(tmp_path, *TINY_POOL, *SEVERAL, "--chat-template", str(tmp_path / "template")) as server:
        engine, *others = server.children()
        assert listening_pids(server) == {server.process.pid, *others} and len(others) == 2
        assert server.log().count("jaxserve is ready") == 1 and server.log().count("tool calls: ") == 1

        async def alone(path: str, **more) -> dict:
            """By a connection of its own: the kernel gives it to any of the processes."""
            async with aiohttp.ClientSession() as session:
                method = "POST" if more else "GET"
                async with session.request(method, server.url + path, **more) as answer:
                    assert answer.status == 200, await answer.text()
                    return await answer.json()

        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True)) as session:
            options = {"stream_options": {"include_usage": True}}
            requests = [body(i, **options) for i in range(64)]
            answers = await asyncio.gather(
                *(stream(session, server.url, r, 2 if i % 7 == 3 else None) for i, r in enumerate(requests))
            )
            assert all(a is None or a["finish_reason"] == "length" for a in answers)
            after = await settled(session, server.url)
            assert after["kv_cache_usage_perc"] == 0 and after["compiles_after_warmup_total"] == 0
            counts = [(await metrics(session, server.url))["e2e_request_latency_seconds_count"] for _ in range(12)]
            assert len(set(counts)) == 1 and sum(a is not None for a in answers) <= counts[0] <= 64
        made = await alone("/v1/responses", json={"input": "hi", "max_output_tokens": 4, "ignore_eos": True})
        for _ in range(12):
            assert await alone(f"/v1/responses/{made['id']}") == made

        async def turn(path: str, *, paused: bool) -> None:
            await alone(path, json={})
            in_a_row = 0
            async with asyncio.timeout(30):  # each has been told, and may still have to read it
                while in_a_row < 6:
                    in_a_row = in_a_row + 1 if await alone("/is_paused") == {"is_paused": paused} else 0

        await turn("/pause", paused=True)
        running = [
            asyncio.create_task(alone("/v1/completions", json=body(9, stream=False, max_tokens=200))) for _ in range(9)
        ]
        async with aiohttp.ClientSession() as session, asyncio.timeout(30):  # until the engine has them all
            while (await metrics(session, server.url))["num_requests_waiting"] != 9:
                await asyncio.sleep(0.01)
        assert (await alone("/load"))["server_load"] == 9
        assert (await alone("/abort_requests", json={}))["aborted"] == 9
        assert {(await one)["choices"][0]["finish_reason"] for one in running} == {"abort"}
        await turn("/resume", paused=False)
        assert not re.search(r"Traceback|ERROR|WARNING", server.log()), server.log()


async def test_an_http_process_that_ends_ends_the_server(tmp_path: Path):
    async with serving(tmp_path, "--enforce-eager", *SEVERAL) as server:
        children = server.children()

        async def status(i: int) -> int | None:
            try:
                async with aiohttp.ClientSession() as session:
                    request = body(i, max_tokens=190, stream=False)
                    async with session.post(f"{server.url}/v1/completions", json=request) as answer:
                        return answer.status
            except aiohttp.ClientError:
                return None  # it was with the one that is killed

        asking = [asyncio.create_task(status(i)) for i in range(12)]
        async with aiohttp.ClientSession() as session:
            while await (await session.get(f"{server.url}/load")).json() != {"server_load": 12}:
                await asyncio.sleep(0.01)
        os.kill(children[-1], signal.SIGKILL)
        told = {await one for one in asking}
        assert 503 in told and told <= {503, None}, "clients of the others are told"
        assert await server.wait_until_ended() == 1
        assert "HTTP process 3 of 3 ended with code -9: shutting down" in server.log()
        assert "Traceback" not in server.log() and not any(map(is_running, children))


async def test_an_http_process_that_ends_before_it_is_ready_ends_the_start(tmp_path: Path):
    async with starting(tmp_path, "--enforce-eager", *SEVERAL) as server:
        await server.wait_until(lambda: len(server.children()) == 3)
        children = server.children()
        os.kill(children[-1], signal.SIGKILL)
        async with asyncio.timeout(START_S):
            while server.process.poll() is None:
                await asyncio.sleep(0.05)
        assert server.process.returncode == 1
        last = server.log().splitlines()[-1]
        assert last == "jaxserve: error: HTTP process 3 of 3 ended with code -9 before it was ready"
        assert "Traceback" not in server.log() and not any(map(is_running, children))


async def test_a_killed_server_leaves_no_process(tmp_path: Path):
    async with serving(tmp_path, "--enforce-eager", *SEVERAL) as server:
        children = server.children()
        server.process.kill()
        await server.wait_until_ended()
        async with asyncio.timeout(10):
            while any(map(is_running, children)):
                await asyncio.sleep(0.02)


async def test_clients_of_every_http_process_are_told_of_a_dead_engine(tmp_path: Path):
    async with serving(tmp_path, "--enforce-eager", *SEVERAL) as server:
        children = server.children()

        async def status(i: int) -> int:
            async with aiohttp.ClientSession() as session:
                request = body(i, max_tokens=150, stream=False)
                async with session.post(f"{server.url}/v1/completions", json=request) as answer:
                    return answer.status

        asking = [asyncio.create_task(status(i)) for i in range(12)]
        async with aiohttp.ClientSession() as session:
            while await (await session.get(f"{server.url}/load")).json() != {"server_load": 12}:
                await asyncio.sleep(0.01)
        os.kill(server.engine_pid(), signal.SIGKILL)
        assert {await one for one in asking} == {503}
        assert await server.wait_until_ended() == 1
        assert "engine process ended" in server.log() and not any(map(is_running, children))


async def test_a_quantization_that_the_device_does_not_have_ends_the_start(tmp_path: Path):
    async with starting(tmp_path, "--quantization", "fp8") as server:
        assert await server.wait_until_ended() == 2
        assert "error: --quantization fp8 needs a TPU 7x, or an NVIDIA GPU from Ada on" in server.log()
        assert "and this is cpu: --quantization int8, or leave it out" in server.log()


async def test_a_second_server_finds_a_shared_port_taken(tmp_path: Path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    async with starting(tmp_path / "one", "--enforce-eager", *SEVERAL) as first:
        await first.wait_until_ready()
        port = first.url.rsplit(":", 1)[1]
        async with starting(tmp_path / "two", *SEVERAL, "--port", port) as second:
            assert await second.wait_until_ended() == 2
            assert "the port is in use" in second.log()


# ------------------------------------------------------------------------------------------------------ signals


def is_running(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False


async def assert_quiet_end(server: Server, code: int, children: list[int]) -> None:
    assert await server.wait_until_ended() == code, server.log()
    assert not re.search(r"Traceback|ERROR|Exception", server.log()), server.log()
    async with asyncio.timeout(5):
        while any(map(is_running, children)):
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("processes", ["1", "3"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_signal_while_streams_run(tmp_path: Path, number: signal.Signals, processes: str):
    async with serving(tmp_path, *TINY_POOL, "--api-server-count", processes) as server:
        children = server.children()

        async def last_reason(i: int) -> str:
            reason = ""
            async with session.post(f"{server.url}/v1/completions", json=body(i, max_tokens=150)) as answer:
                async for line in answer.content:
                    if line.startswith(b"data: {"):
                        reason = json.loads(line[6:])["choices"][0]["finish_reason"] or reason
            assert line == b"\n", "ended in order"
            return reason

        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            # A quick engine ends some before all are there: they wait until it is told to go on.
            async with session.post(f"{server.url}/pause", json={}) as paused:
                assert paused.status == 200
            streams = [asyncio.create_task(last_reason(i)) for i in range(40)]
            async with asyncio.timeout(30):
                while (await metrics(session, server.url))["num_requests_waiting"] < 40:
                    await asyncio.sleep(0.01)
            async with session.post(f"{server.url}/resume", json={}) as resumed:
                assert resumed.status == 200
            await asyncio.sleep(0.2)
            os.killpg(server.process.pid, number)
            reasons = set(await asyncio.gather(*streams))
        assert reasons <= {"length", "abort"}
        assert "abort" in reasons or number == signal.SIGTERM
        await assert_quiet_end(server, 0, children)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(
    ("when", "options"), [("", ()), ("KV cache:", ()), ("KV cache:", SEVERAL)], ids=["loading", "compiling", "several"]
)
async def test_a_signal_while_the_engine_starts(tmp_path: Path, number: signal.Signals, when: str, options):
    async with starting(tmp_path, *options) as server:
        await server.wait_until(lambda: bool(server.children()) and when in server.log())
        children = server.children()
        if when:
            await server.wait_until(lambda: "making " in server.log())
            assert re.search(r"making \d+ programs ready: compiled the first time .* read from /", server.log())
        os.killpg(server.process.pid, number)
        await assert_quiet_end(server, -number, children)
        assert re.search(
            r"^\d\d:\d\d:\d\d INFO jaxserve.serve: interrupted while starting$", server.log(), re.MULTILINE
        )


JUST_STARTED = """
import asyncio, os, sys
from jaxserve import serve
from jaxserve.config import ServeConfig

class Engine:
    client = None
    async def wait(self): await asyncio.sleep(60)
    async def stop(self): print("stopped", flush=True)

async def start(config):
    os.kill(os.getpid(), int(sys.argv[1]))  # nobody serves yet, and the start can no more be cancelled
    return Engine(), None, serve.HttpProcesses(ServeConfig(port=0))

async def http(*_, **__): await asyncio.sleep(60)

serve._start, serve.serve_http = start, http
sys.exit(asyncio.run(serve._serve(None)))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_when_the_engine_has_just_started_is_not_lost(number: signal.Signals):
    command = [sys.executable, "-c", JUST_STARTED, str(int(number))]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=20)
    assert (ended.returncode, ended.stdout) == (-number, "stopped\n"), ended.stderr


async def test_many_signals_end_it_as_one_does(tmp_path: Path):
    async with serving(tmp_path, "--enforce-eager") as server:
        children = server.children()
        while server.process.poll() is None:
            os.killpg(server.process.pid, signal.SIGINT)
            await asyncio.sleep(0.05)
        await assert_quiet_end(server, 0, children)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(("model", "variable"), [("demo", "PIP_INDEX_URL"), ("nobody/nothing", "HF_ENDPOINT")])
async def test_a_signal_during_a_download_that_hangs(tmp_path: Path, number, model: str, variable: str, monkeypatch):
    monkeypatch.setenv("JAXSERVE_CACHE_DIR", str(tmp_path / "cache"))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv(variable, f"http://127.0.0.1:{silent.getsockname()[1]}")
        async with starting(tmp_path, "--model", model) as server:
            connection, _ = await asyncio.to_thread(silent.accept)  # its question will get no answer
            os.killpg(server.process.pid, number)
            await assert_quiet_end(server, -number, server.children())
            connection.close()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--max-model-len", "100000"), "--max-model-len must be at most the model's 320 tokens, got 100000"),
        (("--port", "TAKEN"), "the port is in use; choose another with --port, or --port 0 for any free one"),
        (("--kv-cache-memory-bytes", "64k"), "longest that fits is"),
        (("--page-size", "64", "--attention-backend", "mosaic_gpu"), "mosaic_gpu cannot run"),
    ],
)
async def test_what_cannot_be_honoured_is_said_in_one_line(tmp_path: Path, options, words):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        with pytest.raises(AssertionError, match="not ready"):
            async with serving(tmp_path, *(port if option == "TAKEN" else option for option in options)):
                pass
    lines = (tmp_path / "log").read_text().splitlines()
    assert words in lines[-1]
    assert "--kv-cache-memory-bytes" in options or "weights" not in "".join(lines)  # it is said before they are loaded
    assert not any("Traceback" in line for line in lines)


# ---- every feature at once

REQUESTS, CONCURRENCY = 1000, 64
FREE = {"prompt": [7, 8, 9, 10, 11], "max_tokens": 12, "temperature": 0.8, "seed": 11, "ignore_eos": True}


def random_body(rng: random.Random) -> dict[str, Any]:
    """A valid body of /v1/completions: any features that may go together."""
    prompt = [rng.randrange(5, 500) for _ in range(rng.choice((1, 3, 15, 16, 17, 60)))]
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": rng.randrange(1, 24), "seed": rng.randrange(1000)}
    body["temperature"] = rng.choice((0, 0.3, 1.0, 1.7))
    may: list[dict[str, Any]] = [
        {"top_p": 0.7}, {"top_k": 5}, {"min_p": 0.1}, {"presence_penalty": 1.0}, {"frequency_penalty": 0.5},
        {"repetition_penalty": 1.2}, {"logit_bias": {"9": 5, "10": -100}}, {"bad_words": ["the"]}, {"stop": ["a", "zz"]},
        {"stop_token_ids": [17]}, {"ignore_eos": True}, {"min_tokens": 1}, {"logprobs": 3}, {"stream": True},
        {"return_token_ids": True}, {"skip_special_tokens": False}, {"include_stop_str_in_output": True},
    ]  # fmt: skip
    for each in rng.sample(may, rng.randrange(0, 6)):
        body |= each
    if rng.random() < 0.3:
        body |= rng.choice((
            {"structured_outputs": {"choice": ["left", "right"]}}, {"structured_outputs": {"regex": "[a-c]{2,5}"}},
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"enum": [1, "two"]}}}},
        ))  # fmt: skip
    elif rng.random() < 0.2:
        body["allowed_token_ids"] = [5, 6, 7, 8, 9]
    if body["temperature"] and rng.random() < 0.2:
        body["n"] = 3
    if not body.get("stream") and rng.random() < 0.1:
        body["prompt_logprobs"] = 1
    if not body.get("stream") and body.get("n", 1) == 1 and rng.random() < 0.1:
        body["echo"] = True
    return body


PICK = {
    "name": "pick",
    "parameters": {"type": "object", "properties": {"x": {"type": "integer", "maximum": 99}}, "required": ["x"]},
}
THINKERS = (  # what a chat may ask for
    {"tool_choice": "required"}, {"tool_choice": "auto"}, {"tool_choice": {"type": "function", "function": {"name": "pick"}}},
    {"tool_choice": "none"}, {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"enum": [1, "two"]}}}},
)  # fmt: skip


def random_call(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """A path and a valid body for it."""
    kind, seed = rng.random(), rng.randrange(1000)
    if kind < 0.7:
        return "/v1/completions", random_body(rng)
    if kind < 0.75:
        return "/v1/embeddings", {"input": [[rng.randrange(5, 500) for _ in range(rng.choice((1, 17, 60)))]]}
    if kind < 0.85:
        form = {"format": {"type": "json_schema", "name": "n", "schema": {"enum": [1, "two"]}}}
        asked: dict[str, Any] = rng.choice(
            ({}, {"text": form}, {"tools": [{"type": "function", **PICK}], "tool_choice": "required"})
        )
        asked |= {"reasoning": {"effort": "none"}} if rng.random() < 0.8 else {}
        return "/v1/responses", {"input": "Which?", "max_output_tokens": rng.randrange(1, 90), **asked}
    body = {"messages": [{"role": "user", "content": "Which?"}], "max_tokens": rng.randrange(1, 90), "seed": seed}
    body |= rng.choice(THINKERS)
    if "tool_choice" in body:
        body["tools"] = [{"type": "function", "function": {**PICK, "strict": rng.random() < 0.5}}]
    if rng.random() < 0.8:
        body["thinking_token_budget"] = rng.randrange(12)
    for each in ({"stream": True}, {"reasoning_effort": "none"}, {"logprobs": True, "top_logprobs": 2},
                 {"n": 2}, {"include_reasoning": False}, {"parallel_tool_calls": False}):  # fmt: skip
        body |= each if rng.random() < 0.3 else {}
    return "/v1/chat/completions", body


def thinking_tokenizer(folder: Path) -> list[str]:
    """Options: TOKENIZER with marks of reasoning that are tokens, and a chat template of tools and reasoning."""
    tokenizer = load_tokenizer(TOKENIZER, [])
    tokenizer._backend.add_tokens(["<think>", "</think>"])
    names = {name: tokenizer.special_tokens[name] for name in ("bos_token", "eos_token")}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer._backend, **names).save_pretrained(folder / "tokenizer")
    always = "{% if add_generation_prompt and not (enable_thinking is defined and not enable_thinking) %}<think>\n{% endif %}"
    (folder / "chat.jinja").write_text(QWEN3 + always)
    return ["--tokenizer", str(folder / "tokenizer"), "--chat-template", str(folder / "chat.jinja")]


async def test_a_thousand_mixed_requests(tmp_path: Path):
    rng = random.Random(5)
    async with serving(tmp_path, *TINY_POOL, *thinking_tokenizer(tmp_path)) as server:
        assert "tool calls: hermes; reasoning: qwen3" in server.log()
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(240)) as session:
            url = f"{server.url}/v1/completions"

            async def text() -> str:
                async with session.post(url, json=FREE) as answer:
                    return (await answer.json())["choices"][0]["text"]

            alone = await text()
            among: list[str] = []
            ended: Counter[str] = Counter()
            gate = asyncio.Semaphore(CONCURRENCY)

            async def one(i: int, path: str, body: dict[str, Any], leaves: bool) -> None:
                async with gate:
                    if i % 50 == 0:
                        among.append(await text())
                    async with session.post(server.url + path, json=body) as answer:
                        if leaves:
                            return
                        sent = await answer.text()
                        assert answer.status == 200, (body, sent)
                        assert not re.search('"error": ?{', sent), (body, sent)
                        if not body.get("stream"):
                            ended.update(CHECKS[path](body, json.loads(sent)))

            await asyncio.gather(*(one(i, *random_call(rng), rng.random() < 0.15) for i in range(REQUESTS)))
            found = await settled(session, server.url)
        assert set(among) == {alone}
        assert all(ended[what] > 5 for what in ("text", "thought", "call", "form", "item", "embedding")), ended
        assert not found["kv_cache_usage_perc"] and not found["compiles_after_warmup_total"]
        assert "Traceback" not in server.log() and " ERROR " not in server.log()


def check(body: dict[str, Any], answer: dict[str, Any]) -> list[str]:
    """What of it was there to be checked; so do the other checks."""
    choices = answer["choices"]
    assert [choice["index"] for choice in choices] == list(range(body.get("n", 1)))
    assert 1 <= answer["usage"]["completion_tokens"] <= body["max_tokens"] * len(choices)
    for choice in choices:
        assert choice["finish_reason"] in ("stop", "length")
        if "choice" in body.get("structured_outputs", {}) and choice["finish_reason"] == "stop" and "stop" not in body:
            assert body.get("echo") or choice["text"] in ("left", "right"), (body, choice)
    return ["text"]


def check_chat(body: dict[str, Any], answer: dict[str, Any]) -> list[str]:
    choices, budget, seen = answer["choices"], body.get("thinking_token_budget"), []
    assert len(choices) == body.get("n", 1)
    thought = answer["usage"]["completion_tokens_details"]["reasoning_tokens"]
    if budget is not None:
        assert thought <= len(choices) * (budget + 2)
        seen += ["thought"] * (thought > len(choices))
    for choice in choices:
        called = choice["message"].get("tool_calls", [])
        assert choice["finish_reason"] in ("stop", "length", "tool_calls")
        if choice["finish_reason"] == "length":
            continue
        if body.get("tool_choice") not in (None, "auto", "none"):
            assert called and all(json.loads(call["function"]["arguments"])["x"] < 100 for call in called)
            seen.append("call")
        if "response_format" in body:
            assert json.loads(choice["message"]["content"]) in (1, "two")
            seen.append("form")
    return seen


def check_response(body: dict[str, Any], answer: dict[str, Any]) -> list[str]:
    assert answer["status"] in ("completed", "incomplete")
    if answer["status"] == "incomplete" or not body.keys() & {"tools", "text"}:
        return []
    last = answer["output"][-1]
    if "tools" in body:
        assert last["type"] == "function_call" and json.loads(last["arguments"])["x"] < 100
    else:
        assert json.loads(last["content"][0]["text"]) in (1, "two")
    return ["item"]


def check_embedding(body: dict[str, Any], answer: dict[str, Any]) -> list[str]:
    (found,) = answer["data"]
    assert abs(sum(value * value for value in found["embedding"]) - 1) < 1e-3
    return ["embedding"]


CHECKS = {
    "/v1/completions": check,
    "/v1/chat/completions": check_chat,
    "/v1/responses": check_response,
    "/v1/embeddings": check_embedding,
}

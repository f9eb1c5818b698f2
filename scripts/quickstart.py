"""The second half of scripts/quickstart, inside .venv: serve the demo model, wait until ready, ask, stay."""

import argparse
import collections
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from typing import IO, NoReturn

QUESTION = "What is the capital of France, and what is it known for?"
MAX_TOKENS = 80
DEFAULT_PORT = 8000
READY_TIMEOUT_S = 900  # a cold start compiles every step; a GPU's first one downloads nothing but takes minutes
POLL_S = 0.2
STOP_GRACE_S = 15
TAIL_LINES = 40


class Server:
    """`jaxserve serve` as a child. Its log is shown while `show_log` is set, and its end is kept."""

    def __init__(self, port: int):
        self.url = f"http://127.0.0.1:{port}"
        self.show_log = threading.Event()
        self.show_log.set()
        self.only_problems = False  # of the log, once the server is ready
        self.tail: collections.deque[str] = collections.deque(maxlen=TAIL_LINES)
        command = [sys.executable, "-m", "jaxserve", "serve", "--port", str(port)]
        # A process group of its own: Ctrl-C reaches this script alone, which then stops the server in order.
        self.process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
        )
        assert self.process.stdout is not None
        self._reader = threading.Thread(target=self._read, args=(self.process.stdout,), daemon=True)
        self._reader.start()

    def _read(self, output: IO[bytes]) -> None:
        """Shows lines as they come; a line that is still growing, such as a progress bar, only at a terminal."""
        line = b""
        while block := os.read(output.fileno(), 1 << 16):
            *whole, line = (line + block).split(b"\n")
            for each in whole:
                self._show(_newest(each), "\n")
            if sys.stderr.isatty():
                self._show(_newest(line), "")
        self._show(_newest(line), "\n")

    def _show(self, text: str, end: str) -> None:
        if not text.strip():
            return
        if end == "\n":
            self.tail.append(text)
        if self.show_log.is_set() and not (self.only_problems and " INFO " in text):
            print(f"\r  | {text}\x1b[K" if sys.stderr.isatty() else f"  | {text}", end=end, file=sys.stderr, flush=True)

    def wait_until_ready(self) -> None:
        """Returns when /health answers 200. Exits with the log's end if the server dies or takes too long."""
        deadline_s = time.monotonic() + READY_TIMEOUT_S
        while time.monotonic() < deadline_s:
            if self.process.poll() is not None:
                self.fail(f"the server ended with code {self.process.returncode}")
            with contextlib.suppress(urllib.error.URLError, OSError):
                with urllib.request.urlopen(f"{self.url}/health", timeout=5) as response:
                    if response.status == 200:
                        return
            time.sleep(POLL_S)
        self.fail(f"the server was not ready after {READY_TIMEOUT_S} s")

    def fail(self, reason: str) -> NoReturn:
        self.stop()
        self._reader.join(5)
        if not self.show_log.is_set():
            print("\n".join(("The end of its log:", *self.tail)), file=sys.stderr)
        sys.exit(f"scripts/quickstart: {reason}; its log is above")

    def stop(self, number: int = signal.SIGTERM) -> None:
        """The signal, then SIGKILL for the whole group if that is not enough."""
        if self.process.poll() is not None:
            return
        self.process.send_signal(number)
        try:
            self.process.wait(STOP_GRACE_S)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def _newest(line: bytes) -> str:
    """What a terminal shows of a line: a progress bar writes its states one over the other."""
    states = [state for state in line.decode(errors="replace").split("\r") if state.strip()]
    return states[-1] if states else ""


def choose_port(named: int | None) -> int:
    """The port that was named, which must be free; else 8000, or another one, and says so."""
    port = free_port(DEFAULT_PORT if named is None else named)
    if named and port != named:
        sys.exit(f"scripts/quickstart: port {named} is in use, or not ours to take: name another one with --port")
    if named is None and port != DEFAULT_PORT:
        print(f"Port {DEFAULT_PORT} is in use: taking {port} (--port names one)", file=sys.stderr)
    return port


def free_port(wanted: int) -> int:
    """`wanted` if nobody listens there, else any free port."""
    for port in (wanted, 0):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with contextlib.suppress(OSError, OverflowError):
                probe.bind(("127.0.0.1", port))
                return probe.getsockname()[1]
    sys.exit("scripts/quickstart: no free port")


def get_demo_model() -> None:
    from jaxserve.demo import demo_model
    from jaxserve.errors import JaxserveError
    from jaxserve.logs import setup_logging

    setup_logging()
    try:
        print(f"Demo model: {demo_model()}", file=sys.stderr)
    except JaxserveError as error:
        sys.exit(f"scripts/quickstart: {error.message}")


def ask(url: str) -> str | None:
    """Asks one question and prints the answer as it comes. The model's name, or None if there was no answer."""
    from openai import OpenAI, OpenAIError

    client = OpenAI(base_url=f"{url}/v1", api_key=os.environ.get("JAXSERVE_API_KEY", "").split(",")[0] or "none")
    print(f"\n> {QUESTION}", flush=True)
    answer = ""
    try:
        model = client.models.list().data[0].id
        stream = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": QUESTION}],
            max_tokens=MAX_TOKENS,
            temperature=0,
            stream=True,
        )
        for chunk in stream:
            for choice in chunk.choices:
                answer += choice.delta.content or ""
                print(choice.delta.content or "", end="", flush=True)
    except OpenAIError as error:
        print(f"\n{error}", file=sys.stderr)
        return None
    print("\n", flush=True)
    return model if answer.strip() else None


def show_next_steps(url: str, model: str) -> None:
    print(f"Serving at {url}/v1, for any OpenAI client. Try, in another terminal:\n")
    print(f"  curl {url}/v1/chat/completions -H 'Content-Type: application/json' \\")
    body = {"model": model, "messages": [{"role": "user", "content": "Tell me a story"}], "max_tokens": 100}
    print(f"    -d '{json.dumps(body)}'\n")
    print(f"  .venv/bin/jaxserve chat --url {url}\n", flush=True)


def interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/quickstart")
    parser.add_argument("--check", action="store_true", help="stop after the answer")
    parser.add_argument("--port", metavar="N", type=int, help="(default: 8000, or a free one)")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, interrupt)
    port = choose_port(args.port)
    get_demo_model()
    started_s = time.monotonic()
    server = Server(port)
    try:
        server.wait_until_ready()
        print(f"Ready after {time.monotonic() - started_s:.1f} s", file=sys.stderr)
        server.show_log.clear()
        model = ask(server.url)
        if model is None:
            server.fail("no answer came")
        if args.check:
            return 0
        show_next_steps(server.url, model)
        print("Ctrl-C stops the server. Until then only warnings and errors of its log are shown.", flush=True)
        server.only_problems = True
        server.show_log.set()
        server.process.wait()
        server.fail(f"the server ended with code {server.process.returncode}")
    except KeyboardInterrupt:
        print("\nStopping.", file=sys.stderr)
        server.stop(signal.SIGINT)  # at once, where SIGTERM waits for open answers
        return 130 if args.check else 0
    finally:
        server.stop()


if __name__ == "__main__":
    sys.exit(main())

"""The command line: what it prints, its exit codes, and the two REPLs against a stand-in server."""

import argparse
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jaxserve import __version__, cli
from jaxserve.config import ServeConfig
from jaxserve.errors import ConfigError, EngineDead

COMMANDS = [list(path) for path in cli.COMMANDS]


def run(*argv: str, stdin: str = "", env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "jaxserve", *argv]
    environment = {**os.environ, **(env or {})}
    return subprocess.run(command, input=stdin, capture_output=True, text=True, check=False, env=environment)


def test_version(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"jaxserve {__version__}\n"


def test_python_dash_m_is_the_same_command():
    done = run("--version")
    assert (done.returncode, done.stdout) == (0, f"jaxserve {__version__}\n")


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_every_command_has_help(path: list[str], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as caught:
        cli.main([*path, "--help"])
    out = capsys.readouterr().out
    assert caught.value.code == 0
    assert out.startswith(f"usage: jaxserve {' '.join(path)}")


def test_help_of_serve_is_grouped(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        cli.main(["serve", "--help"])
    out = capsys.readouterr().out
    heads = [line for line in out.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert [h for h in heads if h[:-1] in ("model", "memory", "scheduling", "execution", "HTTP server")] == heads[2:-1]
    assert heads[-1] == "environment:" and "JAXSERVE_CACHE_DIR" in out


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(" ".join(path) in out for path in COMMANDS)
    assert cli.main([]) == 2


def test_help_of_a_group(capsys: pytest.CaptureFixture[str]):
    for argv, code in ((["bench"], 2), (["bench", "--help"], 0)):
        with pytest.raises(SystemExit) as caught:
            cli.main(argv)
        captured = capsys.readouterr()
        assert caught.value.code == code
        assert "bench throughput" in captured.out + captured.err


@pytest.mark.parametrize(
    ("argv", "known"), [(["sreve"], "serve"), (["bench", "speed"], "throughput"), (["--port", "1"], "serve")]
)
def test_a_wrong_command_says_what_is_known(argv: list[str], known: str, capsys: pytest.CaptureFixture[str]):
    assert cli.main(argv) == 2
    err = capsys.readouterr().err
    assert err.startswith("jaxserve: error: unknown command") and known in err


def serving(monkeypatch: pytest.MonkeyPatch, main: Callable[[ServeConfig], int]) -> None:
    """Puts `main` in the place of jaxserve.serve.main."""
    stand_in = type(sys)("jaxserve.serve")
    stand_in.main = main  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "jaxserve.serve", stand_in)


@pytest.mark.parametrize("argv", [["m", "--port", "1"], ["--model", "m", "--port", "1"], ["--port", "1", "m"]])
def test_serve_gets_its_config(argv: list[str], monkeypatch: pytest.MonkeyPatch):
    seen: list[ServeConfig] = []
    serving(monkeypatch, lambda config: seen.append(config) or 0)
    assert cli.main(["serve", *argv]) == 0
    assert (seen[0].model, seen[0].port) == ("m", 1)


def raising(error: BaseException) -> Callable[[Any], int]:
    def main(_: Any) -> int:
        raise error

    return main


@pytest.mark.parametrize(
    ("error", "code"), [(ConfigError("no such thing"), 2), (EngineDead("no such thing"), 1)], ids=["config", "engine"]
)
def test_an_error_is_one_line_and_a_code(error, code, monkeypatch, capsys: pytest.CaptureFixture[str]):
    serving(monkeypatch, raising(error))
    assert cli.main(["serve"]) == code
    assert capsys.readouterr().err == "jaxserve: error: no such thing\n"


def test_the_code_of_the_server_is_passed_on(monkeypatch: pytest.MonkeyPatch):
    serving(monkeypatch, lambda config: 1)
    assert cli.main(["serve"]) == 1


def test_ctrl_c_is_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    serving(monkeypatch, raising(KeyboardInterrupt()))
    assert cli.main(["serve"]) == 130
    assert capsys.readouterr().err == ""


def test_a_bad_option_ends_before_anything_starts(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["serve", "--port", "99999"]) == 2
    assert capsys.readouterr().err == "jaxserve: error: --port must be at most 65535, got 99999\n"


def test_flags_are_not_abbreviated(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["serve", "--max-model", "4"]) == 2
    assert "unknown option '--max-model'" in capsys.readouterr().err


@pytest.mark.parametrize("path", [path for path in COMMANDS if path != ["collect-env"]], ids=" ".join)
def test_every_command_names_an_unknown_option_and_what_was_meant(path: list[str], capsys: pytest.CaptureFixture[str]):
    name = {"serve": "--port", "chat": "--max-tokens", "complete": "--max-tokens", "compile": "--dtype",
            "kernels": "--dtype"}.get(path[-1], "--seed")  # fmt: skip
    name = "--num-prompts" if path == ["bench", "serve"] else name
    needed = ["-i", "in.jsonl", "-o", "out.jsonl"] if path == ["run-batch"] else []
    assert cli.main([*path, *needed, f"{name}x", "3"]) == 2
    out, err = capsys.readouterr()
    assert err.startswith(f"jaxserve: error: unknown option '{name}x': did you mean {name}") and err.count("\n") == 1
    assert not out


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["serve", "--model"], "--model: expected one argument"),
        (["serve", "--port", "--model", "x"], "--port: expected one argument"),
        (["bench", "throughput", "--num-prompts", "x"], "--num-prompts: invalid int value: 'x'"),
        (["run-batch", "-i", "in.jsonl"], "the following arguments are required: -o/--output-file"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_an_option_without_its_value_is_one_line_like_all_errors(argv: list[str], said: str, capsys):
    assert cli.main(argv) == 2
    command = " ".join(word for word in argv[:2] if word.strip("-") == word)
    wanted = f"jaxserve: error: {said} (`jaxserve {command} --help` lists the options)\n"
    assert capsys.readouterr() == ("", wanted)


def test_a_word_too_many_is_named(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["serve", "one", "two"]) == 2
    assert capsys.readouterr().err.startswith("jaxserve: error: unexpected 'two'")


def test_output_into_a_closed_pipe_is_no_traceback():
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "jaxserve", "collect-env", "--no-devices"],
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (1, "")


def test_collect_env_tells_versions_and_hides_secrets():
    done = run("collect-env", "--no-devices", env={"HF_TOKEN": "hf_secret", "JAXSERVE_API_KEY": "secret", "JAX_X": "1"})
    assert done.returncode == 0
    assert f"jaxserve: {__version__}" in done.stdout and "\naiohttp: " in done.stdout
    assert "JAX_X=1" in done.stdout and "HF_TOKEN=(set, not shown)" in done.stdout
    assert "secret" not in done.stdout.replace("HF_TOKEN", "")


# ------------------------------------------------------------------------------------------------------- REPLs


def test_chat_quick_prints_the_answer(stand_in):
    done = run("chat", "--url", f"{stand_in.url}/v1", "-q", "hi", "--system-prompt", "be kind", "--max-tokens", "4")
    assert (done.returncode, done.stdout) == (0, "w0 w1 w2 w3 \n")
    assert stand_in.bodies[0]["messages"] == [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "hi"},
    ]
    assert stand_in.bodies[0]["model"] == "stand-in" and stand_in.bodies[0]["stream"] is True


def test_complete_quick_and_stats(stand_in):
    done = run("complete", "--url", f"{stand_in.url}/v1/", "-q", "once", "--stats", "--model-name", "other")
    assert (done.returncode, done.stdout) == (0, "w0 w1 w2 \n")
    assert done.stderr.startswith("[3 tokens, first after ") and "tok/s]" in done.stderr
    assert (stand_in.bodies[0]["prompt"], stand_in.bodies[0]["model"]) == ("once", "other")


@pytest.mark.parametrize("command", ["chat", "complete"])
@pytest.mark.parametrize("quick", [True, False])
def test_in_a_locale_without_unicode_text_goes_out_whole_and_what_comes_is_shown_as_it_can(stand_in, command, quick):
    stand_in.word = "é😀"
    said, ascii_locale = "Zoë 😀", {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    how = {"stdin": "" if quick else f"{said}\n"}
    done = run(command, "--url", f"{stand_in.url}/v1", *(["-q", said] if quick else []), env=ascii_locale, **how)
    assert (done.returncode, done.stdout, done.stderr) == (0, "??0 ??1 ??2 \n", "")
    asked = stand_in.bodies[0]
    assert (asked["messages"][0]["content"] if command == "chat" else asked["prompt"]) == said


def test_chat_remembers_the_conversation(stand_in):
    done = run("chat", "--url", f"{stand_in.url}/v1", stdin="one\n\ntwo\n")
    assert (done.returncode, done.stdout) == (0, "w0 w1 w2 \nw0 w1 w2 \n")
    assert [m["content"] for m in stand_in.bodies[1]["messages"]] == ["one", "w0 w1 w2 ", "two"]


def test_complete_does_not_remember(stand_in):
    run("complete", "--url", f"{stand_in.url}/v1", stdin="one\ntwo\n")
    assert [body["prompt"] for body in stand_in.bodies] == ["one", "two"]


@pytest.mark.parametrize("flag", [True, False])
def test_the_key_is_sent(flag: bool, stand_in):
    args = ["--api-key", "k"] if flag else []
    run("chat", "--url", f"{stand_in.url}/v1", "-q", "hi", *args, env={"JAXSERVE_API_KEY": "e,f"})
    assert stand_in.headers[0]["Authorization"] == ("Bearer k" if flag else "Bearer e")


def test_a_refusal_is_one_line(stand_in):
    stand_in.fail = lambda body: 400
    done = run("chat", "--url", f"{stand_in.url}/v1", "-q", "hi")
    assert (done.returncode, done.stderr) == (1, "jaxserve: error: refused by the stand-in\n")


def test_an_error_in_the_stream_is_one_line_and_is_not_remembered(stand_in):
    stand_in.break_after = 1
    done = run("chat", "--url", f"{stand_in.url}/v1", stdin="one\ntwo\n")
    assert done.returncode == 1
    assert done.stderr == "jaxserve: error: broken by the stand-in\n" * 2
    assert [m["content"] for m in stand_in.bodies[1]["messages"]] == ["two"]


KEY_NEEDED = {"error": {"message": "a key is needed", "type": "AuthenticationError", "code": "invalid_api_key"}}


@pytest.mark.parametrize(
    ("status", "body", "words"),
    [
        (401, KEY_NEEDED, "a key is needed (--api-key KEY or JAXSERVE_API_KEY names one)"),
        (403, {"error": {"message": "not for you"}}, "not for you"),
        (403, {"detail": "not for you"}, "HTTP 403: "),
        (404, {"error": {"message": "no route"}}, "no route; is this the address of an OpenAI-compatible server?"),
        (200, {"data": []}, "lists no model; is this the address"),
        (500, {"error": {"message": "on fire"}}, "on fire"),
    ],
)
def test_what_a_server_says_instead_of_its_models_is_shown(stand_in, status: int, body: Any, words: str):
    stand_in.refuse_models = status, body
    done = run("chat", "--url", f"{stand_in.url}/v1", "-q", "hi")
    assert done.returncode == 1
    assert done.stderr.startswith("jaxserve: error: ") and words in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize("command", ["chat", "complete"])
def test_a_port_or_a_url_without_v1_will_do(stand_in, command: str):
    port = stand_in.url.rpartition(":")[2]
    for where in (["--port", port], ["--url", stand_in.url], ["--url", f"{stand_in.url}/"]):
        assert run(command, *where, "-q", "hi").stdout == "w0 w1 w2 \n"
    done = run(command, "--url", stand_in.url, "--port", port, "-q", "hi")
    assert done.returncode == 2 and "not allowed with argument" in done.stderr


@pytest.mark.parametrize("command", ["chat", "complete"])
@pytest.mark.parametrize(
    ("flag", "value", "words"),
    [
        ("temperature", "nan", "must be finite, got nan"),
        ("temperature", "inf", "must be finite, got inf"),
        ("temperature", "-inf", "must be finite, got -inf"),
        ("temperature", "1e999", "must be finite, got inf"),
        ("temperature", "-1", "must be at least 0, got -1.0"),
        ("max-tokens", "0", "must be at least 1, got 0"),
        ("max-tokens", "-1", "must be at least 1, got -1"),
        ("port", "0", "must be at least 1, got 0"),
        ("port", "65536", "must be at most 65535, got 65536"),
    ],
)
def test_a_bad_option_is_named_before_a_server_is_asked(stand_in, command: str, flag: str, value: str, words: str):
    where = [] if flag == "port" else ["--url", stand_in.url]
    done = run(command, *where, f"--{flag}={value}", "-q", "hi")
    assert (done.returncode, done.stderr) == (2, f"jaxserve: error: --{flag} {words}\n")
    assert not stand_in.bodies


def test_a_url_with_another_path_gets_a_hint(stand_in):
    done = run("complete", "--url", f"{stand_in.url}/api", "-q", "hi")
    assert done.returncode == 1
    assert f"the URL of such a server ends with /v1: try {stand_in.url}/api/v1\n" in done.stderr


@pytest.mark.parametrize("url", ["localhost:9", "//localhost:9", "htp://localhost:9", "http:/localhost:9"])
def test_a_url_without_a_scheme_gets_a_hint(url: str):
    done = run("chat", "--url", url, "-q", "hi")
    assert done.returncode == 2
    assert done.stderr == (
        f"jaxserve: error: {url!r} is no URL of a server: write it with http://, like http://localhost:9\n"
    )


def test_no_server_says_how_to_start_one():
    done = run("chat", "--url", "http://127.0.0.1:9/v1", "-q", "hi")
    assert done.returncode == 1
    assert done.stderr.startswith("jaxserve: error: cannot reach http://127.0.0.1:9/v1/models")
    assert "`jaxserve serve`" in done.stderr and done.stderr.count("\n") == 1


class Terminal:
    """A `jaxserve chat` at a pseudo-terminal."""

    def __init__(self, url: str, cache: Path):
        command = [sys.executable, "-m", "jaxserve", "chat", "--url", f"{url}/v1", "--max-tokens", "500"]
        self.fd, child_fd = pty.openpty()
        login = f"import os; os.login_tty({child_fd}); os.execv({command[0]!r}, {command!r})"  # Ctrl-C needs a terminal
        env = {**os.environ, "JAXSERVE_CACHE_DIR": str(cache), "TERM": "dumb"}
        self.process = subprocess.Popen([sys.executable, "-c", login], pass_fds=[child_fd], env=env)
        os.close(child_fd)
        self.seen = ""

    def wait_for(self, text: str, timeout_s: float = 60) -> None:
        """Reads until `text` is on the screen, after what earlier calls waited for."""
        deadline_s = time.monotonic() + timeout_s
        while text not in self.seen:
            left_s = deadline_s - time.monotonic()
            assert left_s > 0 and select.select([self.fd], [], [], left_s)[0], f"no {text!r} in {self.seen!r}"
            try:
                self.seen += os.read(self.fd, 4096).decode(errors="replace")
            except OSError:  # Linux's way of saying that the other side has left
                raise AssertionError(f"left before {text!r}: {self.seen!r}") from None
        self.seen = self.seen.split(text, 1)[1]

    def type(self, text: str) -> None:
        os.write(self.fd, text.encode())

    def interrupt_until(self, text: str) -> None:
        """Presses Ctrl-C until `text` is on the screen.

        Once is not always enough: CPython's input() sleeps on a signal that comes just before it waits for a key.
        """
        for _ in range(60):
            self.type("\x03")
            try:
                return self.wait_for(text, timeout_s=1)
            except AssertionError:
                assert self.process.poll() is None, f"left before {text!r}: {self.seen!r}"
        raise AssertionError(f"no {text!r} in {self.seen!r}")

    def exit_code(self) -> int:
        return self.process.wait(60)


def test_ctrl_c_stops_the_answer_and_ctrl_d_leaves(stand_in, tmp_path: Path):
    stand_in.delay_s = 0.02
    terminal = Terminal(stand_in.url, tmp_path)
    terminal.wait_for("> ")
    terminal.interrupt_until("\n> ")  # at the prompt: a new line, nothing else
    terminal.type("hello\n")
    terminal.wait_for("w1 ")
    terminal.interrupt_until("[stopped]")
    terminal.wait_for("> ")
    deadline_s = time.monotonic() + 30
    while not stand_in.disconnects:
        assert time.monotonic() < deadline_s, "the server was not told"
        time.sleep(0.01)
    terminal.type("again\n")
    terminal.wait_for("w1 ")
    assert [m["role"] for m in stand_in.bodies[1]["messages"]] == ["user", "assistant", "user"]
    terminal.interrupt_until("[stopped]")
    terminal.wait_for("> ")
    terminal.type("\x04")
    assert terminal.exit_code() == 0
    assert (tmp_path / "history-chat").read_text().split() == ["hello", "again"]


def test_control_characters_of_a_model_do_not_reach_the_terminal():
    from jaxserve.repl import UNPRINTED

    assert "a\x1b[2J\x9bb\r\n\tc\x00é".translate(UNPRINTED) == "a[2Jb\n\tcé"


def test_ctrl_c_in_a_quick_question_is_130(stand_in):
    stand_in.delay_s = 0.05
    command = [
        sys.executable,
        "-m",
        "jaxserve",
        "chat",
        "--url",
        f"{stand_in.url}/v1",
        "-q",
        "hi",
        "--max-tokens",
        "500",
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.read(2) == "w0"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "")


def test_a_chat_shows_reasoning_and_sends_back_what_was_said():
    from jaxserve.repl import Chat

    chat = Chat(argparse.Namespace(), [])
    for _ in range(2):
        chat.body("a")
        deltas = [{"role": "assistant", "content": ""}, {"reasoning": "H"}, {"reasoning": "m."}, {"content": "Yes"}]
        shown = "".join(chat.text_of({"delta": delta}) for delta in [*deltas, {"content": "."}, {}])
        assert shown == "Hm.\n\nYes."
        chat.remember("a", shown)
    assert chat.messages == [{"role": "user", "content": "a"}, {"role": "assistant", "content": "Yes."}] * 2

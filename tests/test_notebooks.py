"""The notebooks: no outputs stored, and every code cell but the installation runs, in order, on a CPU."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

NOTEBOOKS = Path(__file__).parent.parent / "notebooks"
PATHS = sorted(NOTEBOOKS.glob("*.ipynb"))
PRINTED = {"quickstart": ("jaxserve is ready", "Paris"), "tpu": ("tpus: ", "Paris", "32 sequences: ")}


def cells(path: Path) -> list[dict]:
    return json.loads(path.read_text())["cells"]


def test_it_is_known_what_each_notebook_prints():
    assert {path.stem for path in PATHS} == set(PRINTED)


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_nothing_of_a_run_is_stored(path: Path):
    for cell in cells(path):
        if cell["cell_type"] == "code":
            assert not cell["outputs"] and cell["execution_count"] is None
    assert len({cell["id"] for cell in cells(path)}) == len(cells(path))


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
@pytest.mark.parametrize(
    "repo", ["..", "dist/jaxserve-0.1.0-py3-none-any.whl", "git+https://github.com/someone/jaxserve"]
)
def test_a_notebook_installs_from_a_clone_a_wheel_or_a_repository(repo: str, path: Path, tmp_path: Path, monkeypatch):
    (tmp_path / "dist").mkdir()
    (tmp_path / "dist" / "jaxserve-0.1.0-py3-none-any.whl").touch()
    monkeypatch.chdir(tmp_path)
    (install,) = [c for c in cells(path) if "install" in c["metadata"].get("tags", [])]
    *code, pip = "".join(install["source"]).split("\n")
    values = {"REPO": repo}
    exec("\n".join(code), values)
    requirement = Requirement(re.search(r'"(.*)"', pip)[1].format(**values))  # type: ignore[index]
    assert requirement.name == "jaxserve" and "quickstart" in requirement.extras
    assert requirement.url == (repo if "://" in repo else (tmp_path / repo).resolve().as_uri())


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_a_notebook_in_a_clone_finds_it(path: Path):
    (parameters,) = [c for c in cells(path) if "parameters" in c["metadata"].get("tags", [])]
    values: dict[str, str] = {}
    exec("".join(parameters["source"]), values)
    assert (NOTEBOOKS / values["REPO"] / "pyproject.toml").is_file()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_the_code_runs(path: Path, tmp_path: Path):
    code = [
        "".join(cell["source"])
        for cell in cells(path)
        if cell["cell_type"] == "code" and "install" not in cell["metadata"].get("tags", [])
    ]
    script = tmp_path / f"{path.stem}.py"
    script.write_text("\n\n".join(code))
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(NOTEBOOKS.parent)}
    log = tmp_path / "log"
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, script], stdout=file, stderr=file, env=env, cwd=tmp_path, start_new_session=True
        )
        try:
            process.wait(850)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with the server that a failed notebook leaves
    output = log.read_text()
    assert process.returncode == 0, output
    assert "Traceback" not in output
    assert not [text for text in PRINTED[path.stem] if text not in output], output

"""Programs traced by other processes are those that the engine would have traced, and no start depends on them."""

import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from jax import export
from jax._src.interpreters.mlir import make_ir_context  # what no public name tells
from jax.sharding import AbstractDevice
from jaxlib.mlir import ir

from jaxserve import tracers
from jaxserve.config import EngineConfig
from jaxserve.deployment import resolve_deployment
from jaxserve.engine import Engine
from jaxserve.models.loading import model_shapes
from jaxserve.programs import Kind, Programs
from jaxserve.request import Request, SamplingParams
from jaxserve.sharding import devices, mesh_of
from jaxserve.tracers import Tracers, how_many
from tests.gpu_kernels import MOSAIC_GPU, TRITON, kernels_of

CONFIG = EngineConfig(
    model=str(Path(__file__).parent / "goldens" / "llama"), page_size=16, max_num_seqs=1, max_num_batched_tokens=17,
    max_model_len=64, dtype="float32", kv_cache_memory_bytes=2**22,
)  # fmt: skip
HF = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 512, "hidden_size": 256, "intermediate_size": 256,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128,
    "max_position_embeddings": 512,
}  # fmt: skip
SIZES = 8, 512

pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")


@pytest.fixture(autouse=True)
def two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracers, "how_many", lambda platform, num_programs: 2 if num_programs else 0)


@pytest.fixture
def steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("JAXSERVE_CACHE_DIR", str(tmp_path))
    return tmp_path / "steps"


def on_gpu(device_kind: str, tokens: int, quantization: str | None = None) -> tuple[EngineConfig, Programs]:
    """The draws and plain steps of a GPU, traced on this host: 193 tokens at most are enough for every kernel."""
    config = EngineConfig(max_num_seqs=1, max_num_batched_tokens=tokens, quantization=quantization)
    deployment, mesh = resolve_deployment(config, HF, "gpu", device_kind), mesh_of(devices())
    shapes = model_shapes(deployment.model, deployment.dtype, mesh)
    programs = Programs(shapes, deployment, mesh, AbstractDevice(device_kind, 1, "gpu"))
    programs.keys = [key for key in programs.keys if key[0] in (Kind.DRAW, Kind.PLAIN)]  # which come first
    return config, programs


def on_h200(quantization: str | None = None) -> tuple[EngineConfig, Programs]:
    """Three programs of an H200: two draws, and a step of a decode row."""
    config, programs = on_gpu("NVIDIA H200", 65, quantization)
    del programs.keys[3:]
    return config, programs


def greedy_ids(engine: Engine) -> list[int]:
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    engine.submit(Request(request_id="a", prompt_token_ids=[5, 6, 7], params=params, max_tokens=6))
    ids = []
    while engine.has_work():
        ids += [each for delta in engine.step() for each in delta.token_ids]
    return ids


def module(path: Path) -> set[str]:
    """A kept program's functions, without what differs: where they were traced, and how often a helper is there."""
    exported = export.deserialize(bytearray(path.read_bytes()))
    with make_ir_context():
        text = str(ir.Module.parse(exported.mlir_module()).operation.get_asm()).rstrip().removesuffix("\n}")
    return {str(exported.platforms), *re.split(r"\n  (?=func\.func )", re.sub(r"(@\w+?)(?:_\d+)?\b", r"\1", text))}


def kernels(steps: Path) -> dict[str, set[str]]:
    """Those of all kept programs, by name."""
    found: dict[str, set[str]] = {}
    for path in steps.iterdir():
        for name, those in kernels_of(export.deserialize(bytearray(path.read_bytes())).mlir_module()).items():
            found[name] = found.get(name, set()) | those
    return found


def messages(caplog: pytest.LogCaptureFixture, level: int = logging.WARNING) -> list[str]:
    """Of at least that level: tests before may have let through what is below."""
    return [r.message for r in caplog.records if r.name == tracers.__name__ and r.levelno >= level]


def all_traced(found: Tracers, programs: Programs, steps: Path) -> dict:
    """What tracers that were told to have traced: all programs, by their files."""
    for key in programs.keys:
        found.wait(key)
        assert programs.path(key, *SIZES).exists()
    return {path.name: module(path) for path in steps.iterdir()}


def test_a_first_start_has_them_and_a_second_needs_none(steps: Path, caplog, monkeypatch: pytest.MonkeyPatch):
    with caplog.at_level(logging.INFO, tracers.__name__):
        ids = greedy_ids(Engine(CONFIG, checks=True))
        (line,) = messages(caplog, logging.INFO)
        traced = {path.name: module(path) for path in steps.iterdir()}
        assert line == f"2 processes trace {len(traced)} programs"
        caplog.clear()
        engine = Engine(CONFIG, checks=True)
        assert greedy_ids(engine) == ids
        assert not messages(caplog, logging.INFO)
    monkeypatch.setenv("JAXSERVE_CACHE_DIR", str(steps / "alone"))
    for key in engine._runner._programs.keys:
        engine._runner._programs.trace(key, *engine._runner._sizes)
    assert {path.name: module(path) for path in (steps / "alone" / "steps").iterdir()} == traced


@pytest.mark.parametrize(
    ("make", "names", "dtype"),
    [
        (partial(on_gpu, "NVIDIA H200", 193), MOSAIC_GPU, "bf16"),
        (partial(on_h200, "fp8"), {"decode", "combine", "add_norm"}, "f8E4M3FN"),
        (partial(on_gpu, "NVIDIA A10G", 65), TRITON, "bf16"),
    ],
    ids=["mosaic_gpu", "fp8", "triton"],
)
def test_a_gpus_programs_are_the_same_ones(
    steps: Path, monkeypatch: pytest.MonkeyPatch, caplog, make: Callable[[], tuple[EngineConfig, Programs]],
    names: set[str], dtype: str,
):  # fmt: skip
    """Each kernel, too, in whichever process and order it is traced: XLA finds compiled ones by their code."""
    config, programs = make()
    with Tracers(config, HF, programs) as found:
        found.start(len(programs.keys))  # ahead: the pool's size may come later
        found.trace(*SIZES)
        traced = all_traced(found, programs, steps)
    assert not messages(caplog)
    assert all("('cuda',)" in functions for functions in traced.values())
    assert any(dtype in function for functions in traced.values() for function in functions)
    theirs = kernels(steps)
    assert set(theirs) == names
    monkeypatch.setenv("JAXSERVE_CACHE_DIR", str(steps / "alone"))
    for key in reversed(programs.keys):
        programs.trace(key, *SIZES)
    assert kernels(steps / "alone" / "steps") == theirs
    assert {path.name: module(path) for path in (steps / "alone" / "steps").iterdir()} == traced


@pytest.mark.tpu_aot
def test_programs_of_several_devices_are_the_same_ones(steps: Path, monkeypatch: pytest.MonkeyPatch, caplog, tpu_chips):
    """The engine's are of two chips that this host has not; a tracer has CPU devices in their place."""
    config = EngineConfig(max_num_seqs=1, max_num_batched_tokens=33, tensor_parallel_size=2)
    mesh = mesh_of(tpu_chips("v5e")[:2])
    chip = mesh.devices.flat[0]
    deployment = resolve_deployment(config, HF, chip.platform, chip.device_kind)
    programs = Programs(model_shapes(deployment.model, deployment.dtype, mesh), deployment, mesh)
    with Tracers(config, HF, programs) as found:
        found.trace(*SIZES)
        traced = all_traced(found, programs, steps)
    assert not messages(caplog)
    assert any("all_reduce" in function for functions in traced.values() for function in functions)
    assert any("tpu_custom_call" in function for functions in traced.values() for function in functions)
    for key in programs.keys:
        programs.lower(key, *SIZES).compile(programs.options(key))  # which reads what they have traced
    monkeypatch.setenv("JAXSERVE_CACHE_DIR", str(steps / "alone"))
    for key in programs.keys:
        programs.trace(key, *SIZES)
    assert {path.name: module(path) for path in (steps / "alone" / "steps").iterdir()} == traced


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("raise SystemExit(1)", "has ended"),
        ("import time; time.sleep(60)", "has said nothing"),
        ("import os, time; os.write(1, b'.' * 50); time.sleep(60)", "traces others"),
    ],
)
def test_what_one_does_not_do_the_engine_does(
    steps: Path, monkeypatch: pytest.MonkeyPatch, caplog, code: str, why: str
):
    begun = []

    def popen(_: list[str], **options):
        begun.append(subprocess.Popen([sys.executable, "-c", code], **options))
        return begun[-1]

    monkeypatch.setattr(tracers, "Popen", popen)
    monkeypatch.setattr(tracers, "MAX_SILENCE_S", 2.0)
    config, programs = on_h200()
    with Tracers(config, HF, programs) as found:
        found.trace(*SIZES)
        for key in programs.keys:
            found.wait(key)
    assert [why in line for line in messages(caplog)] == [True, True]
    assert len(begun) == 2 and all(process.returncode is not None for process in begun)


def test_without_a_cache_there_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("JAXSERVE_CACHE_DIR", str(tmp_path / "file"))
    config, programs = on_h200()
    with caplog.at_level(logging.INFO, tracers.__name__), Tracers(config, HF, programs) as found:
        found.trace(*SIZES)
        found.wait(programs.keys[0])
    assert not messages(caplog)


def test_they_end_with_the_engine(steps: Path):
    code = """
import sys, time; sys.path.insert(0, "tests")
from jaxserve import tracers
from test_tracers import HF, SIZES, on_h200
tracers.how_many = lambda *_: 2
config, programs = on_h200()
found = tracers.Tracers(config, HF, programs)
found.start(8)
print(*(tracer.pid for tracer in found._tracers), flush=True)
if "trace" in sys.argv: found.trace(*SIZES)
time.sleep(60)
"""
    root = Path(__file__).parent.parent
    engine = subprocess.Popen([sys.executable, "-c", code, "trace"], cwd=root, stdout=subprocess.PIPE, text=True)
    assert engine.stdout is not None
    with engine:
        pids = [int(pid) for pid in engine.stdout.readline().split()]
        assert len(pids) == 2
        engine.send_signal(signal.SIGKILL)
    deadline_s = time.monotonic() + 60
    while any(_runs(pid) for pid in pids):
        assert time.monotonic() < deadline_s, "they outlive the engine"
        time.sleep(0.1)


def _runs(pid: int) -> bool:
    try:
        return os.stat(f"/proc/{pid}") is not None and Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False


def test_only_where_they_pay(monkeypatch: pytest.MonkeyPatch):
    cores = {1: 0, 2: 0, 4: 2, 16: 8, 128: 8}
    for count, expected in cores.items():
        monkeypatch.setattr(os, "cpu_count", lambda count=count: count)
        assert how_many("gpu", 41) == how_many("tpu", 41) == expected
        assert how_many("cpu", 41) == how_many("gpu", 7) == 0

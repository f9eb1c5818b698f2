"""The GPU's table: its floors on known numbers, its Markdown, and that the scripts behind it take any model."""

import contextlib
import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from jaxserve import LLM, SamplingParams
from jaxserve.bench.offline import watched_slots
from jaxserve.models.base import decoder_config
from jaxserve.runner import Runner

ROOT = Path(__file__).parent.parent
SCRIPTS, GOLDENS = ROOT / "scripts", ROOT / "tests" / "goldens"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch):
    """Imports a script by its name, as Python finds it when another one beside it runs."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module


@pytest.fixture
def floors(script) -> ModuleType:
    return script("floors")


@pytest.fixture
def bench_gpu(script) -> ModuleType:
    return script("bench_gpu")


# ------------------------------------------------------------------------------------------------------ floors


def weights(floors: ModuleType, shape: str) -> Any:
    hf = json.loads((SCRIPTS / "shapes" / shape / "config.json").read_text())
    return floors.weights_of(decoder_config(hf, sliding_windows=None))


@pytest.mark.parametrize(
    ("shape", "rows", "context", "ms"),
    [
        ("llama-8b", 1, 248, 3.50), ("llama-8b", 8, 248, 3.55), ("llama-8b", 64, 248, 3.97),
        ("qwen-1.5b", 1, 248, 0.72), ("qwen-1.5b", 8, 248, 0.73), ("qwen-1.5b", 64, 248, 0.82),
        ("llama-8b", 256, 640, 4.865 + 4.993),  # products take longer than reading the weights; then attention
    ],
)  # fmt: skip
def test_a_decode_step_reads_its_weights_and_pages_once(floors, shape: str, rows: int, context: int, ms: float):
    assert 1e3 * floors.decode_s(floors.Card(), weights(floors, shape), rows, context) == pytest.approx(ms, abs=0.006)


def test_a_prompt_is_bound_by_products_and_a_short_one_by_the_weights(floors):
    llama = weights(floors, "llama-8b")
    assert 1e3 * floors.least_s(floors.Card(), llama, tokens=512, drawn=1) == pytest.approx(9.05, abs=0.005)
    assert 1e3 * floors.least_s(floors.Card(), llama, tokens=16, drawn=1) == pytest.approx(15.01 / 4.3, abs=0.005)


@pytest.mark.parametrize(("shape", "known", "strict"), [("llama-8b", 12_700, 13_568), ("qwen-1.5b", 61_000, 67_661)])
@pytest.mark.parametrize("rows", [256, 1024])
def test_offline_floors_are_those_of_rough_counts_without_what_no_prompt_needs(floors, shape, known, strict, rows):
    """`known`: with every parameter, so with embedding and head too, for each token of a prompt."""
    exact = weights(floors, shape)
    params = exact.in_layers + exact.in_head * (2 if shape == "llama-8b" else 1)
    rough = exact._replace(in_layers=params, in_head=0)
    assert floors.output_tokens_per_s(floors.Card(), rough, rows, 512, 256) == pytest.approx(known, rel=0.03)
    assert floors.output_tokens_per_s(floors.Card(), exact, rows, 512, 256) == pytest.approx(strict, rel=1e-3)


def test_cached_prompts_cost_nothing_and_few_rows_are_bound_by_the_weights(floors):
    llama, card = weights(floors, "llama-8b"), floors.Card()
    speeds = [floors.output_tokens_per_s(card, llama, 256, 512, 256, cached=share) for share in (0, 0.25)]
    assert speeds == pytest.approx([13_568, 15_416], rel=1e-3)
    a_step_s = (15.009e9 + 639 * 131_072) / 4.3e12
    assert floors.output_tokens_per_s(card, llama, 1, 512, 256) == pytest.approx(1 / a_step_s, rel=1e-3)


# ------------------------------------------------------------------------------------------------------- table


def test_the_table(bench_gpu):
    figures = {
        "start, cold s": bench_gpu.Figure(67.31, 125.8 * 2**30),
        "offline 256, tok/s": bench_gpu.Figure(10670.4, 125.81 * 2**30),
        "offline 256, wasted slots %": bench_gpu.Figure(5.4321, None),
        "decode batch 1, ms": bench_gpu.Figure(4.25, 20 * 2**30),
    }
    assert bench_gpu.table("llama-8b", figures, {"offline 256, tok/s": 13568.4, "decode batch 1, ms": 3.4981}) == (
        "## llama-8b\n\n"
        "| figure | jaxserve | vLLM 0.26.0 | goal | floor | of the floor | peak memory, GiB |\n"
        "|---|---|---|---|---|---|---|\n"
        "| start, cold s | 67.3 | 111 | 75 |  |  | 125.8 |\n"
        "| offline 256, tok/s | 10,670 | 9,918 | 10,900 | 13,568 | 79% | 125.8 |\n"
        "| offline 256, wasted slots % | 5.43 |  |  |  |  |  |\n"
        "| decode batch 1, ms | 4.25 | 5.09 | 4.3 | 3.50 | 82% | 20.0 |"
    )


class Measured:
    """Stands in for what is started: a server, the load on it, and the other commands."""

    def __init__(self, bench_gpu: ModuleType, monkeypatch: pytest.MonkeyPatch):
        self.started: list[str] = []
        self.caches: list[str] = []
        for name in ("server", "bench_serve", "run", "peak_of"):
            monkeypatch.setattr(bench_gpu, name, getattr(self, name))
        monkeypatch.setattr(bench_gpu, "find_gpu", lambda: "NVIDIA H200")

    @contextlib.contextmanager
    def server(self, cache: Path, options: list[str]):
        self.started.append(options[options.index("--model") + 1])
        (cache / "compiled").touch()
        yield "http://server", 12.5

    def peak_of(self, url: str) -> float:
        return 2.0**37

    def bench_serve(self, url: str, file: Path, **options: int) -> dict[str, float]:
        names = ("output_throughput", "p50_ttft_ms", "p99_ttft_ms", "p50_tpot_ms", "p99_itl_ms")
        return dict.fromkeys(names, 7.0) | {"peak_device_memory_bytes": 2.0**37}

    def run(self, *command: str) -> str:
        self.caches.append(os.environ["JAXSERVE_CACHE_DIR"])
        if "throughput" in command:
            keys = ("output_tokens_per_second", "peak_device_memory_bytes", "mean_kv_cache_wasted_slots_ratio")
            Path(command[command.index("--output-json") + 1]).write_text(json.dumps(dict.fromkeys(keys, 0.05)))
        if "scripts/bench_structured.py" in command:
            return "| plain | 9,849 | 100.0% |\n| JSON schema | 9,141 | 92.8% |\n\nPeak device memory: 125.80 GiB\n"
        assert "--batch 1 8 64 --context 128" in " ".join(command) or "throughput" in command
        steps = [f"### decode, batch {n}, context 248 on average: 4.256 ms/step by the clock" for n in (1, 8, 64)]
        return "\n".join([*steps, "Peak device memory: 20.50 GiB"])


def call(bench_gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys, *argv: str) -> tuple[str, str]:
    monkeypatch.setattr(sys, "argv", ["scripts/bench_gpu.py", *argv])
    monkeypatch.setenv("JAXSERVE_CACHE_DIR", "")  # so that it is put back
    assert bench_gpu.main() == 0
    return capsys.readouterr()


def test_one_call_measures_both_models_and_shows_all_that_is_known_of_them(bench_gpu, monkeypatch, tmp_path, capsys):
    measured = Measured(bench_gpu, monkeypatch)
    out, err = call(bench_gpu, monkeypatch, capsys, "--out", str(tmp_path), "--read-tb-s", "4.8")
    head, *tables = out.split("\n## ")
    assert head.startswith("# NVIDIA H200\n") and re.search(r"\npython 3\.\d+\.\d+, .*jaxlib [\d.]+", head)
    assert "Floor: memory at 4.8 TB/s, products at 790 TFLOP/s" in head
    assert len(measured.started) == 4 and len(set(measured.caches)) == 2, "each model has a compile cache of its own"
    for shape, text in zip(("llama-8b", "qwen-1.5b"), tables, strict=True):
        rows = {cells[1]: cells[2:-1] for line in text.splitlines() if len(cells := re.split(r" ?\| ?", line)) == 9}
        wanted = bench_gpu.KNOWN[shape] | bench_gpu.floors(shape, bench_gpu.Card())
        assert text.startswith(f"{shape}\n") and not wanted.keys() - rows.keys()
        assert {"64 rows, JSON schema, tok/s", "server 256, new prompts, tok/s", "start, cold s"} < rows.keys()
        assert rows["decode batch 8, ms"][0] == "4.26" and rows["decode batch 8, ms"][-1] == "20.5"
        assert rows["64 rows, plain, tok/s"] == ["9,849", "", "", "", "", "125.8"]
        assert rows["server 64, tok/s"][-1] == "128.0"
        assert f"## {text.strip()}\n" in err, "a call that is cut off has shown what it had"


def test_what_an_earlier_call_has_left_is_shown(bench_gpu, monkeypatch, tmp_path, capsys):
    measured = Measured(bench_gpu, monkeypatch)
    call(bench_gpu, monkeypatch, capsys, "qwen-1.5b", "--parts", "decode", "--out", str(tmp_path))
    out, _ = call(bench_gpu, monkeypatch, capsys, "--out", str(tmp_path), "--parts")
    assert "| decode batch 64, ms | 4.26 | 4.07 | 2.0 | 0.824 | 19% | 20.5 |" in out and "## llama-8b" in out
    assert len(measured.caches) == 1


def test_an_unknown_shape_is_named(bench_gpu, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["scripts/bench_gpu.py", "llama-7b"])
    with pytest.raises(SystemExit):
        bench_gpu.main()
    assert "unknown shape 'llama-7b': known are llama-8b, qwen-1.5b" in capsys.readouterr().err


# -------------------------------------------------------------------------------------------- on other machines


MODEL = ("--model", str(GOLDENS / "llama"), "--tokenizer", str(GOLDENS / "vocab" / "qwen2.gguf"), "--enforce-eager")


@pytest.mark.parametrize("argv", [["bench_gpu"], ["check_kernels_gpu"], ["profile_step", *MODEL]], ids=lambda a: a[0])
def test_without_a_gpu_there_is_one_clear_line(argv: list[str], tmp_path: Path):
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    script = str(SCRIPTS / f"{argv[0]}.py")
    done = subprocess.run([sys.executable, script, *argv[1:]], capture_output=True, text=True, check=False, env=env)
    wanted = f"{script} needs a GPU: JAX finds a cpu; with an NVIDIA GPU, pip install '.[cuda]'\n"
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.endswith(wanted) and "Traceback" not in done.stderr


@pytest.fixture(scope="module")
def tiny() -> LLM:
    """A model of few token ids, with a tokenizer that has more."""
    options = {"max_num_seqs": 2, "max_num_batched_tokens": 48, "enforce_eager": True, "page_size": 16}
    return LLM(str(GOLDENS / "llama"), tokenizer=str(GOLDENS / "vocab" / "qwen2.gguf"), **options)


def test_the_peak_of_the_device_comes_with_the_engines_figures(tiny: LLM, monkeypatch):
    assert tiny.get_metrics().peak_device_memory_bytes is None, "a CPU does not say"
    monkeypatch.setattr(Runner, "peak_memory_bytes", lambda self: 2**30)
    with watched_slots(tiny) as watch:
        pass
    assert watch.numbers()["peak_device_memory_bytes"] == 2**30
    assert watch.line().endswith("\nPeak device memory: 1.00 GiB")


def test_prompts_of_a_profile_are_ids_of_the_model(script, tiny: LLM):
    profile_step = script("profile_step")
    ids = profile_step.submit(tiny, 2, 16, 4)
    assert len(ids) == 2 and tiny._engine.has_work()
    profile_step.stop(tiny._engine, ids)


def test_prompts_beside_a_schema_are_ids_of_the_model(script, tiny: LLM):
    args = script("argparse").Namespace(batch=2, input_len=16)
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    assert script("bench_structured").speed(tiny, args, params) > 0

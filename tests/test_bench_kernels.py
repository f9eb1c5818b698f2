"""`jaxserve bench kernels`: its table on a CPU, and that its chains lower for the GPUs whose kernels it is for."""

import json
from dataclasses import replace
from pathlib import Path

import jax
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from jaxserve import cli
from jaxserve.bench import kernel_jobs
from jaxserve.config import EngineConfig
from jaxserve.deployment import resolve_deployment
from jaxserve.step_cache import OURS

TINY = Path(__file__).parent / "goldens" / "qwen2_window_yarn"
SMALL = ["--decode", "2x33", "--prefill", "2x16+5", "--tokens", "1", "3"]
LARGE = [(8, 512)], [(2, 256, 64)], [8, 256]


def test_the_table_and_its_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "kernels.json"
    assert cli.main(["bench", "kernels", str(TINY), "--dtype", "float32", *SMALL, "--output-json", str(file)]) == 0
    table = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    data = json.loads(file.read_text())
    assert data["backend"] == "reference" and data["dtype"] == "float32" and data["memory_tb_per_s"] > 0
    shown = [(row["kernel"], row["shape"], f"{row['us']:.1f}", row["unit"]) for row in data["kernels"]]
    assert shown == [(kernel, shape, us, unit) for kernel, shape, us, _, unit, _ in table[1:]]
    hf = json.loads((TINY / "config.json").read_text())
    size, ffn = hf["hidden_size"], hf["intermediate_size"]
    assert [(kernel, shape) for kernel, shape, *_ in shown] == [
        ("decode attention", "2 x 33"),
        ("decode: rope, write, attention", "2 x 33"),
        ("prefill attention", "2 x 16 + 5"),
        ("rope and write", "1"),
        ("rope and write", "3"),
        ("residual and norm", f"1 x {size}"),
        ("residual and norm", f"3 x {size}"),
        ("gate, up and silu", f"1 x {size} x {ffn}"),
        ("gate, up and silu", f"3 x {size} x {ffn}"),
    ]
    assert all(row["us"] > 0 and row["rate"] > 0 and row["share"] > 0 for row in data["kernels"])


@pytest.mark.parametrize(
    ("flag", "word", "shape"),
    [
        ("--decode", "12", "ROWSxCONTEXT"),
        ("--decode", "0x5", "ROWSxCONTEXT"),
        ("--prefill", "1x5", "CHUNKSxTOKENS+CONTEXT"),
        ("--tokens", "many", "N"),
    ],
)
def test_a_size_that_is_none_is_named(flag: str, word: str, shape: str, capsys: pytest.CaptureFixture[str]):
    assert cli.main(["bench", "kernels", str(TINY), flag, word]) == 2
    message = f"jaxserve: error: {flag} takes {shape}, with numbers of at least 1, got {word!r}"
    assert capsys.readouterr().err.strip() == message


def test_work_counts_what_a_window_lets_through():
    hf = json.loads((TINY / "config.json").read_text())
    at = resolve_deployment(EngineConfig(dtype="float32"), hf, "cpu", "cpu")
    window = 8
    at = replace(at, model=replace(at.model, sliding_windows=(window,) * at.model.num_layers))
    model = at.model
    per_key = model.num_heads * model.head_dim
    job = kernel_jobs.attention_job(at, 2, 3, window, decode=False)
    assert job.work == 4 * 2 * per_key * 3 * window and job.unit == "TFLOP/s"
    job = kernel_jobs.attention_job(at, 2, 3, 0, decode=False)
    assert job.work == 4 * 2 * per_key * (1 + 2 + 3)
    job = kernel_jobs.attention_job(at, 5, 1, 10 * window, decode=True)
    assert job.work == 5 * model.num_kv_heads * model.head_dim * window * 2 * 4 and job.unit == "TB/s"


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
@pytest.mark.parametrize(("backend", "kind"), [("mosaic_gpu", "NVIDIA H200"), ("triton", "NVIDIA A100")])
@pytest.mark.parametrize("model", ["llama-8b", "qwen-1.5b"])
def test_every_chain_lowers_for_its_gpu(backend: str, kind: str, model: str):
    folder = Path(__file__).parent.parent / "scripts" / "shapes" / model
    config = EngineConfig(attention_backend=backend)
    at = resolve_deployment(config, json.loads((folder / "config.json").read_text()), "gpu", kind)
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=AbstractDevice(kind, 1, "gpu"))):
        for job in kernel_jobs.all_jobs(at, *LARGE):
            job = job._replace(layers=2)
            program = jax.jit(job.chain, donate_argnums=0)
            module = jax.export.export(program, platforms=["cuda"], disabled_checks=OURS)(
                *job.arguments()
            ).mlir_module()
            ours = "mosaic_gpu_v2" in module or "__gpu$xla.gpu.triton" in module
            by_xla = {"residual and norm"} if backend == "triton" else set()
            if backend == "triton" or job.x.shape[0] == 8:
                by_xla.add("gate, up and silu")
            assert ours == (job.kernel not in by_xla)

"""`jaxserve compile`, with the real TPU compiler: what it prints, what it keeps, and what does not fit."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax._src import compilation_cache
from jax.sharding import SingleDeviceSharding

from jaxserve import cli
from jaxserve.compile_ahead import HEAD
from jaxserve.config import EngineConfig
from jaxserve.errors import DoesNotFit
from jaxserve.fit import Fit, _does_not_fit
from jaxserve.programs import Kind, Needs, Programs
from jaxserve.shapes import Bucket
from jaxserve.tpu_topology import parse_topology

SHAPE = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 1024, "hidden_size": 256, "intermediate_size": 512,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128,
    "max_position_embeddings": 4096,
}  # fmt: skip
WIDE = SHAPE | {"hidden_size": 2048, "intermediate_size": 65536}
SMALL = ("--max-num-seqs", "8", "--max-num-batched-tokens", "64")
KV_BYTES = 2**30
ROOT = Path(__file__).parent.parent
DOCS = (ROOT / "docs/tpu.md").read_text()

pytestmark = pytest.mark.tpu_aot


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tpu_chip) -> Path:
    """A directory with config.json, and a cache of its own."""
    monkeypatch.setenv("JAXSERVE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SHAPE))
    return folder


@pytest.fixture
def xla_cache(model: Path) -> Iterator[None]:
    """JAX's own cache is where the command puts it, also if something was compiled in this process before."""
    names = ("compilation_cache_dir", "persistent_cache_min_compile_time_secs", "persistent_cache_min_entry_size_bytes")
    before = {f"jax_{name}": getattr(jax.config, f"jax_{name}") for name in names}
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def table(out: str) -> list[dict[str, str]]:
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in out.splitlines() if line.startswith("|")]
    assert tuple(rows[0]) == HEAD
    return [dict(zip(HEAD, cells, strict=True)) for cells in rows[2:]]


def test_a_deployment_that_fits(model: Path, xla_cache: None, capsys):
    kept = model.parent / "cache"
    argv = [*SMALL, "--kv-cache-memory-bytes", str(KV_BYTES)]
    assert cli.main(["compile", str(model), "--topology", "v5e-1", *argv]) == 0
    out = capsys.readouterr().out
    assert (
        "on 1 chip of v5e-1 (1 chip, 1x1x1, 1 host)" in out
        and "15.75  that programs may use" in out
        and "It fits." in out
    )
    rows = table(out)
    deployment = deployment_of(SMALL)
    assert len(rows) == len(deployment.programs.keys)
    for row in rows:
        assert float(row["HBM GiB"]) + float(row["free GiB"]) == pytest.approx(15.75, abs=0.011)
        assert float(row["best ms"]) > 0 and float(row["GB touched"]) > 0
        assert 0 <= int(row["VMEM MiB"]) <= 128
    decode = next(row for row in rows if row["program"] == "plain" and not row["prompt tokens"])
    assert decode["bound by"] == "memory" and int(decode["VMEM MiB"]) > 0
    traced, compiled = set((kept / "steps").iterdir()), set((kept / "xla").glob("*-cache"))
    assert len(traced) >= len(rows) and len(compiled) >= len(rows)
    # Whoever compiles the same for the same TPUs finds it: names of files do not depend on what else was compiled.
    jax.clear_caches()
    again = deployment_of(SMALL, kv_cache_memory_bytes=KV_BYTES)
    pool = again.programs.size_pool(again.config, lambda: 0)
    again.programs.lower(again.programs.keys[0], pool.num_pages, pool.max_model_len).compile()
    assert set((kept / "steps").iterdir()) == traced and set((kept / "xla").glob("*-cache")) == compiled


def deployment_of(argv: tuple[str, ...], **options: Any) -> Fit:
    config = EngineConfig(max_num_seqs=int(argv[1]), max_num_batched_tokens=int(argv[3]), **options)
    return Fit(config, SHAPE, parse_topology("v5e-1"))


def test_weights_that_are_too_large_are_told_with_the_chips_that_hold_them(model: Path, capsys):
    (model / "config.json").write_text(json.dumps(WIDE))
    assert cli.main(["compile", str(model), "--topology", "v5e-1", *SMALL, "--gpu-memory-utilization", "0.095"]) == 2
    err = capsys.readouterr().err
    assert "does not fit: the weights need 1.52 GiB" in err and "of each chip and there are 1.50 GiB" in err
    assert err.rstrip().endswith("fits with --quantization int8, or --topology v5e-4 --tensor-parallel-size 4")


@pytest.mark.parametrize(
    ("given", "named"), [({}, "gpu_memory_utilization"), ({"kv_cache_memory_bytes": 1}, "kv_cache_memory_bytes")]
)
def test_a_pool_that_is_too_small_names_the_option_that_sets_it(tpu_chip, given: dict[str, int], named: str):
    fit = deployment_of(SMALL, **given)
    with pytest.raises(DoesNotFit, match=f"give more memory with --{named.replace('_', '-')}, or") as caught:
        fit.programs.size_pool(fit.config, lambda: 1)
    assert caught.value.param == named


def test_chips_share_weights_and_kv_heads_and_add_up_their_parts(tpu_chip):
    config = EngineConfig(max_num_seqs=8, max_num_batched_tokens=64, tensor_parallel_size=4)
    fit, alone = Fit(config, SHAPE, parse_topology("v6e-4")), deployment_of(SMALL)
    assert alone.weight_bytes / 4 < fit.weight_bytes < alone.weight_bytes / 2, "kv heads are fewer, norms are whole"
    key = next(key for key in fit.programs.keys if key[0].value == "plain")
    text = fit.programs.lower(key, 64, 4096).compile().as_text()
    assert text.count(" all-reduce(") >= 1 + 2 * SHAPE["num_hidden_layers"]
    assert "ragged_paged_attention_1" in text


@pytest.mark.parametrize(
    ("name", "topology", "chips", "pages"),
    [
        ("qwen-1.5b", "v5e-1", 1, 4739),
        pytest.param("llama-8b", "v5e-8", 8, 9145, marks=[pytest.mark.heavy, pytest.mark.slow]),
        pytest.param("llama-8b", "v6e-4", 4, 10816, marks=[pytest.mark.heavy, pytest.mark.slow]),
        pytest.param("qwen-32b", "v6e-8", 8, 7942, marks=[pytest.mark.heavy, pytest.mark.slow]),
        pytest.param("llama-70b", "v5p-16", 8, 25381, marks=[pytest.mark.heavy, pytest.mark.slow]),
        pytest.param("llama-70b", "v6e-16", 16, 5354, marks=[pytest.mark.heavy, pytest.mark.slow]),
    ],
)
def test_the_decode_step_of_a_deployment_of_the_docs_fits(name: str, topology: str, chips: int, pages: int, tpu_chip):
    """All layers, 128 rows, and the pool that docs/tpu.md says."""
    hf = json.loads((ROOT / "scripts/shapes" / name / "config.json").read_text())
    assert re.search(rf"`jaxserve compile scripts/shapes/{name} --topology {topology}\b[^#]* {pages} pages", DOCS)
    fit = Fit(EngineConfig(tensor_parallel_size=chips), hf, parse_topology(topology))
    key = (Kind.PLAIN, Bucket(0, 128, 0))
    assert key in fit.programs.keys
    memory = fit.programs.lower(key, pages, hf["max_position_embeddings"]).compile().memory_analysis()
    taken = memory.argument_size_in_bytes + memory.temp_size_in_bytes + memory.generated_code_size_in_bytes
    taken += memory.output_size_in_bytes - memory.alias_size_in_bytes
    pool = pages * 64 * 2 * hf["num_hidden_layers"] * fit.programs.model.num_kv_heads * 128 * 2
    assert fit.weight_bytes + pool < taken < fit.share_bytes


@pytest.mark.parametrize("tied", [False, True])
def test_weights_in_8_bits_take_half_and_are_multiplied_at_twice_the_speed(tied: bool, tpu_chip):
    shape = WIDE | {"intermediate_size": 8192, "vocab_size": 2048, "tie_word_embeddings": tied}
    fits = {}
    for quantization in (None, "int8"):
        config = EngineConfig(max_num_seqs=8, kv_cache_memory_bytes=KV_BYTES, quantization=quantization)
        fits[quantization] = Fit(config, shape, parse_topology("v5e-1"))
    plain, int8 = fits[None], fits["int8"]
    assert "LlamaForCausalLM in bfloat16 and int8, 8 sequences" in int8.what
    table = plain.programs.table_bytes
    assert int8.programs.table_bytes == table, "the embedding stays"
    assert int8.weight_bytes - table == pytest.approx((plain.weight_bytes - table) / 2, rel=0.01)
    assert int8.programs.matrix_elements == plain.programs.matrix_elements
    pool = int8.programs.size_pool(int8.config, lambda: 0)
    steps = {key[1].prefill_tokens: key for key in plain.programs.keys if key[0].value == "plain"}
    decode, prefill = steps[0], steps[max(steps)]
    for key, times in ((decode, 1.8), (prefill, 1.9)):
        slow, fast = (fit.best(key, pool, 16) for fit in (plain, int8))
        assert slow.bound == fast.bound == ("memory" if key is decode else "compute")
        assert 2 >= slow.seconds / fast.seconds > times


def test_a_kv_cache_that_the_chip_cannot_hold_is_refused(model: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.setattr(Programs, "_measure", lambda self: Needs(slots=2**20, step=2**24, code=2**24))
    assert cli.main(["compile", str(model), "--topology", "v5e-1", *SMALL, "--kv-cache-memory-bytes", "15.7GiB"]) == 2
    assert "--kv-cache-memory-bytes 16857746636 is more than the 15.2" in capsys.readouterr().err


def test_a_program_that_the_rest_leaves_no_room_for_does_not_fit(monkeypatch: pytest.MonkeyPatch, tpu_chip):
    """What else lies in a chip's memory the compiler does not see: it was estimated too small."""
    monkeypatch.setattr(Programs, "_measure", lambda self: Needs(slots=0, step=-(2**30), code=2**30))
    fit = deployment_of(SMALL, kv_cache_memory_bytes=15 * 2**30)
    fit.programs.keys = [key for key in fit.programs.keys if key[0].value == "plain"][:1]
    with pytest.raises(DoesNotFit, match=r"plain of 8 decode rows .* takes 16.\d\d GiB of each chip, .* 15.75 GiB"):
        list(fit.compile(fit.pool(), 1024))


def test_a_kv_cache_that_is_too_small_says_what_length_fits(model: Path, capsys):
    argv = ("--kv-cache-memory-bytes", "1MiB", "--max-model-len", "4096")
    assert cli.main(["compile", str(model), "--topology", "v6e-1", *SMALL, *argv]) == 2
    assert "the longest that fits is 448: pass --max-model-len 448" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ((), "--topology is needed"),
        (("--topology", "v5e-3"), "--topology must be one of v5e-1, v5e-4"),
        (("--topology", "h100-8"), "--topology must be a slice of v4, v5e, v5p, v6e"),
        (("--topology", "v5e-1", "--context-len", "0"), "--context-len must be at least 1, got 0"),
        (("--topology", "v5e-1", "--page-size", "8"), "--page-size must be one of"),
        (("--topology", "v5e-1", "--port", "1"), "unknown option '--port'"),
        (("--topology", "v5e-4", "--tensor-parallel-size", "8"), "must be at most 4, the chips of v5e-4, got 8"),
        (("--topology", "v5e-4", "--tensor-parallel-size", "3"), "--tensor-parallel-size must divide"),
        (("--topology", "v5e-1", "--attention-backend", "mosaic_gpu"), "it needs an NVIDIA Hopper GPU"),
        (("--topology", "v5e-1", "--quantization", "fp8"), "this is TPU v5 lite: --quantization int8, or leave it out"),
    ],
)
def test_wrong_options_are_refused(model: Path, argv, message, capsys):
    assert cli.main(["compile", str(model), *argv]) == 2
    assert message in capsys.readouterr().err


def test_pages_that_the_kernel_cannot_hold_are_refused_with_what_it_needs(model: Path, capsys):
    heads = {"num_attention_heads": 32, "num_key_value_heads": 32}
    (model / "config.json").write_text(json.dumps(SHAPE | heads))
    argv = ("--topology", "v4-8", "--dtype", "float32", "--page-size", "256")
    assert cli.main(["compile", str(model), *argv, *SMALL]) == 2
    err = capsys.readouterr().err
    assert "needs 18.8 MiB of VMEM and may take 16.0" in err and "a smaller --page-size needs less" in err


def test_rows_of_the_page_table_that_the_kernel_cannot_hold_are_refused(model: Path, capsys):
    """A model that was made for more tokens can be served with fewer."""
    long = SHAPE | {"max_position_embeddings": 2**21}
    (model / "config.json").write_text(json.dumps(long))
    assert cli.main(["compile", str(model), "--topology", "v5e-1", "--page-size", "16", *SMALL]) == 2
    err = capsys.readouterr().err
    assert "needs 2052 KiB of scalar memory and may take 1020" in err and "or a smaller --max-model-len needs" in err
    config = EngineConfig(max_num_seqs=8, max_num_batched_tokens=64, page_size=16, max_model_len=4096)
    programs = Fit(config, long, parse_topology("v5e-1")).programs
    for key in programs._profile_keys():
        programs.trace(key, *programs._profile_sizes())
    assert programs.is_profiled()


def test_what_the_compiler_says_of_too_large_a_program_is_understood(tpu_chip):
    place = SingleDeviceSharding(parse_topology("v5e-1").devices()[0])
    lowered = jax.jit(lambda x: x + 1).lower(jax.ShapeDtypeStruct((20 * 2**30,), jnp.int8, sharding=place))
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        lowered.compile()
    understood = _does_not_fit(caught.value)
    assert isinstance(understood, DoesNotFit) and "15.75G" in understood.message
    other = jax.errors.JaxRuntimeError("INTERNAL: anything")
    assert _does_not_fit(other) is other

"""Compiled steps never copy a weight or a KV pool, nor widen a quantized weight, and share out the rows once for all
layers: read off the programs that XLA makes, on this host or on a GPU.
"""

import math
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxserve.config import QUANTIZATIONS, EngineConfig
from jaxserve.deployment import resolve_deployment
from jaxserve.models.loading import model_shapes
from jaxserve.programs import LOOP_STEPS, Kind, Programs
from jaxserve.sharding import mesh_of

PAGES = 128
MOVES = ("copy", "copy-start", "transpose")
ROWS, CHUNK = 32, 64  # so few tokens that no activation is as large as a weight
HF = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 2048, "hidden_size": 512, "intermediate_size": 1024,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128,
    "max_position_embeddings": 512,
}  # fmt: skip
NARROW_HEADS = HF | {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64}
WIDE = HF | {"hidden_size": 2048}  # so that no activation in 32 bits is as large as a weight in 8
ITEM_BYTES = {"pred": 1, "s8": 1, "u8": 1, "f8e4m3fn": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4}

pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")


def large_copies(hlo: str, least_bytes: int, *, moves: tuple[str, ...] = MOVES) -> list[str]:
    """Instructions that write an array of so many bytes which they only move. Fusions around a product may turn their
    operands as they read them, which costs no memory: what is within those does not count.
    """
    found = []
    for computation in hlo.split("\n}\n"):
        if " dot(" in computation and "\nENTRY " not in f"\n{computation.lstrip()}":
            continue
        for line in computation.splitlines():
            match = re.search(r" = \(?(\w+)\[([\d,]*)\].*? ([\w-]+)\(", line)
            if match and match[3] in moves:
                elements = math.prod(map(int, match[2].split(",") if match[2] else ()))
                if elements * ITEM_BYTES[match[1]] >= least_bytes:
                    found.append(line.strip())
    return found


def integers_of_kernels(hlo: str) -> dict[str, list[tuple[str, ...]]]:
    """For each call of a kernel of ours, by the kernel's name: the integer arrays that it is given, by theirs. A call
    may be in a fusion, with the slices that it takes; kernels that are given no integers are left out.
    """
    entry = hlo[hlo.index("\nENTRY ") :]
    bodies = dict(re.findall(r"^%([\w.-]+) \(.*\{\n((?:  .*\n)+)\}", hlo, re.MULTILINE))
    integers = set(re.findall(r"^ +(%[\w.-]+) = s32\[", entry, re.MULTILINE))
    target, name = r'custom_call_target="(?:mosaic_gpu_v2|__gpu\$xla\.gpu\.triton)"', r"(\w+)/(?:mpmd_map|pallas_call)"
    found: dict[str, list[tuple[str, ...]]] = {}
    for call in re.findall(r"^.* (?:custom-call|fusion)\(.*$", entry, re.MULTILINE):
        fused = re.search(r" calls=%([\w.-]+)", call)
        kernel = re.search(rf'{target}.*?op_name="[^"]*?{name}"', bodies[fused[1]] if fused else call)
        if kernel:
            operands = re.findall(r"%[\w.-]+", call[call.index("(%") :].split(")", 1)[0])
            if given := tuple(operand for operand in operands if operand in integers):
                found.setdefault(kernel[1], []).append(given)
    return found


def compiled(
    backend: str, kind: Kind, mixed: bool, hf: dict = HF, quantization: str | None = None, device: Any = None
) -> tuple[str, Programs, int]:
    """A program's HLO, and how many arrays it is given to keep. `device`: one that is elsewhere; None: that of here."""
    options = {"xla_gpu_autotune_level": 0} if device else {}  # nothing can be tried out
    device = device or jax.devices()[0]
    config = EngineConfig(
        max_num_seqs=ROWS, max_num_batched_tokens=ROWS + CHUNK, attention_backend=backend,
        dtype="float32" if device.platform == "cpu" else "bfloat16", quantization=quantization,
    )  # fmt: skip
    deployment, mesh = resolve_deployment(config, hf, device.platform, device.device_kind), mesh_of([device])
    programs = Programs(model_shapes(deployment.model, deployment.dtype, mesh), deployment, mesh)
    (size,) = [
        bucket
        for bucket in programs.buckets[kind]
        if bucket.decode_rows == ROWS and bucket.prefill_tokens == (CHUNK if mixed else 0)
    ]
    program = programs.lower((kind, size), PAGES, 512).compile(programs.options((kind, size)) | options)
    return program.as_text(), programs, len(programs.flat((kind, size), PAGES, 512)[2])


def check(backend: str, kind: Kind, mixed: bool, hf: dict, device: Any = None) -> str:
    """Returns the HLO."""
    hlo, programs, donated = compiled(backend, kind, mixed, hf, device=device)
    itemsize, model = jnp.dtype(programs.deployment.dtype).itemsize, programs.model
    weight = model.hidden_size * model.num_heads * model.head_dim * itemsize  # o, the smallest matrix
    pool = 2 * PAGES * model.num_kv_heads * programs.deployment.page_size * model.head_dim * itemsize
    assert (ROWS + CHUNK) * max(2 * model.ffn_size, model.qkv_size) * itemsize < min(weight, pool)
    assert not large_copies(hlo, min(weight, pool))
    assert len(re.findall("(?:may|must)-alias", hlo.splitlines()[0])) == donated > model.num_layers
    return hlo


def check_quantized(backend: str, kind: Kind, mixed: bool, quantization: str) -> None:
    hlo, programs, _ = compiled(backend, kind, mixed, WIDE, quantization)
    model = programs.model
    weight = model.hidden_size * model.num_heads * model.head_dim  # bytes; o, the smallest matrix
    assert (ROWS + CHUNK) * max(2 * model.ffn_size, model.qkv_size, model.hidden_size) * 4 < weight
    assert not large_copies(hlo, weight)
    assert not large_copies(hlo, 2 * weight, moves=("convert",))


def test_a_copy_is_found():
    pool = jnp.zeros((64, 64))
    write = jax.jit(lambda pool, x: pool.at[3].set(x)).lower(pool, jnp.zeros(64)).compile().as_text()
    assert len(large_copies(write, 64 * 64 * 4)) == 1
    in_place = jax.jit(lambda pool, x: pool.at[3].set(x), donate_argnums=0).lower(pool, jnp.zeros(64)).compile()
    assert not large_copies(in_place.as_text(), 64 * 64 * 4)
    assert large_copies("  ROOT %t.1 = bf16[4,2]{1,0:T(8)} transpose(%p), dimensions={1,0}", 16)
    assert large_copies("  %c = (f32[4,2]{1,0}, f32[4,2]{1,0}, u32[]) copy-start(%p)", 32)
    assert not large_copies("  %c = f32[4,2]{1,0} copy(%p)", 33)
    assert not large_copies("  %f = f32[4,2]{1,0} fusion(%copy), calls=%copy", 8)
    turned = "{\n  %t = f32[4,2]{1,0} transpose(%p)\n  ROOT %d = f32[4,4]{1,0} dot(%t, %t)\n}\n"
    assert not large_copies(f"%gemm_fusion {turned}", 8)
    assert large_copies(f"ENTRY %main {turned}", 8)


HEADS = pytest.mark.parametrize("hf", [HF, NARROW_HEADS], ids=["128", "64"])


@HEADS
@pytest.mark.parametrize("mixed", [False, True], ids=["decode", "mixed"])
def test_a_step_on_a_cpu_copies_neither_weights_nor_pools(
    mixed: bool, hf: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    if jax.devices()[0].platform != "cpu":
        pytest.skip("this host computes on something else")
    monkeypatch.setenv("JAXSERVE_CACHE_DIR", str(tmp_path))
    check("reference", Kind.FORWARD, mixed, hf)


@pytest.mark.parametrize("mixed", [False, True], ids=["decode", "mixed"])
def test_a_quantized_step_on_a_cpu_neither_copies_nor_widens_weights(
    mixed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    if jax.devices()[0].platform != "cpu":
        pytest.skip("this host computes on something else")
    monkeypatch.setenv("JAXSERVE_CACHE_DIR", str(tmp_path))
    check_quantized("reference", Kind.FORWARD, mixed, "int8")


@pytest.mark.parametrize(
    ("backend", "kind", "mixed", "hf"),
    [
        ("mosaic_gpu", Kind.PLAIN, False, HF), ("mosaic_gpu", Kind.PLAIN, True, HF),
        ("mosaic_gpu", Kind.FORWARD, True, HF), ("mosaic_gpu", Kind.PLAIN, True, NARROW_HEADS),
        ("mosaic_gpu", Kind.LOOP, False, HF), ("triton", Kind.PLAIN, True, HF),
    ],
    ids=["decode", "mixed", "forward", "64", "loop", "triton"],
)  # fmt: skip
def test_a_step_compiled_for_an_h200_copies_nothing_and_is_one_graph(
    backend: str, kind: Kind, mixed: bool, hf: dict, h200: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """XLA makes a CUDA graph of a plain step, and of what a loop repeats, if there is nothing in it that the host has a
    part in: no loop, no conditional, nothing that begins and ends.
    """
    monkeypatch.setenv("JAXSERVE_CACHE_DIR", str(tmp_path))
    hlo = check(backend, kind, mixed, hf, h200)
    if kind is not Kind.FORWARD:
        entry = hlo[hlo.index("\nENTRY ") :]
        if kind is Kind.LOOP:
            (loop,) = (line for line in entry.splitlines() if " while(" in line)
            assert f'"known_trip_count":{{"n":"{LOOP_STEPS}"}}' in loop, "the host asks the device how often"
            body = loop.partition("body=")[2].partition(",")[0]
            entry = hlo[hlo.index(f"\n{body} ") :].partition("\n}")[0]
        found = set(re.findall(r"^ +(?:ROOT )?%[\w.-]+ = .*? ([\w-]+)\(", entry, re.MULTILINE))
        assert found <= {"fusion", "custom-call", "parameter", "constant", "bitcast", "get-tuple-element", "tuple"}


@pytest.mark.parametrize(
    ("backend", "mixed", "kernels"),
    [
        ("mosaic_gpu", False, {"decode", "combine"}),
        ("mosaic_gpu", True, {"rope_write", "decode", "combine", "prefill"}),
        ("triton", True, {"rope_and_write", "paged_decode", "combine_decode", "paged_prefill"}),
    ],
    ids=["decode", "mixed", "triton"],
)
def test_work_lists_are_made_once_for_all_layers(
    backend: str, mixed: bool, kernels: set[str], h200: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Each layer asks for them anew (`make_work`). XLA sees that they are the same."""
    monkeypatch.setenv("JAXSERVE_CACHE_DIR", str(tmp_path))
    layers = 3
    hlo, _, _ = compiled(backend, Kind.PLAIN, mixed, HF | {"num_hidden_layers": layers}, device=h200)
    found = integers_of_kernels(hlo)
    assert {name: len(calls) for name, calls in found.items()} == dict.fromkeys(kernels, layers)
    assert {name: len(set(calls)) for name, calls in found.items()} == dict.fromkeys(kernels, 1)


def test_a_draw_sorts_a_few_candidates_and_never_the_vocabulary(
    h200: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("JAXSERVE_CACHE_DIR", str(tmp_path))
    hf = HF | {"vocab_size": 128_256}
    config, mesh = (
        EngineConfig(max_num_seqs=8, max_num_batched_tokens=72, attention_backend="mosaic_gpu"),
        mesh_of([h200]),
    )
    deployment = resolve_deployment(config, hf, h200.platform, h200.device_kind)
    programs = Programs(model_shapes(deployment.model, deployment.dtype, mesh), deployment, mesh)
    key = next(key for key in programs.keys if key[0] is Kind.DRAW)
    hlo = programs.lower(key, PAGES, 512).compile(programs.options(key) | {"xla_gpu_autotune_level": 0}).as_text()
    lines = [
        line for line in hlo.splitlines() if re.search(r" (?:sort|topk)\(|TopK|[Ss]ort", line.partition("metadata")[0])
    ]
    widths = [int(size) for line in lines for size in re.findall(r"\[\d+,(\d+)\]", line.partition("metadata")[0])]
    assert widths and max(widths) <= 128_256 // 16


@pytest.mark.gpu
@HEADS
@pytest.mark.parametrize("mixed", [False, True], ids=["decode", "mixed"])
@pytest.mark.parametrize("kind", [Kind.PLAIN, Kind.FORWARD])
@pytest.mark.parametrize("backend", ["mosaic_gpu", "triton"])
def test_a_step_on_a_gpu_copies_neither_weights_nor_pools(
    backend: str, kind: Kind, mixed: bool, hf: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("JAXSERVE_CACHE_DIR", str(tmp_path))
    check(backend, kind, mixed, hf)


@pytest.mark.gpu
@pytest.mark.parametrize("mixed", [False, True], ids=["decode", "mixed"])
@pytest.mark.parametrize("quantization", QUANTIZATIONS)
@pytest.mark.parametrize("backend", ["mosaic_gpu", "triton"])
def test_a_quantized_step_on_a_gpu_neither_copies_nor_widens_weights(
    backend: str, quantization: str, mixed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("JAXSERVE_CACHE_DIR", str(tmp_path))
    check_quantized(backend, Kind.PLAIN, mixed, quantization)

"""Which backend a device gets, and that a named one either runs or raises."""

import logging
import re

import jax
import pytest
from kernel_cases import TOLERANCE, Case
from rope_cases import RopeCase, make_rope_step, qkv_error

from jaxserve.errors import ConfigError
from jaxserve.pallas_kernels.ops import resolve_backend


@pytest.mark.parametrize(
    ("platform", "kind", "shapes", "expected"),
    [
        ("cpu", "cpu", {}, "reference"),
        ("gpu", "NVIDIA H200", {}, "mosaic_gpu"),
        ("cuda", "NVIDIA H100 80GB HBM3", {"dtype": "bfloat16", "head_dim": 128, "group": 4}, "mosaic_gpu"),
        ("gpu", "NVIDIA GH200 480GB", {"dtype": "float16"}, "mosaic_gpu"),
        ("gpu", "NVIDIA H200", {"dtype": "float32"}, "reference"),
        ("gpu", "NVIDIA H200", {"head_dim": 80}, "mosaic_gpu"),
        ("gpu", "NVIDIA H200", {"head_dim": 96, "dtype": "float16"}, "mosaic_gpu"),
        ("gpu", "NVIDIA H200", {"head_dim": 72}, "triton"),
        ("gpu", "NVIDIA H200", {"group": 32}, "triton"),
        ("gpu", "NVIDIA A100-SXM4-80GB", {}, "triton"),
        ("cuda", "NVIDIA A100 80GB PCIe", {"dtype": "float16", "head_dim": 96, "group": 71}, "triton"),
        ("gpu", "NVIDIA A10G", {}, "triton"),
        ("gpu", "NVIDIA L4", {"head_dim": 256}, "triton"),
        ("gpu", "NVIDIA L40S", {}, "triton"),
        ("gpu", "NVIDIA RTX A6000", {}, "triton"),
        ("gpu", "NVIDIA RTX 6000 Ada Generation", {}, "triton"),
        ("gpu", "NVIDIA GeForce RTX 3060 Laptop GPU", {}, "triton"),
        ("gpu", "NVIDIA GeForce RTX 4090", {}, "triton"),
        ("gpu", "NVIDIA A100-SXM4-80GB", {"dtype": "float32"}, "reference"),
        ("gpu", "NVIDIA L4", {"head_dim": 512}, "reference"),
        ("gpu", "NVIDIA B200", {}, "reference"),
        ("gpu", "NVIDIA GeForce RTX 5090", {}, "reference"),
        ("gpu", "NVIDIA GeForce RTX 2080 Ti", {}, "reference"),
        ("gpu", "Quadro RTX 4000", {}, "reference"),
        ("gpu", "Tesla T4", {}, "reference"),
        ("gpu", "NVIDIA RTX H1000", {}, "reference"),
        ("rocm", "AMD Instinct MI300X", {}, "reference"),
        ("tpu", "TPU v5e", {}, "mosaic_tpu"),
        ("tpu", "TPU v4", {"dtype": "bfloat16", "head_dim": 64, "group": 7}, "mosaic_tpu"),
        ("tpu", "TPU v5 lite", {"dtype": "float32", "head_dim": 96}, "mosaic_tpu"),
        ("tpu", "TPU v5", {}, "mosaic_tpu"),
        ("tpu", "TPU v5p", {}, "mosaic_tpu"),
        ("tpu", "TPU v6 lite", {"head_dim": 256}, "mosaic_tpu"),
        ("tpu", "TPU7x", {}, "mosaic_tpu"),
        ("tpu", "TPU v3", {}, "reference"),
        ("tpu", "TPU v5e", {"dtype": "float16"}, "reference"),
        ("tpu", "TPU v5e", {"head_dim": 320}, "reference"),
    ],
)
def test_auto_takes_the_best_that_runs_and_says_so(platform, kind, shapes, expected, caplog):
    with caplog.at_level(logging.INFO):
        backend = resolve_backend("auto", platform, kind, **shapes)
    assert backend.name == expected
    assert f"attention backend: {expected} on {kind}" in caplog.text
    # what is said of another platform's kernels would only confuse
    best_first = {"gpu": ["mosaic_gpu", "triton"], "tpu": ["mosaic_tpu"]}.get(backend.platform, [])
    worse = best_first[: best_first.index(expected)] if expected in best_first else best_first
    assert re.findall(r"(\w+) passed over", caplog.text) == worse
    assert backend.default_page_size in backend.page_sizes
    assert backend.platform == ("gpu" if platform in ("cuda", "rocm") else platform)


@pytest.mark.parametrize(
    ("name", "platform", "kind", "shapes", "message"),
    [
        ("mosaic_gpu", "cpu", "cpu", {}, "needs an NVIDIA Hopper GPU"),
        ("mosaic_gpu", "gpu", "NVIDIA B200", {}, "NVIDIA B200"),
        ("mosaic_gpu", "gpu", "NVIDIA H200", {"dtype": "float32"}, "the dtype is float32"),
        ("mosaic_gpu", "gpu", "NVIDIA H200", {"head_dim": 72}, "multiples of 16 up to 256, and the model's is 72"),
        ("mosaic_gpu", "gpu", "NVIDIA H200", {"head_dim": 320}, "the model's is 320"),
        ("mosaic_gpu", "gpu", "NVIDIA H200", {"group": 17}, "the model has 17"),
        ("mosaic_gpu", "tpu", "TPU v5e", {}, "needs an NVIDIA Hopper GPU"),
        ("triton", "cpu", "cpu", {}, "needs an NVIDIA Ampere, Ada or Hopper GPU"),
        ("triton", "gpu", "Tesla T4", {}, "Tesla T4"),
        ("triton", "gpu", "NVIDIA A100-SXM4-80GB", {"dtype": "float32"}, "the dtype is float32"),
        ("triton", "gpu", "NVIDIA L4", {"head_dim": 512}, "the model's is 512"),
        ("mosaic_tpu", "cpu", "cpu", {}, "needs a TPU"),
        ("mosaic_tpu", "gpu", "NVIDIA H200", {}, "NVIDIA H200"),
        ("mosaic_tpu", "tpu", "TPU v2", {}, "this is TPU v2"),
        ("mosaic_tpu", "tpu", "TPU v5e", {"dtype": "float16"}, "the dtype is float16"),
        ("mosaic_tpu", "tpu", "TPU v5e", {"head_dim": 320}, "the model's is 320"),
    ],
)
def test_a_named_backend_that_cannot_run_raises(name, platform, kind, shapes, message):
    with pytest.raises(ConfigError, match=message) as caught:
        resolve_backend(name, platform, kind, **shapes)
    assert caught.value.param == "attention_backend"


def test_triton_can_be_asked_for_on_hopper():
    assert resolve_backend("triton", "gpu", "NVIDIA H200", dtype="bfloat16", head_dim=128, group=4).name == "triton"


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ConfigError, match="auto, mosaic_gpu, triton, mosaic_tpu, reference, got 'flash'"):
        resolve_backend("flash", "cpu", "cpu")


@pytest.mark.parametrize("sinks", [False, True])
def test_the_reference_backend_serves_a_step(sinks):
    backend = resolve_backend("reference", "cpu", "cpu")
    case = Case(decode=(20, 0, 65), page_size=16, sinks=sinks)
    step = make_rope_step(RopeCase(case, bias=True))

    @jax.jit
    def run(qkv, kv, meta, cos, sin, weights):
        how = {"sinks": None} | case.options
        return backend.attend(qkv, kv, backend.prepare(meta, 16), cos, sin, **weights, **step.options, **how)

    assert qkv_error(*run(*step.arguments), step, case) < TOLERANCE["float32"]


@pytest.mark.parametrize(
    ("platform", "kind", "widths"),
    [
        ("cpu", "cpu", {64: 64, 80: 80}),
        ("gpu", "NVIDIA H200", {16: 64, 64: 64, 80: 128, 96: 128, 128: 128, 160: 256, 256: 256}),
        ("tpu", "TPU v5e", {64: 128, 80: 128, 96: 128, 128: 128, 256: 256}),
    ],
)
def test_how_wide_pages_are(platform, kind, widths):
    backend = resolve_backend("auto", platform, kind)
    assert {head_dim: backend.stored_head_dim(head_dim) for head_dim in widths} == widths

"""Benchmarks: what is sent, what is counted, and the figures that come out of known timings."""

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tokenizers

from jaxserve import cli, metrics
from jaxserve.bench import datasets, latency, offline, report, serve, server_metrics, throughput
from jaxserve.bench.datasets import RandomLengths, random_samples
from jaxserve.bench.load import arrival_times_s
from jaxserve.bench.report import RequestTiming
from jaxserve.errors import ConfigError, RequestError
from jaxserve.request import CompletionOutput, EngineStats, RequestOutput


class WordCodec:
    """A tokenizer whose tokens are words: id 12 is "w12". Decoding joins neighbours below 3, so text may be shorter."""

    vocab_size = 100
    special_ids = frozenset({0, 99})

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [int(word[1:]) if word[1:].isdigit() else 50 for word in text.split()]

    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str:
        return " ".join(f"w{i}" for i in ids).replace("w1 w2", "w12")


# ---------------------------------------------------------------------------------------------------- data sets


def test_random_samples_are_a_function_of_the_seed():
    lengths = RandomLengths(input_len=20, output_len=5)
    assert random_samples(8, lengths, 100, seed=3) == random_samples(8, lengths, 100, seed=3)
    assert random_samples(8, lengths, 100, seed=3) != random_samples(8, lengths, 100, seed=4)


def test_random_samples_begin_with_different_ids_within_the_vocabulary():
    samples = random_samples(98, RandomLengths(input_len=20, output_len=5), 100, 0, special_ids=frozenset({0, 99}))
    assert len({sample.prompt[0] for sample in samples}) == 98
    used = {i for sample in samples for i in sample.prompt}
    assert min(used) >= 1 and max(used) <= 98
    assert all(len(s.prompt) == s.prompt_len == 20 and s.output_len == 5 for s in samples)


def test_random_samples_share_the_prefix_that_was_asked_for():
    samples = random_samples(5, RandomLengths(input_len=10, output_len=1, prefix_len=7), 100, 0)
    assert len({tuple(s.prompt[:7]) for s in samples}) == 1
    assert len({s.prompt[7] for s in samples}) == 5
    assert all(s.prompt_len == 17 for s in samples)


def test_random_lengths_lie_within_their_range():
    samples = random_samples(300, RandomLengths(input_len=100, output_len=10, range_ratio=0.5), 1000, 0)
    assert (min(s.prompt_len for s in samples), max(s.prompt_len for s in samples)) == (50, 150)
    assert (min(s.output_len for s in samples), max(s.output_len for s in samples)) == (5, 15)


@pytest.mark.parametrize(
    ("options", "flag"),
    [({"input_len": 0}, "input-len"), ({"output_len": 0}, "output-len"), ({"range_ratio": 1.0}, "range-ratio"),
     ({"range_ratio": -0.1}, "range-ratio"), ({"prefix_len": -1}, "prefix-len")],
)  # fmt: skip
def test_bad_random_lengths_name_the_flag(options: dict[str, Any], flag: str):
    with pytest.raises(ConfigError, match=f"--random-{flag}"):
        RandomLengths(**options)


def test_text_of_random_ids_has_the_length_of_the_ids():
    codec = WordCodec()
    sample = datasets.Sample([1, 2, 3, 4, 1, 2], 6, 9)
    text = datasets.as_text(sample, codec)
    assert len(codec.encode(text.prompt)) == text.prompt_len == 6
    assert text.output_len == 9


def dataset_args(**values: Any) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    datasets.add_dataset_arguments(parser)
    return argparse.Namespace(**{**vars(parser.parse_args([])), "seed": 0, **values})


def test_custom_lines(tmp_path: Path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "w1 w3"}\n\n{"prompt": "w4", "output_tokens": 3}\n')
    args = dataset_args(dataset_name="custom", dataset_path=file, custom_output_len=9)
    samples = datasets.load_samples(args, 3, WordCodec(), None)
    assert [(s.prompt, s.prompt_len, s.output_len) for s in samples] == [("w1 w3", 2, 9), ("w4", 1, 3), ("w1 w3", 2, 9)]


@pytest.mark.parametrize("line", ["{", "[]", '{"text": "a"}', '{"prompt": 1}', '{"prompt": "a", "output_tokens": "x"}'])
def test_a_bad_custom_line_is_named(line: str, tmp_path: Path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "good"}\n' + line)
    with pytest.raises(ConfigError, match="line 2"):
        datasets.load_samples(dataset_args(dataset_name="custom", dataset_path=file), 1, None, None)


def sharegpt_file(tmp_path: Path, lengths: list[tuple[int, int]]) -> Path:
    file = tmp_path / "sharegpt.json"
    rows = [{"conversations": [{"value": " ".join(["w5"] * n)} for n in pair]} for pair in lengths]
    file.write_text(json.dumps(rows))
    return file


def test_sharegpt_leaves_out_what_is_too_short_or_too_long(tmp_path: Path):
    file = sharegpt_file(tmp_path, [(3, 9), (9, 3), (1025, 9), (1000, 1500), (10, 20), (4, 4)])
    args = dataset_args(dataset_name="sharegpt", dataset_path=file)
    samples = datasets.load_samples(args, 4, WordCodec(), None)
    assert sorted({(s.prompt_len, s.output_len) for s in samples}) == [(4, 4), (10, 20)]
    args.sharegpt_output_len = 7
    assert {s.output_len for s in datasets.load_samples(args, 2, WordCodec(), None)} == {7}


@pytest.mark.parametrize("text", ["{", "{}", '[{"conversations": 1}]', "[]"])
def test_a_file_that_is_not_sharegpt_is_named(text: str, tmp_path: Path):
    file = tmp_path / "sharegpt.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match="sharegpt.json"):
        datasets.load_samples(dataset_args(dataset_name="sharegpt", dataset_path=file), 1, WordCodec(), None)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"dataset_name": "custom"}, "needs --dataset-path"),
        ({"dataset_name": "custom", "dataset_path": Path("/nothing/here")}, "/nothing/here"),
        ({"dataset_name": "sharegpt", "dataset_path": Path("x")}, "needs --tokenizer"),
        ({"dataset_name": "random"}, "--tokenizer or --vocab-size"),
        ({"dataset_name": "random", "dataset_path": Path("x")}, "goes with"),
    ],
)
def test_what_a_dataset_needs(values: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        datasets.load_samples(dataset_args(**values), 1, None, None)


# ------------------------------------------------------------------------------------------------------ arrivals


def test_an_infinite_rate_starts_all_at_once():
    assert arrival_times_s(5, float("inf"), 1.0, 0).tolist() == [0.0] * 5


@pytest.mark.parametrize("burstiness", [0.2, 1.0, 50.0])
def test_arrivals_keep_the_rate_and_follow_the_burstiness(burstiness: float):
    times = arrival_times_s(4000, 8.0, burstiness, 0)
    gaps = np.diff(times)
    assert times[-1] == pytest.approx(500)
    assert (gaps >= 0).all()
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.15)  # of a gamma distribution


# ------------------------------------------------------------------------------------------------------- figures

TIMINGS = [
    RequestTiming(0.0, prompt_len=10, output_len=3, ttft_s=0.1, itls_s=[0.2, 0.4], latency_s=0.7, text="abc"),
    RequestTiming(0.5, prompt_len=20, output_len=1, ttft_s=0.3, itls_s=[], latency_s=0.3, text="d"),
    RequestTiming(0.0, prompt_len=99, output_len=9, error="gone"),
]


def numbers(**options: Any) -> dict[str, Any]:
    defaults = {"metrics": ["ttft", "tpot", "itl", "e2el"], "percentiles": [50.0, 99.0, 99.9], "goodput": {}}
    return report.run_numbers(TIMINGS, 2.0, **{**defaults, **options})


def test_figures_of_known_timings():
    got = numbers()
    assert (got["completed"], got["failed"], got["duration"]) == (2, 1, 2.0)
    assert (got["total_input_tokens"], got["total_output_tokens"]) == (30, 4)
    assert (got["request_throughput"], got["output_throughput"], got["total_token_throughput"]) == (1.0, 2.0, 17.0)
    assert got["mean_ttft_ms"] == pytest.approx(200) and got["median_ttft_ms"] == pytest.approx(200)
    assert got["p50_ttft_ms"] == pytest.approx(200) and got["p99.9_ttft_ms"] == pytest.approx(299.8)
    assert got["mean_tpot_ms"] == pytest.approx(300) and got["std_tpot_ms"] == 0  # one request has no second token
    assert got["mean_itl_ms"] == pytest.approx(300) and got["p99_itl_ms"] == pytest.approx(398)
    assert got["mean_e2el_ms"] == pytest.approx(500)
    assert got["max_concurrent_requests"] == 2 and got["max_output_tokens_per_s"] == 4
    assert got["request_goodput"] is None


def test_goodput_counts_requests_within_all_limits():
    assert numbers(goodput={"ttft": 200.0})["request_goodput"] == 0.5
    assert numbers(goodput={"ttft": 200.0, "tpot": 299.0})["request_goodput"] == 0.0
    assert numbers(goodput={"e2el": 700.1})["request_goodput"] == 1.0


def test_figures_of_a_run_in_which_all_failed():
    got = report.run_numbers(TIMINGS[2:], 1.0, metrics=["ttft", "itl"], percentiles=[99.0], goodput={})
    assert (got["completed"], got["failed"], got["mean_ttft_ms"], got["p99_itl_ms"]) == (0, 1, 0.0, 0.0)


def test_peak_tokens_are_those_of_the_best_second():
    one = RequestTiming(0.0, output_len=4, ttft_s=0.9, itls_s=[0.2, 0.1, 0.9], latency_s=2.1)
    assert report.peak_tokens_per_s([one]) == 2
    assert report.peak_tokens_per_s([one, replace(one, start_s=0.5)]) == 5
    assert report.peak_tokens_per_s([replace(one, output_len=8)]) == 4  # two tokens in each piece


@pytest.mark.parametrize("text", ["", "x", "50,", "101", "-1"])
def test_bad_percentiles(text: str):
    with pytest.raises(ConfigError, match="--metric-percentiles"):
        report.parse_percentiles(text)


@pytest.mark.parametrize("pair", ["ttft", "ttft:", "itl:5", "ttft:-1", "ttft:x"])
def test_bad_goodput(pair: str):
    with pytest.raises(ConfigError, match="--goodput"):
        report.parse_goodput([pair])


# ------------------------------------------------------------------------------------------------- bench serve

BASE = [
    "bench",
    "serve",
    "--disable-tqdm",
    "--vocab-size",
    "1000",
    "--random-input-len",
    "12",
    "--random-output-len",
    "5",
]


def bench_serve(stand_in, tmp_path: Path, *argv: str) -> dict[str, Any]:
    file = tmp_path / "out" / "result.json"
    save = ["--save-detailed", "--result-dir", str(file.parent), "--result-filename", file.name]
    assert cli.main([*BASE, "--base-url", stand_in.url, *save, *argv]) == 0
    return json.loads(file.read_text())


def test_bench_serve_sends_what_was_asked_and_reports_it(stand_in, tmp_path: Path, capsys):
    stand_in.delay_s = 0.002
    argv = (
        "--num-prompts 7 --num-warmups 2 --ignore-eos --top-k 3 --metric-percentiles 50,99 --max-concurrency 3".split()
    )
    result = bench_serve(stand_in, tmp_path, *argv, "--extra-body", '{"min_tokens": 5}')
    assert len(stand_in.bodies) == 9 and stand_in.most_running <= 3
    body = stand_in.bodies[0]
    assert len(body["prompt"]) == 12 and all(0 <= i < 1000 for i in body["prompt"])
    assert (body["max_tokens"], body["ignore_eos"], body["top_k"], body["min_tokens"]) == (5, True, 3, 5)
    assert (body["temperature"], body["model"], body["stream"]) == (0.0, "stand-in", True)
    assert len({tuple(b["prompt"]) for b in stand_in.bodies}) == 9
    assert (result["completed"], result["failed"], result["num_prompts"]) == (7, 0, 7)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (7 * 7, 7 * 5)  # as the server counts
    assert result["generated_texts"] == ["w0 w1 w2 w3 w4 "] * 7
    assert all(len(gaps) == 4 for gaps in result["itls"])
    assert result["max_concurrent_requests"] <= 3 and result["request_rate"] == "inf"
    out = capsys.readouterr().out
    for line in ("Successful requests:", "Median TTFT (ms):", "P50 TPOT (ms):", "P99 ITL (ms):"):
        assert line in out


VLLM_KEYS = (
    "date endpoint_type label model_id tokenizer_id num_prompts request_rate burstiness max_concurrency duration completed "
    "failed total_input_tokens total_output_tokens request_throughput request_goodput output_throughput "
    "total_token_throughput input_lens output_lens ttfts itls generated_texts errors "
    "mean_ttft_ms median_ttft_ms std_ttft_ms p99_ttft_ms mean_tpot_ms median_tpot_ms std_tpot_ms p99_tpot_ms "
    "mean_itl_ms median_itl_ms std_itl_ms p99_itl_ms"
).split()


def test_result_files_have_vllms_keys(stand_in, tmp_path: Path):
    result = bench_serve(stand_in, tmp_path, "--num-prompts", "2")
    assert not [key for key in VLLM_KEYS if key not in result]


def test_results_without_details_have_a_name_of_their_own(stand_in, tmp_path: Path):
    argv = [
        "--num-prompts",
        "2",
        "--save-result",
        "--result-dir",
        str(tmp_path),
        "--max-concurrency",
        "2",
        "--label",
        "x",
    ]
    assert cli.main([*BASE, "--base-url", stand_in.url, *argv]) == 0
    (file,) = tmp_path.iterdir()
    assert file.name.startswith("x-infqps-concurrency2-stand-in-")
    assert "itls" not in json.loads(file.read_text())


def test_chat_backend(stand_in, tmp_path: Path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "hello", "output_tokens": 4}\n')
    argv = ["--backend", "openai-chat", "--dataset-name", "custom", "--dataset-path", str(file), "--num-prompts", "2"]
    result = bench_serve(stand_in, tmp_path, *argv)
    assert stand_in.bodies[0]["messages"] == [{"role": "user", "content": "hello"}]
    assert stand_in.bodies[0]["max_completion_tokens"] == 4
    assert all(len(gaps) == 3 for gaps in result["itls"])  # the chunk that only names the role is no token


def test_tokenizer_may_be_a_folder_with_nothing_else(stand_in, tmp_path: Path):
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, "a")).save(str(folder / "tokenizer.json"))
    assert datasets.load_codec("a model that is elsewhere", str(folder)).vocab_size == 2
    assert bench_serve(stand_in, tmp_path, "--tokenizer", str(folder), "--num-prompts", "2")["completed"] == 2


def test_random_text_for_chat_comes_from_the_tokenizer(stand_in, tmp_path: Path, monkeypatch):
    monkeypatch.setattr("jaxserve.bench.serve.load_codec", lambda model, tokenizer: WordCodec())
    bench_serve(stand_in, tmp_path, "--backend", "openai-chat", "--num-prompts", "2")
    assert len(stand_in.bodies[0]["messages"][0]["content"].split()) == 12


def test_failures_are_counted_and_shown(stand_in, tmp_path: Path, capsys):
    stand_in.fail = lambda body: 429 if len(stand_in.bodies) % 2 else None
    result = bench_serve(stand_in, tmp_path, "--num-prompts", "4")
    assert (result["completed"], result["failed"]) == (2, 2)
    assert sorted(result["errors"]) == ["", "", "refused by the stand-in", "refused by the stand-in"]
    assert "refused by the stand-in" in capsys.readouterr().out


def test_a_broken_stream_is_a_failure(stand_in, tmp_path: Path):
    stand_in.break_after = 2
    argv = [*BASE, "--base-url", stand_in.url, "--num-prompts", "2"]
    assert cli.main(argv) == 1


def test_without_a_success_there_is_an_error_and_no_table(stand_in, tmp_path: Path, capsys):
    stand_in.fail = lambda body: 400
    save = ["--save-detailed", "--result-dir", str(tmp_path), "--result-filename", "r.json"]
    assert cli.main([*BASE, "--base-url", stand_in.url, "--num-prompts", "3", *save]) == 1
    out, err = capsys.readouterr()
    assert err == "jaxserve: error: 3 of 3 requests failed: refused by the stand-in\n"
    assert "Throughput" not in out and "Benchmark" not in out
    assert json.loads((tmp_path / "r.json").read_text())["failed"] == 3


@pytest.mark.parametrize(
    ("errors", "said"),
    [
        (["", ""], ""),
        (["a", ""], "1 of 2 requests failed: a"),
        (["a", "b", "b"], "3 of 3 requests failed: b (and 1 other error)"),
        (["a", "b", "b", "c", ""], "4 of 5 requests failed: b (and 2 other errors)"),
    ],
)
def test_failures_are_told_by_the_most_common(errors: list[str], said: str):
    assert serve._failures([RequestTiming(0.0, error=error) for error in errors]) == said


def test_a_failed_warm_up_ends_the_run(stand_in, capsys):
    stand_in.fail = lambda body: 400
    assert cli.main([*BASE, "--base-url", stand_in.url, "--num-prompts", "2", "--num-warmups", "1"]) == 1
    assert capsys.readouterr().err == "jaxserve: error: a warm-up request failed: refused by the stand-in\n"
    assert len(stand_in.bodies) == 1


def test_requests_start_at_their_time(stand_in, tmp_path: Path):
    begin_s = time.monotonic()
    result = bench_serve(stand_in, tmp_path, "--num-prompts", "4", "--request-rate", "10", "--burstiness", "100")
    assert time.monotonic() - begin_s >= 0.4  # the last one starts at 4 / 10 s
    assert result["duration"] >= 0.4 and stand_in.most_running == 1


def test_a_server_that_never_comes(capsys):
    argv = [*BASE, "--port", "9", "--ready-check-timeout-sec", "1.1"]
    assert cli.main(argv) == 1
    waiting, error = capsys.readouterr().err.splitlines()
    assert waiting.startswith("waiting for the server, at most 1.1 s: cannot reach http://127.0.0.1:9/v1/models")
    assert error.startswith("jaxserve: error: cannot reach http://127.0.0.1:9/v1/models")


@pytest.mark.parametrize("status", [400, 401, 403, 404, 429])
def test_a_server_that_refuses_is_not_waited_for(status: int, stand_in, capsys):
    stand_in.refuse_models = status, {"error": {"message": "not you"}}
    assert cli.main([*BASE, "--base-url", stand_in.url]) == 1
    err = capsys.readouterr().err
    assert "not you" in err and "waiting" not in err and err.count("\n") == 1


def test_a_base_url_with_v1_gets_a_hint(stand_in, capsys):
    assert cli.main([*BASE, "--base-url", f"{stand_in.url}/v1"]) == 1
    assert f"this URL goes without /v1: try {stand_in.url}\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--request-rate", "0"], "--request-rate must be positive"),
        (["--burstiness", "0"], "--burstiness must be positive"),
        (["--temperature", "nan"], "--temperature must be finite, got nan"),
        (["--top-p", "inf"], "--top-p must be finite, got inf"),
        (["--repetition-penalty=-inf"], "--repetition-penalty must be finite, got -inf"),
        (["--max-concurrency", "0"], "--max-concurrency must be positive"),
        (["--extra-body", "{"], "--extra-body is not JSON"),
        (["--extra-body", '{"temperature": NaN}'], "--extra-body is not JSON"),
        (["--extra-body", "[" * 5000], "--extra-body is not JSON"),
        (["--extra-body", "[]"], "--extra-body must be a JSON object"),
        (["--percentile-metrics", "ttft,x"], "unknown 'x'"),
        (["--goodput", "x:1"], "--goodput takes"),
    ],
)
def test_bad_options_are_refused_before_anything_is_sent(argv: list[str], message: str, stand_in, capsys):
    assert cli.main([*BASE, "--base-url", stand_in.url, *argv]) == 2
    assert message in capsys.readouterr().err
    assert stand_in.bodies == []


def test_the_servers_own_figures_are_reported(stand_in, tmp_path: Path, capsys):
    result = bench_serve(stand_in, tmp_path, "--num-prompts", "2")
    assert result["mean_kv_cache_wasted_slots_ratio"] == result["max_kv_cache_wasted_slots_ratio"] == 0.125
    assert result["prefix_cache_hits"] == stand_in.scrapes - 1  # the stand-in counts its scrapes
    assert "Mean wasted KV slots (%):                12.50" in capsys.readouterr().out


def test_the_names_read_are_names_that_our_server_has():
    stats = EngineStats(running=1, allocated_token_slots=8, used_token_slots=6, peak_device_memory_bytes=2**31)
    first = server_metrics.parse_metrics(metrics.Metrics(lambda: stats, "m").text().decode())
    both = server_metrics.ServerMetrics(client=None, samples=[first, first])  # type: ignore[arg-type]
    assert both.numbers() == {
        "mean_kv_cache_wasted_slots_ratio": 0.25,
        "max_kv_cache_wasted_slots_ratio": 0.25,
        "max_kv_cache_usage": 0.0,
        "prefix_cache_hits": 0.0,
        "num_preemptions": 0.0,
        "compiles_after_warmup": 0.0,
        "peak_device_memory_bytes": 2.0**31,
    }


def test_a_device_that_does_not_tell_its_peak_has_no_gauge():
    assert b"peak_device_memory_bytes" not in metrics.Metrics(EngineStats, "m").text()


# ----------------------------------------------------------------------------------------------------- offline


class FakeLLM:
    """Answers each prompt with as many tokens as asked, and counts."""

    def __init__(self) -> None:
        self.batches: list[tuple[list[list[int]], Any]] = []
        self.stats = EngineStats(allocated_token_slots=16, used_token_slots=12, peak_device_memory_bytes=3 * 2**29)

    info = SimpleNamespace(vocab_size=98, max_model_len=2048)  # the tokenizer knows 2 ids more

    def get_tokenizer(self) -> WordCodec:
        return WordCodec()

    def get_metrics(self) -> EngineStats:
        return self.stats

    def generate(self, prompts: list[list[int]], params: Any, *, use_tqdm: bool) -> list[RequestOutput]:
        self.batches.append((prompts, params))
        time.sleep(2 * offline.WATCH_PERIOD_S)
        self.stats = replace(self.stats, preemptions=self.stats.preemptions + 1)
        each = params if isinstance(params, list) else [params] * len(prompts)
        return [
            RequestOutput("0", None, ids, [CompletionOutput(i, token_ids=[1] * p.max_tokens) for i in range(p.n)])
            for ids, p in zip(prompts, each)
        ]


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> FakeLLM:
    fake = FakeLLM()
    for module in (latency, throughput):
        monkeypatch.setattr(module, "load_llm", lambda args: fake)
    return fake


def test_throughput(llm: FakeLLM, tmp_path: Path, capsys):
    file = tmp_path / "t.json"
    argv = "bench throughput --num-prompts 3 --num-warmups 1 --input-len 6 --output-len 4 --n 2 --disable-tqdm".split()
    assert cli.main([*argv, "--output-json", str(file)]) == 0
    (warm, _), (prompts, params) = llm.batches
    assert len(warm) == 1 and [len(p) for p in prompts] == [6, 6, 6] and warm[0] not in prompts
    assert all(i < 98 for ids in warm + prompts for i in ids)
    assert all(p.ignore_eos and p.max_tokens == 4 and p.n == 2 and p.detokenize for p in params)
    got = json.loads(file.read_text())
    assert (got["num_requests"], got["total_num_tokens"], got["total_output_tokens"]) == (3, 18 + 24, 24)
    assert got["tokens_per_second"] == pytest.approx(42 / got["elapsed_time"])
    assert (got["num_preemptions"], got["mean_kv_cache_wasted_slots_ratio"]) == (1, 0.25)
    assert got["peak_device_memory_bytes"] == 3 * 2**29
    out = capsys.readouterr().out
    assert out.startswith("Throughput: ") and out.endswith("\nPeak device memory: 1.50 GiB\n")


def test_latency(llm: FakeLLM, tmp_path: Path, capsys):
    file = tmp_path / "l.json"
    argv = "bench latency --batch-size 2 --input-len 5 --output-len 3 --num-iters 3 --num-iters-warmup 1 --disable-tqdm"
    assert cli.main([*argv.split(), "--output-json", str(file)]) == 0
    assert len(llm.batches) == 4 and all(i < 98 for prompts, _ in llm.batches for ids in prompts for i in ids)
    assert len({tuple(p) for prompts, _ in llm.batches for p in prompts}) == 8  # never a prompt twice
    got = json.loads(file.read_text())
    assert len(got["latencies"]) == 3 and got["avg_latency"] == pytest.approx(np.mean(got["latencies"]))
    assert list(got["percentiles"]) == ["10", "25", "50", "75", "90", "99"]
    assert "99% percentile latency" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("latency --batch-size 0", "--batch-size must be at least 1"),
        ("latency --output-len 0", "--output-len must be at least 1"),
        ("latency --num-iters-warmup -1", "--num-iters-warmup must be at least 0"),
        ("throughput --num-prompts 0", "--num-prompts must be at least 1"),
        ("throughput --input-len 4 --dataset-name custom --dataset-path x", "--input-len goes with"),
    ],
)
def test_bad_offline_options(argv: str, message: str, llm: FakeLLM, capsys):
    assert cli.main(["bench", *argv.split()]) == 2
    assert message in capsys.readouterr().err and not llm.batches


@pytest.mark.parametrize("command", ["throughput", "latency"])
def test_prompts_that_are_too_long_name_the_option(command: str, llm: FakeLLM, capsys):
    assert cli.main(["bench", command, "--input-len", "2000", "--output-len", "49"]) == 2
    assert capsys.readouterr().err == (
        "jaxserve: error: a prompt of 2000 tokens and an answer of 49 do not fit the model's context of 2048: "
        "lower --input-len or --output-len\n"
    )
    assert not llm.batches


def test_engine_options_reach_the_llm(monkeypatch: pytest.MonkeyPatch):
    import sys

    seen: dict[str, Any] = {}
    module = SimpleNamespace(LLM=lambda **options: seen.update(options))
    monkeypatch.setitem(sys.modules, "jaxserve.llm", module)  # type: ignore[arg-type]
    parser = argparse.ArgumentParser()
    throughput.add_throughput_arguments(parser)
    offline.load_llm(parser.parse_intermixed_args(["some/model", "--dtype", "float32", "--max-num-seqs", "4"]))
    assert (seen["model"], seen["dtype"], seen["max_num_seqs"]) == ("some/model", "float32", 4)
    assert "max_queue_len" not in seen  # LLM has its own: offline, the list is the queue


def test_a_result_that_cannot_be_written_is_an_error(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write"):
        report.write_json(tmp_path / "file" / "x.json", {})


def test_bad_sampling_values_are_refused(llm: FakeLLM):
    with pytest.raises(RequestError, match="temperature"):
        throughput.run_throughput(_throughput_args("--temperature", "3"))


def _throughput_args(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    throughput.add_throughput_arguments(parser)
    return parser.parse_intermixed_args(argv)

"""`jaxserve bench latency`: how long one batch takes offline. Flags and JSON keys are those of vLLM's command."""

import argparse
import time

import numpy as np
from tqdm import trange

from jaxserve.bench.datasets import RandomLengths, random_samples
from jaxserve.bench.offline import check_lengths, common_vocab_size, load_llm, watched_slots
from jaxserve.bench.report import add_output_json_argument, percentile_key, write_json
from jaxserve.config import EngineConfig, add_arguments
from jaxserve.errors import ConfigError
from jaxserve.request import SamplingParams

PERCENTILES = (10, 25, 50, 75, 90, 99)


def add_latency_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("benchmark")
    for flag, default, doc in (
        ("input-len", 32, "tokens of each prompt"),
        ("output-len", 128, "tokens of each answer"),
        ("batch-size", 8, "prompts in a batch"),
        ("n", 1, "answers per prompt"),
        ("num-iters-warmup", 10, "batches before the measured ones"),
        ("num-iters", 30, "measured batches"),
    ):
        group.add_argument(f"--{flag}", metavar="N", type=int, default=default, help=f"{doc} (default: {default})")
    group.add_argument("--disable-tqdm", action="store_true", help="no progress bar")
    add_output_json_argument(group)
    add_arguments(parser, EngineConfig)


def run_latency(args: argparse.Namespace) -> int:
    for name in ("input_len", "output_len", "batch_size", "n", "num_iters"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}")
    if args.num_iters_warmup < 0:
        raise ConfigError(f"--num-iters-warmup must be at least 0, got {args.num_iters_warmup}")
    lengths = RandomLengths(input_len=args.input_len, output_len=args.output_len)
    llm = load_llm(args)
    count, special_ids = args.batch_size * (args.num_iters_warmup + args.num_iters), llm.get_tokenizer().special_ids
    samples = random_samples(count, lengths, common_vocab_size(llm), getattr(args, "seed", 0), special_ids)
    check_lengths(samples, llm)
    params = SamplingParams(n=args.n, temperature=1.0, ignore_eos=True, max_tokens=args.output_len, detokenize=False)

    def run_batch(number: int) -> float:
        batch = samples[number * args.batch_size : (number + 1) * args.batch_size]  # new prompts: no prefix hits
        start_s = time.perf_counter()
        llm.generate([sample.prompt for sample in batch], params, use_tqdm=False)
        return time.perf_counter() - start_s

    for i in trange(args.num_iters_warmup, desc="Warm-up", disable=args.disable_tqdm):
        run_batch(i)
    with watched_slots(llm) as watch:
        measured = trange(args.num_iters, desc="Batches", disable=args.disable_tqdm)
        latencies = [run_batch(args.num_iters_warmup + i) for i in measured]
    percentiles = dict(zip(map(percentile_key, PERCENTILES), np.percentile(latencies, PERCENTILES).tolist()))
    average = float(np.mean(latencies))
    print(f"Avg latency: {average:.4f} seconds")
    for key, value in percentiles.items():
        print(f"{key}% percentile latency: {value:.4f} seconds")
    output_tokens = args.batch_size * args.n * args.output_len
    print(f"Output: {output_tokens / average:.2f} tokens/s")
    print(watch.line())
    if args.output_json:
        data = {"avg_latency": average, "latencies": latencies, "percentiles": percentiles}
        write_json(args.output_json, data | watch.numbers())
    return 0

"""`jaxserve bench throughput`: tokens per second offline. Flags and JSON keys are those of vLLM's command."""

import argparse
import time

from jaxserve.bench.datasets import add_dataset_arguments, load_samples
from jaxserve.bench.offline import check_lengths, common_vocab_size, load_llm, watched_slots
from jaxserve.bench.report import add_output_json_argument, write_json
from jaxserve.config import EngineConfig, add_arguments
from jaxserve.errors import ConfigError
from jaxserve.request import SamplingParams


def add_throughput_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("benchmark")
    group.add_argument("--num-prompts", metavar="N", type=int, default=1000, help="requests (default: %(default)s)")
    group.add_argument("--input-len", metavar="N", type=int, help="same as --random-input-len")
    group.add_argument(
        "--output-len", metavar="N", type=int, help="same as --random-output-len, --sharegpt-..., --custom-..."
    )
    group.add_argument("--n", metavar="N", type=int, default=1, help="answers per prompt (default: %(default)s)")
    group.add_argument("--temperature", metavar="X", type=float, default=1.0, help="0 is greedy (default: %(default)s)")
    group.add_argument("--num-warmups", metavar="N", type=int, default=0, help="requests before (default: %(default)s)")
    group.add_argument("--disable-detokenize", action="store_true", help="ids only, no text")
    group.add_argument("--disable-tqdm", action="store_true", help="no progress bar")
    add_output_json_argument(group)
    add_dataset_arguments(parser)
    add_arguments(parser, EngineConfig)


def run_throughput(args: argparse.Namespace) -> int:
    _apply_lengths(args)
    args.seed = getattr(args, "seed", 0)
    if args.num_warmups < 0:
        raise ConfigError(f"--num-warmups must be at least 0, got {args.num_warmups}")
    if args.num_prompts < 1:
        raise ConfigError(f"--num-prompts must be at least 1, got {args.num_prompts}")
    llm = load_llm(args)
    samples = load_samples(args, args.num_prompts + args.num_warmups, llm.get_tokenizer(), common_vocab_size(llm))
    if args.dataset_name == "random":
        check_lengths(samples, llm)
    prompts = [sample.prompt for sample in samples]
    params = [
        SamplingParams(
            n=args.n,
            temperature=args.temperature,
            ignore_eos=True,
            max_tokens=sample.output_len,
            detokenize=not args.disable_detokenize,
        )
        for sample in samples
    ]
    cut = args.num_warmups
    if cut:
        llm.generate(prompts[:cut], params[:cut], use_tqdm=False)
    with watched_slots(llm) as watch:
        start_s = time.perf_counter()
        outputs = llm.generate(prompts[cut:], params[cut:], use_tqdm=not args.disable_tqdm)
        elapsed_s = time.perf_counter() - start_s
    input_tokens = sum(len(o.prompt_token_ids) for o in outputs)
    output_tokens = sum(len(c.token_ids) for o in outputs for c in o.outputs)
    total = input_tokens + output_tokens
    print(
        f"Throughput: {len(outputs) / elapsed_s:.2f} requests/s, {total / elapsed_s:.2f} total tokens/s, "
        f"{output_tokens / elapsed_s:.2f} output tokens/s"
    )
    print(f"Total num prompt tokens:  {input_tokens}")
    print(f"Total num output tokens:  {output_tokens}")
    print(watch.line())
    if args.output_json:
        figures = {
            "elapsed_time": elapsed_s,
            "num_requests": len(outputs),
            "total_num_tokens": total,
            "requests_per_second": len(outputs) / elapsed_s,
            "tokens_per_second": total / elapsed_s,
            "total_input_tokens": input_tokens,
            "total_output_tokens": output_tokens,
            "output_tokens_per_second": output_tokens / elapsed_s,
        }
        write_json(args.output_json, figures | watch.numbers())
    return 0


def _apply_lengths(args: argparse.Namespace) -> None:
    """--input-len and --output-len, the short names of vLLM's command."""
    if args.input_len is not None:
        if args.dataset_name != "random":
            raise ConfigError(f"--input-len goes with --dataset-name random, not {args.dataset_name}")
        args.random_input_len = args.input_len
    if args.output_len is not None:
        args.random_output_len = args.sharegpt_output_len = args.custom_output_len = args.output_len

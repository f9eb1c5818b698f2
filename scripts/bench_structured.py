"""What a JSON schema costs: output tokens/s of a batch with and without, in turn, in one engine. Prints Markdown.

    python scripts/made_tokenizer.py scripts/shapes/llama-8b/config.json /tmp/tokenizer
    python scripts/bench_structured.py --model scripts/shapes/llama-8b --load-format dummy --tokenizer /tmp/tokenizer
        [--batch 64] [any option of `jaxserve serve` for the engine]

Each answer is cut at --output-len tokens: the schema asks for texts longer than that.
"""

import argparse
import statistics
import time
from typing import Any

import numpy as np

from jaxserve import LLM, SamplingParams
from jaxserve.bench.offline import common_vocab_size, load_llm, peak_memory_line
from jaxserve.config import EngineConfig, add_arguments
from jaxserve.request import StructuredOutputsParams

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 100},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 40}, "minItems": 5},
        "score": {"type": "number"},
        "notes": {"type": "string", "minLength": 2000},
    },
    "required": ["name", "tags", "score", "notes"],
    "additionalProperties": False,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=64, help="requests at once (default: %(default)s)")
    parser.add_argument("--input-len", type=int, default=128, help="tokens of a prompt (default: %(default)s)")
    parser.add_argument("--output-len", type=int, default=256, help="tokens of an answer (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each kind (default: %(default)s)")
    add_arguments(parser, EngineConfig)
    args = parser.parse_args()
    llm = load_llm(args)
    kinds = {"plain": None, "top_k 20, top_p 0.8": None, "JSON schema": StructuredOutputsParams(json=SCHEMA)}
    found: dict[str, list[float]] = {name: [] for name in kinds}
    for repeat in range(args.repeats + 1):  # the first round is not counted
        for name, structured in kinds.items():
            sampling: dict[str, Any] = (
                {"temperature": 0.7, "top_k": 20, "top_p": 0.8} if "top_k" in name else {"temperature": 0.7}
            )
            params = SamplingParams(
                **sampling, max_tokens=args.output_len, ignore_eos=True, seed=repeat, structured_outputs=structured
            )
            found[name].append(speed(llm, args, params))
    print("| rows | output tok/s, median | of plain |\n|---|---|---|")
    plain = statistics.median(found["plain"][1:])
    for name, runs in found.items():
        print(f"| {name} | {statistics.median(runs[1:]):,.0f} | {statistics.median(runs[1:]) / plain:.1%} |")
    print(f"\n{peak_memory_line(llm.get_metrics().peak_device_memory_bytes)}")


def speed(llm: LLM, args: argparse.Namespace, params: SamplingParams) -> float:
    rng = np.random.default_rng(time.monotonic_ns())
    prompts = rng.integers(0, common_vocab_size(llm), (args.batch, args.input_len)).tolist()
    begin = time.perf_counter()
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    return sum(len(c.token_ids) for o in outputs for c in o.outputs) / (time.perf_counter() - begin)


if __name__ == "__main__":
    main()

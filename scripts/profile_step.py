"""Where the time of one engine step goes: kernels by their share of the device's time, beside the step's floor.

    python scripts/profile_step.py --model scripts/shapes/qwen-1.5b --load-format dummy --batch 1 64 --context 512
        --tokenizer tests/goldens/vocab/qwen2.gguf [--prefill 2048] [any option of `jaxserve serve` for the engine]

For each batch: that many sequences decode greedily, from `--context` tokens on. Steps are timed on the host clock, the
median of four rounds of 60 (the engine runs one or two steps ahead, so that is the device's pace or the host's,
whichever is slower; where the host hardly waits in collect() it is the host's), then traced. The floor is that of
scripts/floors.py, at --read-tb-s and --matrix-tflops, with the KV of all rows halfway through the rounds. With
--prefill N, six prompts of N tokens are run besides. Last comes the most memory that was in use on the device.
"""

import argparse
import collections
import contextlib
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from floors import Weights, add_card_arguments, card_of, decode_s, least_s, weights_of
from need_gpu import find_gpu

from jaxserve import LLM, SamplingParams
from jaxserve.bench.offline import load_llm, peak_memory_line
from jaxserve.config import EngineConfig, add_arguments

ROUNDS, TIMED_STEPS, TRACED_STEPS, PREFILLS = 4, 60, 20, 6
ROOM = ROUNDS * TIMED_STEPS + 2 * TRACED_STEPS + 40  # tokens that a row gets, and some to spare


class Trace(NamedTuple):
    """Durations in ms, by name: kernels of the device, and calls of the runtime and the driver (they nest)."""

    kernels: dict[str, list[float]]
    host: dict[str, list[float]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 64, 256], help="(default: 1 8 64 256)")
    parser.add_argument("--context", type=int, default=512, help="tokens of each row (default: %(default)s)")
    parser.add_argument("--prefill", type=int, default=0, help="prompt tokens of a second kind of step")
    parser.add_argument("--top", type=int, default=14, help="kernels listed (default: %(default)s)")
    add_card_arguments(parser)
    add_arguments(parser, EngineConfig)
    args = parser.parse_args()
    find_gpu()
    llm = load_llm(args)
    for batch in args.batch:
        profile_decode(args, llm, batch)
    if args.prefill:
        profile_prefill(args, llm)
    print(f"\n{peak_memory_line(llm.get_metrics().peak_device_memory_bytes)}")


def submit(llm: LLM, count: int, prompt_len: int, max_tokens: int) -> list[str]:
    """Hands the engine `count` random prompts, past the frontend."""
    rng = np.random.default_rng(time.monotonic_ns())
    engine: Any = llm._engine
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
    prompts = rng.integers(0, engine.info.vocab_size, (count, prompt_len)).tolist()
    made = [llm._frontend.make_request(f"p{time.monotonic_ns()}-{i}", ids, params) for i, ids in enumerate(prompts)]
    for request in made:
        engine.submit(request)
    return [request.request_id for request in made]


def profile_decode(args: argparse.Namespace, llm: LLM, batch: int) -> None:
    engine: Any = llm._engine
    room = engine.info.max_model_len - args.context
    if batch > engine.info.max_num_seqs or room < ROOM:
        sys.exit(
            f"batch {batch} at context {args.context} needs --max-num-seqs {batch} and --max-model-len "
            f"{args.context + ROOM} at least"
        )
    ids = submit(llm, batch, args.context, room)
    started: set[str] = set()
    while len(started) < batch:
        started |= {delta.request_id for delta in engine.step()}
    run_steps(engine, batch, 12)
    runner = engine._runner
    with clocked(runner, "launch", "_run", "collect") as spent_s, clocked(runner._packer, "pack") as packing_s:
        rounds = [run_steps(engine, batch, TIMED_STEPS) for _ in range(ROUNDS)]
    wall_ms = statistics.median(round.seconds / round.steps for round in rounds) * 1e3
    timed, launches = (sum(getattr(round, name) for round in rounds) for name in ("steps", "launches"))
    trace = traced(engine, TRACED_STEPS)
    stop(engine, ids)
    context = args.context + ROUNDS * TIMED_STEPS // 2
    floor_ms = 1e3 * decode_s(card_of(args), weights_in(runner), batch, context)
    # One copy to the host per launch; of those launched before the trace began, it has nothing.
    steps = len(trace.kernels["MemcpyD2H"]) * timed / launches
    report(f"decode, batch {batch}, context {context} on average", wall_ms, trace, steps, floor_ms, args.top)
    ms = {name: s / timed * 1e3 for name, s in (spent_s | packing_s).items()}
    print(
        f"\nHost, ms/step, {timed / launches:.3g} steps per launch: launch {ms['launch']:.3f} (pack {ms['pack']:.3f}, "
        f"run {ms['_run']:.3f}), collect {ms['collect']:.3f}, the rest {wall_ms - ms['launch'] - ms['collect']:.3f}"
    )


def weights_in(runner: Any) -> Weights:
    """As they lie on the device, where they may be quantized."""
    model, nbytes, itemsize = runner._model, sum(a.nbytes for a in runner._weights), runner._weights[0].dtype.itemsize
    if not model.tied_embeddings:
        nbytes -= model.vocab_size * model.hidden_size * itemsize  # the embedding is only looked up
    return weights_of(model, itemsize)._replace(nbytes=nbytes)


class Round(NamedTuple):
    seconds: float
    steps: float
    launches: int


def run_steps(engine: Any, batch: int, count: int) -> Round:
    """So many steps or a few more, in which each row gets a token: a launch may be several."""
    begin, steps, launches = time.perf_counter(), 0.0, 0
    while steps < count:
        if not engine.has_work():
            sys.exit("the rows have ended: some began long before others; --max-model-len would give them more tokens")
        steps += sum(len(delta.token_ids) for delta in engine.step()) / batch
        launches += 1
    return Round(time.perf_counter() - begin, steps, launches)


@contextlib.contextmanager
def clocked(owner: Any, *names: str) -> Iterator[dict[str, float]]:
    """Seconds spent in these methods of `owner` while the body runs."""
    spent_s = dict.fromkeys(names, 0.0)

    def timed(name: str, method: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            begin = time.perf_counter()
            try:
                return method(*args, **options)
            finally:
                spent_s[name] += time.perf_counter() - begin

        return call

    for name in names:
        setattr(owner, name, timed(name, getattr(owner, name)))
    try:
        yield spent_s
    finally:
        for name in names:
            delattr(owner, name)


def profile_prefill(args: argparse.Namespace, llm: LLM) -> None:
    engine: Any = llm._engine
    for _ in range(2):  # the first round may compile
        submit(llm, PREFILLS, args.prefill, 1)
        begin = time.perf_counter()
        run_dry(engine)
        wall_ms = (time.perf_counter() - begin) / PREFILLS * 1e3
    submit(llm, PREFILLS, args.prefill, 1)
    trace = traced(engine, None)
    all_s = least_s(card_of(args), weights_in(engine._runner), tokens=PREFILLS * args.prefill, drawn=PREFILLS)
    floor_ms = 1e3 * all_s / PREFILLS
    report(f"prefill, {args.prefill} tokens", wall_ms, trace, PREFILLS, floor_ms, args.top)


def run_dry(engine: Any) -> None:
    while engine.has_work():
        engine.step()


def stop(engine: Any, ids: list[str]) -> None:
    for request_id in ids:
        engine.cancel(request_id)
    run_dry(engine)


def traced(engine: Any, steps: int | None) -> Trace:
    """What ran while the engine took `steps` steps, or until it had run dry."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            if steps is None:
                run_dry(engine)
            else:
                for _ in range(steps):
                    engine.step()
                engine._runner.wait()
        return trace_of(Path(folder))


def trace_of(folder: Path) -> Trace:
    trace = Trace(collections.defaultdict(list), collections.defaultdict(list))
    for file in folder.rglob("*.xplane.pb"):
        for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
            device = plane.name.startswith("/device:GPU")
            for line in plane.lines:
                if device and not line.name.startswith("Stream"):
                    continue
                for event in line.events:
                    if device:
                        trace.kernels[kind_of(event.name)].append(event.duration_ns / 1e6)
                    elif plane.name.startswith("/host") and not event.name.startswith("$"):  # $: Python's own
                        trace.host[kind_of(event.name)].append(event.duration_ns / 1e6)
    return trace


def kind_of(name: str) -> str:
    """One name for the copies of a kernel that XLA numbers."""
    return re.sub(r"(_\d+)+$", "", name.split("(")[0])[:70]


def report(title: str, wall_ms: float, trace: Trace, steps: float, floor_ms: float, top: int) -> None:
    device_ms = sum(map(sum, trace.kernels.values())) / steps
    print(
        f"\n### {title}: {wall_ms:.3f} ms/step by the clock, {device_ms:.3f} on the device, floor {floor_ms:.3f} "
        f"({floor_ms / wall_ms:.0%})\n\n| kernel | times | us each | ms/step | share |\n|---|---|---|---|---|"
    )
    for name, count, total in longest(trace.kernels, steps, top):
        print(
            f"| {name} | {count:.1f} | {total / max(count, 1e-9) * 1e3:.1f} | {total:.3f} | {total / device_ms:.0%} |"
        )
    print("\nHost calls that took longest (nested, slowed by tracing), times x us: ", end="")
    print(", ".join(f"{name} {n:.1f} x {t / n * 1e3:.0f}" for name, n, t in longest(trace.host, steps, top)))


def longest(found: dict[str, list[float]], steps: float, top: int) -> list[tuple[str, float, float]]:
    """Name, times per step and ms per step of those that took most time."""
    return [
        (name, len(runs) / steps, sum(runs) / steps)
        for name, runs in sorted(found.items(), key=lambda item: -sum(item[1]))[:top]
    ]


if __name__ == "__main__":
    main()

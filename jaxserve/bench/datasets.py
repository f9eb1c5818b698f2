"""What a benchmark sends: prompts with the length of answer to ask for.

Random prompts are token ids drawn from a seed. Their first ids all differ, so that the prefix cache of the server
cannot help beyond the prefix that `--random-prefix-len` asks for.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from jaxserve.errors import ConfigError

RETOKENIZE_TRIES = 10
SHAREGPT_MIN_TOKENS, SHAREGPT_MAX_PROMPT, SHAREGPT_MAX_TOTAL = 4, 1024, 2048  # what vLLM's bench keeps


class TextCodec(Protocol):
    """The part of a tokenizer that benchmarks need."""

    special_ids: frozenset[int]

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str: ...


@dataclass(frozen=True, slots=True)
class Sample:
    """One prompt, as text or token ids; lengths in tokens. `prompt_len` is None where no tokenizer counted it."""

    prompt: str | list[int]
    prompt_len: int | None
    output_len: int


@dataclass(frozen=True, kw_only=True)
class RandomLengths:
    """Lengths in tokens; each sample's are drawn uniformly from length * (1 ± range_ratio)."""

    input_len: int = 1024
    output_len: int = 128
    range_ratio: float = 0.0
    prefix_len: int = 0

    def __post_init__(self) -> None:
        for flag, value, least in (("input", self.input_len, 1), ("output", self.output_len, 1)):
            if value < least:
                raise ConfigError(f"--random-{flag}-len must be at least {least}, got {value}")
        if self.prefix_len < 0:
            raise ConfigError(f"--random-prefix-len must be at least 0, got {self.prefix_len}")
        if not 0 <= self.range_ratio < 1:
            raise ConfigError(f"--random-range-ratio must be at least 0 and less than 1, got {self.range_ratio}")


def add_dataset_arguments(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Adds --dataset-name, --dataset-path and what each dataset takes; returns their group."""
    group = parser.add_argument_group("dataset")
    group.add_argument(
        "--dataset-name",
        choices=("random", "sharegpt", "custom"),
        default="random",
        help="random: token ids from the seed; sharegpt: a ShareGPT JSON file; custom: JSON lines with `prompt` "
        "(default: %(default)s)",
    )
    group.add_argument("--dataset-path", metavar="FILE", type=Path, help="file of --dataset-name sharegpt or custom")
    group.add_argument(
        "--random-input-len", metavar="N", type=int, default=1024, help="tokens of a prompt (default: %(default)s)"
    )
    group.add_argument(
        "--random-output-len", metavar="N", type=int, default=128, help="tokens of an answer (default: %(default)s)"
    )
    group.add_argument(
        "--random-range-ratio",
        metavar="X",
        type=float,
        default=0.0,
        help="lengths are drawn from length * (1 ± X) (default: %(default)s)",
    )
    group.add_argument(
        "--random-prefix-len",
        metavar="N",
        type=int,
        default=0,
        help="tokens that all prompts begin with, before --random-input-len (default: %(default)s)",
    )
    group.add_argument(
        "--sharegpt-output-len", metavar="N", type=int, help="tokens of an answer (default: as long as the dataset's)"
    )
    group.add_argument(
        "--custom-output-len",
        metavar="N",
        type=int,
        default=256,
        help="tokens of an answer, where a line has no `output_tokens` (default: %(default)s)",
    )
    return group


def load_samples(args: argparse.Namespace, count: int, codec: TextCodec | None, vocab_size: int | None) -> list[Sample]:
    """`count` samples of the dataset that `args` choose; raises ConfigError if it cannot give them."""
    if count < 1:
        raise ConfigError(f"--num-prompts must be at least 1, got {count}")
    if args.dataset_name == "random":
        if args.dataset_path:
            raise ConfigError("--dataset-path goes with --dataset-name sharegpt or custom")
        if vocab_size is None:
            raise ConfigError("--dataset-name random needs --tokenizer or --vocab-size")
        lengths = RandomLengths(
            input_len=args.random_input_len,
            output_len=args.random_output_len,
            range_ratio=args.random_range_ratio,
            prefix_len=args.random_prefix_len,
        )
        return random_samples(count, lengths, vocab_size, args.seed, codec.special_ids if codec else frozenset())
    if args.dataset_path is None:
        raise ConfigError(f"--dataset-name {args.dataset_name} needs --dataset-path FILE")
    if args.dataset_name == "custom":
        return custom_samples(args.dataset_path, count, args.custom_output_len, codec)
    if codec is None:
        raise ConfigError("--dataset-name sharegpt needs --tokenizer")
    return sharegpt_samples(args.dataset_path, count, args.sharegpt_output_len, codec, args.seed)


def random_samples(
    count: int, lengths: RandomLengths, vocab_size: int, seed: int, special_ids: frozenset[int] = frozenset()
) -> list[Sample]:
    """Samples of random token ids in [0, vocab_size), without special ones. A pure function of its arguments."""
    usable = np.array([i for i in range(vocab_size) if i not in special_ids])
    if len(usable) == 0:
        raise ConfigError(f"a vocabulary of {vocab_size} has no ordinary token ids")
    rng = np.random.default_rng(seed)
    prefix = rng.choice(usable, lengths.prefix_len)
    first = np.resize(rng.permutation(usable), count)  # repeats only where there are more prompts than ids
    input_lens = _draw_lengths(rng, count, lengths.input_len, lengths.range_ratio)
    output_lens = _draw_lengths(rng, count, lengths.output_len, lengths.range_ratio)
    samples = []
    for first_id, input_len, output_len in zip(first, input_lens, output_lens):
        ids = [*prefix.tolist(), int(first_id), *rng.choice(usable, input_len - 1).tolist()]
        samples.append(Sample(ids, len(ids), int(output_len)))
    return samples


def _draw_lengths(rng: np.random.Generator, count: int, length: int, range_ratio: float) -> np.ndarray:
    low, high = max(1, round(length * (1 - range_ratio))), round(length * (1 + range_ratio))
    return rng.integers(low, high + 1, count)


def as_text(sample: Sample, codec: TextCodec) -> Sample:
    """The sample with text for a prompt, for routes that take no ids; of equal length as far as the tokenizer allows.

    Text of random ids often encodes to other ids; it is cut or filled up a few times.
    """
    if isinstance(sample.prompt, str):
        return sample
    ids, wanted, text = sample.prompt, len(sample.prompt), ""
    for _ in range(RETOKENIZE_TRIES):
        text = codec.decode(ids)
        ids = codec.encode(text, add_special_tokens=False)
        if len(ids) == wanted:
            break
        ids = (ids + sample.prompt[: max(0, wanted - len(ids))])[:wanted]
    return Sample(text, len(codec.encode(text, add_special_tokens=False)), sample.output_len)


def custom_samples(path: Path, count: int, output_len: int, codec: TextCodec | None) -> list[Sample]:
    """Lines `{"prompt": "...", "output_tokens": N}` of a JSON lines file, from its top, again if there are too few."""
    samples = []
    for number, line in enumerate(_read(path).splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            prompt, tokens = row["prompt"], int(row.get("output_tokens") or output_len)
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ConfigError(f'{path}, line {number}: must be a JSON object with "prompt"') from None
        if not isinstance(prompt, str):
            raise ConfigError(f"{path}, line {number}: prompt must be text")
        samples.append(Sample(prompt, len(codec.encode(prompt)) if codec else None, tokens))
    return _repeated(samples, count, path)


def sharegpt_samples(path: Path, count: int, output_len: int | None, codec: TextCodec, seed: int) -> list[Sample]:
    """First turns of ShareGPT conversations, shuffled by the seed, without very short and very long ones."""
    try:
        conversations = json.loads(_read(path))
        order = np.random.default_rng(seed).permutation(len(conversations))
        turns = ([t["value"] for t in conversations[i]["conversations"][:2]] for i in order)
        samples = list(_sharegpt_kept(turns, count, output_len, codec))
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is not a ShareGPT file: {error!r}") from None
    return _repeated(samples, count, path)


def _sharegpt_kept(
    turns: Iterator[list[str]], count: int, output_len: int | None, codec: TextCodec
) -> Iterator[Sample]:
    kept = 0
    for pair in turns:
        if kept == count:
            return
        if len(pair) < 2:
            continue
        prompt_len = len(codec.encode(pair[0]))
        answer_len = output_len or len(codec.encode(pair[1], add_special_tokens=False))
        too_short = min(prompt_len, answer_len) < SHAREGPT_MIN_TOKENS
        if too_short or prompt_len > SHAREGPT_MAX_PROMPT or prompt_len + answer_len > SHAREGPT_MAX_TOTAL:
            continue
        kept += 1
        yield Sample(pair[0], prompt_len, answer_len)


def _repeated(samples: Sequence[Sample], count: int, path: Path) -> list[Sample]:
    if not samples:
        raise ConfigError(f"{path} holds no usable prompt")
    return [samples[i % len(samples)] for i in range(count)]


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--dataset-path {path}: {getattr(error, 'strerror', None) or error}") from None


def load_codec(model: str, tokenizer: str | None) -> Any:
    """A tokenizer, or that of a model, without its weights."""
    from jaxserve.checkpoint import Checkpoint, find_tokenizer
    from jaxserve.config import EngineConfig

    if tokenizer is not None:
        return find_tokenizer(tokenizer, [])
    config = EngineConfig(model=model, load_format="dummy")
    return Checkpoint.open(config).load_tokenizer(config)

"""A tokenizer for models with random weights: as many tokens as the model has, each a short made-up word."""

import argparse
import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers


def make_tokenizer(config: Path, folder: Path) -> Path:
    """Writes a byte-level tokenizer.json with the vocabulary size of a config.json to `folder`, and returns that.

    The first 256 tokens are the bytes, so that every text can be encoded; token i beyond is the word " i" in base 26.
    """
    size = json.loads(config.read_text())["vocab_size"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["Ġ" + _letters(i) for i in range(size - len(alphabet) - 1)]
    vocab = {token: i for i, token in enumerate([*alphabet, *words])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>"})
    )
    return folder


def _letters(number: int) -> str:
    """At least two letters, unlike for different numbers."""
    text = ""
    while number or len(text) < 2:
        number, digit = divmod(number, 26)
        text = chr(ord("a") + digit) + text
    return text


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", type=Path, help="the model's config.json")
    parser.add_argument("folder", type=Path, help="where the tokenizer goes")
    args = parser.parse_args()
    print(make_tokenizer(args.config, args.folder))

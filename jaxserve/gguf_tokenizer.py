"""The tokenizer that a GGUF file describes, built so that its ids equal those of the model's own tokenizer.json.

A GGUF file has the vocabulary, merges or scores, and the *names* of two more things: the kind of tokenizer
(tokenizer.ggml.model) and how text is cut before merging (tokenizer.ggml.pre). What the names mean is written here.
Normal form and digits follow Hugging Face's files where llama.cpp differs from them. Never imports jax.
"""

from collections.abc import Sequence
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from jaxserve.errors import ConfigError
from jaxserve.gguf_file import GGUFFile
from jaxserve.tokenizer import Tokenizer

# tokenizer.ggml.token_type
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# tokenizer.ggml.pre -> how text is cut: gpt2 (ByteLevel's own regex), digits (each digit alone, then gpt2), or a regex
_CUTS = {
    **dict.fromkeys(("default", "gpt-2", "gpt2", "mpt", "olmo", "jais", "trillion"), "gpt2"),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), "digits"),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "smaug-bpe", "dbrx", "pixtral"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "stablelm2"), _QWEN2),
    "tekken": _TEKKEN,
}
_WHOLE_WORDS_FIRST = (_LLAMA3, _TEKKEN)  # cuts whose vocabularies hold whole words that merges do not reach
_ADDS_BOS = ("llama3", "llama-v3", "llama-bpe", "falcon3", "smaug-bpe", "pixtral", "tekken")  # unless the file says no


def tokenizer_from_gguf(file: GGUFFile, *, eos_token_ids: Sequence[int] = ()) -> Tokenizer:
    """`eos_token_ids` are further ones. Raises ConfigError if the file's tokenizer is broken or not supported."""
    try:
        return _tokenizer(file, eos_token_ids)
    except ConfigError:
        raise
    except Exception as error:  # whatever broken metadata makes of it
        message = f"{file.path.name} has no tokenizer that can be made: {type(error).__name__}: {error}"
        raise ConfigError(message, param="tokenizer") from error


def _tokenizer(file: GGUFFile, eos_token_ids: Sequence[int]) -> Tokenizer:
    kind = file.get("tokenizer.ggml.model")
    tokens = _list(file, "tokens", str)
    if not tokens or kind not in ("gpt2", "llama"):
        raise ConfigError(f"{file.path.name}: tokenizer {kind!r} is not supported: only gpt2 and llama are")
    types = _list(file, "token_type", int, len(tokens)) or [_NORMAL] * len(tokens)
    backend = _byte_level(file, tokens) if kind == "gpt2" else _sentencepiece(file, tokens, types)
    backend.add_tokens([
        AddedToken(token, special=kind != _USER_DEFINED, normalized=False)
        for token, kind in zip(tokens, types, strict=True)
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
    ])  # fmt: skip
    names = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
    ids = {short: file.get(f"tokenizer.ggml.{name}_token_id") for name, short in names.items()}
    _add_bos_and_eos(backend, file, tokens, ids)
    return Tokenizer(
        backend,
        bos_token_id=ids["bos"],
        eos_token_ids=[*file.generation_config.get("eos_token_id", []), *eos_token_ids],
        special_tokens={f"{short}_token": tokens[i] for short, i in ids.items() if i is not None},
        chat_template=_templates(file),
    )


def _list(file: GGUFFile, name: str, kind: type, length: int | None = None) -> list[Any]:
    """A list of the file's metadata, of items of a `kind`, empty if there is none."""
    value = file.get(f"tokenizer.ggml.{name}", [])
    if not isinstance(value, list) or not set(map(type, value)) <= {kind}:
        raise ConfigError(f"{file.path.name}: tokenizer.ggml.{name} must be a list of {kind.__name__}")
    if value and length not in (None, len(value)):
        raise ConfigError(f"{file.path.name}: tokenizer.ggml.{name} has {len(value)} entries for {length} tokens")
    return value


def _merges(file: GGUFFile) -> list[Any]:
    """Pairs of tokens; in a broken file something else, which the backend refuses."""
    return [tuple(merge.split(" ", 1)) for merge in _list(file, "merges", str)]


def _byte_level(file: GGUFFile, tokens: list[str]) -> Backend:
    """Byte-level BPE, the kind of GPT-2."""
    pre = file.get("tokenizer.ggml.pre", "default")
    if pre not in _CUTS:
        raise ConfigError(f"{file.path.name}: pre-tokenizer {pre!r} is not supported: only {', '.join(_CUTS)} are")
    merges = _merges(file)
    vocab = {token: i for i, token in enumerate(tokens)}
    backend = Backend(models.BPE(vocab, merges, ignore_merges=_CUTS[pre] in _WHOLE_WORDS_FIRST))
    backend.pre_tokenizer = _cut(_CUTS[pre], prefix=bool(file.get("tokenizer.ggml.add_space_prefix", False)))
    if _CUTS[pre] == _QWEN2:
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    return backend


def _cut(cut: str, prefix: bool) -> Any:
    if cut == "gpt2":
        return pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    if cut == "digits":
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=prefix)])
    split = pre_tokenizers.Split(Regex(cut), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=False)])


def _sentencepiece(file: GGUFFile, tokens: list[str], types: list[int]) -> Backend:
    """SentencePiece BPE with byte fallback, the kind of Llama 2: every chunk of text begins with a space."""
    vocab = {token: i for i, token in enumerate(tokens)}
    merges = _merges(file)
    if not merges:
        scores = _list(file, "scores", float, len(tokens))
        if not scores:
            raise ConfigError(f"{file.path.name}: the tokenizer has neither merges nor scores of its tokens")
        merges = merges_from_scores(vocab, scores, types)
    unknown = file.get("tokenizer.ggml.unknown_token_id", 0)
    backend = Backend(models.BPE(vocab, merges, unk_token=tokens[unknown], fuse_unk=True, byte_fallback=True))
    prefix = bool(file.get("tokenizer.ggml.add_space_prefix", True))
    to_mark = normalizers.Replace(" ", "▁")
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), to_mark] if prefix else [to_mark])
    undo = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*undo, decoders.Strip(" ", 1, 0)] if prefix else undo)
    return backend


def merges_from_scores(vocab: dict[str, int], scores: list[float], types: list[int]) -> list[tuple[str, str]]:
    """The merges that a SentencePiece vocabulary implies: every cut of a piece into two pieces, best score first."""
    found = []
    for token, i in vocab.items():
        if types[i] != _NORMAL:
            continue
        cuts = [(token[:at], token[at:]) for at in range(1, len(token))]
        cuts = [(left, right) for left, right in cuts if left in vocab and right in vocab]
        cuts.sort(key=lambda cut: (vocab[cut[0]], vocab[cut[1]]))
        found += [(scores[i], len(left), len(right), left, right) for left, right in cuts]
    found.sort(key=lambda merge: merge[:3], reverse=True)
    return [(left, right) for *_, left, right in found]


def _add_bos_and_eos(backend: Backend, file: GGUFFile, tokens: list[str], ids: dict[str, int | None]) -> None:
    sentencepiece = file.get("tokenizer.ggml.model") == "llama"
    by_default = sentencepiece or file.get("tokenizer.ggml.pre") in _ADDS_BOS
    bos = tokens[ids["bos"]] if ids["bos"] is not None and file.get("tokenizer.ggml.add_bos_token", by_default) else ""
    eos = tokens[ids["eos"]] if ids["eos"] is not None and file.get("tokenizer.ggml.add_eos_token", False) else ""
    if bos or eos:
        template = [part for part in (bos, "$A", eos) if part]
        backend.post_processor = processors.TemplateProcessing(
            single=template, special_tokens=[(token, tokens.index(token)) for token in (bos, eos) if token]
        )


def _templates(file: GGUFFile) -> dict[str, str]:
    """The file's chat templates: the default one, and named ones beside it."""
    named = {name: file.get(f"tokenizer.chat_template.{name}") for name in file.get("tokenizer.chat_templates", [])}
    named["default"] = file.get("tokenizer.chat_template")
    return {name: template for name, template in named.items() if template}

"""Prompts with a hole: each family's order of tokens, and text that goes on without a space that nobody wrote."""

import copy
from pathlib import Path

import pytest

from jaxserve.errors import RequestError
from jaxserve.fill_in_middle import STYLES, FillInMiddle, Style
from jaxserve.gguf_file import GGUFFile
from jaxserve.gguf_tokenizer import tokenizer_from_gguf
from jaxserve.tokenizer import Tokenizer

VOCAB = Path(__file__).parent / "goldens" / "vocab"
PREFIX, SUFFIX = "def add(a, b):\n    return ", "\n\nprint(add(1, 2))"
BY_FIRST_TOKEN = {style.layout[0]: style for style in STYLES}


def tokenizer_with(name: str, style: Style | None) -> Tokenizer:
    """A golden tokenizer whose vocabulary also has the style's tokens."""
    tokenizer = tokenizer_from_gguf(GGUFFile(VOCAB / f"{name}.gguf"))
    backend = copy.deepcopy(tokenizer._backend)
    if style:
        backend.add_special_tokens([part for part in (*style.layout, *style.ends) if part[0] != "{"])
    return Tokenizer(backend, bos_token_id=tokenizer.bos_token_id, eos_token_ids=tokenizer.eos_token_ids)


@pytest.mark.parametrize("name", ["smollm", "spm", "llama-bpe"])
@pytest.mark.parametrize("style", STYLES, ids=BY_FIRST_TOKEN)
def test_the_order_is_the_familys_and_the_texts_are_whole(name: str, style: Style):
    tokenizer = tokenizer_with(name, style)
    fill = FillInMiddle(tokenizer)
    ids = fill.prompt_ids(PREFIX, SUFFIX, add_special_tokens=True)
    starts_with_bos = tokenizer.encode("")[:1] == [tokenizer.bos_token_id]
    assert (ids[0] == tokenizer.bos_token_id) == starts_with_bos
    ids = ids[starts_with_bos:]
    assert fill.prompt_ids(PREFIX, SUFFIX, add_special_tokens=False) == ids
    joined = b"".join(map(tokenizer.token_bytes, ids)).decode()
    first_space = " " if name == "spm" else ""  # before a text that begins, not before one that goes on
    expected = "".join(style.layout).replace("{prefix}", first_space + PREFIX).replace("{suffix}", SUFFIX)
    assert joined == expected
    by_ids = fill.prompt_ids(tokenizer.encode(PREFIX, add_special_tokens=False), SUFFIX, add_special_tokens=False)
    assert by_ids == ids
    assert {tokenizer.token_id(end) for end in style.ends} == set(fill.stop_ids)


@pytest.mark.parametrize("suffix", ["x", " x", "  x", "\tx", "é", "☺", " ", "\n"])
def test_a_suffix_is_what_was_written(suffix: str):
    style = BY_FIRST_TOKEN["▁<PRE>"]
    tokenizer = tokenizer_with("spm", style)
    ids = FillInMiddle(tokenizer).prompt_ids("a", suffix, add_special_tokens=True)
    cut = [ids.index(tokenizer.token_id(part)) for part in ("▁<SUF>", "▁<MID>")]  # type: ignore[arg-type]
    assert b"".join(map(tokenizer.token_bytes, ids[cut[0] + 1 : cut[1]])).decode() == suffix


def test_other_models_say_why_not():
    with pytest.raises(RequestError, match="tokenizer has no tokens that mark prefix and suffix") as caught:
        FillInMiddle(tokenizer_with("smollm", None))
    assert caught.value.param == "suffix"

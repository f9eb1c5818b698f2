"""Prompts with a hole: text before and after it -> token ids, as code models were trained on them. Never imports jax.

    <prefix> text before <suffix> text after <middle>  ──►  what belongs in between

The order is that of the models' own papers and tools: most put the text before first, Codestral the text after.
"""

from dataclasses import dataclass

from jaxserve.errors import RequestError
from jaxserve.tokenizer import Tokenizer


@dataclass(frozen=True)
class Style:
    """One family's tokens: `{prefix}` and `{suffix}` in `layout` stand for the two texts. `ends` end the answer."""

    layout: tuple[str, ...]
    ends: tuple[str, ...] = ()


STYLES = (
    Style(  # Qwen2.5-Coder, CodeGemma
        ("<|fim_prefix|>", "{prefix}", "<|fim_suffix|>", "{suffix}", "<|fim_middle|>"),
        ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>", "<|file_sep|>", "<|endoftext|>"),
    ),
    Style(  # StarCoder, StarCoder2, Granite code
        ("<fim_prefix>", "{prefix}", "<fim_suffix>", "{suffix}", "<fim_middle>"),
        ("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<fim_pad>", "<file_sep>", "<|endoftext|>"),
    ),
    Style(  # CodeLlama
        ("▁<PRE>", "{prefix}", "▁<SUF>", "{suffix}", "▁<MID>"),
        ("▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>"),
    ),
    Style(  # DeepSeek-Coder
        ("<｜fim▁begin｜>", "{prefix}", "<｜fim▁hole｜>", "{suffix}", "<｜fim▁end｜>"),
        ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    ),
    Style(("[SUFFIX]", "{suffix}", "[PREFIX]", "{prefix}"), ("[SUFFIX]", "[PREFIX]")),  # Codestral
)
_MARK = "☺"  # a text that no token joins with what follows


class FillInMiddle:
    """The prompts with a hole of one tokenizer. Raises RequestError if its model was not trained on such."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        style = next((each for each in STYLES if self._has(each)), None)
        if style is None:
            raise RequestError(
                "suffix needs a model that fills in the middle, such as Qwen2.5-Coder: this one's tokenizer has no"
                " tokens that mark prefix and suffix",
                param="suffix",
            )
        self._layout = style.layout
        ends = map(tokenizer.token_id, style.ends)
        self.stop_ids = [i for i in ends if i is not None]

    def _has(self, style: Style) -> bool:
        return all(self._tokenizer.token_id(part) is not None for part in style.layout if part[0] != "{")

    def prompt_ids(self, prefix: str | list[int], suffix: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of the whole prompt, BOS included if the tokenizer puts it before a text."""
        bos = self._tokenizer.bos_token_id
        starts = add_special_tokens and self._tokenizer.encode("")[:1] == [bos]
        ids = [bos] if starts and bos is not None else []
        for part in self._layout:
            if part == "{prefix}":
                ids += self._tokenizer.encode(prefix, add_special_tokens=False) if isinstance(prefix, str) else prefix
            elif part == "{suffix}":
                ids += self._continued(suffix)
            else:
                token = self._tokenizer.token_id(part)
                assert token is not None, "checked by _has"
                ids.append(token)
        return ids

    def _continued(self, text: str) -> list[int]:
        """Ids of a text that goes on from another: without the space that sentencepiece puts before a text."""
        mark = self._tokenizer.encode(_MARK, add_special_tokens=False)
        if not self._tokenizer.token_bytes(mark[0]).startswith(b" "):
            return self._tokenizer.encode(text, add_special_tokens=False)
        return self._tokenizer.encode(_MARK + text, add_special_tokens=False)[len(mark) :]

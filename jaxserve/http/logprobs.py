"""Logprobs in the two shapes of the OpenAI API, and vLLM's prompt_logprobs."""

from collections.abc import Sequence

from jaxserve.detokenize import TextDelta, token_text
from jaxserve.frontend import finite, logprob_dict
from jaxserve.http.replies import ChatLogprobs, LegacyLogprobs, TokenLogprob, TopLogprob
from jaxserve.request import TokenLogprobs
from jaxserve.tokenizer import Tokenizer


class LogprobShapes:
    """Writes logprobs of the `count` likeliest tokens. `as_ids`: tokens are named token_id:N, not by their text."""

    def __init__(self, tokenizer: Tokenizer, count: int, *, as_ids: bool = False):
        self._tokenizer = tokenizer
        self._count = count
        self._as_ids = as_ids

    def _name(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._as_ids else token_text(self._tokenizer.token_bytes(token_id))

    def legacy(self, delta: TextDelta, *, base: int = 0) -> LegacyLogprobs:
        """Of the delta's tokens, with text offsets counted from character `base`."""
        logprobs = LegacyLogprobs()
        for entry, offset in zip(delta.logprobs, delta.offsets, strict=True):
            self._add_legacy(logprobs, entry.token_id, entry, base + offset)
        return logprobs

    def legacy_prompt(
        self, ids: list[int], entries: Sequence[TokenLogprobs | None], offsets: list[int]
    ) -> LegacyLogprobs:
        """Of an echoed prompt; None stands for the first token's."""
        logprobs = LegacyLogprobs()
        for token_id, entry, offset in zip(ids, entries, offsets, strict=True):
            self._add_legacy(logprobs, token_id, entry, offset)
        return logprobs

    def _add_legacy(self, logprobs: LegacyLogprobs, token_id: int, entry: TokenLogprobs | None, offset: int) -> None:
        logprobs.text_offset.append(offset)
        logprobs.tokens.append(self._name(token_id))
        logprobs.token_logprobs.append(finite(entry.logprob) if entry else None)
        logprobs.top_logprobs.append(self._top(entry) if entry else None)

    def _top(self, entry: TokenLogprobs) -> dict[str, float]:
        """The sampled token and the likeliest ones, under distinct names whatever their texts."""
        top: dict[str, float] = {self._name(entry.token_id): finite(entry.logprob)}
        for token_id, logprob in self._likeliest(entry):
            if token_id != entry.token_id:
                name = self._name(token_id)
                top[f"token_id:{token_id}" if name in top else name] = finite(logprob)
        return top

    def _likeliest(self, entry: TokenLogprobs) -> list[tuple[int, float]]:
        return list(zip(entry.top_ids[: self._count], entry.top_logprobs, strict=False))

    def chat(self, delta: TextDelta) -> ChatLogprobs:
        """Of the delta's tokens; the `bytes` of all tokens join to the text's UTF-8."""
        content = []
        for entry in delta.logprobs:
            token = self._tokenizer.token_bytes(entry.token_id)
            top = [
                TopLogprob(self._name(i), finite(logprob), list(self._tokenizer.token_bytes(i)))
                for i, logprob in self._likeliest(entry)
            ]
            content.append(TokenLogprob(self._name(entry.token_id), finite(entry.logprob), list(token), top))
        return ChatLogprobs(content)

    def prompt(self, entries: list[TokenLogprobs | None]) -> list[dict | None]:
        """vLLM's prompt_logprobs: token id -> logprob, rank, decoded_token; null for the first token."""
        return [entry and self._prompt_entry(entry) for entry in entries]

    def _prompt_entry(self, entry: TokenLogprobs) -> dict:
        return {
            str(token_id): {"logprob": finite(p.logprob), "rank": p.rank, "decoded_token": p.decoded_token}
            for token_id, p in logprob_dict(self._tokenizer, entry, self._count).items()
        }

"""Text to token ids and back, exact bytes of a token, and chat templates. Never imports jax.

The work is done by a Rust tokenizer of the `tokenizers` package. For a Hugging Face directory `transformers` builds it
(imported only then: it costs most of a second); for a GGUF file gguf_tokenizer.py does, without transformers.
"""

import copy
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from jaxserve.chat_template import ChatTemplate
from jaxserve.errors import ConfigError, RequestError
from jaxserve.request import short

ByteMap = dict[str, int]

VOCABULARY_FILES = ("tokenizer.json", "*.model", "vocab.*", "*.tiktoken")  # a tokenizer has one of them

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Vocabulary:
    """What grammars are compiled for: a tokenizer.json, and the ids that end a text."""

    tokenizer_json: str
    eos_token_ids: list[int]


class Tokenizer:
    """One model's tokenizer. Immutable after construction, so that threads may share it.

    vocab_size       token ids are below this; the embedding may have more rows
    eos_token_ids    all ids that end a sequence
    special_ids      ids that `skip_special_tokens` leaves out
    special_tokens   bos_token, eos_token, ... as text: what chat templates may name
    chat_template    the default template, if the model has one
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        bos_token_id: int | None,
        eos_token_ids: list[int],
        special_tokens: Mapping[str, str] | None = None,
        chat_template: str | Mapping[str, str] | None = None,
    ):
        backend.no_truncation()  # a tokenizer.json may ask for either; a server wants neither
        backend.no_padding()
        self._backend = backend
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        self.bos_token_id = bos_token_id
        self.eos_token_ids = list(dict.fromkeys(eos_token_ids))
        self.special_tokens = dict(special_tokens or {})
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self._added_bytes = {i: token.content.encode() for i, token in added.items()}
        self._added_ids = {token.content: i for i, token in added.items()}
        self._byte_of = byte_map() if _uses(backend.decoder, "ByteLevel") else None
        self._bytes: dict[int, bytes] = {}  # of the tokens that were asked for
        self._templates: dict[str, str] = _named_templates(chat_template)
        self._compiled: dict[str, ChatTemplate] = {}

    @classmethod
    def from_directory(cls, path: Path, *, eos_token_ids: Sequence[int] = ()) -> "Tokenizer":
        """The tokenizer of a Hugging Face checkpoint directory, as transformers reads it. Raises ConfigError.

        `eos_token_ids` are further ones, that other files of the model name.
        """
        if not any(any(path.glob(name)) for name in VOCABULARY_FILES):
            # transformers would make one without tokens of what config.json says
            raise ConfigError(
                f"{path} has no tokenizer: no {', '.join(VOCABULARY_FILES)}; name another one with --tokenizer",
                param="tokenizer",
            )
        logging.getLogger("transformers").addFilter(_not_about_pytorch)
        try:
            if (path / "tokenizer.json").is_file():
                from transformers import PreTrainedTokenizerFast as Source
            else:  # only sentencepiece or vocabulary files: transformers converts them
                from transformers import AutoTokenizer as Source
            hf: Any = Source.from_pretrained(path)
            backend: tokenizers.Tokenizer = hf.backend_tokenizer
        except Exception as error:  # whatever a broken or foreign file makes of it
            raise ConfigError(f"{path} has no tokenizer that can be loaded: {error}", param="tokenizer") from error
        return cls(
            backend,
            bos_token_id=hf.bos_token_id,
            eos_token_ids=[*([] if hf.eos_token_id is None else [hf.eos_token_id]), *eos_token_ids],
            special_tokens={k: str(v) for k, v in hf.special_tokens_map.items() if isinstance(v, str)},
            chat_template=hf.chat_template,
        )

    # ---- text and ids

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; special tokens written out in it count as themselves."""
        # A batch of one: plain encode() keeps the GIL, for seconds if the text is long.
        return self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids; ids outside the vocabulary add nothing."""
        return self._backend.decode_batch([ids], skip_special_tokens=skip_special_tokens)[0]  # without the GIL, too

    def added_token_id(self, text: str) -> int | None:
        """The id of an added token (special or not), such as a mark of the chat format."""
        return self._added_ids.get(text)

    def token_id(self, token: str) -> int | None:
        """The id of a token by its name in the vocabulary."""
        return self._backend.token_to_id(token)

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes that a token adds to the text, which may be part of a character. b"" past the vocabulary."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes_of(token_id)
            if 0 <= token_id < self.vocab_size:
                self._bytes[token_id] = known
        return known

    def _bytes_of(self, token_id: int) -> bytes:
        if (added := self._added_bytes.get(token_id)) is not None:
            return added
        token = self._backend.id_to_token(token_id) if token_id >= 0 else None
        if token is None:
            return b""
        if self._byte_of is not None:
            try:
                return bytes([self._byte_of[c] for c in token])
            except KeyError:  # a token outside the byte alphabet stands for itself
                return token.encode()
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes.fromhex(token[3:5])
        return token.replace("▁", " ").encode()

    def to_json(self) -> str:
        """As tokenizer.json has it."""
        return self._backend.to_str()

    # ---- chat

    @property
    def chat_template(self) -> str | None:
        return self._templates.get("default")

    def with_chat_template(self, template: str) -> "Tokenizer":
        """The same tokenizer with another default template. Raises ConfigError if it is bad."""
        clone = copy.copy(self)
        clone._templates, clone._compiled = {"default": template}, {}
        clone.compile_templates()
        return clone

    def compile_templates(self) -> None:
        """Raises ConfigError for a bad template now, and not at the first chat."""
        for template in self._templates.values():
            self.template(template)

    def apply_chat_template(
        self,
        messages: list[dict],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        tools: list[dict] | None = None,
        **kwargs: Any,
    ) -> str:
        """The prompt text of a chat. `kwargs` are further variables of the template.

        Raises RequestError: param "messages" if the template refuses them, "chat_template" if there is none.
        """
        if (template := chat_template or self.template_for(tools)) is None:
            message = "the model has no chat template: start the server with --chat-template FILE"
            raise RequestError(message, param="chat_template")
        variables = self.special_tokens | {"tools": tools, "documents": None} | kwargs
        return self.template(template).render(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables=variables,
        )

    def template_wants_parts(self, template: str | None) -> bool:
        """Whether the template loops over a message's content as a list of parts."""
        return template is not None and self.template(template).wants_parts

    def template_for(self, tools: object) -> str | None:
        """The template of conversations with or without tools: some models have two."""
        return self._templates.get("tool_use" if tools else "default", self.chat_template)

    def template(self, template: str) -> ChatTemplate:
        """A template compiled, once."""
        if template not in self._compiled:
            self._compiled[template] = ChatTemplate(template)
        return self._compiled[template]


def byte_map() -> ByteMap:
    """Character -> byte of byte-level BPE: printable latin-1 stands for itself, the rest is shifted past 255."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    shifted = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(shifted)}


def _uses(decoder: Any, kind: str) -> bool:
    """Whether a decoder, or a part of a sequence of decoders, is of this type."""
    return decoder is not None and f'"type":"{kind}"' in decoder.__getstate__().decode().replace(" ", "")


def _named_templates(templates: str | Mapping[str, str] | None) -> dict[str, str]:
    if isinstance(templates, str):
        return {"default": templates}
    named = {} if templates is None else templates
    if not isinstance(named, Mapping) or not all(isinstance(each, str) for each in (*named, *named.values())):
        raise ConfigError(f"the model's chat template must be text, got {short(templates)}", param="chat_template")
    if named and "default" not in named:
        log.info("the model has chat templates %s and no default one", ", ".join(named))
    return dict(named)


def _not_about_pytorch(record: logging.LogRecord) -> bool:
    return "PyTorch was not found" not in record.getMessage()

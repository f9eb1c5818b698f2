"""Reply bodies, as msgspec encodes them. A field left UNSET is not sent."""

from typing import Any

from msgspec import UNSET, Struct, UnsetType


class ErrorDetail(Struct):
    """What went wrong: `param` names the field, `code` is the HTTP status."""

    message: str
    type: str
    param: str | None
    code: int


class ErrorReply(Struct):
    """The body of every error."""

    error: ErrorDetail


class PromptTokensDetails(Struct):
    cached_tokens: int


class CompletionTokensDetails(Struct):
    reasoning_tokens: int


class Usage(Struct):
    """The prompt counts once whatever n; several prompts add up."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


class LegacyLogprobs(Struct):
    """Logprobs of /v1/completions: parallel lists, one entry per token."""

    text_offset: list[int] = []
    token_logprobs: list[float | None] = []
    tokens: list[str] = []
    top_logprobs: list[dict[str, float] | None] = []

    def before(self, later: "LegacyLogprobs") -> "LegacyLogprobs":
        """These, then the later ones."""
        return LegacyLogprobs(*(getattr(self, name) + getattr(later, name) for name in self.__struct_fields__))


class CompletionChoice(Struct):
    index: int
    text: str
    logprobs: LegacyLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: list[dict | None] | UnsetType = UNSET


class Completion(Struct, kw_only=True):
    """An answer of /v1/completions, or one chunk of it."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType = UNSET
    system_fingerprint: str | UnsetType = UNSET


class TopLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    content: list[TokenLogprob]


class FunctionCall(Struct):
    """`name` only at the beginning of a streamed call."""

    arguments: str
    name: str | UnsetType = UNSET


class ToolCall(Struct, kw_only=True):
    """A call, or a piece of a streamed one, which has an index; the first piece has id and type."""

    index: int | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: FunctionCall


class ChatMessage(Struct, kw_only=True):
    role: str = "assistant"
    content: str | None
    refusal: str | None = None
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(Struct):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(Struct, kw_only=True):
    """An answer of /v1/chat/completions."""

    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage | UnsetType = UNSET
    system_fingerprint: str | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: list[dict | None] | UnsetType = UNSET


class ChatDelta(Struct):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChunkChoice(Struct):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(Struct, kw_only=True):
    """One chunk of a streamed chat answer."""

    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType = UNSET
    system_fingerprint: str | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class Embedding(Struct, kw_only=True):
    object: str = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingUsage(Struct):
    prompt_tokens: int
    total_tokens: int


class EmbeddingList(Struct, kw_only=True):
    """An answer of /v1/embeddings."""

    id: str
    object: str = "list"
    created: int
    model: str
    data: list[Embedding]
    usage: EmbeddingUsage


class ModelCard(Struct, kw_only=True):
    id: str
    object: str = "model"
    created: int
    owned_by: str = "jaxserve"
    root: str
    parent: str | None = None
    max_model_len: int
    permission: list[Any] = []


class ModelList(Struct, kw_only=True):
    object: str = "list"
    data: list[ModelCard]


class Tokens(Struct):
    """The answer of /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Text(Struct):
    """The answer of /detokenize."""

    prompt: str


class Load(Struct):
    """The answer of /load: how many calls are open that generate."""

    server_load: int


class Aborted(Struct, kw_only=True):
    """The answer of /abort_requests: how many calls were ended that were not ending already."""

    status: str = "aborted"
    aborted: int


class Success(Struct):
    success: bool = True


class Status(Struct):
    status: str


class Paused(Struct):
    is_paused: bool


class Asleep(Struct):
    is_sleeping: bool


class Version(Struct):
    version: str

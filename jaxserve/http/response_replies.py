"""What /v1/responses answers: the response, its output items and the events of its stream, as msgspec encodes them."""

from typing import Any

from msgspec import Struct

from jaxserve.http.replies import TokenLogprob

# ----------------------------------------------------------------------------------------------------- output items


class OutputText(Struct, tag_field="type", tag="output_text"):
    text: str = ""
    annotations: list[Any] = []
    logprobs: list[TokenLogprob] = []


class ReasoningText(Struct, tag_field="type", tag="reasoning_text"):
    text: str = ""


class MessageItem(Struct, tag_field="type", tag="message", kw_only=True):
    id: str
    status: str = "in_progress"
    role: str = "assistant"
    content: list[OutputText] = []


class ReasoningItem(Struct, tag_field="type", tag="reasoning", kw_only=True):
    id: str
    status: str = "in_progress"
    summary: list[Any] = []
    content: list[ReasoningText] = []
    encrypted_content: str | None = None


class FunctionCallItem(Struct, tag_field="type", tag="function_call", kw_only=True):
    id: str
    status: str = "in_progress"
    call_id: str
    name: str
    arguments: str = ""


OutputItem = MessageItem | ReasoningItem | FunctionCallItem

# ----------------------------------------------------------------------------------------------------- the response


class InputTokensDetails(Struct):
    cached_tokens: int
    cache_write_tokens: int = 0  # of a cache that is paid for: there is none


class OutputTokensDetails(Struct):
    reasoning_tokens: int


class ResponseUsage(Struct):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseError(Struct):
    code: str
    message: str


class IncompleteDetails(Struct):
    reason: str


class Response(Struct, kw_only=True):
    """One response, finished or not: what was asked, and what came of it."""

    id: str
    object: str = "response"
    created_at: int
    status: str = "in_progress"
    background: bool
    completed_at: int | None = None
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None = None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem] = []
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: dict[str, Any]
    safety_identifier: str | None
    service_tier: str = "default"
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: str
    usage: ResponseUsage | None = None
    user: str | None


class DeletedResponse(Struct):
    """The answer of DELETE /v1/responses/{response_id}."""

    id: str
    object: str = "response"
    deleted: bool = True


class InputItems(Struct, kw_only=True):
    """One page of the items that a response was generated from."""

    object: str = "list"
    data: list[dict[str, Any]]
    first_id: str
    last_id: str
    has_more: bool


class InputTokens(Struct):
    """The answer of /v1/responses/input_tokens."""

    input_tokens: int
    object: str = "response.input_tokens"


# ------------------------------------------------------------------------------------------------------- the events


class Event(Struct, tag_field="type", kw_only=True):
    """One event of a stream; they are numbered from 0 without gaps."""

    sequence_number: int = -1

    @property
    def type(self) -> str:
        return str(self.__struct_config__.tag)


class ResponseEvent(Event, kw_only=True):
    """An event that tells the state of the whole response."""

    response: Response


class Created(ResponseEvent, tag="response.created", kw_only=True):
    pass


class Queued(ResponseEvent, tag="response.queued", kw_only=True):
    pass


class InProgress(ResponseEvent, tag="response.in_progress", kw_only=True):
    pass


class Completed(ResponseEvent, tag="response.completed", kw_only=True):
    pass


class Incomplete(ResponseEvent, tag="response.incomplete", kw_only=True):
    pass


class Failed(ResponseEvent, tag="response.failed", kw_only=True):
    pass


class ItemEvent(Event, kw_only=True):
    """An event of one output item, which stands at `output_index` of the response's output."""

    output_index: int


class ItemAdded(ItemEvent, tag="response.output_item.added", kw_only=True):
    item: OutputItem


class ItemDone(ItemEvent, tag="response.output_item.done", kw_only=True):
    item: OutputItem


class ContentEvent(ItemEvent, kw_only=True):
    """An event of the text of an item."""

    item_id: str
    content_index: int = 0


class PartAdded(ContentEvent, tag="response.content_part.added", kw_only=True):
    part: OutputText | ReasoningText


class PartDone(ContentEvent, tag="response.content_part.done", kw_only=True):
    part: OutputText | ReasoningText


class TextDeltaEvent(ContentEvent, tag="response.output_text.delta", kw_only=True):
    delta: str
    logprobs: list[TokenLogprob] = []


class TextDone(ContentEvent, tag="response.output_text.done", kw_only=True):
    text: str
    logprobs: list[TokenLogprob] = []


class ReasoningDelta(ContentEvent, tag="response.reasoning_text.delta", kw_only=True):
    delta: str


class ReasoningDone(ContentEvent, tag="response.reasoning_text.done", kw_only=True):
    text: str


class ArgumentsDelta(ItemEvent, tag="response.function_call_arguments.delta", kw_only=True):
    item_id: str
    delta: str


class ArgumentsDone(ItemEvent, tag="response.function_call_arguments.done", kw_only=True):
    item_id: str
    name: str
    arguments: str


AnyEvent = (
    Created
    | Queued
    | InProgress
    | Completed
    | Incomplete
    | Failed
    | ItemAdded
    | ItemDone
    | PartAdded
    | PartDone
    | TextDeltaEvent
    | TextDone
    | ReasoningDelta
    | ReasoningDone
    | ArgumentsDelta
    | ArgumentsDone
)

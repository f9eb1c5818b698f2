"""Streams of /v1/responses, judged by the official client's types."""

import json

from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

PATH = "/v1/responses"
EVENT = TypeAdapter(ResponseStreamEvent)


def say(api, text: str) -> list[int]:
    """Makes the engine answer `text` and then EOS, whatever it is asked."""
    ids = [*api.frontend.tokenizer.encode(text, add_special_tokens=False), 1]
    api.engine.script = lambda request, index: ids
    return ids


def prompt_of(api, at: int = -1) -> str:
    """The prompt of a request that the engine was sent, as text."""
    return api.frontend.tokenizer.decode(api.engine.requests[at].prompt_token_ids, skip_special_tokens=False)


async def events_of(response) -> list[dict]:
    """All events of a stream, each judged by the client's types; names, numbers and places must be right."""
    assert response.status == 200, await response.text()
    assert response.content_type == "text/event-stream"
    blocks = (await response.text()).split("\n\n")
    assert blocks.pop() == ""
    events = []
    for block in blocks:
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        parsed = EVENT.validate_python(event)
        assert parsed.type == event["type"]
        events.append(event)
    first = events[0]["sequence_number"] if events else 0
    assert [event["sequence_number"] for event in events] == list(range(first, first + len(events)))
    return events


def kinds(events: list[dict]) -> list[str]:
    """The types of the events, each run of the same once, without `response.`."""
    names = [event["type"].removeprefix("response.") for event in events]
    return [name for i, name in enumerate(names) if i == 0 or names[i - 1] != name]

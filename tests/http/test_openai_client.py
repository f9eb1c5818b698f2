"""The official client, sync and async, against the production server."""

import asyncio

import openai
import pytest

USER = [{"role": "user", "content": "hi"}]


async def test_models(client):
    assert [model.id async for model in client.models.list()] == ["m"]
    assert (await client.models.retrieve("m")).owned_by == "jaxserve"


async def test_chat(api, client):
    whole = await client.chat.completions.create(model="m", messages=USER, max_tokens=40, logprobs=True, top_logprobs=2)
    stream = await client.chat.completions.create(
        model="m", messages=USER, max_tokens=40, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content and text
    assert chunks[-1].usage == whole.usage
    assert len(whole.choices[0].logprobs.content) == whole.usage.completion_tokens


async def test_a_conversation_goes_on_with_what_came_back(client):
    first = await client.chat.completions.create(model="m", messages=USER, max_tokens=5)
    messages = [*USER, first.choices[0].message.model_dump(), *USER]
    await client.chat.completions.create(model="m", messages=messages, max_tokens=5)


async def test_the_stream_helper(api, client):
    api.engine.script = lambda request, index: [50, 51, 1]
    async with client.chat.completions.stream(model="m", messages=USER, max_tokens=20) as stream:
        kinds = {event.type async for event in stream}
        final = await stream.get_final_completion()
    assert "content.delta" in kinds and final.choices[0].message.content


async def test_completions(client):
    whole = await client.completions.create(model="m", prompt=["a", "b"], max_tokens=8, logprobs=2, n=2, echo=True)
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    assert whole.choices[0].logprobs.token_logprobs[0] is None
    stream = await client.completions.create(model="m", prompt="a", max_tokens=8, stream=True)
    text = "".join([chunk.choices[0].text async for chunk in stream])
    assert text == (await client.completions.create(model="m", prompt="a", max_tokens=8)).choices[0].text


async def test_a_closed_stream_cancels(api, client):
    api.engine.pause_at = 20
    stream = await client.chat.completions.create(model="m", messages=USER, max_tokens=400, stream=True)
    async for _ in stream:
        break
    assert api.engine.open
    await stream.close()
    await api.settled()


async def test_errors_are_the_clients_own(api, client, start):
    with pytest.raises(openai.BadRequestError) as bad:
        await client.chat.completions.create(model="m", messages=USER, temperature=9, stream=True)
    assert bad.value.param == "temperature" and bad.value.type == "BadRequestError"
    with pytest.raises(openai.NotFoundError):
        await client.chat.completions.create(model="zz", messages=USER)
    async with start(api_key=["right"]) as guarded:
        for key in ("right", "wrong"):
            async with openai.AsyncOpenAI(base_url=guarded.url + "/v1", api_key=key) as other:
                if key == "right":
                    await other.models.list()
                else:
                    with pytest.raises(openai.AuthenticationError):
                        await other.models.list()
    api.engine.broken_at = (2, RuntimeError("x"))
    with pytest.raises(openai.APIError):
        async for _ in await client.chat.completions.create(model="m", messages=USER, stream=True):
            pass


async def test_the_sync_client(api):
    def talk() -> str:
        with openai.OpenAI(base_url=api.url + "/v1", api_key="none") as client:
            stream = client.chat.completions.create(model="m", messages=USER, max_completion_tokens=9, stream=True)
            return "".join(chunk.choices[0].delta.content or "" for chunk in stream)

    assert await asyncio.to_thread(talk)

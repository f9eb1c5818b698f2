"""X-Request-Id: on every answer; the client's own if it is sane."""

import pytest

TEXT = "/v1/completions"
CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]


async def answer(api, method: str, path: str, sent: dict[str, str] | None = None, **kwargs) -> tuple[str, str]:
    """The id and the body."""
    async with api.session.request(method, api.url + path, headers=sent, **kwargs) as response:
        return response.headers["X-Request-Id"], await response.text()


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", TEXT, {"prompt": "a"}),
        ("POST", TEXT, {"prompt": "a", "stream": True}),
        ("POST", TEXT, {"prompt": "a", "temperature": 9}),
        ("POST", CHAT, {"messages": USER}),
        ("POST", CHAT, {"messages": USER, "stream": True}),
        ("GET", "/health", None),
        ("GET", "/metrics", None),
        ("GET", "/nothing", None),
        ("DELETE", TEXT, None),
    ],
)
async def test_every_answer_has_one(api, method, path, body):
    ids = [(await answer(api, method, path, json=body))[0] for _ in range(2)]
    assert len(set(ids)) == 2 and all(ids)
    assert (await answer(api, method, path, {"X-Request-Id": "trace-1.a:b/c=@+"}, json=body))[0] == "trace-1.a:b/c=@+"


@pytest.mark.parametrize("insane", ["", "a b", "x" * 129, "é", '"', "<script>", "a,b"])
async def test_an_insane_id_is_not_echoed(api, insane):
    found, _ = await answer(api, "GET", "/health", {"X-Request-Id": insane})
    assert found and found != insane


@pytest.mark.parametrize(("path", "body"), [(TEXT, {"prompt": "a"}), (CHAT, {"messages": USER})])
@pytest.mark.parametrize("stream", [False, True])
async def test_ours_is_the_id_in_the_body(api, path, body, stream):
    found, text = await answer(api, "POST", path, json={**body, "stream": stream})
    assert f'"id":"{found}"' in text

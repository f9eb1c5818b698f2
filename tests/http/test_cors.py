"""CORS as browsers see it: preflight, then the call; off unless origins are named."""

import pytest

TEXT = "/v1/completions"
PAGE = "https://chat.example"


async def headers(api, method: str, sent: dict[str, str], path: str = TEXT, **kwargs):
    async with api.session.request(method, api.url + path, headers=sent, **kwargs) as response:
        await response.read()
        return response.status, response.headers


def preflight(origin: str = PAGE, method: str = "POST", names: str = "authorization,content-type") -> dict[str, str]:
    return {"Origin": origin, "Access-Control-Request-Method": method, "Access-Control-Request-Headers": names}


async def test_off_by_default(api):
    status, got = await headers(api, "OPTIONS", preflight())
    assert status == 405 and not any(name.startswith("Access-Control") for name in got)
    status, got = await headers(api, "POST", {"Origin": PAGE}, json={"prompt": "a"})
    assert status == 200 and "Access-Control-Allow-Origin" not in got


@pytest.mark.parametrize("origins", [[PAGE, "http://localhost:3000"], ["*"]])
async def test_a_page_of_an_allowed_origin_may_call(start, origins):
    async with start(allowed_origins=origins, api_key=["secret"]) as api:
        status, got = await headers(api, "OPTIONS", preflight())  # without a key, as browsers do
        assert status == 204 and got["Access-Control-Allow-Origin"] == PAGE
        assert got["Access-Control-Allow-Methods"] == "POST"
        assert got["Access-Control-Allow-Headers"] == "authorization,content-type"
        assert "Access-Control-Allow-Credentials" not in got
        key = {"Authorization": "Bearer secret", "Origin": PAGE}
        for body, expected in (
            ({"prompt": "a"}, 200),
            ({"prompt": "a", "stream": True}, 200),
            ({"prompt": "a", "temperature": 9}, 400),
        ):
            status, got = await headers(api, "POST", key, json=body)
            assert (status, got["Access-Control-Allow-Origin"]) == (expected, PAGE)
            assert "Origin" in got["Vary"]
        status, got = await headers(api, "POST", {"Origin": PAGE}, json={"prompt": "a"})
        assert (status, got["Access-Control-Allow-Origin"]) == (401, PAGE)
        assert (await headers(api, "OPTIONS", {"Origin": PAGE}))[0] == 401, "this is no preflight"


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        (preflight(origin="https://evil.example"), "origin 'https://evil.example' is not allowed (--allowed-origins)"),
        (preflight(origin=PAGE + ".evil.example"), "--allowed-origins"),
        (preflight(origin="null"), "--allowed-origins"),
        (preflight(method="DELETE"), "method 'DELETE' is not allowed (--allowed-methods)"),
        (preflight(names="authorization,x-strange"), "header 'x-strange' is not allowed (--allowed-headers)"),
    ],
)
async def test_what_is_not_allowed_is_refused(start, sent, words):
    async with start(
        allowed_origins=[PAGE], allowed_methods=["POST"], allowed_headers=["Authorization"], allow_credentials=True
    ) as api:
        error = await api.error(TEXT, None, 400, method="OPTIONS", headers=sent)
        assert words in error["message"]
        status, got = await headers(api, "OPTIONS", preflight(names="AUTHORIZATION, Content-Type"))
        assert (status, got["Access-Control-Allow-Credentials"]) == (204, "true")
        _, got = await headers(api, "POST", {"Origin": "https://evil.example"}, json={"prompt": "a"})
        assert "Access-Control-Allow-Origin" not in got

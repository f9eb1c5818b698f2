"""The small routes: models, health, version, tokens, metrics; and API keys on all of them."""

import asyncio
import json
import logging
import threading

import pytest
from prometheus_client.parser import text_string_to_metric_families

import jaxserve
import jaxserve.http.metrics as http_metrics
from jaxserve.http.routes import ROUTES
from jaxserve.metrics import TrafficLog
from jaxserve.request import EngineStats
from jaxserve.tokenizer import Tokenizer

TEXT = "/v1/completions"


async def test_models(start):
    async with start(served_model_name=["small", "org/large"]) as api:
        _, models = await api.call("/v1/models", method="GET")
        assert models["object"] == "list" and [card["id"] for card in models["data"]] == ["small", "org/large"]
        for card in models["data"]:
            assert (card["object"], card["owned_by"], card["max_model_len"]) == ("model", "jaxserve", 512)
            assert card["root"] == "fake" and card["created"] > 10**9
            assert await api.call(f"/v1/models/{card['id']}", method="GET") == (200, card)
            quoted = card["id"].replace("/", "%2F")
            assert (await api.call(f"/v1/models/{quoted}", method="GET"))[1]["id"] == card["id"]
        assert (await api.error("/v1/models/zz", None, 404, method="GET"))["param"] == "model"


async def test_health_follows_the_engine(api):
    for method, path in (("GET", "/health"), ("GET", "/ping"), ("POST", "/ping")):
        assert await api.call(path, method=method) == (200, "")
    api.engine.alive = False
    for method, path in (("GET", "/health"), ("GET", "/ping"), ("POST", "/ping")):
        await api.error(path, None, 503, method=method)


async def test_version(api):
    assert await api.call("/version", method="GET") == (200, {"version": jaxserve.__version__})


async def test_tokenize_and_back(api):
    text = "<s> naïve 日本語 😀<|im_end|>"
    answer = await api.ok("/tokenize", {"prompt": text, "return_token_strs": True})
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"]) and answer["max_model_len"] == 512
    assert answer["tokens"].count(0) == 1
    assert (await api.ok("/detokenize", {"tokens": answer["tokens"]})) == {"prompt": text}
    bare = await api.ok("/tokenize", {"prompt": "a", "add_special_tokens": False})
    assert bare["tokens"] == api.frontend.tokenizer.encode("a", add_special_tokens=False)
    assert bare["token_strs"] is None
    assert (await api.ok("/tokenize", {"prompt": ""}))["tokens"] == [0]
    assert (await api.ok("/detokenize", {"tokens": []})) == {"prompt": ""}


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (TEXT, {"prompt": "%s"}),
        (TEXT, {"prompt": "a", "bad_words": ["%s"]}),
        (TEXT, {"prompt": ["a", "%s"]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "%s"}]}),
        ("/tokenize", {"prompt": "%s"}),
        ("/tokenize", {"messages": [{"role": "user", "content": "%s"}]}),
    ],
)
async def test_long_text_is_refused_untokenised_and_worked_on_off_the_loop(start, monkeypatch, path, body, chunked):
    """However its body is sent: a chunked one names no size."""

    async def sent(text: str):
        data = json.dumps(body).replace("%s", text).encode()

        async def pieces():
            yield data

        headers = {"Content-Type": "application/json"}
        async with api.session.post(api.url + path, data=pieces() if chunked else data, headers=headers) as response:
            return response.status, await response.json()

    threads = []

    def encode(self: Tokenizer, text: str, **_: bool) -> list[int]:
        threads.append((threading.get_ident(), len(text)))
        return [5]

    async with start() as api:
        monkeypatch.setattr(Tokenizer, "encode", encode)
        status, answer = await sent("x" * 1_000_000)
        assert status == 400 and " characters" in answer["error"]["message"]
        assert all(chars < 100 for _, chars in threads)
        if "bad_words" not in body:
            monkeypatch.setattr(api.frontend, "_max_token_bytes", 10_000)
            assert (await sent("x" * 30_000))[0] == 200
            (thread,) = [thread for thread, chars in threads if chars >= 30_000]
            assert thread != threading.get_ident()


async def test_tokenize_a_conversation(api):
    messages = [{"role": "user", "content": "hi"}]
    answer = await api.ok("/tokenize", {"messages": messages})
    await api.ok("/v1/chat/completions", {"messages": messages})
    assert answer["tokens"] == api.engine.requests[0].prompt_token_ids
    shorter = await api.ok("/tokenize", {"messages": messages, "add_generation_prompt": False})
    assert answer["tokens"][: shorter["count"]] == shorter["tokens"] and shorter["count"] < answer["count"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": "a", "nonsense": 1}, "nonsense"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": [{"role": "user", "content": "a"}], "tools": [{}]}, "tools.0.type"),
        ("/tokenize", {"messages": [{"role": "user", "content": "a"}], "chat_template": "x"}, "chat_template"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {"tokens": [1.5]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [10**6]}, "tokens"),
        ("/detokenize", {"tokens": [True]}, "tokens"),
    ],
)
async def test_bad_token_calls(api, path, body, param):
    assert (await api.error(path, body))["param"] == param


# ------------------------------------------------------------------------------------------------------------ keys


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: f"{route.method} {route.path}")
async def test_keys_guard_every_route_but_health(start, route):
    async with start(api_key=["first", "zweiter-schlüssel"]) as api:
        path = route.path.replace("{model:.+}", "m")

        async def status(header: str | None) -> int:
            headers = {"Authorization": header} if header is not None else {}
            body = {"prompt": "a", "tokens": [], "messages": [{"role": "user", "content": "a"}]}
            kwargs = {"json": body} if route.method == "POST" else {}
            async with api.session.request(route.method, api.url + path, headers=headers, **kwargs) as response:
                if response.status == 401:
                    error = (await response.json())["error"]
                    assert (error["type"], error["code"]) == ("AuthenticationError", 401)
                    assert response.headers["WWW-Authenticate"] == "Bearer"
                return response.status

        wrong = [None, "", "Bearer", "Bearer ", "Bearer wrong", "Bearer firs", "Bearer first2", "Basic first", "first"]
        for header in wrong:
            assert (await status(header) == 401) == (path != "/health"), header
        for header in ("Bearer first", "bearer first", "Bearer\tfirst", "Bearer zweiter-schlüssel"):
            assert await status(header) != 401, header


async def test_unknown_routes_need_a_key_too(start):
    async with start(api_key=["k"]) as api:
        await api.error("/nothing", None, 401, method="GET")
        await api.error("/nothing", None, 404, method="GET", headers={"Authorization": "Bearer k"})


# --------------------------------------------------------------------------------------------------------- metrics


async def scrape(api) -> dict[str, float]:
    _, text = await api.call("/metrics", method="GET")
    return {
        sample.name
        + "".join(f"[{v}]" for k, v in sorted(sample.labels.items()) if k not in ("model_name", "le")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if not sample.name.endswith("_bucket")
    }


async def test_metrics(api):
    stats = api.engine.stats
    stats.running, stats.waiting, stats.pages_used, stats.preemptions = 2, 1, 16, 4
    stats.allocated_token_slots, stats.used_token_slots, stats.compiles_after_warmup = 200, 150, 0
    stats.prefix_cache_query_tokens, stats.prefix_cache_hit_tokens = 100, 60
    values = await scrape(api)
    assert values["jaxserve:num_requests_running"] == 2 and values["jaxserve:num_requests_waiting"] == 1
    assert values["jaxserve:kv_cache_usage_perc"] == 0.25 and values["jaxserve:num_preemptions_total"] == 4
    assert values["jaxserve:kv_cache_wasted_slots_ratio"] == 0.25
    assert values["jaxserve:prefix_cache_queries_total"] == 100 and values["jaxserve:prefix_cache_hits_total"] == 60
    assert values["jaxserve:compiles_after_warmup_total"] == 0
    assert values["jaxserve:request_success_total[stop]"] == 0


async def test_latencies_and_ends_are_counted(api):
    await api.ok(TEXT, {"prompt": "a", "max_tokens": 5})
    await api.ok(TEXT, {"prompt": "a", "max_tokens": 60, "stop": ["fox"], "n": 2})
    values = await scrape(api)
    ends = [values[f"jaxserve:request_success_total[{reason}]"] for reason in ("stop", "length", "abort", "error")]
    assert sum(ends) == 3 and ends[2:] == [0, 0]
    assert values["jaxserve:time_to_first_token_seconds_count"] == 2
    assert values["jaxserve:request_queue_time_seconds_count"] == 2
    assert values["jaxserve:e2e_request_latency_seconds_count"] == 3
    assert values["jaxserve:inter_token_latency_seconds_count"] >= 4
    assert values["jaxserve:generation_tokens_total"] >= 5 and values["jaxserve:prompt_tokens_total"] > 0


async def test_refusals_are_no_ends_and_errors_are(api):
    await api.error(TEXT, {"prompt": ""})
    api.engine.broken_at = (2, RuntimeError("x"))
    await api.error(TEXT, {"prompt": "a"}, 500)
    values = await scrape(api)
    assert values["jaxserve:request_success_total[error]"] == 1
    assert values["jaxserve:request_success_total[abort]"] == 0


async def test_two_servers_have_their_own_metrics(start):
    async with start() as one, start() as two:
        await one.ok(TEXT, {"prompt": "a"})
        assert (await scrape(two))["jaxserve:time_to_first_token_seconds_count"] == 0


def test_the_log_line_speaks_of_the_period():
    stats = EngineStats(pages_total=100)
    log = TrafficLog(lambda: stats)
    assert log.line() is None, "nothing happened"
    stats.prompt_tokens, stats.generation_tokens, stats.running, stats.pages_used = 50, 20, 3, 25
    stats.prefix_cache_query_tokens, stats.prefix_cache_hit_tokens = 40, 10
    line = log.line()
    assert line and "running 3, waiting 0" in line and "usage 25.0%" in line and "hit rate 25.0%" in line
    assert "tokens/s" in line
    stats.running = 0
    assert log.line() is None, "the totals are not this period's"


async def test_traffic_is_logged(start, monkeypatch, caplog):
    monkeypatch.setattr(http_metrics, "LOG_PERIOD_S", 0.02)
    with caplog.at_level(logging.INFO, "jaxserve"):
        async with start() as api:
            await api.ok(TEXT, {"prompt": "a"})
            async with asyncio.timeout(5):
                while not any("tokens/s" in record.getMessage() for record in caplog.records):
                    await asyncio.sleep(0.01)

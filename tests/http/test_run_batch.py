"""`jaxserve run-batch`: every line gets its answer, whatever the line; an interrupted run goes on."""

import asyncio
import json
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jaxserve import cli
from jaxserve.config import ServeConfig
from jaxserve.errors import ConfigError, EngineDead
from jaxserve.frontend import Frontend
from jaxserve.run_batch import URLS, answer_file, check_files, read_done

TEXT = "/v1/completions"
CHAT = "/v1/chat/completions"


def line(custom_id: Any, url: str = TEXT, body: Any = None, **more: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body or {"prompt": "a"}, **more}


@pytest.fixture
def batch(make_engine, tmp_path: Path) -> Callable[..., Any]:
    """batch(lines) -> the records written so far, after running the file; `.engine` is what ran it."""

    async def run(lines: list[Any], *, overwrite: bool = False, max_concurrency: int = 8) -> list[dict[str, Any]]:
        source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
        source.write_text("".join((one if isinstance(one, str) else json.dumps(one)) + "\n" for one in lines))
        check_files(source, target)
        engine = run.engine
        await answer_file(
            Frontend(engine.tokenizer, engine.info), engine, ServeConfig(model="m", api_key=["secret"]), source, target,
            max_concurrency=max_concurrency, overwrite=overwrite,
        )  # fmt: skip
        return [json.loads(one) for one in target.read_text().splitlines()]

    run.engine, run.target = make_engine(), tmp_path / "out.jsonl"  # type: ignore[attr-defined]
    return run


async def test_every_route_answers_as_over_http(batch, start):
    talk = {"messages": [{"role": "user", "content": "hi"}]}
    bodies = {
        TEXT: {"prompt": ["a", "b"], "seed": 4},
        CHAT: talk,
        "/tokenize": {"prompt": "a"},
        "/detokenize": {"tokens": [9]},
        "/v1/embeddings": {"input": ["a", "b c"], "encoding_format": "base64"},
        "/v1/responses": {"input": "hi", "max_output_tokens": 8},
        "/v1/responses/input_tokens": {"input": "hi"},
    }
    assert set(bodies) == set(URLS) and not {"/pause", "/sleep", "/abort_requests", "/ping"} & set(URLS)
    records = {one["custom_id"]: one for one in await batch([line(url, url, body) for url, body in bodies.items()])}
    async with start(batch.engine) as api:
        for url, body in bodies.items():
            record, expected = records[url], await api.ok(url, body)
            assert set(record) == {"id", "custom_id", "response", "error"} and record["error"] is None
            assert record["id"].startswith("batch_req_") and record["response"]["status_code"] == 200
            answer = record["response"]["body"]
            if "id" in answer:
                assert record["response"]["request_id"] == answer["id"]
            for each in (answer, expected, *answer.get("output", []), *expected.get("output", [])):
                for name in ("id", "created", "created_at", "completed_at"):
                    each.pop(name, None)
            assert answer == expected
    assert len({one["id"] for one in records.values()}) == len(bodies)


BAD = [
    ("{", None, "not valid JSON"),
    ("[1]", None, "JSON object"),
    ("[" * 5000, None, "JSON"),
    (line(None), None, "custom_id"),
    (line(""), "", "custom_id"),
    (line(5), None, "custom_id"),
    (line("a") | {"method": "GET"}, "a", "method must be POST, got 'GET'"),
    (line("a", "/v1/nothing"), "a", "url must be one of"),
    (line("a", "/sleep"), "a", "url must be one of"),
    (line("a", ["/x"]), "a", "url must be one of"),
    (line("a") | {"body": "x"}, "a", "body must be an object"),
    (line("a", body={"prompt": "a", "stream": True}), "a", "stream"),
    (line("a", priority=1), "a", "unknown field 'priority'"),
]


@pytest.mark.parametrize(("bad", "custom_id", "words"), BAD, ids=[words for *_, words in BAD])
async def test_a_bad_line_is_an_error_record(batch, bad, custom_id, words):
    for _ in range(2):  # a second run adds nothing
        records = await batch([line("first"), "", bad, line("last")])
        assert sorted(one["custom_id"] for one in records if one["response"]) == ["first", "last"]
        (error,) = [one for one in records if one["error"]]
        assert error["custom_id"] == custom_id and error["response"] is None
        assert words in error["error"]["message"] and error["error"]["line"] == 3


async def test_a_refused_body_is_an_answer(batch):
    records = await batch(
        [line("a", body={"prompt": "a", "temperature": 9}), line("b", body={"model": "x", "prompt": "a"})]
    )
    found = {one["custom_id"]: one["response"] for one in records}
    assert found["a"]["status_code"] == 400 and found["a"]["body"]["error"]["param"] == "temperature"
    assert found["b"]["status_code"] == 404 and all(one["error"] is None for one in records)


async def test_a_custom_id_twice(batch):
    for _ in range(2):
        records = await batch([line("a"), line("b"), line("a"), line("a")])
        assert sorted(one["custom_id"] for one in records if one["response"]) == ["a", "b"]
        errors = [one for one in records if one["error"]]
        assert [(one["custom_id"], one["error"]["line"]) for one in errors] == [("a", 3), ("a", 4)]
    assert len(batch.engine.requests) == 2


async def test_an_interrupted_run_goes_on(batch):
    lines = [line(f"{i}") for i in range(40)]
    batch.engine.gate.clear()
    running = asyncio.create_task(batch(lines, max_concurrency=3))
    while len(batch.engine.open) < 3:
        await asyncio.sleep(0.002)
    batch.engine.gate.set()
    while len(batch.target.read_text().splitlines()) < 10:
        await asyncio.sleep(0.002)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    while batch.engine.open:
        await asyncio.sleep(0.002)
    whole = batch.target.read_text()
    before = whole.splitlines()
    assert 10 <= len(before) < 40
    batch.target.write_text(whole + before[0][:30])  # cut amid a line
    asked = len(batch.engine.requests)
    records = await batch(lines)
    assert len(batch.engine.requests) - asked == 40 - len(before)
    assert sorted(int(one["custom_id"]) for one in records) == list(range(40))
    assert [json.dumps(one, separators=(",", ":"), ensure_ascii=False) for one in records[: len(before)]] == before
    assert len(await batch(lines, overwrite=True)) == 40 and len(batch.engine.requests) == asked + 80 - len(before)


async def test_work_at_once_is_bounded(batch):
    most = 0
    submit = batch.engine.submit

    async def counting(request):
        nonlocal most
        stream = await submit(request)
        most = max(most, len(batch.engine.open))
        return stream

    batch.engine.submit = counting
    assert len(await batch([line(f"{i}") for i in range(30)], max_concurrency=4)) == 30
    assert most == 4


async def test_many_at_once_are_not_too_many_files(batch, make_engine):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    batch.engine = make_engine(max_num_seqs=300)
    batch.engine.gate.clear()
    resource.setrlimit(resource.RLIMIT_NOFILE, (400, hard))
    try:
        running = asyncio.create_task(batch([line(f"{i}") for i in range(300)], max_concurrency=300))
        async with asyncio.timeout(20):
            while len(batch.engine.open) < 300:
                assert not running.done(), running
                await asyncio.sleep(0.01)
        batch.engine.gate.set()
        assert len(await running) == 300
        with pytest.raises(ConfigError, match="--max-concurrency must be at most"):
            await batch([line("a")], max_concurrency=hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_a_dead_engine_is_no_answer(batch):
    def die(request, index):
        batch.engine.alive = False
        raise EngineDead("the engine process ended with code -9")

    batch.engine.script = die
    with pytest.raises(EngineDead, match="again to go on"):
        await batch([line(f"{i}") for i in range(20)])
    assert batch.target.read_text() == ""


async def test_an_empty_file(batch):
    assert await batch([]) == []


def test_files_that_cannot_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    there = tmp_path / "there.jsonl"
    there.write_text('{"id": "x", "custom_id": "a"}\n')
    for argv, words in (
        (["-i", str(tmp_path / "none"), "-o", str(there)], "No such file"),
        (["-i", str(there), "-o", str(there)], "the same file"),
        (["-i", str(there), "-o", str(tmp_path)], "Is a directory"),
        (["-i", str(there), "-o", str(tmp_path / "out"), "--max-concurrency", "0"], "1 to 4096, got 0"),
    ):
        assert cli.main(["run-batch", *argv]) == 2
        assert words in capsys.readouterr().err
    for text in ('{"custom_id": "a"}\n', "no record\n", "[]\n"):
        there.write_text(text)
        with pytest.raises(ConfigError, match="line 1 is no answer of run-batch.*--overwrite"):
            read_done(there)
    for flag in ("--port", "--host", "--api-key"):
        assert cli.main(["run-batch", "-i", str(there), "-o", str(tmp_path / "o"), flag, "1"]) == 2
        assert f"unknown option '{flag}'" in capsys.readouterr().err

"""POST /v1/embeddings against a stand-in engine: [pooled token ids, 1, 0, 2], which the route makes as long as 1."""

import asyncio
import base64

import numpy as np
import pytest

PATH = "/v1/embeddings"


def unit(first: float, size: int = 4) -> np.ndarray:
    vector = np.array([first, 1, 0, 2][:size], np.float32)
    return vector / np.linalg.norm(vector)


@pytest.mark.parametrize(
    ("given", "firsts", "tokens"),
    [
        ([5, 6, 7], [7], 3),
        ([[5, 6, 7], [9]], [7, 9], 4),
    ],
)
async def test_each_input_has_an_embedding_in_its_place(api, given, firsts, tokens):
    answer = await api.ok(PATH, {"input": given, "model": "m"})
    assert answer["object"] == "list" and answer["model"] == "m" and answer["id"].startswith("embd-")
    assert [each["index"] for each in answer["data"]] == list(range(len(firsts)))
    assert answer["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    for each, first in zip(answer["data"], firsts, strict=True):
        np.testing.assert_allclose(each["embedding"], unit(first), rtol=1e-6)
    await api.settled()


async def test_texts_are_tokenised(api):
    ids = api.frontend.encode("hello")
    (each,) = (await api.ok(PATH, {"input": "hello"}))["data"]
    np.testing.assert_allclose(each["embedding"], unit(ids[-1]), rtol=1e-6)
    assert len((await api.ok(PATH, {"input": ["hello", "you"]}))["data"]) == 2


async def test_base64_is_little_endian_float32(api):
    (each,) = (await api.ok(PATH, {"input": [4, 8], "encoding_format": "base64", "pooling": "mean"}))["data"]
    np.testing.assert_allclose(np.frombuffer(base64.b64decode(each["embedding"]), "<f4"), unit(6), rtol=1e-6)


async def test_fewer_dimensions_of_a_model_that_was_trained_for_it(api):
    api.engine.info.hidden_size = 4
    error = await api.error(PATH, {"input": [5], "dimensions": 2})
    assert error["param"] == "dimensions" and "is_matryoshka" in error["message"]
    api.engine.info.matryoshka = True
    (each,) = (await api.ok(PATH, {"input": [5], "dimensions": 2}))["data"]
    np.testing.assert_allclose(each["embedding"], unit(5, 2), rtol=1e-6)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", ""]}, "input.1"),
        ({"input": ["a", [5]]}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": [None]}, "input"),
        ({"input": [[5], [None]]}, "input.1"),
        ({"input": [[5], [-1]]}, "input.1"),
        ({"input": {"a": 1}}, "input"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a", "pooling": "cls"}, "pooling"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "dimensions": 10**9}, "dimensions"),
        ({"input": "a", "temperature": 1}, "temperature"),
        ({"input": [1] * 10**5}, "input"),
    ],
)
async def test_bad_bodies(api, body, param):
    error = await api.error(PATH, body)
    assert error["param"] == param and "None" not in error["message"]


async def test_an_unknown_model(api):
    assert (await api.error(PATH, {"input": "a", "model": "zz"}, 404))["param"] == "model"


async def test_one_that_is_aborted_ends_with_an_error_of_its_own(api, caplog):
    """A completion says finish_reason "abort", for which an embedding has no place; it is no failure of the server."""
    api.engine.gate.clear()
    asking = asyncio.create_task(api.error(PATH, {"input": [[5, 6], [7]]}, 499))
    async with asyncio.timeout(5):
        while len(api.engine.open) < 2:
            await asyncio.sleep(0.002)
    assert (await api.ok("/abort_requests", {}))["aborted"] == 1
    assert (await asking)["type"] == "RequestAbortedError"
    await api.settled()
    assert not caplog.records

"""Prompts and params become Requests, deltas become outputs: as the offline API and the server both use them."""

import math

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from jaxserve.errors import ConfigError, DeadlineExceeded, EngineError, QueueFull, RequestError
from jaxserve.frontend import Frontend
from jaxserve.request import EngineInfo, RequestOutputKind, SamplingParams, SequenceDelta, TokenLogprobs
from jaxserve.tokenizer import Tokenizer

VOCAB = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
LIMIT = 32


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """One token per byte, and two special ones."""
    backend = tokenizers.Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(VOCAB)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    return Tokenizer(backend, bos_token_id=0, eos_token_ids=[1])


def make_frontend(tokenizer: Tokenizer, **defaults) -> Frontend:
    info = EngineInfo(
        model="m", vocab_size=len(VOCAB), max_model_len=LIMIT, max_num_seqs=4, page_size=16, num_pages=8,
        device="cpu", dtype="float32", scheduling_policy="priority",
    )  # fmt: skip
    return Frontend(tokenizer, info, defaults)


@pytest.fixture
def frontend(tokenizer) -> Frontend:
    return make_frontend(tokenizer)


def ids(frontend: Frontend, text: str) -> list[int]:
    return frontend.tokenizer.encode(text, add_special_tokens=False)


def test_a_request_has_everything_resolved(frontend):
    params = SamplingParams(max_tokens=5, stop_token_ids=[7, 1, 7], seed=3, bad_words=["ab"])
    request = frontend.make_request("r", "héllo", params, priority=2, timeout_s=9, arrival_s=100.0)
    assert request.prompt_token_ids == ids(frontend, "héllo") and len(request.prompt_token_ids) == 6
    assert (request.max_tokens, request.stop_ids, request.seed, request.priority) == (5, [1, 7], 3, 2)
    assert request.bad_words_ids == [ids(frontend, "ab"), ids(frontend, " ab")]
    assert (request.arrival_s, request.deadline_s) == (100.0, 109.0)


def test_token_ids_are_taken_as_they_are(frontend):
    assert frontend.make_request("r", [0, 0, 5], SamplingParams()).prompt_token_ids == [0, 0, 5]


def test_max_tokens_none_fills_the_context(frontend):
    assert frontend.make_request("r", [5] * 10, SamplingParams(max_tokens=None)).max_tokens == LIMIT - 10
    assert frontend.make_request("r", [5] * (LIMIT - 1), SamplingParams(max_tokens=None)).max_tokens == 1


@pytest.mark.parametrize(
    ("prompt", "params", "param", "words"),
    [
        ("", {}, "prompt", ["empty"]),
        ([], {}, "prompt", ["empty"]),
        ([5] * LIMIT, {}, "prompt", [str(LIMIT), str(LIMIT - 1)]),
        ("x" * 40, {}, "prompt", ["40 tokens"]),
        ("x" * 10_000, {}, "prompt", ["10000 characters"]),
        ([len(VOCAB)], {}, "prompt", ["vocabulary", str(len(VOCAB) - 1)]),
        ([-1], {}, "prompt", ["-1"]),
        ([5] * 20, {"max_tokens": 13}, "max_tokens", ["at most 12", "20", "13"]),
        ([5] * 20, {"max_tokens": None, "min_tokens": 13}, "min_tokens", ["at most 12", "13"]),
        ([5], {"logit_bias": {9999: 1.0}}, "logit_bias", ["9999"]),
        ([5], {"allowed_token_ids": [9999]}, "allowed_token_ids", ["9999"]),
        ([5], {"stop": ["x" * 5000]}, "stop", ["4096", "5000"]),
        ([5], {"bad_words": ["x" * 17]}, "bad_words", ["17 tokens", "16"]),
        ([5], {"bad_words": ["a", "x" * 5000]}, "bad_words", ["bad_words[1]", "1024 characters", "5000"]),
        ([5], {"allowed_token_ids": [1], "min_tokens": 3}, "allowed_token_ids", ["min_tokens (3)", "[1]"]),
        (
            [5],
            {"allowed_token_ids": [9, 1], "stop_token_ids": [9], "min_tokens": 4},
            "allowed_token_ids",
            ["min_tokens (4)", "[9, 1]"],
        ),
        ([5], {"allowed_token_ids": [VOCAB.index("b")], "bad_words": ["b"]}, "allowed_token_ids", ["bad word"]),
    ],
)
def test_refusals_name_field_limit_and_value(frontend, prompt, params, param, words):
    with pytest.raises(RequestError) as caught:
        frontend.make_request("r", prompt, SamplingParams(**params))
    assert caught.value.param == param
    assert all(word in caught.value.message for word in (*words, param))


@pytest.mark.parametrize(
    "params",
    [
        {"allowed_token_ids": [1]},  # it may end at once
        {"allowed_token_ids": [1], "min_tokens": 3, "ignore_eos": True},
        {"allowed_token_ids": [1, 9], "min_tokens": 3},
        {"allowed_token_ids": [VOCAB.index("b"), 9], "bad_words": ["b"]},
        {"allowed_token_ids": [VOCAB.index("b")], "bad_words": ["bb"]},  # once it may
    ],
)
def test_narrow_choices_that_leave_something_are_taken(frontend, params):
    frontend.make_request("r", [5], SamplingParams(**params))


def test_bad_words_keep_their_inner_spaces(frontend):
    request = frontend.make_request("r", "a", SamplingParams(bad_words=["  b c", " "]))
    assert request.bad_words_ids == [ids(frontend, text) for text in ("b c", " b c", " ", "  ")]


def test_defaults_of_the_model(tokenizer):
    frontend = make_frontend(tokenizer, temperature=0.7, top_k=40, max_new_tokens=9, eos_token_id=[1, 5], top_p=None)
    params = frontend.default_params()
    assert (params.temperature, params.top_k, params.top_p) == (0.7, 40, 1.0)
    assert frontend.params(temperature=0.0).temperature == 0.0
    assert frontend.default_max_tokens == 9
    assert frontend.make_request("r", "a", params).stop_ids == [1, 5]
    assert make_frontend(tokenizer, eos_token_id=5).eos_ids == [1, 5]


BAD_DEFAULTS = [
    *({"eos_token_id": bad} for bad in ("x", -5, 1.5, math.nan, True, 10**30, {}, [None], ["x"])),
    *({"max_new_tokens": bad} for bad in ("x", 0, -1, 1.5, 10**30, math.nan, True, [])),
]


@pytest.mark.parametrize(
    "defaults", [{"temperature": -1}, {"top_p": "x"}, {"eos_token_id": list(range(9))}, *BAD_DEFAULTS]
)
def test_bad_defaults_are_a_start_up_error(tokenizer, defaults):
    with pytest.raises(ConfigError):
        make_frontend(tokenizer, **defaults)


def test_a_written_bos_is_not_doubled(frontend, tokenizer, monkeypatch):
    def with_bos(text, *, add_special_tokens=True):
        return [0] * add_special_tokens + Tokenizer.encode(tokenizer, text, add_special_tokens=False)

    monkeypatch.setattr(tokenizer, "encode", with_bos)
    assert frontend.encode("<s>a")[:2] != [0, 0] and frontend.encode("<s>a")[0] == 0
    assert frontend.encode("a")[0] == 0
    assert frontend.encode("<s><s>a", add_special_tokens=False)[:2] == [0, 0], "what was asked for stays"


# ------------------------------------------------------------------------------------------------- deltas to outputs


def entry(token_id: int) -> TokenLogprobs:
    return TokenLogprobs(token_id, -1.0, 2, [9, token_id], [-0.5, -1.0])


def test_an_output_grows(frontend):
    params = SamplingParams(n=2, logprobs=1, prompt_logprobs=1, stop=["##"])
    request = frontend.make_request("r", "ab", params)
    builder = frontend.output_builder(request, "ab")
    a, hash_ = ids(frontend, "a#")
    assert not builder.push(SequenceDelta("r", -1))
    first = SequenceDelta("r", 0, [a], [entry(a)], prompt_logprobs=[None, entry(5)], cached_tokens=16)
    assert builder.push(first).text == "a"
    assert not builder.push(SequenceDelta("r", 0, [hash_], [entry(hash_)]))
    assert builder.push(SequenceDelta("r", 0, [hash_], [entry(hash_)])).stopped
    assert not builder.output.finished
    builder.push(SequenceDelta("r", 1, [a], [entry(a)], finish_reason="length"))
    builder.push(SequenceDelta("r", 0, finish_reason="abort"))  # the engine's answer to the cancel
    output = builder.output
    assert output.finished and builder.finished and output.num_cached_tokens == 16
    one, two = output.outputs
    assert (one.text, one.token_ids, one.finish_reason, one.stop_reason) == ("a", [a, hash_, hash_], "stop", "##")
    assert (two.text, two.token_ids, two.finish_reason, two.stop_reason) == ("a", [a], "length", None)
    assert one.cumulative_logprob == -3.0 and len(one.logprobs) == 3
    assert [list(step) for step in two.logprobs] == [[a, 9]] and two.logprobs[0][a].decoded_token == "a"
    assert two.logprobs[0][a].rank == 2 and two.logprobs[0][9].rank == 1
    assert output.prompt_logprobs[0] is None and list(output.prompt_logprobs[1]) == [5, 9]
    assert (builder.num_tokens, output.prompt, output.prompt_token_ids) == (4, "ab", request.prompt_token_ids)


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_what_a_stream_yields(frontend, kind):
    params = SamplingParams(n=2, logprobs=1, output_kind=kind)
    builder = frontend.output_builder(frontend.make_request("r", "ab", params))
    a, b = ids(frontend, "ab")
    half = [ids(frontend, "é")[0]]
    deltas = [
        SequenceDelta("r", -1),
        SequenceDelta("r", 0, [a], [entry(a)]),
        SequenceDelta("r", 1, half, [entry(half[0])]),
        SequenceDelta("r", 0, [b], [entry(b)], finish_reason="length"),
        SequenceDelta("r", 1, finish_reason="abort"),
    ]
    outputs = [output for delta in deltas if (output := builder.news(builder.push(delta)))]
    texts = [[(one.index, one.text) for one in output.outputs] for output in outputs]
    assert (
        texts
        == {
            RequestOutputKind.CUMULATIVE: [[(0, "a"), (1, "")], [(0, "ab"), (1, "")], [(0, "ab"), (1, "\ufffd")]],
            RequestOutputKind.DELTA: [[(0, "a")], [(0, "b")], [(1, "\ufffd")]],
            RequestOutputKind.FINAL_ONLY: [[(0, "ab"), (1, "\ufffd")]],
        }[kind]
    )
    assert all(len(one.token_ids) == len(one.logprobs) for output in outputs for one in output.outputs)
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    assert outputs[-1].outputs[-1].token_ids == half and outputs[-1].outputs[-1].finish_reason == "abort"
    assert [output.metrics.finished_s is not None for output in outputs] == [o.finished for o in outputs]


def test_without_logprobs_there_are_none(frontend):
    builder = frontend.output_builder(frontend.make_request("r", "ab", SamplingParams()))
    builder.push(SequenceDelta("r", 0, [5], finish_reason="length"))
    assert builder.output.outputs[0].logprobs is None and builder.output.outputs[0].cumulative_logprob is None


@pytest.mark.parametrize(
    ("delta", "error"),
    [
        (SequenceDelta("r", 0, finish_reason="timeout"), DeadlineExceeded),
        (SequenceDelta("r", 0, finish_reason="error"), EngineError),
        (SequenceDelta("r", -1, finish_reason="error", error=QueueFull("full").info()), QueueFull),
    ],
)
def test_errors_are_raised(frontend, delta, error):
    builder = frontend.output_builder(frontend.make_request("r", "ab", SamplingParams()))
    with pytest.raises(error):
        builder.push(delta)


def test_render_chat_needs_a_template(frontend):
    with pytest.raises(RequestError) as caught:
        frontend.render_chat([{"role": "user", "content": "a"}])
    assert caught.value.param == "chat_template"


def test_a_default_max_tokens_yields_where_room_is_short_and_a_given_one_is_refused(frontend):
    prompt = list(range(2, LIMIT - 1))  # leaves room for three
    params = SamplingParams(max_tokens=16)
    assert frontend.make_request("r", prompt, params, max_tokens_field=None).max_tokens == 3
    with pytest.raises(RequestError, match=r"max_completion_tokens must be at most 3"):
        frontend.make_request("r", prompt, params, max_tokens_field="max_completion_tokens")


def test_a_priority_that_nobody_would_heed_is_refused(tokenizer):
    frontend = make_frontend(tokenizer)
    frontend.info.scheduling_policy = "fcfs"
    with pytest.raises(RequestError, match="--scheduling-policy priority, got 2"):
        frontend.make_request("r", [2, 3], SamplingParams(), priority=2)

"""What completions and chats answer: shapes, order, counts, and streams that say the same as whole answers."""

import copy
import dataclasses
import json

import pytest

from jaxserve.http.logprobs import LogprobShapes
from jaxserve.request import TokenLogprobs
from jaxserve.tokenizer import Tokenizer

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
USER = [{"role": "user", "content": "hi"}]


def say(api, text: str) -> list[int]:
    """Makes the engine answer `text` and then EOS, whatever it is asked."""
    ids = [*api.frontend.tokenizer.encode(text, add_special_tokens=False), 1]
    api.engine.script = lambda request, index: ids
    return ids


def texts_of(events: list[dict]) -> dict[int, str]:
    """Choice index -> text of a streamed completion or chat."""
    texts: dict[int, str] = {}
    for event in events:
        for choice in event["choices"]:
            piece = choice["delta"].get("content", "") if "delta" in choice else choice["text"]
            texts[choice["index"]] = texts.get(choice["index"], "") + piece
    return texts


def logprobs_of(events: list[dict]) -> dict[str, list]:
    """Legacy logprobs of choice 0 of a stream, joined."""
    joined: dict[str, list] = {}
    for event in events:
        for choice in event["choices"]:
            if choice["index"] == 0:
                for name, values in (choice["logprobs"] or {}).items():
                    joined.setdefault(name, []).extend(values)
    return joined


async def test_completion_shape(api):
    say(api, "brown fox")
    answer = await api.ok(TEXT, {"model": "m", "prompt": "quick", "max_tokens": 50})
    assert answer.pop("id").startswith("cmpl-") and answer.pop("created") > 10**9
    assert answer.pop("system_fingerprint").startswith("jaxserve-")
    prompt_tokens, output_tokens = (
        len(api.engine.requests[0].prompt_token_ids),
        len(api.engine.script(api.engine.requests[0], 0)),
    )
    assert answer == {
        "object": "text_completion",
        "model": "m",
        "choices": [{"index": 0, "text": "brown fox", "logprobs": None, "finish_reason": "stop", "stop_reason": None}],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": output_tokens,
            "total_tokens": prompt_tokens + output_tokens,
            "prompt_tokens_details": {"cached_tokens": 3},
        },
    }


async def test_chat_shape(api):
    say(api, "fine")
    answer = await api.ok(CHAT, {"messages": USER})
    assert answer["id"].startswith("chatcmpl-") and answer["object"] == "chat.completion"
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "fine", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ]


async def test_chat_stream_shape(api):
    say(api, "ab")
    events = await api.events(CHAT, {"messages": USER, "stream_options": {"include_usage": True}})
    choices = [event["choices"][0] for event in events[:-1]]
    assert [choice["delta"] for choice in choices] == [
        {"role": "assistant", "content": ""},
        {"content": "a"},
        {"content": "b"},
        {},
    ]
    assert [choice["finish_reason"] for choice in choices] == [None, None, None, "stop"]
    assert events[-1]["choices"] == [] and events[-1]["usage"]["completion_tokens"] == 3
    assert len({(event["id"], event["object"], event["created"], event["model"]) for event in events}) == 1
    assert not any("usage" in event for event in events[:-1])


async def test_completion_stream_shape(api):
    events = await api.events(TEXT, {"prompt": "a", "max_tokens": 3, "stream_options": {"include_usage": True}})
    assert all(event["object"] == "text_completion" for event in events)
    assert [event["choices"][0]["finish_reason"] for event in events[:-1]][-1] == "length"
    assert events[-1]["choices"] == [] and events[-1]["usage"]["completion_tokens"] == 3
    assert "usage" not in (await api.events(TEXT, {"prompt": "a"}))[-1]


async def test_continuous_usage_grows_to_the_final_one(api):
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = await api.events(CHAT, {"messages": USER, "max_tokens": 6, "n": 2, "stream_options": options})
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts) and counts[-1] == 12 and counts[0] < 12


async def test_indices_of_several_prompts_and_samples(api):
    body = {"prompt": ["ab", "c"], "n": 2, "max_tokens": 9}
    answer = await api.ok(TEXT, body)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    prompts = [len(request.prompt_token_ids) for request in api.engine.requests]
    assert answer["usage"]["prompt_tokens"] == sum(prompts), "a prompt counts once, whatever n"
    assert answer["usage"]["completion_tokens"] == 4 * 9
    alone = [(await api.ok(TEXT, {**body, "prompt": prompt}))["choices"] for prompt in body["prompt"]]
    assert [c["text"] for c in answer["choices"]] == [c["text"] for choices in alone for c in choices]


async def test_streams_of_several_prompts_interleave_and_end_once_each(api):
    body = {"prompt": [[5, 6], [7, 8], [9]], "n": 2, "max_tokens": 12}
    whole = await api.ok(TEXT, body)
    events = await api.events(TEXT, body)
    order = [event["choices"][0]["index"] for event in events]
    ends = [event["choices"][0]["index"] for event in events if event["choices"][0]["finish_reason"]]
    assert sorted(ends) == [0, 1, 2, 3, 4, 5]
    assert order != sorted(order), "one prompt after the other"
    assert texts_of(events) == {choice["index"]: choice["text"] for choice in whole["choices"]}


@pytest.mark.parametrize("tokens_per_delta", [1, 3])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"stop": ["###"]},
        {"stop": ["some", "naïve"], "include_stop_str_in_output": True},
        {"stop": "日本", "min_tokens": 3},
        {"echo": True},
        {"echo": True, "logprobs": 2, "stop": ["fox"]},
        {"logprobs": 0},
        {"logprobs": 5, "n": 2, "seed": 3},
        {"stop_token_ids": [100, 120, 140]},
        {"skip_special_tokens": False, "return_token_ids": True},
    ],
    ids=json.dumps,
)
async def test_a_stream_says_what_the_whole_answer_says(api, fields, tokens_per_delta):
    api.engine.tokens_per_delta = tokens_per_delta
    body = {"prompt": "naïve 😀 ##", "max_tokens": 120, **fields}
    whole = await api.ok(TEXT, body)
    events = await api.events(TEXT, body)
    assert texts_of(events) == {choice["index"]: choice["text"] for choice in whole["choices"]}
    for choice in whole["choices"]:
        chunks = [c for event in events for c in event["choices"] if c["index"] == choice["index"]]
        assert all(chunk["text"] for chunk in chunks[:-1]), "an empty chunk before the end"
        assert all(chunk["finish_reason"] is None for chunk in chunks[:-1])
        for name in ("finish_reason", "stop_reason"):
            assert chunks[-1][name] == choice[name]
        if "token_ids" in choice:
            assert [i for chunk in chunks for i in chunk["token_ids"]] == choice["token_ids"]
    if "logprobs" in fields:
        assert logprobs_of(events) == whole["choices"][0]["logprobs"]


@pytest.mark.parametrize("fields", [{}, {"stop": ["###"]}, {"logprobs": True, "top_logprobs": 2}], ids=json.dumps)
async def test_a_chat_stream_says_what_the_whole_answer_says(api, fields):
    body = {"messages": USER, "max_tokens": 90, "n": 2, **fields}
    whole = await api.ok(CHAT, body)
    events = await api.events(CHAT, body)
    assert texts_of(events) == {choice["index"]: choice["message"]["content"] for choice in whole["choices"]}
    for choice in whole["choices"]:
        chunks = [c for event in events for c in event["choices"] if c["index"] == choice["index"]]
        assert [c["delta"].get("role") for c in chunks] == ["assistant", *[None] * (len(chunks) - 1)]
        assert [c["finish_reason"] for c in chunks if c["finish_reason"]] == [choice["finish_reason"]]
        if choice["logprobs"]:
            pieces = [entry for c in chunks if c["logprobs"] for entry in c["logprobs"]["content"]]
            assert pieces == choice["logprobs"]["content"]


@pytest.mark.parametrize("stream", [False, True])
async def test_stop_strings_never_show_and_end_the_engine_request(api, stream):
    say(api, "one # two ## three ### four " * 5)
    body = {"prompt": "a", "max_tokens": 400, "stop": ["###"]}
    if stream:
        events = await api.events(TEXT, body)
        text, last = texts_of(events)[0], events[-1]["choices"][0]
    else:
        last = (await api.ok(TEXT, body))["choices"][0]
        text = last["text"]
    assert text == "one # two ## three "
    assert (last["finish_reason"], last["stop_reason"]) == ("stop", "###")
    request_id = api.engine.requests[0].request_id
    assert (request_id, 0) in api.engine.cancelled
    await api.settled()


async def test_one_sequence_stops_and_the_others_go_on(api):
    fox, other = (api.frontend.tokenizer.encode(text, add_special_tokens=False) * 20 for text in ("a fox", "a bear"))
    api.engine.script = lambda request, index: fox if index == 1 else other
    answer = await api.ok(TEXT, {"prompt": "b", "n": 3, "max_tokens": 40, "stop": ["fox"]})
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["length", "stop", "length"]
    assert answer["choices"][1]["text"] == "a " and answer["choices"][0]["text"].startswith("a beara bear")
    ((_, index),) = api.engine.cancelled
    assert index == 1
    assert answer["usage"]["completion_tokens"] < 3 * 40


async def test_a_stop_id_is_the_stop_reason(api):
    ids = say(api, "abc")
    choice = (await api.ok(TEXT, {"prompt": "a", "stop_token_ids": [ids[1]]}))["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("a", "stop", ids[1])


async def test_unicode_is_never_cut(api):
    text = "naïve 日本語 😀👍🏽 🇩🇪 end"
    say(api, text)
    events = await api.events(CHAT, {"messages": USER})
    pieces = [event["choices"][0]["delta"].get("content", "") for event in events]
    assert "".join(pieces) == text and "\ufffd" not in "".join(pieces)


async def test_a_prompt_cut_inside_a_character(api):
    smile = api.frontend.tokenizer.encode("a😀", add_special_tokens=False)
    api.engine.script = lambda request, index: [*smile[3:], *smile[:1], 1]
    events = await api.events(TEXT, {"prompt": smile[:3]})
    assert texts_of(events) == {0: "😀a"}, "new text only, with the character it completes"
    assert texts_of(await api.events(TEXT, {"prompt": smile[:3], "echo": True})) == {0: "a😀a"}


# ------------------------------------------------------------------------------------------------------- logprobs


async def test_chat_bytes_join_to_the_content(api):
    text = "naïve 日本語 😀👍🏽"
    ids = say(api, text)
    answer = await api.ok(CHAT, {"messages": USER, "logprobs": True, "top_logprobs": 3})
    content = answer["choices"][0]["logprobs"]["content"]
    assert bytes(b for entry in content[:-1] for b in entry["bytes"]).decode() == text  # the last one is EOS
    assert len(content) == len(ids) and all(len(entry["top_logprobs"]) == 3 for entry in content)
    assert all(top["logprob"] >= -9999 for entry in content for top in entry["top_logprobs"])


async def test_chat_logprobs_without_top(api):
    answer = await api.ok(CHAT, {"messages": USER, "logprobs": True, "max_tokens": 2})
    assert [entry["top_logprobs"] for entry in answer["choices"][0]["logprobs"]["content"]] == [[], []]
    assert (await api.ok(CHAT, {"messages": USER, "logprobs": False, "top_logprobs": 0}))["choices"][0][
        "logprobs"
    ] is None


async def test_legacy_logprobs(api):
    ids = say(api, "日本語 fox 😀")
    answer = (await api.ok(TEXT, {"prompt": "a", "logprobs": 5, "max_tokens": 50}))["choices"][0]
    logprobs = answer["logprobs"]
    assert all(len(values) == len(ids) for values in logprobs.values())
    for token, value, top in zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True):
        assert top[token] == value
        assert 5 <= len(top) <= 6, "names collide"
    offsets = logprobs["text_offset"]
    assert offsets[0] == 0 and offsets == sorted(offsets) and offsets[-1] == len(answer["text"])
    words = [(t, o) for t, o in zip(logprobs["tokens"], offsets, strict=True) if "fox" in t]
    assert words and all(answer["text"][o : o + len(t)] == t for t, o in words)


async def test_logprobs_zero_is_the_sampled_token_only(api):
    logprobs = (await api.ok(TEXT, {"prompt": "a", "logprobs": 0, "max_tokens": 6}))["choices"][0]["logprobs"]
    assert [list(top) for top in logprobs["top_logprobs"]] == [[token] for token in logprobs["tokens"]]


async def test_tokens_named_by_id(api):
    ids = say(api, "日")
    body = {"prompt": "a", "logprobs": 1, "return_tokens_as_token_ids": True, "return_token_ids": True}
    choice = (await api.ok(TEXT, body))["choices"][0]
    assert choice["logprobs"]["tokens"] == [f"token_id:{i}" for i in ids]
    assert choice["token_ids"] == ids and choice["prompt_token_ids"] == api.engine.requests[0].prompt_token_ids
    chat = await api.ok(CHAT, {"messages": USER, "return_token_ids": True})
    assert chat["choices"][0]["token_ids"] == ids
    assert chat["prompt_token_ids"] == api.engine.requests[1].prompt_token_ids
    first, *rest = await api.events(CHAT, {"messages": USER, "return_token_ids": True})
    assert first["prompt_token_ids"] == chat["prompt_token_ids"]
    assert [i for event in rest for i in event["choices"][0].get("token_ids", [])] == ids


@pytest.mark.parametrize("max_tokens", [0, 1])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("as_ids", [False, True])
async def test_echo_scores_the_prompt(api, max_tokens, stream, as_ids):
    """What lm-eval's loglikelihood asks: prompt tokens included, the first without a value."""
    text = "naïve fox 😀"
    ids = api.frontend.tokenizer.encode(text, add_special_tokens=not as_ids)
    body = {"prompt": ids if as_ids else text, "echo": True, "logprobs": 1, "max_tokens": max_tokens, "temperature": 0}
    if stream:
        body["stream_options"] = {"include_usage": True}
        *events, last = await api.events(TEXT, body)
        logprobs, usage = logprobs_of(events), last["usage"]
        shown = texts_of(events)[0]
        end = events[-1]["choices"][0]
    else:
        answer = await api.ok(TEXT, body)
        end, usage = answer["choices"][0], answer["usage"]
        logprobs, shown = end["logprobs"], end["text"]
    assert end["finish_reason"] == "length"
    assert shown.startswith(text) and (max_tokens or shown == text)
    assert all(len(values) == len(ids) + max_tokens for values in logprobs.values())
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
    assert all(value is not None for value in logprobs["token_logprobs"][1:])
    assert logprobs["text_offset"] == sorted(logprobs["text_offset"])
    assert logprobs["text_offset"][-1] <= len(shown)
    assert usage["completion_tokens"] == max_tokens and usage["prompt_tokens"] == len(ids)
    at = logprobs["text_offset"].index(len("naïve"))
    assert logprobs["tokens"][at].startswith(" ")


async def test_echo_gives_each_sample_the_prompt(api):
    answer = await api.ok(TEXT, {"prompt": ["ab", "c"], "echo": True, "n": 2, "max_tokens": 3})
    assert [choice["text"][:2] for choice in answer["choices"]][:2] == ["ab", "ab"]
    assert all(choice["text"].startswith("c") for choice in answer["choices"][2:])


@pytest.mark.parametrize("ask", [{"prompt_logprobs": 2}, {"echo": True, "logprobs": 2}], ids=["prompt", "echo"])
async def test_prompt_logprobs_are_written_once_for_all_choices(api, monkeypatch, ask):
    written = []
    entry = LogprobShapes._prompt_entry if "prompt_logprobs" in ask else LogprobShapes._top

    def counted(self, of):
        written.append(of)
        return entry(self, of)

    monkeypatch.setattr(LogprobShapes, entry.__name__, counted)
    body = {"prompt": ["a fox", "then"], "n": 3, "max_tokens": 2}
    await api.ok(TEXT, {**body, "n": 1, **ask})
    once = len(written)
    answer = await api.ok(TEXT, {**body, **ask})
    generated = 0 if "prompt_logprobs" in ask else 2 * 2 * 2  # of the two further choices of each prompt
    assert len(written) == 2 * once + generated
    for prompt in (answer["choices"][:3], answer["choices"][3:]):
        if "prompt_logprobs" in ask:
            assert prompt[0]["prompt_logprobs"] == prompt[1]["prompt_logprobs"] == prompt[2]["prompt_logprobs"]
        else:
            assert len({str(choice["logprobs"]["top_logprobs"][:-2]) for choice in prompt}) == 1
            assert all(len(choice["logprobs"]["tokens"]) == len(choice["logprobs"]["text_offset"]) for choice in prompt)


async def test_prompt_logprobs(api):
    ids = api.frontend.tokenizer.encode("a fox")
    for answer in (
        (await api.ok(TEXT, {"prompt": "a fox", "prompt_logprobs": 2}))["choices"][0],
        await api.ok(CHAT, {"messages": USER, "prompt_logprobs": 2}),
    ):
        first, *rest = answer["prompt_logprobs"]
        assert first is None
        assert all({"logprob", "rank", "decoded_token"} == set(value) for entry in rest for value in entry.values())
        assert all(2 <= len(entry) <= 3 for entry in rest)
    answer = (await api.ok(TEXT, {"prompt": "a fox", "prompt_logprobs": 0}))["choices"][0]["prompt_logprobs"]
    assert [list(entry) for entry in answer[1:]] == [[str(i)] for i in ids[1:]]


# ------------------------------------------------------------------------------------------ prompts and parameters


async def test_exactly_one_bos(api):
    """The template writes it, a rendered prompt contains it, the tokenizer adds it: one is meant."""
    rendered = api.frontend.render_chat(USER)
    assert rendered.startswith("<s>")
    await api.ok(CHAT, {"messages": USER})
    await api.ok(CHAT, {"messages": USER, "add_special_tokens": True})
    await api.ok(TEXT, {"prompt": rendered})
    await api.ok(TEXT, {"prompt": rendered, "add_special_tokens": False})
    await api.ok(TEXT, {"prompt": "plain"})
    for request in api.engine.requests:
        assert request.prompt_token_ids.count(0) == 1 and request.prompt_token_ids[0] == 0
    assert len({tuple(request.prompt_token_ids) for request in api.engine.requests[:4]}) == 1
    await api.ok(TEXT, {"prompt": "plain", "add_special_tokens": False})
    assert 0 not in api.engine.requests[-1].prompt_token_ids


async def test_max_tokens_when_none_is_named(api, start):
    room = api.frontend.info.max_model_len
    await api.ok(TEXT, {"prompt": "a"})
    await api.ok(TEXT, {"prompt": "a", "max_tokens": None})
    await api.ok(CHAT, {"messages": USER})
    await api.ok(CHAT, {"messages": USER, "max_tokens": 5})
    await api.ok(CHAT, {"messages": USER, "max_tokens": 5, "max_completion_tokens": 7})
    chat = api.engine.requests[2]
    expected = [16, 16, room - len(chat.prompt_token_ids), 5, 7]
    assert [request.max_tokens for request in api.engine.requests] == expected
    async with start(defaults={"max_new_tokens": 33}) as limited:
        await limited.ok(CHAT, {"messages": USER})
        await limited.ok(TEXT, {"prompt": "a"})
        assert [request.max_tokens for request in limited.engine.requests] == [33, 16]


async def test_default_sampling_comes_from_the_model(start):
    defaults = {"temperature": 0.6, "top_k": 20, "eos_token_id": [1, 3], "do_sample": True, "top_p": None}
    async with start(defaults=defaults) as api:
        await api.ok(CHAT, {"messages": USER})
        await api.ok(CHAT, {"messages": USER, "temperature": 0, "top_k": -1, "ignore_eos": True})
        first, second = api.engine.requests
        assert (first.params.temperature, first.params.top_k, first.params.top_p) == (0.6, 20, 1.0)
        assert (second.params.temperature, second.params.top_k) == (0, 0)
        assert (first.stop_ids, second.stop_ids) == ([1, 3], [])


async def test_every_sampling_field_reaches_the_engine(api):
    fields = {
        "min_tokens": 2, "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "presence_penalty": 1,
        "frequency_penalty": -1, "repetition_penalty": 1.5, "logit_bias": {"7": -200, "8": 3}, "seed": 11,
        "allowed_token_ids": [5, 6], "bad_words": ["fox"], "stop_token_ids": [9], "ignore_eos": True, "n": 2,
        "priority": -3, "max_tokens": 9,
    }  # fmt: skip
    await api.ok(TEXT, {"prompt": "a", **fields})
    request = api.engine.requests[0]
    for name, value in fields.items():
        if name == "logit_bias":
            value = {7: -100.0, 8: 3.0}
        assert getattr(request if name in ("priority", "max_tokens") else request.params, name) == value, name
    assert request.stop_ids == [9] and request.seed == 11
    encode = api.frontend.tokenizer.encode
    assert request.bad_words_ids == [encode(text, add_special_tokens=False) for text in ("fox", " fox")]


async def test_request_timeout_is_a_deadline(start):
    async with start(request_timeout=9) as api:
        await api.ok(TEXT, {"prompt": "a"})
        request = api.engine.requests[0]
        assert request.deadline_s == request.arrival_s + 9


async def test_the_model_name_is_echoed(start):
    async with start(served_model_name=["small", "org/large"]) as api:
        assert (await api.ok(TEXT, {"prompt": "a"}))["model"] == "small"
        assert (await api.ok(TEXT, {"prompt": "a", "model": "org/large"}))["model"] == "org/large"
        await api.error(TEXT, {"prompt": "a", "model": "m"}, 404)


# ------------------------------------------------------------------------------------------------------ messages


async def prompt_of(api, messages: list[dict], **fields) -> str:
    await api.ok(CHAT, {"messages": messages, "max_tokens": 1, **fields})
    return api.frontend.tokenizer.decode(api.engine.requests[-1].prompt_token_ids, skip_special_tokens=False)


async def test_messages_are_rendered(api):
    messages = [
        {"role": "system", "content": "S", "name": None},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "c", "refusal": None, "tool_calls": None, "annotations": [], "audio": None},
        {"role": "tool", "content": "d", "tool_call_id": "1"},
    ]
    prompt = "<s>" + "".join(
        f"<|im_start|>{role}\n{content}<|im_end|>\n"
        for role, content in (("system", "S"), ("user", "a\nb"), ("assistant", "c"), ("tool", "d"))
    )
    assert await prompt_of(api, messages) == prompt + "<|im_start|>assistant\n"
    assert await prompt_of(api, messages, add_generation_prompt=False) == prompt


async def test_the_developer_role_has_an_older_name(api):
    assert "<|im_start|>system\nD" in await prompt_of(api, [{"role": "developer", "content": "D"}])


async def test_the_final_message_may_be_continued(api):
    messages = [*USER, {"role": "assistant", "content": "Once"}]
    prompt = await prompt_of(api, messages, add_generation_prompt=False, continue_final_message=True)
    assert prompt.endswith("assistant\nOnce")


async def test_template_variants(start, make_engine, tokenizer):
    """A template that loops over content gets parts; template arguments arrive; what it refuses is a 400."""
    template = (
        "{% for m in messages %}{% for part in m['content'] %}[{{ part['text'] }}]{% endfor %}{% endfor %}"
        "{{ extra }}{% if bad %}{{ raise_exception('not like this') }}{% endif %}"
    )
    engine = make_engine()
    engine.tokenizer = tokenizer.with_chat_template(template)
    async with start(engine) as api:
        parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
        messages = [{"role": "user", "content": parts}, {"role": "user", "content": "c"}]
        assert await prompt_of(api, messages, chat_template_kwargs={"extra": "E"}) == "[a][b][c]E"
        error = await api.error(CHAT, {"messages": USER, "chat_template_kwargs": {"bad": True}, "stream": True})
        assert error["param"] == "messages" and "not like this" in error["message"]


async def test_a_model_without_a_template(start, make_engine, tokenizer):
    engine = make_engine()
    engine.tokenizer = tokenizer.with_chat_template("x")
    engine.tokenizer._templates = {}
    async with start(engine) as api:
        error = await api.error(CHAT, {"messages": USER})
        assert error["param"] == "chat_template" and "--chat-template" in error["message"]


async def test_long_text_is_tokenised_beside_other_streams(start, make_engine):
    async with start(make_engine(max_model_len=40_000)) as api:
        text = "quick brown fox " * 2000
        answer = await api.ok(TEXT, {"prompt": text, "echo": True, "max_tokens": 1})
        assert answer["choices"][0]["text"].startswith(text)
        await api.ok(CHAT, {"messages": [{"role": "user", "content": text}], "max_tokens": 1})


# ------------------------------------------------------------------------------------------- best_of, suffix, cutting


@pytest.mark.parametrize("prompt", ["a", ["a", "bc"]], ids=["one", "two"])
async def test_best_of_sends_the_likeliest(api, prompt, monkeypatch):
    """The engine's candidates have the same seeds, so that n=8 shows all of those of best_of=8."""
    monkeypatch.setattr(
        api.engine, "logprobs", lambda i, count: TokenLogprobs(i, -i / 99, 1, [7] * count, [-9.0] * count)
    )
    fields = {"prompt": prompt, "max_tokens": 7, "ignore_eos": True, "seed": 5, "echo": True}
    every = await api.ok(TEXT, {**fields, "n": 8, "logprobs": 0, "echo": False})
    best = await api.ok(TEXT, {**fields, "n": 3, "best_of": 8})
    prompts = [prompt] if isinstance(prompt, str) else prompt
    assert [choice["index"] for choice in best["choices"]] == list(range(3 * len(prompts)))
    for i, sent in enumerate(prompts):
        ranked = sorted(
            every["choices"][8 * i : 8 * i + 8], key=lambda choice: -sum(choice["logprobs"]["token_logprobs"]) / 7
        )
        assert len({sum(choice["logprobs"]["token_logprobs"]) for choice in ranked}) > 2
        texts = [choice["text"] for choice in best["choices"][3 * i : 3 * i + 3]]
        assert texts == [sent + choice["text"] for choice in ranked[:3]]
    assert all(choice["logprobs"] is None for choice in best["choices"]), "nobody asked for them"
    assert best["usage"]["completion_tokens"] == every["usage"]["completion_tokens"] == 7 * 8 * len(prompts)
    with_logprobs = await api.ok(TEXT, {**fields, "best_of": 8, "logprobs": 2})
    assert len(with_logprobs["choices"]) == len(prompts)
    assert len(with_logprobs["choices"][0]["logprobs"]["top_logprobs"][-1]) == 3


async def test_best_of_that_asks_for_nothing(api):
    for fields in (
        {"best_of": 1},
        {"best_of": 1, "stream": True},
        {"best_of": 2, "n": 2},
        {"best_of": 1, "temperature": 0},
    ):
        assert (await api.call(TEXT, {"prompt": "a", **fields}))[0] == 200
        assert api.engine.requests[-1].params.logprobs is None


async def test_suffix(start, make_engine, tokenizer):
    backend = copy.deepcopy(tokenizer._backend)
    backend.add_special_tokens(["<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<file_sep>"])
    pre, suf, mid, end = (
        backend.token_to_id(f"<{name}>") for name in ("fim_prefix", "fim_suffix", "fim_middle", "file_sep")
    )
    engine = make_engine()
    engine.tokenizer = Tokenizer(backend, bos_token_id=0, eos_token_ids=[1])
    engine.info = dataclasses.replace(engine.info, vocab_size=engine.tokenizer.vocab_size)

    def ids(text: str) -> list[int]:
        return engine.tokenizer.encode(text, add_special_tokens=False)

    async with start(engine) as api:
        for prompt in ("The qu", ids("The qu"), ""):
            await api.ok(TEXT, {"prompt": prompt, "suffix": " fox"})
            given = ids(prompt) if isinstance(prompt, str) else prompt
            request = engine.requests[-1]
            assert request.prompt_token_ids == [0, pre, *given, suf, *ids(" fox"), mid]
            assert {1, pre, suf, mid, end} == set(request.stop_ids)
        await api.ok(TEXT, {"prompt": "a", "suffix": "b", "ignore_eos": True, "add_special_tokens": False})
        assert engine.requests[-1].prompt_token_ids[0] == pre and engine.requests[-1].stop_ids == []
        await api.ok(TEXT, {"prompt": "a", "suffix": ""})
        assert engine.requests[-1].prompt_token_ids == [0, *ids("a")]
        for fields in ({"echo": True}, {"truncate_prompt_tokens": 5}):
            assert (await api.error(TEXT, {"prompt": "a", "suffix": "b", **fields}))["param"] == "suffix"
        assert (await api.error(TEXT, {"prompt": "", "suffix": ""}))["param"] == "prompt"
        assert "512" in (await api.error(TEXT, {"prompt": "a", "suffix": "日" * 200}))["message"]


async def test_a_suffix_needs_a_model_that_fills_in(api):
    error = await api.error(TEXT, {"prompt": "a", "suffix": "b"})
    assert error["param"] == "suffix" and "no tokens that mark prefix and suffix" in error["message"]


async def test_prompts_are_cut_to_size(api):
    text = "The quick brown fox " * 200  # more than the context
    whole = api.frontend.tokenizer.encode(text)

    async def sent(**fields) -> list[int]:
        await api.ok(TEXT, {"max_tokens": 8, **fields})
        return api.engine.requests[-1].prompt_token_ids

    assert whole[0] == 0 and len(whole) > 512
    assert await sent(prompt=text, truncate_prompt_tokens=20) == [0, *whole[-19:]], "BOS stays"
    assert await sent(prompt=text, truncate_prompt_tokens=20, truncation_side="left") == [0, *whole[-19:]]
    assert await sent(prompt=text, truncate_prompt_tokens=20, truncation_side="right") == whole[:20]
    assert await sent(prompt=text, truncate_prompt_tokens=-1) == [0, *whole[-503:]], "room for 8 tokens"
    assert await sent(prompt=text, truncate_prompt_tokens=1) == whole[-1:]
    assert await sent(prompt=whole, truncate_prompt_tokens=20) == whole[-20:], "ids as they are"
    assert await sent(prompt="The", truncate_prompt_tokens=20) == api.frontend.tokenizer.encode("The")
    echo = await api.ok(
        TEXT, {"prompt": "The quick brown fox", "truncate_prompt_tokens": 4, "echo": True, "logprobs": 0}
    )
    ids = api.engine.requests[-1].prompt_token_ids
    assert echo["choices"][0]["text"].startswith(api.frontend.tokenizer.decode(ids)) and len(ids) == 4
    assert len(echo["choices"][0]["logprobs"]["tokens"]) == 4 + 16
    assert (await api.error(TEXT, {"prompt": text, "truncate_prompt_tokens": 512, "max_tokens": 8}))[
        "param"
    ] == "prompt"


async def test_conversations_are_cut_to_size(api):
    talk = {"messages": [{"role": "user", "content": "The quick brown fox " * 200}], "max_tokens": 8}
    assert (await api.error(CHAT, talk))["param"] == "messages"
    await api.ok(CHAT, {**talk, "truncate_prompt_tokens": -1})
    ids = api.engine.requests[-1].prompt_token_ids
    assert len(ids) == 504 and ids[0] == 0
    assert api.frontend.tokenizer.decode(ids, skip_special_tokens=False).endswith("<|im_end|>\n<|im_start|>assistant\n")

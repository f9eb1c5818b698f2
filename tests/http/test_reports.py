"""Bug reports of other engines, as tests of their whole kind. Where each number of our list is tested:

 1  stop strings in streams     test_detokenize.py: test_any_split_streams_to_the_offline_text,
                                test_exactly_what_may_become_a_stop_string_is_held_back; test_answers.py:
                                test_a_stream_says_what_the_whole_answer_says, test_stop_strings_never_show_...
 3  the cut is at the hit       here; test_detokenize.py: test_the_cut_is_at_the_hit_and_not_at_an_earlier_occurrence
 5  stop strings and calls      test_tools.py: test_a_stop_string_in_text_that_is_held_back_loses_nothing
 7  stop strings in reasoning   test_tools.py: test_a_stop_string_in_the_reasoning_ends_cleanly
 9  prompts cut in a character  here; test_detokenize.py: test_a_prompt_cut_inside_a_character_is_completed_by_the_output
11  names of half characters    here; test_answers.py: test_chat_bytes_join_to_the_content, test_legacy_logprobs
13  echo with logprobs          test_answers.py: test_echo_scores_the_prompt
15  prompt_logprobs and cache   test_engine.py: test_prompt_logprobs_are_the_same_twice_and_in_chunks
17  logits that overflow        test_engine.py: test_report_17_...; test_sampling.py: test_rows_with_nan_...;
                                test_scheduler.py: test_logits_that_are_not_finite_...; what clients see: here
19  tokens past the stop        here; test_detokenize.py: test_tokens_up_to_the_one_that_completed_the_stop_are_kept
21  pieces of arguments         parsers/test_message_parser.py: test_every_single_cut, test_random_cuts_of_random_texts;
                                test_tools.py: test_streams_say_the_same_and_lose_no_token
23  reasoning in streams        test_tools.py: test_with_thinking_off_everything_is_content, test_streams_say_the_same_...
25  n > 1 with a grammar        test_structured.py: test_each_of_n_has_its_own_state, test_each_finished_output_matches_...;
                                test_serve.py: test_a_thousand_mixed_requests
27  double BOS                  test_answers.py: test_exactly_one_bos; test_frontend.py: test_a_written_bos_is_not_doubled
29  logprobs, bool or int       here
31  refusals of streamed calls  here
33  limits with numbers, short  here; test_errors.py: test_prompts_that_leave_no_room, test_absurdly_long_text_...
35  larger than the pool        test_scheduler_sharing.py: test_report_35_...
37  preempted a step ahead      test_scheduler_sharing.py: test_report_37_...; test_engine.py: test_greedy_ids_...
39  finish and abort at once    test_scheduler_sharing.py: test_report_39_...; test_scheduler_machine.py
41  caches that must not meet   here; test_prefix_cache.py: test_other_roots_share_nothing, test_reset_forgets_...;
                                test_sleep.py: test_the_same_text_after_sleep_..., test_pause_forgets_the_prefix_cache_...
43  memory at start-up          test_engine.py: test_the_share_of_a_gpu_..., test_options_that_cannot_be_honoured_...
45  defaults from the model     here; test_answers.py: test_default_sampling_comes_from_the_model
47  top_k=0 draws freely        test_engine.py: test_report_47_...
49  shapes nobody compiled      test_engine.py: test_no_compile_after_warm_up_whatever_is_asked; test_serve.py:
                                test_a_thousand_mixed_requests; test_sharding.py: test_what_cannot_be_split_...
"""

import json
import logging
import re
from pathlib import Path

import pytest

from jaxserve.errors import EngineDead, QueueFull
from jaxserve.frontend import Frontend
from jaxserve.http.schema import ChatBody, CompletionBody, field_specs
from jaxserve.request import SequenceDelta

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
USER = [{"role": "user", "content": "hi"}]
NEEDED = {TEXT: {"prompt": "hi"}, CHAT: {"messages": USER}}


def say(api, text: str) -> list[int]:
    """Makes the engine answer `text` and then EOS, whatever it is asked."""
    ids = [*api.frontend.tokenizer.encode(text, add_special_tokens=False), 1]
    api.engine.script = lambda request, index: ids
    return ids


def text_of(events: list[dict]) -> str:
    return "".join(choice["text"] for event in events for choice in event["choices"])


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("per_delta", [1, 4, 100])
@pytest.mark.parametrize(
    ("prompt", "fields", "shown"),
    [
        ("a fox", {}, "then a {fox}"),  # the prompt is not searched
        ("a fox", {"echo": True}, "a foxthen a {fox}"),
        ("fo", {"echo": True}, "fothen a {fox}"),
        ("fox fo", {"echo": True, "logprobs": 1}, "fox fothen a {fox}"),
        ("a", {"min_tokens": "past the first"}, "then a fox and a {fox}"),  # the first one comes too early
    ],
)
async def test_report_3_the_cut_is_at_the_hit(api, prompt, fields, shown, per_delta, include):
    api.engine.tokens_per_delta = per_delta
    say(api, "then a fox and a fox at last")
    if "min_tokens" in fields:
        fields = {"min_tokens": len(api.frontend.tokenizer.encode("then a fox and", add_special_tokens=False))}
    body = {"prompt": prompt, "stop": ["fox"], "max_tokens": 60, "include_stop_str_in_output": include, **fields}
    expected = shown.replace("{fox}", "fox" if include else "")
    choice = (await api.ok(TEXT, body))["choices"][0]
    assert (choice["text"], choice["stop_reason"]) == (expected, "fox")
    assert text_of(await api.events(TEXT, body)) == expected


@pytest.mark.parametrize("text", ["naïve 😀👍🏽 日本", "a\U0001f1e9\U0001f1ea", "\u0301e"])
async def test_report_9_a_prompt_may_be_cut_anywhere(api, text):
    """What streams is what the output adds: nothing of the prompt comes again, nothing is lost, nothing is half."""
    ids = api.frontend.tokenizer.encode(text, add_special_tokens=False)
    for cut in range(1, len(ids)):
        api.engine.script = lambda request, index, rest=ids[cut:]: [*rest, 1]
        body = {"prompt": ids[:cut], "max_tokens": 60}
        whole = (await api.ok(TEXT, body))["choices"][0]["text"]
        assert text_of(await api.events(TEXT, body)) == whole and "\ufffd" not in whole
        assert text.endswith(whole)
        assert text_of(await api.events(TEXT, {**body, "echo": True})) == text


async def test_report_11_every_token_has_a_name_of_its_own(api):
    """Byte-level pieces all look like U+FFFD: as keys of one object they must not fall together."""
    vocabulary = range(4, api.frontend.tokenizer.vocab_size)
    api.engine.script = lambda request, index: [*vocabulary]
    body = {"max_tokens": len(vocabulary), "ignore_eos": True}
    logprobs = (await api.ok(TEXT, {"prompt": "a", "logprobs": 20, **body}))["choices"][0]["logprobs"]
    for token_id, name, value, top in zip(
        vocabulary, logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
    ):
        among_the_likeliest = token_id % 3 != 0
        assert len(top) == 20 if among_the_likeliest else 21
        assert top[name] == value
    chat = await api.ok(CHAT, {"messages": USER, "logprobs": True, "top_logprobs": 20, **body})
    for token_id, entry in zip(vocabulary, chat["choices"][0]["logprobs"]["content"], strict=True):
        assert bytes(entry["bytes"]) == api.frontend.tokenizer.token_bytes(token_id)
        assert len(entry["top_logprobs"]) == 20


@pytest.mark.parametrize("prompt", ["a", ["a", "b"]])
@pytest.mark.parametrize("stream", [False, True])
async def test_report_17_a_request_whose_logits_overflow_fails_and_says_so(api, prompt, stream):
    api.engine.broken_at = (2, SequenceDelta("r", 0, finish_reason="error"))
    if stream:
        *_, last = await api.events(TEXT, {"prompt": prompt})
        error = last["error"]
    else:
        error = await api.error(TEXT, {"prompt": prompt}, 500)
    assert error["code"] == 500
    await api.settled()
    _, metrics = await api.call("/metrics", method="GET")
    (count,) = re.findall(r'request_success_total\{finished_reason="error",model_name="m"\} (\S+)', metrics)
    assert float(count) > 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("per_delta", [1, 4, 100])
async def test_report_19_tokens_and_logprobs_end_where_the_text_does(api, per_delta, stream):
    """Also where the engine sends several tokens at once, of which some come after the stop string."""
    api.engine.tokens_per_delta = per_delta
    say(api, "one, two, three, four")
    body = {"prompt": "a", "stop": ["two"], "logprobs": 1, "return_token_ids": True, "max_tokens": 60}
    if stream:
        choices = [choice for event in await api.events(TEXT, body) for choice in event["choices"]]
    else:
        choices = (await api.ok(TEXT, body))["choices"]
    decode = api.frontend.tokenizer.decode
    ids = [token_id for choice in choices for token_id in choice["token_ids"]]
    assert "".join(choice["text"] for choice in choices) == "one, "
    assert decode(ids).startswith("one, two") and "two" not in decode(ids[:-1])
    assert sum(len(choice["logprobs"]["tokens"]) for choice in choices if choice["logprobs"]) == len(ids)
    if not stream:
        assert (await api.ok(TEXT, body))["usage"]["completion_tokens"] == len(ids)


@pytest.mark.parametrize("path", [TEXT, CHAT, "/v1/responses"])
async def test_report_41_a_cache_that_is_asked_to_be_apart_is_not_shared_in_silence(api, path):
    error = await api.error(path, NEEDED.get(path, {"input": "a"}) | {"cache_salt": "mine"})
    assert error["param"] == "cache_salt" and not api.engine.requests


@pytest.mark.parametrize(
    ("path", "good", "bad"),
    [(TEXT, [0, 5, 20, None], [True, False, "5", 21, -1, 1.5]), (CHAT, [True, False, None], [0, 1, 5, "true"])],
)
async def test_report_29_logprobs_is_a_number_here_and_a_bool_there(api, path, good, bad):
    for value in good:
        assert "choices" in await api.ok(path, {**NEEDED[path], "logprobs": value})
    for value in bad:
        error = await api.error(path, {**NEEDED[path], "logprobs": value})
        assert error["param"] == "logprobs" and "logprobs must be" in error["message"]


REFUSED = [
    ({"temperature": 9}, 400),
    ({"nonsense": 1}, 400),
    ({"suffix": "x"}, 400),
    ({"model": "zz"}, 404),
    ({"max_tokens": 10**9}, 400),
    ({"min_tokens": 5, "max_tokens": 4}, 400),
    ({"stop": [""]}, 400),
    ({"bad_words": ["w" * 200]}, 400),
    ({"logit_bias": {"999999": 1}}, 400),
    ({"n": 2, "temperature": 0}, 400),
    ({"prompt": "long " * 600}, 400),
    ({"prompt": ["a", ""]}, 400),
    ({"prompt": [10**6]}, 400),
    ({"messages": [{"role": "user", "content": "long " * 600}]}, 400),
    ({"messages": [{"role": "robot", "content": "hi"}]}, 400),
    ({"messages": USER, "chat_template_kwargs": {"messages": 5}}, 400),
]


@pytest.mark.parametrize(("fields", "status"), REFUSED, ids=lambda value: json.dumps(value)[:40])
async def test_report_31_a_streamed_call_is_refused_like_a_plain_one(api, fields, status):
    path = CHAT if "messages" in fields else TEXT
    plain, streamed = [
        await api.error(path, {**NEEDED[path], **fields, "stream": stream}, status) for stream in (False, True)
    ]
    assert plain == streamed
    assert plain["param"] and (plain["param"].split(".")[0] in fields), "the error names no field of the call"
    assert not api.engine.requests


@pytest.mark.parametrize("refusal", [QueueFull("full"), EngineDead("dead")])
@pytest.mark.parametrize("path", [TEXT, CHAT])
async def test_report_31_what_the_engine_refuses_too(api, path, refusal):
    api.engine.refusal = refusal
    errors = [await api.error(path, {**NEEDED[path], "stream": s}, refusal.status) for s in (False, True)]
    assert errors[0] == errors[1]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "field"),
    [(TEXT, "max_tokens"), (CHAT, "max_tokens"), (CHAT, "max_completion_tokens"), (TEXT, "prompt"), (CHAT, "messages")],
)
async def test_report_33_what_does_not_fit_is_told_with_numbers(api, path, field, stream):
    limit = api.frontend.info.max_model_len
    value = {"prompt": [5] * 600, "messages": [{"role": "user", "content": "long " * 200}]}.get(field, 10**9)
    error = await api.error(path, {**NEEDED[path], field: value, "stream": stream})
    assert error["param"] == field and str(limit) in error["message"]
    given = "1000000000" if "max" in field else "600" if field == "prompt" else "tokens"
    assert given in error["message"]


HUGE = ["x" * 10**5, ["x"] * 10**5, [[1]] * 10**5, {str(i): 1 for i in range(10**4)}, 10**400, {"x" * 10**5: 1}]


@pytest.mark.parametrize("cls", [CompletionBody, ChatBody])
async def test_report_33_no_error_repeats_a_large_value(api, cls):
    """Whatever the field; api.checked checks the length of the message."""
    path = TEXT if cls is CompletionBody else CHAT
    accepted = set()
    for name in field_specs(cls):
        for value in HUGE:
            body = {**NEEDED[path], name: value}
            status, answer = await api.call(path, body)
            if status == 200:
                accepted.add(name)
            else:
                assert 400 <= status < 500, (name, status)
                assert api.checked(answer, status)["param"], name
    unused = {"user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"}
    assert accepted <= unused | {"chat_template_kwargs", "top_k"}  # top_k: as many as there are


@pytest.mark.parametrize("defaults", [{}, {"top_k": 1, "temperature": 0.6}, {"max_new_tokens": 7}])
async def test_report_45_the_models_defaults_are_logged_and_shown(start, caplog, defaults):
    with caplog.at_level(logging.INFO, "jaxserve"):
        async with start(defaults=defaults) as api:
            await api.ok(TEXT, {"prompt": "a"})
            await api.ok(TEXT, {"prompt": "a", "temperature": 1.5, "top_k": 0})
            plain, asked = (request.params for request in api.engine.requests)
            assert (plain.top_k, plain.temperature) == (defaults.get("top_k", 0), defaults.get("temperature", 1.0))
            assert (asked.top_k, asked.temperature) == (0, 1.5)
            fields = (await api.call("/openapi.json", method="GET"))[1]["components"]["schemas"]["ChatBody"]
            assert fields["properties"]["temperature"]["default"] == defaults.get("temperature", 1.0)
    lines = [record.getMessage() for record in caplog.records if "generation_config" in record.getMessage()]
    assert len(lines) == bool(defaults)
    assert all(
        f"{name}={value}" in lines[0] and "--generation-config none" in lines[0] for name, value in defaults.items()
    )


def test_report_45_turned_off_they_are_not_used(make_engine):
    engine = make_engine()
    assert Frontend(engine.tokenizer, engine.info, {}).params().top_k == 0


def test_the_list_above_names_tests_that_exist():
    """Every odd number to 49 (the list has no even ones); `test_x...` is the beginning of a name."""
    lines = (__doc__ or "").splitlines()[2:]
    assert [int(line[:2]) for line in lines if line[:2].strip()] == list(range(1, 50, 2))
    source = "".join(path.read_text() for path in Path(__file__).parent.parent.rglob("test_*.py"))
    for name, rest in re.findall(r"\b(test_\w+)(\.\.\.|\.py)?", "\n".join(lines)):
        if rest == ".py":
            assert list(Path(__file__).parent.parent.rglob(f"{name}.py")), name
        else:
            assert re.search(rf"def {name}{r'\w*' if rest else ''}\(", source, re.MULTILINE), name

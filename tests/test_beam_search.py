"""Beam search against a plain one: on tables of made-up probabilities, and on the logits of a tiny checkpoint."""

import itertools
import json
import math
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.beam_search import BeamSearch, BeamSearchParams
from jaxserve.errors import EngineError, RequestError
from jaxserve.request import Logprob

GOLDENS = Path(__file__).parent / "goldens"

Scores = Callable[[Sequence[int]], np.ndarray]  # tokens so far -> f64[V], log-probabilities of the next
Found = list[tuple[list[int], float, str]]  # tokens, cum_logprob, finish_reason


def plain_search(scores: Scores, prompt: list[int], params: BeamSearchParams, stop_ids: set[int]) -> Found:
    """All steps, the whole vocabulary, nothing left out. A stop token counts if it is among a beam's candidates."""
    width = params.beam_width
    beams: list[tuple[list[int], float]] = [(prompt, 0.0)]
    ended: list[tuple[float, list[int], float, str]] = []
    for _ in range(params.max_tokens):
        grown = []
        for tokens, total in beams:
            row = scores(tokens)
            candidates = np.argsort(-row, kind="stable")[: max(2 * width, width + len(stop_ids))].tolist()
            for token, logprob in enumerate(row.tolist()):
                if token not in stop_ids:
                    grown.append(([*tokens, token], total + logprob))
                elif token in candidates:
                    score = (total + logprob) / len(tokens) ** params.length_penalty
                    kept = [*tokens, token] if params.include_stop_str_in_output else tokens
                    ended.append((score, kept, total + logprob, "stop"))
        beams = sorted(grown, key=lambda beam: -beam[1])[:width]
    ended += [(total / len(tokens) ** params.length_penalty, tokens, total, "length") for tokens, total in beams]
    return [(tokens, total, reason) for _, tokens, total, reason in sorted(ended, key=lambda e: -e[0])[:width]]


def run(scores: Scores, prompt: list[int], params: BeamSearchParams, stop_ids: set[int]) -> tuple[Found, int]:
    """What BeamSearch finds, told the candidates that it asks for; and in how many steps."""
    search, steps = BeamSearch(prompt, params, stop_ids), 0
    count = search.step_params().logprobs or 0
    while not search.finished:
        rows = [scores(beam.tokens) for beam in search.beams]
        best = [np.argsort(-row, kind="stable")[:count].tolist() for row in rows]
        search.advance([{t: Logprob(float(row[t]), 0, "") for t in ids} for row, ids in zip(rows, best, strict=True)])
        steps += 1
    for sequence in search.ended:
        assert len(sequence.logprobs) >= len(sequence.tokens) - len(prompt)
    return [(s.tokens, s.cum_logprob, s.finish_reason or "") for s in search.ended], steps


def made_up(seed: int, vocab: int, stop_ids: set[int] = frozenset(), stop_bias: float = 0.0) -> Scores:
    """Log-probabilities that depend on all tokens so far and on the seed."""

    def scores(tokens: Sequence[int]) -> np.ndarray:
        logits = np.random.default_rng([seed, *tokens]).normal(size=vocab) * 2
        logits[list(stop_ids)] += stop_bias
        return logits - np.log(np.exp(logits).sum())

    return scores


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    width=st.integers(1, 10),
    max_tokens=st.integers(1, 8),
    stops=st.integers(0, 4),
    stop_bias=st.sampled_from([-2.0, 0.0, 3.0]),
    penalty=st.sampled_from([1.0, 0.0, 2.0, 0.3, -1.0]),
    keep_stop=st.booleans(),
    prompt=st.lists(st.integers(0, 29), min_size=1, max_size=4),
)
def test_equals_a_plain_search(seed, width, max_tokens, stops, stop_bias, penalty, keep_stop, prompt):
    stop_ids = set(range(stops))
    params = BeamSearchParams(width, max_tokens, length_penalty=penalty, include_stop_str_in_output=keep_stop)
    scores = made_up(seed, 30, stop_ids, stop_bias)
    found, _ = run(scores, prompt, params, stop_ids)
    assert found == plain_search(scores, prompt, params, stop_ids)


@pytest.mark.parametrize("penalty", [0.0, 1.0, -1.0])
def test_a_beam_wider_than_the_tree_finds_the_very_best(penalty):
    scores, stop, prompt = made_up(3, 3), 0, [1, 2]
    tree = {}  # every text that there is: two tokens of 1 and 2, or a stop token before that
    for first, second in itertools.product([1, 2], repeat=2):
        one, two = scores(prompt)[first], scores([*prompt, first])
        tree[1, 2, first, second] = one + two[second]
        tree[1, 2, first] = one + two[stop]
    tree[1, 2] = scores(prompt)[stop]
    best = sorted(tree, key=lambda tokens: -tree[tokens] / len(tokens) ** penalty)
    found, _ = run(scores, prompt, BeamSearchParams(10, 2, length_penalty=penalty), {stop})
    assert [tuple(tokens) for tokens, _, _ in found] == best
    assert [total for _, total, _ in found] == pytest.approx([tree[tokens] for tokens in best])


def test_it_ends_where_nothing_can_change_any_more():
    scores = made_up(5, 30, {0}, stop_bias=6.0)
    found, steps = run(scores, [1], BeamSearchParams(2, 50, length_penalty=0.0), {0})
    assert steps < 10 and [reason for *_, reason in found] == ["stop", "stop"]


def test_impossible_tokens_are_no_candidates():
    def scores(tokens: Sequence[int]) -> np.ndarray:
        return np.array([-math.inf, 0.0, -math.inf])

    found, _ = run(scores, [2], BeamSearchParams(4, 3), {0})
    assert found == [([2, 1, 1, 1], 0.0, "length")]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"beam_width": 0}, ["beam_width", "at least 1", "0"]),
        ({"beam_width": 11}, ["beam_width", "at most 10", "20", "11"]),
        ({"beam_width": 2.0}, ["beam_width", "int", "2.0"]),
        ({"max_tokens": 0}, ["max_tokens", "at least 1", "0"]),
        ({"max_tokens": None}, ["max_tokens", "int", "None"]),
        ({"temperature": 0.7}, ["temperature", "0 or 1", "0.7"]),
        ({"temperature": -1}, ["temperature", "-1"]),
        ({"length_penalty": math.inf}, ["length_penalty", "finite", "inf"]),
        ({"length_penalty": 11}, ["length_penalty", "at most 10", "11"]),
        ({"ignore_eos": 1}, ["ignore_eos", "bool", "1"]),
    ],
)
def test_refusals_name_field_limit_and_value(given, words):
    with pytest.raises(RequestError) as caught:
        BeamSearchParams(**{"beam_width": 2, "max_tokens": 4, **given})
    assert caught.value.param == next(iter(given)) and all(word in caught.value.message for word in words)


# ------------------------------------------------------------------------------------------------ with the engine

CASE = "qwen3_tied"
PROMPTS = [entry["prompt_ids"] for entry in json.loads((GOLDENS / CASE / "golden.json").read_text())][:3]


@pytest.fixture(scope="module")
def scores() -> Scores:
    """The same model without pages, which tests/models/test_parity.py holds to Transformers."""
    from tests.models.test_parity import load, logits_of

    logits = logits_of(load(CASE))

    def last(tokens: Sequence[int]) -> np.ndarray:
        row = logits(list(tokens))[-1].astype(np.float64)
        return row - np.log(np.exp(row - row.max()).sum()) - row.max()

    return last


@pytest.fixture(scope="module")
def llm(tmp_path_factory, scores):
    """A tiny checkpoint with random weights, two of whose tokens end a sequence: likely ones after the first prompt."""
    from jaxserve import LLM

    likely = np.argsort(-scores(PROMPTS[0]))
    folder = tmp_path_factory.mktemp("model") / CASE
    shutil.copytree(GOLDENS / CASE, folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": likely[[1, 4]].tolist()}))
    return LLM(
        str(folder), tokenizer=str(GOLDENS / "vocab" / "smollm.gguf"), enforce_eager=True, page_size=16, dtype="float32",
        kv_cache_memory_bytes=2**22, max_num_seqs=16, max_num_batched_tokens=48, max_model_len=90,
    )  # fmt: skip


@pytest.mark.parametrize(
    "params",
    [
        BeamSearchParams(4, 12),
        BeamSearchParams(1, 8),
        BeamSearchParams(10, 5, length_penalty=0.0, include_stop_str_in_output=True),
        BeamSearchParams(3, 20, ignore_eos=True, temperature=1.0),
    ],
    ids=["four", "one", "ten", "on"],
)
def test_the_engine_finds_what_a_plain_search_finds(llm, scores, params):
    stop_ids = set() if params.ignore_eos else {*llm._frontend.eos_ids}
    before = llm.get_metrics().prefix_cache_hit_tokens
    outputs = llm.beam_search([{"prompt_token_ids": ids} for ids in PROMPTS], params, concurrency_limit=2)
    assert len(outputs) == len(PROMPTS)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        expected = plain_search(scores, prompt, params, stop_ids)
        assert [s.tokens for s in output.sequences] == [tokens for tokens, _, _ in expected]
        assert [s.finish_reason for s in output.sequences] == [reason for *_, reason in expected]
        assert [s.cum_logprob for s in output.sequences] == pytest.approx([total for _, total, _ in expected], abs=1e-3)
        for s in output.sequences:
            assert s.text == llm.get_tokenizer().decode(s.tokens, skip_special_tokens=False)
            assert (s.stop_reason in stop_ids) == (s.finish_reason == "stop")
            of_tokens = [step[t].logprob for step, t in zip(s.logprobs, s.tokens[len(prompt) :], strict=False)]
            last = [s.logprobs[-1][s.stop_reason].logprob] if s.stop_reason and s.tokens[-1] != s.stop_reason else []
            assert sum(of_tokens + last) == pytest.approx(s.cum_logprob)
    assert llm.get_metrics().prefix_cache_hit_tokens > before
    assert llm.get_metrics().pages_used == 0 and not llm._engine.has_work()


def test_some_sequences_of_the_cases_above_end_by_a_stop_token(llm):
    outputs = llm.beam_search(PROMPTS, BeamSearchParams(10, 5, length_penalty=0.0))
    reasons = {s.finish_reason for output in outputs for s in output.sequences}
    assert reasons == {"stop", "length"}


def test_a_text_and_no_prompt_at_all(llm):
    (output,) = llm.beam_search("12", BeamSearchParams(2, 3, ignore_eos=True), use_tqdm=True)
    assert len(output.sequences) == 2
    assert all(s.text and s.text.startswith("12") and len(s.logprobs) == 3 for s in output.sequences)
    assert llm.beam_search([], BeamSearchParams(2, 3)) == []


def test_one_bad_prompt_computes_nothing(llm):
    before = llm.get_metrics().prompt_tokens
    with pytest.raises(RequestError, match="max_tokens must be at most 87"):
        llm.beam_search([[5, 6], [5, 6, 7]], BeamSearchParams(2, 88))
    with pytest.raises(RequestError, match="concurrency_limit must be at least 1, got 0"):
        llm.beam_search([[5, 6]], BeamSearchParams(2, 8), concurrency_limit=0)
    assert llm.get_metrics().prompt_tokens == before


def test_a_step_without_a_result_ends_the_search(llm, monkeypatch):
    search = BeamSearch([5, 6], BeamSearchParams(2, 3), [])
    monkeypatch.setattr(llm, "_finish", lambda builders, use_tqdm: [b.output for b in builders])
    monkeypatch.setattr(llm, "_submit", lambda prompts, params, *_: [_failed(llm, prompts[0][0], params[0])])
    with pytest.raises(EngineError, match="finish_reason timeout"):
        llm._extend([search])


def _failed(llm, prompt, params):
    from jaxserve.request import SequenceDelta

    builder = llm._frontend.output_builder(llm._frontend.make_request("r", prompt, params))
    builder.fail(SequenceDelta("r", 0, finish_reason="timeout"))
    return builder

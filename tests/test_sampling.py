"""The sampler against a numpy oracle in float64, written from the rules and not from the code."""

import numpy as np
import pytest

jax = pytest.importorskip("jax")
import jax.numpy as jnp
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve import sampling
from jaxserve.errors import RequestError
from jaxserve.request import MAX_LOGPROBS, NOTHING_ALLOWED, Request, SamplingParams
from jaxserve.sampling import (
    ALLOWED,
    BAD_WORDS,
    BIAS,
    FILTER,
    LOGPROBS,
    MIN_TOKENS,
    PENALTIES,
    SamplingRows,
    empty_extras,
    pack_extras,
    request_flags,
    sample,
    set_slot,
    token_logprobs,
)

V = 300  # more than NUM_CANDIDATES, so that both ways through the filters are met
S = 32
MAX_LEN = 64
INF = np.inf

run = jax.jit(sample, static_argnames="features")
noise = jax.jit(sampling.gumbel)
logprobs_of = jax.jit(token_logprobs)


def make_rows(num_rows: int = S, **values) -> SamplingRows:
    """Rows that ask for nothing but what `values` says; each a number or one per row."""
    defaults = {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "seed_lo": np.arange(num_rows),
        "seed_hi": 7,
        "sample_index": 0,
        "position": 5,
        "min_tokens_left": 0,
        "flags": 0,
        "prompt_len": 0,
        "num_tokens": 0,
    }
    arrays = {}
    for name, default in defaults.items():
        kind = np.uint32 if name.startswith("seed") else np.float32 if isinstance(default, float) else np.int32
        arrays[name] = jnp.asarray(np.broadcast_to(np.asarray(values.get(name, default), kind), (num_rows,)))
    return SamplingRows(**arrays)


def draw(logits: np.ndarray, rows: SamplingRows, extras=None, *, features: bool = True):
    num_rows, vocab = logits.shape
    extras = empty_extras(num_rows, MAX_LEN, vocab) if extras is None else extras
    out = run(jnp.asarray(logits, jnp.float32), rows, extras, jnp.arange(num_rows), features=features)
    return jax.tree.map(np.asarray, out)


def random_logits(seed: int, num_rows: int = S, vocab: int = V, scale: float = 3.0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(num_rows, vocab)).astype(np.float32) * np.float32(scale)


def make_request(prompt: list[int], *, stop_ids=(), bad_words_ids=(), **params) -> Request:
    return Request(
        request_id="r",
        prompt_token_ids=prompt,
        params=SamplingParams(**params),
        max_tokens=16,
        stop_ids=list(stop_ids),
        bad_words_ids=[list(w) for w in bad_words_ids],
    )


def one_request(logits: np.ndarray, request: Request, outputs: list[int]):
    """Draws the next token of one sequence, as the engine would ask for it; S rows with a seed each."""
    p, history = request.params, request.prompt_token_ids + outputs
    row = pack_extras(request, logits.shape[-1], MAX_LEN, history)
    extras = jax.tree.map(lambda leaf: jnp.repeat(jnp.asarray(leaf)[None], S, axis=0), row)
    knobs = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
    rows = make_rows(
        **{name: getattr(p, name) for name in knobs},
        flags=request_flags(request),
        prompt_len=len(request.prompt_token_ids),
        num_tokens=len(history),
        position=len(history),
        min_tokens_left=max(p.min_tokens - len(outputs), 0),
    )
    return draw(np.broadcast_to(logits, (S, logits.shape[-1])), rows, extras)


def greedy_token(logits: np.ndarray, request: Request, outputs: list[int]) -> int:
    (token,) = set(one_request(logits, request, outputs).token.tolist())
    return token


# ---- the oracle


def oracle_edits(logits: np.ndarray, request: Request, outputs: list[int]) -> np.ndarray:
    """Allowed ids, bad words, min_tokens, logit_bias, penalties: in this order, on one row."""
    p, x = request.params, logits.astype(np.float64).copy()
    if p.allowed_token_ids is not None:
        x[[i for i in range(len(x)) if i not in p.allowed_token_ids]] = -INF
    for *prefix, last in request.bad_words_ids:
        if len(prefix) <= len(outputs) and outputs[len(outputs) - len(prefix) :] == prefix:
            x[last] = -INF
    if len(outputs) < p.min_tokens:
        x[request.stop_ids] = -INF
    for i, bias in (p.logit_bias or {}).items():
        x[i] += bias
    for i in set(request.prompt_token_ids + outputs):
        x[i] = x[i] / p.repetition_penalty if x[i] > 0 else x[i] * p.repetition_penalty
    for i in set(outputs):
        x[i] -= p.frequency_penalty * outputs.count(i) + p.presence_penalty
    return x


def oracle_kept(x: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float) -> np.ndarray | None:
    """Which tokens the filters keep, ties included; None where rounding may decide."""
    y = x.astype(np.float64) / max(temperature, 0.01)
    p = np.exp(y - y.max())
    if np.any(np.abs(p - min_p) < 1e-5 * min_p):
        return None
    kept = (p >= min_p) & (y > -INF)
    if top_k > 0:
        order = np.sort(x[kept])[::-1]
        kept &= x >= order[min(top_k, len(order)) - 1]
    if top_p < 1:
        mass = np.array([p[kept & (x > v)].sum() for v in x]) / p[kept].sum()
        if np.any(np.abs(mass - top_p)[kept] < 1e-5):
            return None
        kept &= mass < top_p
    return kept


def check_draws(x: np.ndarray, kept: np.ndarray, rows: SamplingRows, tokens: np.ndarray, decided=slice(None)) -> None:
    """Each token must be the kept one with most of x / temperature + noise, up to rounding."""
    temperature = np.maximum(np.asarray(rows.temperature, np.float64), 0.01)[:, None]
    columns = jnp.arange(x.shape[-1], dtype=jnp.int32)[None]
    score = np.where(kept, x / temperature + np.asarray(noise(rows, columns), np.float64), -INF)
    chosen = np.take_along_axis(score, tokens[:, None], 1)[:, 0]
    np.testing.assert_allclose(chosen[decided], score.max(-1)[decided], rtol=1e-5, atol=1e-4)


# ---- greedy, temperature


def test_greedy_is_argmax_with_the_lowest_id_of_ties():
    logits = np.round(random_logits(0))  # many ties
    for features in (True, False):
        out = draw(logits, make_rows(temperature=0.0), features=features)
        np.testing.assert_array_equal(out.token, logits.argmax(-1))


def test_greedy_begins_at_its_threshold():
    logits = np.tile(random_logits(1, 1), (S, 1))
    near = draw(logits, make_rows(temperature=np.where(np.arange(S) % 2, 0.9e-5, 2.0))).token
    assert set(near[1::2]) == {logits[0].argmax()}
    assert len(set(near[0::2])) > 1


@pytest.mark.parametrize("temperature", [2e-5, 0.001, 0.01, 0.3, 1.0, 2.0])
@pytest.mark.parametrize("features", [True, False])
def test_temperature(temperature: float, features: bool):
    logits = random_logits(2, scale=0.02 if temperature < 0.1 else 3.0)
    rows = make_rows(temperature=temperature)
    tokens = draw(logits, rows, features=features).token
    check_draws(logits, np.ones_like(logits, bool), rows, tokens)
    assert np.any(tokens != logits.argmax(-1))  # low temperatures are raised to 0.01, not taken for greedy


def test_a_mixed_batch_of_greedy_and_drawing_rows():
    logits, greedy = random_logits(3), np.arange(S) % 3 == 0
    rows = make_rows(temperature=np.where(greedy, 0.0, 1.0), top_k=np.where(greedy, 3, 5), flags=FILTER)
    tokens = draw(logits, rows).token
    np.testing.assert_array_equal(tokens[greedy], logits.argmax(-1)[greedy])
    assert np.any(tokens[~greedy] != logits.argmax(-1)[~greedy])


@pytest.mark.parametrize(("platform", "asks"), [("cpu", True), ("cuda", False), ("tpu", False)])
def test_only_the_cpu_asks_whether_it_needs_noise(platform: str, asks: bool):
    """On an accelerator the plain variant is one straight pass: a conditional would wait for the host."""
    args = (np.zeros((S, V), np.float32), make_rows(), empty_extras(S, MAX_LEN, V), np.arange(S, dtype=np.int32))
    plain = run.trace(*args, features=False).lower(lowering_platforms=(platform,)).as_text()
    assert ("applies stablehlo.and" in plain) == asks  # "are all rows greedy?"
    full = run.trace(*args, features=True).lower(lowering_platforms=(platform,)).as_text()
    assert "stablehlo.while" in full


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**31), st.booleans())
def test_plain_variant_equals_the_full_one(seed: int, some_greedy: bool):
    logits = random_logits(seed)
    rows = make_rows(temperature=np.where(np.arange(S) % 2 * some_greedy, 0.0, 0.8), position=seed % 4096)
    full, plain = draw(logits, rows), draw(logits, rows, features=False)
    for a, b in zip(full, plain, strict=True):
        np.testing.assert_array_equal(a, b)


# ---- filters


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    top_k=st.sampled_from([0, 1, 2, 5, 50, 127, 128, 129, 200, 299, 300, 1000]),
    top_p=st.one_of(st.just(1.0), st.floats(1e-6, 0.999)),
    min_p=st.one_of(st.just(0.0), st.floats(1e-4, 1.0)),
    temperature=st.sampled_from([0.2, 0.7, 1.0, 2.0]),
    scale=st.sampled_from([0.01, 1.0, 5.0]),
    step=st.sampled_from([0.0, 0.5]),
    others=st.booleans(),
)
def test_filters_keep_what_the_oracle_keeps(seed, top_k, top_p, min_p, temperature, scale, step, others):
    logits = random_logits(seed, scale=scale)
    if step:
        logits = np.round(logits / step) * np.float32(step)  # ties
    # In half of the batches another row asks for something else, which sends all rows the other way.
    mine = np.arange(S) > 0 if others else np.ones(S, bool)
    rows = make_rows(
        temperature=temperature,
        top_k=np.where(mine, top_k, 0),
        top_p=np.where(mine, top_p, 0.5),
        min_p=np.where(mine, min_p, 0.0),
        flags=FILTER,
    )
    f32 = [float(np.float32(v)) for v in (temperature, top_p, min_p)]
    kept = [oracle_kept(x, f32[0], top_k, f32[1], f32[2]) for x in logits]
    decided = np.array([k is not None for k in kept]) & mine
    tokens = draw(logits, rows).token
    if not decided.any():
        return
    assert all(kept[i][tokens[i]] for i in np.flatnonzero(decided))
    table = np.array([np.ones(V, bool) if k is None else k for k in kept])
    check_draws(logits, table, rows, tokens, decided)


def test_top_k_of_one_takes_the_best():
    logits = random_logits(5)
    out = draw(logits, make_rows(temperature=2.0, top_k=1, flags=FILTER))
    np.testing.assert_array_equal(out.token, logits.argmax(-1))


@pytest.mark.parametrize("top_k", [3, 250])
def test_ties_at_the_border_of_top_k_are_kept(top_k: int):
    logits = np.full((S, V), -5.0, np.float32)
    logits[:, : top_k - 1] = 1.0
    logits[:, top_k - 1 : top_k + 1] = 0.5  # the last one kept, and its equal
    seen = draw_often(logits, temperature=2.0, top_k=top_k)
    assert seen <= set(range(top_k + 1))
    if top_k == 3:
        assert seen == {0, 1, 2, 3}


def draw_often(logits: np.ndarray, **knobs) -> set[int]:
    tokens = [draw(logits, make_rows(flags=FILTER, position=i, **knobs)).token for i in range(8)]
    return set(np.concatenate(tokens).tolist())


def test_top_p_counts_within_top_k():
    """Of the probabilities .4 .3 .2 .1 top_k=2 leaves 4/7 and 3/7, so that top_p=0.5 keeps one token, not two."""
    logits = np.full((S, V), -INF, np.float32)
    logits[:, :4] = np.log([0.4, 0.3, 0.2, 0.1])
    assert draw_often(logits, top_k=2, top_p=0.5) == {0}
    assert draw_often(logits, top_p=0.5) == {0, 1}


def test_filters_that_a_row_did_not_ask_for_do_nothing():
    logits = random_logits(6)
    asks = np.arange(S) % 2 == 0
    rows = make_rows(top_k=1, top_p=0.1, min_p=0.9, flags=np.where(asks, FILTER, 0))
    tokens = draw(logits, rows).token
    np.testing.assert_array_equal(tokens[~asks], draw(logits, make_rows()).token[~asks])
    np.testing.assert_array_equal(tokens[asks], logits.argmax(-1)[asks])


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**31), st.booleans(), st.integers(1, V))
def test_kth_value(seed: int, ties: bool, k: int):
    x = random_logits(seed, 8)
    x = np.round(x) if ties else x
    x[0], x[1, ::2], x[2] = 0.0, -0.0, -np.abs(x[2])
    x[3, : V // 2] = -INF
    value = np.asarray(jax.jit(sampling.kth_value)(x, jnp.full(8, k, jnp.int32)))
    exact = np.sort(x, axis=-1)[:, V - k]
    np.testing.assert_array_equal(x >= value[:, None], x >= exact[:, None])


@pytest.mark.parametrize(("vocab", "k"), [(2003, 3), (20_001, 20), (17_000, 128), (300, 128), (20, 20)])
def test_top_values_are_ordered_by_value_and_id(vocab: int, k: int):
    x = np.round(random_logits(7, 4, vocab) * 4) / 4 + np.float32(0)  # without -0, which sorts below 0
    x[1] = 0.0
    x[2, vocab // 2 :] = -INF
    values, ids = jax.tree.map(np.asarray, jax.jit(sampling.top_values, static_argnums=1)(x, k))
    expected = np.argsort(-x, axis=-1, kind="stable")[:, :k]
    np.testing.assert_array_equal(ids, expected)
    np.testing.assert_array_equal(values, np.take_along_axis(x, expected, 1))


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 1000])
def test_argmax_takes_the_lowest_id(vocab: int):
    x = np.round(random_logits(8, 16, vocab))
    x[0], x[1] = -INF, 0.0
    np.testing.assert_array_equal(jax.jit(sampling.argmax)(x), x.argmax(-1))


# ---- edits


def test_allowed_ids_are_the_only_ones():
    allowed = [3, 31, 32, 64, 299]
    out = one_request(random_logits(9, 1)[0], make_request([1], allowed_token_ids=allowed), [])
    assert set(out.token) <= set(allowed)
    assert len(set(out.token)) > 1


def test_bad_words():
    logits = np.zeros(V, np.float32)
    logits[[10, 11, 12, 13]] = [9, 8, 7, 6]
    request = make_request([1, 2], bad_words_ids=[[10], [2, 11], [5, 6, 12]], temperature=0.0)
    for outputs, expected in (
        ([], 11),  # the single token always; [2, 11] not, as the 2 stands in the prompt
        ([2], 12),
        ([5, 6], 11),
        ([5, 6, 2], 12),
        ([6], 11),
    ):
        assert greedy_token(logits, request, outputs) == expected
    longer = make_request([1], bad_words_ids=[[5, 6, 11], [6, 12], [10]], temperature=0.0)
    assert greedy_token(logits, longer, [6]) == 11
    assert greedy_token(logits, longer, [5, 6]) == 13


def test_the_longest_bad_word_matches():
    word = list(range(20, 36))
    logits = np.zeros(V, np.float32)
    logits[35], logits[4] = 9, 5
    request = make_request([1], bad_words_ids=[word], temperature=0.0)
    assert greedy_token(logits, request, word[:-1]) == 4
    assert greedy_token(logits, request, [*word[:-2], 99]) == 35


def test_stop_ids_are_masked_until_min_tokens():
    logits = np.zeros(V, np.float32)
    logits[[7, 8, 9]] = [9, 8, 7]
    request = make_request([1], stop_ids=[7, 8], min_tokens=2, temperature=0.0)
    assert [greedy_token(logits, request, o) for o in ([], [9], [9, 9])] == [9, 9, 7]


def test_logit_bias():
    logits = random_logits(10, 1)[0]
    request = make_request([1], logit_bias={5: 100.0, 299: -100.0}, temperature=0.0)
    assert greedy_token(logits, request, []) == 5
    logits[299] = 50
    assert greedy_token(logits, make_request([1], logit_bias={299: -100.0}, temperature=0.0), []) != 299


@settings(max_examples=40, deadline=None)
@given(data=st.data(), seed=st.integers(0, 2**31))
def test_edits_follow_the_oracle_in_order(data: st.DataObject, seed: int):
    token = st.integers(0, 19)  # few ids, so that knobs meet on the same token
    ids = st.lists(token, max_size=8)
    prompt, outputs = data.draw(st.lists(token, min_size=1, max_size=20)), data.draw(ids)
    request = make_request(
        prompt,
        stop_ids=data.draw(st.lists(token, max_size=3, unique=True)),
        bad_words_ids=data.draw(st.lists(st.lists(token, min_size=1, max_size=3), max_size=5)),
        allowed_token_ids=data.draw(st.one_of(st.none(), st.lists(token, min_size=5, max_size=18))),
        logit_bias=data.draw(st.one_of(st.none(), st.dictionaries(token, st.floats(-5, 5), max_size=5))),
        min_tokens=data.draw(st.integers(0, 6)),
        presence_penalty=data.draw(st.sampled_from([0.0, -1.0, 1.5])),
        frequency_penalty=data.draw(st.sampled_from([0.0, -0.5, 0.7])),
        repetition_penalty=data.draw(st.sampled_from([1.0, 0.8, 1.3])),
    )
    logits = random_logits(seed, 1)[0]
    logits[20:] -= 5
    history = prompt + outputs
    rows = make_rows(
        1,
        flags=request_flags(request),
        prompt_len=len(prompt),
        num_tokens=len(history),
        min_tokens_left=max(request.params.min_tokens - len(outputs), 0),
        **{n: getattr(request.params, n) for n in ("presence_penalty", "frequency_penalty", "repetition_penalty")},
    )
    extras = jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], pack_extras(request, V, MAX_LEN, history))
    edited = edit(jnp.asarray(logits)[None], rows, extras, jnp.zeros(1, jnp.int32))
    np.testing.assert_allclose(np.asarray(edited)[0], oracle_edits(logits, request, outputs), rtol=1e-5, atol=1e-4)


edit = jax.jit(sampling.edit_logits)


def test_penalties_count_long_histories_chunk_by_chunk(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sampling, "HISTORY_CHUNK", 24)  # does not divide MAX_LEN
    rng = np.random.default_rng(11)
    history = rng.integers(0, 30, size=(4, MAX_LEN)).astype(np.int32)
    lengths, prompts = np.array([64, 50, 24, 0]), np.array([30, 24, 24, 0])
    rows = make_rows(
        4, flags=PENALTIES, frequency_penalty=0.5, repetition_penalty=2.0, num_tokens=lengths, prompt_len=prompts
    )
    extras = empty_extras(4, MAX_LEN, V)._replace(history=jnp.asarray(history))
    logits = random_logits(12, 4)
    order = np.array([2, 0, 3, 1])  # rows and slots need not agree
    picked = jax.tree.map(lambda a: a[order], rows)
    out = np.asarray(jax.jit(sampling.edit_logits)(jnp.asarray(logits), picked, extras, jnp.asarray(order)))
    for row, slot in enumerate(order):
        prompt, outputs = history[slot, : prompts[slot]].tolist(), history[slot, prompts[slot] : lengths[slot]].tolist()
        request = make_request(prompt, frequency_penalty=0.5, repetition_penalty=2.0)
        np.testing.assert_allclose(out[row], oracle_edits(logits[row], request, outputs), rtol=1e-5, atol=1e-4)


def test_what_a_slot_holds_does_not_touch_rows_that_do_not_ask():
    request = make_request(
        [5, 5], stop_ids=[0], bad_words_ids=[[1]], allowed_token_ids=[2], logit_bias={3: 50.0}, min_tokens=9
    )
    row = pack_extras(request, V, MAX_LEN)
    extras = empty_extras(2, MAX_LEN, V)
    for slot in (0, 1):
        extras = set_slot(extras, jnp.int32(slot), row)
    everything = PENALTIES | ALLOWED | BIAS | BAD_WORDS | MIN_TOKENS
    rows = make_rows(
        2, flags=[everything, 0], min_tokens_left=9, num_tokens=2, repetition_penalty=3.0, presence_penalty=1.0
    )
    logits = random_logits(13, 2)
    edited = np.asarray(edit(jnp.asarray(logits), rows, extras, jnp.arange(2)))
    assert np.isfinite(edited[0]).sum() == 1
    np.testing.assert_array_equal(edited[1], logits[1])


# ---- broken rows


@pytest.mark.parametrize("features", [True, False])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_with_nan_give_minus_one_and_leave_others_alone(features: bool, temperature: float):
    logits = random_logits(14)
    rows = make_rows(temperature=temperature)
    good = draw(logits, rows, features=features).token
    bad = logits.copy()
    bad[3, 200], bad[5], bad[7, 0], bad[9] = np.nan, np.nan, -np.nan, -INF
    token = draw(bad, rows, features=features).token
    broken = np.isin(np.arange(S), [3, 5, 7, 9])
    assert np.all(token[broken] == -1)
    np.testing.assert_array_equal(token[~broken], good[~broken])


@pytest.mark.parametrize("knobs", [{"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.5}, {"top_k": 200, "top_p": 0.5}])
def test_nan_under_filters_ends(knobs: dict):
    logits = random_logits(15)
    logits[0, 1], logits[1], logits[2], logits[3, 4] = np.nan, np.nan, -INF, INF
    token = draw(logits, make_rows(flags=FILTER | LOGPROBS, **knobs)).token
    np.testing.assert_array_equal(token[:3], -1)
    assert np.all(token[4:] >= 0)


def test_nan_hidden_by_a_mask_is_still_found():
    logits = random_logits(16, 1)[0]
    logits[4] = np.nan
    assert greedy_token(logits, make_request([1], allowed_token_ids=[7, 8], temperature=0.0), []) == -1


def test_masks_that_leave_nothing_are_told_from_a_broken_model():
    logits = random_logits(17, 1)[0]
    for params in ({"temperature": 0.0}, {"temperature": 1.0}, {"top_k": 3}, {"top_p": 0.5}):
        request = make_request([1], allowed_token_ids=[7, 8], bad_words_ids=[[7], [8]], logprobs=1, **params)
        out = one_request(logits, request, [])
        assert np.all(out.token == NOTHING_ALLOWED)
        assert not out.rank.any()


# ---- random numbers


def uniforms(**values) -> np.ndarray:
    rows = make_rows(values.pop("num_rows"), **values)
    return np.exp(-np.exp(-np.asarray(noise(rows, jnp.arange(256, dtype=jnp.int32)[None]), np.float64)))


STREAMS = {
    "seed_lo": {"seed_lo": np.arange(512)},
    "seed_hi": {"seed_lo": 1, "seed_hi": np.arange(512)},
    "position": {"seed_lo": 1, "position": np.arange(512)},
    "sample_index": {"seed_lo": 1, "sample_index": np.arange(512)},
}


@pytest.mark.parametrize("name", STREAMS)
def test_noise_is_uniform_and_uncorrelated(name: str):
    u = uniforms(num_rows=512, **STREAMS[name])
    n = u.size
    counts = np.histogram(u, 256, (0, 1))[0]
    assert abs(((counts - n / 256) ** 2).sum() / (n / 256) - 255) < 5 * np.sqrt(2 * 255)
    centred = (u - 0.5) * np.sqrt(12)
    for down, right in ((0, 1), (1, 0), (1, 1), (0, 2), (2, 0), (1, -1)):
        shifted = np.roll(centred, (down, right), (0, 1))
        assert abs((centred * shifted).mean()) < 5 / np.sqrt(n)
    # Pairs of neighbours fill the square evenly, and no column or row has a mean of its own.
    for a, b in ((u[:, ::2], u[:, 1::2]), (u[::2], u[1::2])):
        cells = np.histogram2d(a.ravel(), b.ravel(), 16, ((0, 1), (0, 1)))[0]
        expected = a.size / 256
        assert abs(((cells - expected) ** 2).sum() / expected - 255) < 5 * np.sqrt(2 * 255)
    assert np.abs(centred.mean(0)).max() < 5 / np.sqrt(512)
    assert np.abs(centred.mean(1)).max() < 5 / np.sqrt(256)


def test_streams_differ_in_each_word():
    base = {"num_rows": 1, "seed_lo": 1, "seed_hi": 2, "sample_index": 3, "position": 4}
    streams = [base] + [base | {name: base[name] + 1} for name in list(base)[1:]]
    streams.append(base | {"seed_lo": 2, "seed_hi": 1})  # swapped words are not the same
    streams.append(base | {"sample_index": 4, "position": 3})
    u = np.concatenate([uniforms(**s) for s in streams])
    correlation = np.corrcoef(u) - np.eye(len(u))
    assert np.abs(correlation).max() < 0.3
    np.testing.assert_array_equal(uniforms(**base), uniforms(**base))


def test_flipping_a_bit_of_the_seed_flips_half_of_the_choices():
    seeds = np.concatenate([[0], 1 << np.arange(32)])
    u = uniforms(num_rows=33, seed_lo=seeds) > 0.5
    flipped = (u[1:] != u[0]).mean(1)
    assert np.all(np.abs(flipped - 0.5) < 5 * 0.5 / 16)


def test_noise_has_the_tails_of_a_gumbel_variable():
    rows = make_rows(512, seed_lo=3, position=np.arange(512))
    g = np.asarray(noise(rows, jnp.arange(2048, dtype=jnp.int32)[None]), np.float64)
    assert np.isfinite(g).all()
    for x in (-2.0, 0.0, 5.0, 8.0):
        expected = 1 - np.exp(-np.exp(-x))
        assert abs((g > x).mean() - expected) < 5 * np.sqrt(expected * (1 - expected) / g.size)
    assert abs(g.mean() - 0.5772157) < 5 * np.pi / np.sqrt(6 * g.size)


@pytest.mark.parametrize("knobs", [{}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1}])
def test_draws_follow_the_softmax(knobs: dict):
    num, temperature = 8192, 0.7
    x = np.random.default_rng(18).normal(size=8).astype(np.float32)
    rows = make_rows(num, temperature=temperature, seed_lo=5, position=np.arange(num), flags=FILTER, **knobs)
    token = draw(np.tile(x, (num, 1)), rows).token
    kept = oracle_kept(x, temperature, knobs.get("top_k", 0), knobs.get("top_p", 1.0), knobs.get("min_p", 0.0))
    p = np.where(kept, np.exp(x / temperature), 0)
    expected = num * p / p.sum()
    counts = np.bincount(token, minlength=8)
    assert np.all(counts[~kept] == 0)
    degrees = kept.sum() - 1
    chi = ((counts - expected)[kept] ** 2 / expected[kept]).sum()
    assert chi < degrees + 5 * np.sqrt(2 * degrees)


def test_a_row_draws_the_same_wherever_it_stands():
    """Alone, in any batch and order, whichever way its neighbours' filters send the batch."""
    logits = random_logits(19)
    knobs = {
        "temperature": np.tile([0.0, 0.7, 1.0, 1.5], S // 4),
        "top_k": np.tile([0, 5, 0, 200, 40, 0, 3, 0], S // 8),
        "top_p": np.tile([1.0, 0.9, 0.8, 1.0, 1.0, 1.0, 0.5, 1.0], S // 8),
        "min_p": np.tile([0.0, 0.0, 0.05, 0.0], S // 4),
        "position": np.arange(S) * 3,
        "seed_hi": np.arange(S) % 5,
    }
    rows = make_rows(flags=FILTER | LOGPROBS, **knobs)
    together = draw(logits, rows)
    order = np.random.default_rng(20).permutation(S)
    shuffled = draw(logits[order], jax.tree.map(lambda a: a[order], rows))
    np.testing.assert_array_equal(shuffled.token, together.token[order])
    for i in range(16):
        alone = draw(logits[i : i + 1], jax.tree.map(lambda a, i=i: a[i : i + 1], rows))
        assert alone.token[0] == together.token[i]
        assert alone.rank[0] == together.rank[i]


# ---- logprobs


def oracle_logprobs(x: np.ndarray) -> np.ndarray:
    x = x.astype(np.float64)
    top = x.max(-1, keepdims=True)
    return x - top - np.log(np.exp(x - top).sum(-1, keepdims=True))


@pytest.mark.parametrize("vocab", [5, V, 4099])
def test_token_logprobs(vocab: int):
    x = np.round(random_logits(21, 8, vocab) * 2) / 2
    x[0, 1:] = -INF
    targets = np.array([0, 1, 2, 3, 4, 0, 1, -1])
    logprob, rank, top_ids, top = jax.tree.map(np.asarray, logprobs_of(x, jnp.asarray(targets)))
    expected, size = oracle_logprobs(x), min(vocab, MAX_LOGPROBS)
    for i, target in enumerate(targets[:-1]):
        np.testing.assert_allclose(logprob[i], expected[i, target], atol=1e-4)
        assert rank[i] == (x[i] >= x[i, target]).sum()
    assert (logprob[-1], rank[-1]) == (0, 0)
    order = np.argsort(-x, axis=-1, kind="stable")[:, :size]
    np.testing.assert_array_equal(top_ids[:, :size], order)
    np.testing.assert_allclose(top[:, :size], np.take_along_axis(expected, order, 1), atol=1e-4)
    assert np.all(top_ids[:, size:] == -1)
    assert np.all(top[:, size:] == -INF)


def test_logprobs_come_from_the_raw_logits():
    logits = random_logits(22, 1)[0]
    worst = int(logits.argmin())
    request = make_request([1], allowed_token_ids=[worst], temperature=0.5, logprobs=3, logit_bias={worst: 50.0})
    out = one_request(logits, request, [])
    assert (out.token[0], out.rank[0]) == (worst, V)
    np.testing.assert_allclose(out.logprob[0], oracle_logprobs(logits)[worst], atol=1e-4)
    np.testing.assert_array_equal(out.top_ids[0], np.argsort(-logits, kind="stable")[:MAX_LOGPROBS])


def test_no_logprobs_unless_asked_for():
    out = draw(random_logits(23), make_rows(temperature=0.0))
    assert not out.logprob.any()
    assert not out.rank.any()


# ---- host side


@pytest.mark.parametrize(
    ("params", "flags"),
    [
        ({}, 0),
        ({"temperature": 0.0, "top_p": 0.5, "top_k": 3}, 0),
        ({"top_p": 0.5}, FILTER),
        ({"top_k": 3}, FILTER),
        ({"min_p": 0.1}, FILTER),
        ({"presence_penalty": 0.1}, PENALTIES),
        ({"frequency_penalty": -0.1}, PENALTIES),
        ({"repetition_penalty": 1.1}, PENALTIES),
        ({"logit_bias": {1: 1.0}}, BIAS),
        ({"allowed_token_ids": [1]}, ALLOWED),
        ({"min_tokens": 2}, MIN_TOKENS),
        ({"logprobs": 0}, LOGPROBS),
    ],
)
def test_request_flags(params: dict, flags: int):
    assert request_flags(make_request([1], stop_ids=[2], **params)) == flags


def test_request_flags_of_bad_words_and_stop_ids():
    assert request_flags(make_request([1], bad_words_ids=[[1]])) == BAD_WORDS
    assert request_flags(make_request([1], min_tokens=2)) == 0  # nothing to mask


def test_set_slot_replaces_one_slot():
    extras = empty_extras(3, MAX_LEN, V)
    request = make_request([4, 5], stop_ids=[6], bad_words_ids=[[7, 8]], allowed_token_ids=[33], logit_bias={9: 2.0})
    row = pack_extras(request, V, MAX_LEN, [4, 5, 6])
    changed = jax.jit(set_slot, donate_argnums=0)(empty_extras(3, MAX_LEN, V), jnp.int32(1), row)
    for before, after, new in zip(extras, changed, row, strict=True):
        assert new.dtype == after.dtype
        assert new.shape == after.shape[1:]
        np.testing.assert_array_equal(after[1], new)
        np.testing.assert_array_equal(after[0], before[0])
        np.testing.assert_array_equal(after[2], before[2])
    assert row.history[:4].tolist() == [4, 5, 6, -1]
    assert row.bad_words[0, -3:].tolist() == [-1, 7, 8]
    assert row.allowed_mask[:3].tolist() == [0, 2, 0]


def test_lists_longer_than_the_device_keeps_are_refused():
    for request in (
        make_request([1], bad_words_ids=[[1] * 17]),
        make_request([1], bad_words_ids=[[1]] * 257),
        make_request([1], stop_ids=range(65)),
        make_request([1] * (MAX_LEN + 1)),
    ):
        with pytest.raises(RequestError):
            pack_extras(request, V, MAX_LEN)

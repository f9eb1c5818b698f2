"""The sizes that steps are compiled for, on each platform."""

import random

import pytest

from jaxserve.shapes import choose_bucket, coarse, make_buckets, step_limits

PLATFORMS = ("cpu", "gpu", "tpu")
LIMITS = [(1, 17), (8, 24), (32, 160), (100, 300), (128, 2048), (256, 8192), (1024, 8192), (4096, 8192)]


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize(("max_num_seqs", "budget"), LIMITS)
@pytest.mark.parametrize("share", [1, 0.5, 0.125], ids="mixed {} of it".format)
def test_every_plan_within_the_limits_has_a_bucket(platform, max_num_seqs, budget, share):
    mixed = max(int(share * budget), max_num_seqs + 16)
    buckets = make_buckets(max_num_seqs, budget, mixed, platform=platform)
    assert max(b.tokens for b in buckets) == budget and len(set(buckets)) == len(buckets)
    most = max(b.prefill_rows for b in buckets)
    limits = step_limits(max_num_seqs, budget, mixed)
    for fitting in (buckets, coarse(buckets)):
        for rows, limit in ((0, limits[0].tokens), (1, limits[1].tokens), *limits, (max_num_seqs, 0)):
            for tokens in {min(1, limit), min(limit // 3 + 1, limit), limit}:
                for chunks in {0, 1, min(most, tokens)}:
                    if rows or chunks and limit:
                        chosen = choose_bucket(fitting, rows, tokens if chunks else 0, chunks)
                        assert chosen.tokens >= rows + (tokens if chunks else 0)


@pytest.mark.parametrize("platform", PLATFORMS)
def test_odd_limits_have_buckets_too(platform):
    """Budgets hardly larger than the rows, mixed steps hardly larger than those or hardly smaller than the budget."""
    rng = random.Random(0)
    odd = [1, 2, 64, 65, 100, 233, 256, 257, 300, 512, 1000, 1024, 1500, 4096]
    for max_num_seqs in odd * 20:
        budget = max_num_seqs + 16 + rng.choice([0, 1, 50, 200, 548, 1000, 8000])
        mixed = rng.choice([max_num_seqs + 16, budget, max(budget - 14, max_num_seqs + 16)])
        buckets = make_buckets(max_num_seqs, budget, mixed, platform=platform)
        limits, most = step_limits(max_num_seqs, budget, mixed), max(b.prefill_rows for b in buckets)
        assert max(b.tokens for b in buckets) == budget and all(tokens > 0 for _, tokens in limits)
        for fitting in (buckets, coarse(buckets)):
            for rows, tokens in limits:
                for chunks in {1, min(most, tokens)}:
                    assert choose_bucket(fitting, rows, tokens, chunks).tokens <= budget


def test_on_a_gpu_a_step_of_prompts_beside_decode_rows_leaves_no_gaps_in_tiles_of_products():
    """Also where short chunks fill it. Half as large beside few rows; as large as any where nobody watches."""
    buckets, limits = make_buckets(256, 8192, 1024, platform="gpu"), step_limits(256, 8192, 1024)
    assert limits == ((256, 7936), (64, 448), (256, 768))
    for rows, tokens in limits:
        assert choose_bucket(buckets, rows, tokens, 1).tokens == rows + tokens
        assert choose_bucket(buckets, rows, tokens, min(tokens // 8, 64)).tokens == rows + tokens
    assert step_limits(256, 8192, 8192) == ((256, 7936), (256, 7936))
    assert step_limits(1024, 8192, 8192) == ((256, 7936), (256, 7936), (1024, 7168))
    assert len(buckets) == 22 and len(coarse(buckets)) == 13
    for rows, tokens in limits:  # a row with knobs makes no step larger
        assert choose_bucket(coarse(buckets), rows, tokens, 1).tokens == rows + tokens


@pytest.mark.parametrize(("max_num_seqs", "rows"), [(256, 256), (1024, 0)])
def test_on_a_gpu_many_short_prompts_take_no_larger_step_than_a_long_one(max_num_seqs: int, rows: int):
    buckets = make_buckets(max_num_seqs, 8192, 1024, platform="gpu")
    for tokens, chunks in ((512, 64), (256, 32), (1000, 64)):
        assert choose_bucket(buckets, rows, tokens, chunks) == choose_bucket(buckets, rows, tokens, 1)


def test_prompts_with_knobs_are_not_padded_to_the_budget():
    buckets = coarse(make_buckets(256, 8192, 1024, platform="gpu"))
    assert choose_bucket(buckets, 0, 1500, 1).tokens == 2048


def test_on_a_tpu_a_short_prompt_is_not_padded_to_the_budget_and_there_are_few_programs():
    buckets = make_buckets(128, 2048, 2048, platform="tpu")
    assert len(buckets) + len(coarse(buckets)) == 15
    assert choose_bucket(buckets, 0, 100, 1).tokens <= 384
    assert choose_bucket(buckets, 100, 100, 1).tokens <= 384
    assert {b.decode_rows % 8 for b in buckets} == {0}, "tiles of memory have 8 rows"

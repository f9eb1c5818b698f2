"""The sizes that steps are compiled for, on each platform."""

import pytest

from jaxserve.shapes import choose_bucket, coarse, make_buckets

PLATFORMS = ("cpu", "gpu", "tpu")
LIMITS = [(1, 17), (8, 24), (32, 160), (100, 300), (128, 2048), (256, 8192), (4096, 8192)]


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize(("max_num_seqs", "budget"), LIMITS)
def test_every_plan_within_the_limits_has_a_bucket(platform, max_num_seqs, budget):
    buckets = make_buckets(max_num_seqs, budget, platform=platform)
    assert max(b.tokens for b in buckets) == budget and len(set(buckets)) == len(buckets)
    most = max(b.prefill_rows for b in buckets if b.prefill_tokens == budget - max_num_seqs)
    for fitting in (buckets, coarse(buckets)):
        for rows in {0, 1, max_num_seqs // 2, max_num_seqs}:
            for tokens in {1, (budget - max_num_seqs) // 3 + 1, budget - max_num_seqs}:
                for chunks in {0, 1, min(most, tokens)}:
                    if rows or chunks:
                        chosen = choose_bucket(fitting, rows, tokens if chunks else 0, chunks)
                        assert chosen.tokens >= rows + (tokens if chunks else 0)


def test_on_a_tpu_a_short_prompt_is_not_padded_to_the_budget_and_there_are_few_programs():
    buckets = make_buckets(128, 2048, platform="tpu")
    assert len(buckets) + len(coarse(buckets)) == 15
    assert choose_bucket(buckets, 0, 100, 1).tokens <= 384
    assert choose_bucket(buckets, 100, 100, 1).tokens <= 384
    assert {b.decode_rows % 8 for b in buckets} == {0}, "tiles of memory have 8 rows"

"""The benchmark of responses that teach nothing: its batches are what it says, and both sides do the same step."""

from __future__ import annotations

import pytest


@pytest.fixture
def bench(load_benchmark):
    return load_benchmark("without_gradient")


def test_a_share_of_the_groups_has_advantages_and_each_group_one_prompt(bench):
    case = bench.CASES["quickstart"]
    batch = bench.batch_of(case, 0.25)
    teaches = bench.ClippedPolicyGradientLoss(on_policy=True).has_gradient(batch)
    assert teaches.view(case.groups, case.responses).any(1).sum() == 16  # a quarter of 64
    prompts = batch.token_ids.view(case.groups, case.responses, -1)[..., : case.prompt_tokens]
    assert bool((prompts == prompts[:, :1]).all())
    assert int(batch.mask.sum()) == 64 * 8 * case.response_tokens


def test_a_case_reports_both_sides_and_a_floor_between_a_third_and_all(bench):
    row = bench.measure("quickstart", 0.25, repeats=1)
    assert row["skipped_backward_frac"] == 0.75
    assert row["floor_s"] == pytest.approx(row["all_s"] / 2)  # 1 - 2 / 3 * 3 / 4

"""Credit within groups, against numbers worked out by hand."""

from __future__ import annotations

import pytest
from nemorl_rl.policy_gradient.advantages import clip_advantages, group_advantages

ONE_GROUP = [0, 0, 0, 0]


def test_leave_one_out_with_std() -> None:
    # First: the others are all 0, their spread too, so 1 - 0.
    # Others: mean 1/3, std sqrt((4/9 + 1/9 + 1/9) / 2) = 0.57735.
    advantages = group_advantages([1, 0, 0, 0], ONE_GROUP)
    assert advantages == pytest.approx([1.0, -0.57735, -0.57735, -0.57735], abs=1e-5)


def test_whole_group_with_unbiased_std() -> None:
    # mean 0.25, std sqrt((0.5625 + 3 * 0.0625) / 3) = 0.5: 0.75 / 0.500001 and -0.25 / 0.500001.
    advantages = group_advantages([1, 0, 0, 0], ONE_GROUP, leave_one_out=False)
    assert advantages == pytest.approx([1.499997, -0.499999, -0.499999, -0.499999], abs=1e-7)


def test_whole_group_without_std() -> None:
    advantages = group_advantages([1, 0, 0, 0], ONE_GROUP, leave_one_out=False, normalize_std=False)
    assert advantages == [0.75, -0.25, -0.25, -0.25]


def test_leave_one_out_without_std() -> None:
    advantages = group_advantages([1, 0, 0, 0], ONE_GROUP, normalize_std=False)
    assert advantages == pytest.approx([1.0, -1 / 3, -1 / 3, -1 / 3])


@pytest.mark.parametrize("leave_one_out", [True, False])
@pytest.mark.parametrize("normalize_std", [True, False])
@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, 0.95, 1e9, -3.7])
def test_equal_rewards_teach_nothing(leave_one_out: bool, normalize_std: bool, reward: float) -> None:
    # 0.1 and 0.95 are not exact in binary: a mean of eight of them must still leave exactly nothing over.
    advantages = group_advantages([reward] * 8, [0] * 8, normalize_std=normalize_std, leave_one_out=leave_one_out)
    assert advantages == [0.0] * 8


def test_rounding_noise_is_not_divided_by() -> None:
    # The others of the first all have 0.95: their spread is rounding noise, and 0.95 / 1e-6 would be a million.
    advantages = group_advantages([0.0] + [0.95] * 7, [0] * 8)
    assert advantages[0] == pytest.approx(-0.95)
    # The others of the rest: mean 6 * 0.95 / 7 = 0.814286, std sqrt((0.814286^2 + 6 * 0.135714^2) / 6) = 0.359066.
    assert advantages[1:] == pytest.approx([0.377964] * 7, abs=1e-5)


def test_a_response_without_others_gets_nothing() -> None:
    assert group_advantages([5.0, 1.0, 0.0], [7, 8, 8]) == [0.0, 1.0, -1.0]


def test_two_responses_are_each_others_baseline() -> None:
    # One other response has no spread: the plain difference, with and without normalize_std.
    for normalize_std in (True, False):
        assert group_advantages([2.0, 0.5], [0, 0], normalize_std=normalize_std) == [1.5, -1.5]


def test_groups_are_told_apart_by_index_and_may_be_interleaved() -> None:
    together = group_advantages([1, 0, 0, 3, 0, 0], [0, 0, 0, 1, 1, 1])
    interleaved = group_advantages([1, 3, 0, 0, 0, 0], [0, 1, 0, 1, 0, 1])
    assert [interleaved[i] for i in (0, 2, 4, 1, 3, 5)] == together
    assert together[0] == 1.0
    assert together[3] == 3.0


@pytest.mark.parametrize("leave_one_out", [True, False])
def test_a_constant_added_to_all_rewards_changes_nothing(leave_one_out: bool) -> None:
    rewards = [0.25, 1.0, 0.5, 0.0]
    plain = group_advantages(rewards, ONE_GROUP, leave_one_out=leave_one_out)
    shifted = group_advantages([reward + 4096 for reward in rewards], ONE_GROUP, leave_one_out=leave_one_out)
    assert shifted == pytest.approx(plain, abs=1e-9)


def test_a_large_offset_does_not_cancel_the_spread() -> None:
    # E[x^2] - E[x]^2 would lose the 1 next to 1e8; two passes do not.
    advantages = group_advantages([1e8 + 1, 1e8, 1e8, 1e8], ONE_GROUP, leave_one_out=False)
    assert advantages == pytest.approx([1.499997, -0.499999, -0.499999, -0.499999], abs=1e-6)


def test_whole_group_advantages_of_a_group_sum_to_zero() -> None:
    assert sum(group_advantages([0.3, 0.9, 0.1, 0.45], ONE_GROUP, leave_one_out=False)) == pytest.approx(0, abs=1e-12)


def test_no_responses_give_no_advantages() -> None:
    assert group_advantages([], []) == []


def test_clipping_leaves_an_open_side_alone() -> None:
    advantages = [-5.0, -0.5, 0.0, 5.0]
    assert clip_advantages(advantages, -1.0, None) == [-1.0, -0.5, 0.0, 5.0]
    assert clip_advantages(advantages, None, 2.0) == [-5.0, -0.5, 0.0, 2.0]
    assert clip_advantages(advantages, -1.0, 2.0) == [-1.0, -0.5, 0.0, 2.0]
    assert clip_advantages(advantages, None, None) == advantages

"""Newer losses, masks and advantages of the policy gradient, two tokens at a time, against numbers worked out by hand.

# N = tokens of all sequences concatenated
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from nemorl.config import load_config
from nemorl.errors import ConfigError
from nemorl.metrics import values
from nemorl.types import Branch, Prompt, Sample, Samples, Score
from nemorl_grpo.covariant import Highest, MarkCovariant, RandomInBand, covariances
from nemorl_grpo.loss_clip_cov import ClipCovLoss
from nemorl_grpo.loss_dppo import DivergenceMaskLoss
from nemorl_grpo.loss_dro import QuadraticDriftLoss
from nemorl_grpo.loss_gmpo import GeometricMeanLoss
from nemorl_grpo.loss_gspo import SequenceRatioLoss
from nemorl_grpo.loss_kl_cov import KLCovLoss
from nemorl_grpo.loss_sapo import SoftGateLoss
from nemorl_grpo.loss_vespo import GammaWeightLoss
from nemorl_grpo.variants.optimal_token_baseline import OptimalTokenBaseline, token_baselines
from nemorl_grpo.variants.raw_reward import NormalizedRewards
from nemorl_rl.policy_gradient.correction import KPop
from nemorl_rl.policy_gradient.loss import ClippedPolicyGradientLoss, PolicyGradientLoss
from nemorl_rl.policy_gradient.token_masks import HighEntropyMask, MarkHighEntropy, OffPolicyMask
from nemorl_tensors import KLTerm, LossAggregation, TokenBatch
from nemorl_tensors.filtering import TokenFilter
from torch import Tensor

NAN = float("nan")


def two_tokens(
    advantages: tuple[float, float],
    *,
    old: tuple[float, float] = (-1.0, -1.0),
    sampled: tuple[float, float] | None = None,
    level: LossAggregation = "token",
) -> TokenBatch:
    """A prompt token and a response of two; masked slots hold NaN."""
    batch = TokenBatch.from_sequences([[5, 6, 7]], [[False, True, True]], loss_aggregation=level)
    return batch.with_tokens(
        advantages=torch.tensor([NAN, *advantages]),
        old_logprobs=torch.tensor([NAN, *old]),
        generation_logprobs=torch.tensor([NAN, *(sampled or old)]),
        reference_logprobs=torch.tensor([NAN, *old]),
    )


def graded(loss: PolicyGradientLoss, policy: tuple[float, float], batch: TokenBatch) -> tuple[float, list[float]]:
    """Loss, and its gradient by the two tokens."""
    logprobs = torch.tensor([NAN, *policy], requires_grad=True)
    value, _ = loss(logprobs, batch)
    value.backward()  # type: ignore[no-untyped-call]
    assert logprobs.grad is not None
    assert float(logprobs.grad[0]) == 0.0
    return float(value.detach()), logprobs.grad[1:].tolist()


def test_sapo_lets_a_token_go_gradually() -> None:
    # Ratios e^0 = 1 and e^log(2) = 2, advantages 1 and -1, tau 1 and 2.
    # Gates: 4 * sigmoid(0) = 2;   4 / 2 * sigmoid(2 * (2 - 1)) = 2 * 0.880797 = 1.761594. loss = -(2 - 1.761594) / 2.
    # Slopes: 4 * 0.25 * 1 = 1, as without a gate;   2 * 2 * 0.880797 * 0.119203 * ratio 2 = 0.839949.
    value, slopes = graded(SoftGateLoss(1.0, 2.0), (-1.0, -1.0 + math.log(2)), two_tokens((1.0, -1.0)))
    assert value == pytest.approx(-(2 - 1.761594) / 2, abs=1e-6)
    assert slopes == pytest.approx([-0.5, 0.839949 / 2], abs=1e-6)


def test_dppo_drops_a_likely_token_and_keeps_a_rare_one_of_the_same_ratio() -> None:
    # Both ratios are 1.5, both advantages 1. 0.4 -> 0.6 moves by 0.2 > 0.1: dropped. 0.002 -> 0.003 by 0.001: kept,
    # with its ratio: loss = -1.5 / 2, and the slope is the same.
    batch = two_tokens((1.0, 1.0), sampled=(math.log(0.4), math.log(0.002)))
    loss = DivergenceMaskLoss("tv", 0.1, 0.1)
    value, slopes = graded(loss, (math.log(0.6), math.log(0.003)), batch)
    assert value == pytest.approx(-0.75, abs=1e-6)
    assert slopes == pytest.approx([0, -0.75], abs=1e-6)


def test_dppo_drops_by_the_side_that_the_advantage_pushes_to() -> None:
    # 0.4 -> 0.6 at advantage -1 comes back by itself: it trains, with ratio 1.5. 0.6 -> 0.4 does not.
    batch = two_tokens((-1.0, -1.0), sampled=(math.log(0.4), math.log(0.6)))
    _, slopes = graded(DivergenceMaskLoss("tv", 0.1, 0.1), (math.log(0.6), math.log(0.4)), batch)
    assert slopes == pytest.approx([0.75, 0], abs=1e-6)


def test_dppo_measures_in_nats_too() -> None:
    # q = 0.4, p = 0.6: 0.4 log(2/3) + 0.6 log(1.5) = -0.162186 + 0.243279 = 0.081093. Dropped at 0.08, kept at 0.09.
    batch = two_tokens((1.0, 0.0), sampled=(math.log(0.4), -1.0))
    for bound, slope in ((0.08, 0.0), (0.09, -0.75)):
        _, slopes = graded(DivergenceMaskLoss("kl", bound, bound), (math.log(0.6), -1.0), batch)
        assert slopes == pytest.approx([slope, 0], abs=1e-6)


def test_dppo_bounds_weight_and_gradient_and_pays_for_drift() -> None:
    # Ratio 4 counts as 3 in value and slope. Drift 0.1 * log(4)^2 = 0.192181, slope 0.2 * log 4 = 0.277259.
    batch = two_tokens((1.0, 0.0), sampled=(math.log(0.01), -1.0))
    loss = DivergenceMaskLoss(ratio_cap=3.0, drift_penalty=0.1)
    value, slopes = graded(loss, (math.log(0.04), -1.0), batch)
    assert value == pytest.approx((-3 + 0.192181) / 2, abs=1e-6)
    assert slopes == pytest.approx([(-3 + 0.277259) / 2, 0], abs=1e-6)


def test_vespo_weighs_a_response_by_its_whole_ratio() -> None:
    # log w = 0.5 - 0.2 = 0.3, w = 1.349859. A >= 0: phi = exp(3 + 2 * 0.3 - 3 * 1.349859) = exp(-0.449577) = 0.637898.
    # loss = -phi * (-0.5 - 1.2) / 2; each slope -phi / 2.
    value, slopes = graded(GammaWeightLoss(), (-0.5, -1.2), two_tokens((1.0, 1.0)))
    assert value == pytest.approx(0.637898 * 1.7 / 2, abs=1e-5)
    assert slopes == pytest.approx([-0.637898 / 2] * 2, abs=1e-5)
    # A < 0: phi = exp(2 + 3 * 0.3 - 2 * 1.349859) = exp(0.200282) = 1.221747.
    _, slopes = graded(GammaWeightLoss(), (-0.5, -1.2), two_tokens((-1.0, -1.0)))
    assert slopes == pytest.approx([1.221747 / 2] * 2, abs=1e-5)


def test_luspo_gives_every_token_the_gradient_of_its_response() -> None:
    # GSPO's mean over tokens, 1/2 each, times the two tokens of the response: ratio e^0.1 = 1.105171 each.
    config: Any = load_config({"algorithm": "luspo", "model": "org/model"})
    assert config.averages_over == "sequence_sum"
    batch = two_tokens((1.0, 1.0), level="sequence_sum")
    value, slopes = graded(SequenceRatioLoss(0.2, 0.2), (-0.8, -1.0), batch)
    assert value == pytest.approx(-2 * 1.105171, abs=1e-6)
    assert slopes == pytest.approx([-1.105171] * 2, abs=1e-6)


def test_gmpo_clips_each_token_and_then_averages() -> None:
    # Log ratios 1.0, clipped to 0.4, and -0.2: mean 0.1, ratio e^0.1. Without the clip it would be e^0.4.
    batch = two_tokens((1.0, 1.0), level="sequence")
    value, slopes = graded(GeometricMeanLoss(), (0.0, -1.2), batch)
    assert value == pytest.approx(-1.105171, abs=1e-6)
    assert slopes == pytest.approx([0, -1.105171 / 2], abs=1e-6)
    # At a negative advantage a token that grew is pushed back in full: mean (1 - 0.2) / 2 = 0.4.
    value, slopes = graded(GeometricMeanLoss(), (0.0, -1.2), two_tokens((-1.0, -1.0), level="sequence"))
    assert value == pytest.approx(math.exp(0.4), abs=1e-6)
    assert slopes == pytest.approx([math.exp(0.4) / 2] * 2, abs=1e-6)


def test_dro_pulls_back_by_a_square() -> None:
    # -(1 * -0.5) + 0.4 / 2 * 0.5^2 = 0.55 and -(-1 * -1.5) + 0.2 * 0.25 = -1.45: mean -0.45.
    # Slopes: (-1 + 0.4 * 0.5) / 2 and (1 - 0.4 * 0.5) / 2.
    value, slopes = graded(QuadraticDriftLoss(0.4), (-0.5, -1.5), two_tokens((1.0, -1.0)))
    assert value == pytest.approx(-0.45, abs=1e-6)
    assert slopes == pytest.approx([-0.4, 0.4], abs=1e-6)


def test_covariance_is_that_of_advantage_and_log_prob() -> None:
    # Means 0 and -2: (1 - 0) * (-1 + 2) = 1 and (-1 - 0) * (-3 + 2) = 1; a third token 0.
    mask = torch.tensor([False, True, True, True])
    advantages, logprobs = torch.tensor([NAN, 1.0, -1.0, 0.0]), torch.tensor([NAN, -1.0, -3.0, -2.0])
    found = covariances(advantages, logprobs, mask)
    assert found.tolist() == pytest.approx([1, 1, 0])
    generator = torch.Generator().manual_seed(0)
    assert Highest(0.5)(found + torch.tensor([0, 0.5, 0]), generator).tolist() == [1]
    assert RandomInBand(1.0, -0.5, 0.5)(found, generator).tolist() == [2]
    assert RandomInBand(1.0, 5.0, 9.0)(found, generator).tolist() == []


def test_clip_cov_leaves_covariant_tokens_out_and_kl_cov_holds_them_back() -> None:
    batch = two_tokens((1.0, 1.0)).with_tokens(covariant=torch.tensor([False, True, False]))
    # Ratios e^0.1 both. Clip-Cov: the first is left out.
    value, slopes = graded(ClipCovLoss(), (-0.9, -0.9), batch)
    assert value == pytest.approx(-1.105171 / 2, abs=1e-6)
    assert slopes == pytest.approx([0, -1.105171 / 2], abs=1e-6)
    # KL-Cov: the first pays 0.5 * 0.1, slope 0.5.
    value, slopes = graded(KLCovLoss(cov_penalty=0.5), (-0.9, -0.9), batch)
    assert value == pytest.approx(-1.105171 + 0.05 / 2, abs=1e-6)
    assert slopes == pytest.approx([(-1.105171 + 0.5) / 2, -1.105171 / 2], abs=1e-6)


def test_the_choice_of_covariant_tokens_does_not_depend_on_microbatches_and_repeats() -> None:
    batch = two_tokens((2.0, -1.0), old=(-0.1, -4.0))
    found = [MarkCovariant(RandomInBand(0.5, 0.0, 99.0))(batch, Samples(()))[0]["covariant"] for _ in range(2)]
    assert found[0].tolist() == found[1].tolist()
    assert int(found[0].sum()) == 1  # half of two


def test_kpop_judges_by_probability_from_both_sides() -> None:
    # 0.5 -> 0.9: KL(0.9, 0.5) = 0.9 log 1.8 + 0.1 log 0.2 = 0.368064;   KL(0.5, 0.9) = 0.5 log(5/9) + 0.5 log 5 =
    # 0.510826, which is the larger. 0.001 -> 0.003, three times as likely: both about 0.001, kept with weight 3.
    batch = two_tokens((1.0, 1.0), sampled=(math.log(0.5), math.log(0.001)))
    log_ratio = torch.tensor([0.0, math.log(1.8), math.log(3.0)])
    for bound, weight in ((0.4, 0.0), (0.6, 1.8)):
        weights, metrics = KPop(bound)(log_ratio, batch)
        assert weights[1:].tolist() == pytest.approx([weight, 3.0], abs=1e-5)
        assert values(metrics)["is_oob_ratio"] == (0.5 if weight == 0 else 0.0)


def test_a_response_that_the_policy_has_left_teaches_nothing_bad() -> None:
    # generation - policy: 0.9 and 0.5, mean 0.7. At 0.6 the token of negative advantage is left out, the other stays.
    batch = two_tokens((1.0, -1.0), sampled=(-1.0, -1.0))
    for limit, slopes in ((0.6, [-math.exp(-0.9) / 2, 0.0]), (0.8, [-math.exp(-0.9) / 2, 0.0])):
        loss = ClippedPolicyGradientLoss(token_masks=(OffPolicyMask(limit),))
        _, found = graded(loss, (-1.9, -1.5), batch)
        # The negative token's ratio e^-0.5 is below 0.8: PPO's own clip leaves it out at any limit.
        assert found == pytest.approx(slopes, abs=1e-6)
    loss = ClippedPolicyGradientLoss(clip_low=0.9, token_masks=(OffPolicyMask(0.8),))
    assert graded(loss, (-1.9, -1.5), batch)[1] == pytest.approx([-math.exp(-0.9) / 2, math.exp(-0.5) / 2], abs=1e-6)
    loss = replace(loss, token_masks=(OffPolicyMask(0.6),))
    assert graded(loss, (-1.9, -1.5), batch)[1] == pytest.approx([-math.exp(-0.9) / 2, 0], abs=1e-6)


def test_only_unsure_tokens_train_and_the_kl_is_of_all() -> None:
    # Entropies 0.2 and 1.0: the quantile 0.5 of both is 0.6.
    batch = two_tokens((1.0, 1.0)).with_tokens(old_entropies=torch.tensor([0.0, 0.2, 1.0]))
    batch, metrics = MarkHighEntropy(0.5)(batch, Samples(()))
    assert batch["high_entropy"].tolist() == [False, False, True]
    assert values(metrics)["old_entropy"] == pytest.approx(0.6)
    plain = ClippedPolicyGradientLoss(token_masks=(HighEntropyMask(),))
    assert graded(plain, (-1.0, -1.0), batch)[1] == pytest.approx([0, -0.5])
    held = replace(plain, kl_penalty=1.0, kl=KLTerm("k2"))
    # k2's slope is policy - reference = 0.1, times the weight 1/2.
    assert graded(held, (-0.9, -1.0), batch)[1] == pytest.approx([0.05, -0.5])


def test_an_entropy_bonus_is_taken_off_the_loss() -> None:
    # Entropies 0.5 and 1.5, weight 0.1: -0.1 * mean 1.0. The surrogate is 0.
    batch = replace(two_tokens((0.0, 0.0)), keep=TokenFilter(beside_moments=True))
    outputs = torch.tensor([[NAN] * 3, [-1.0, 0.5, 0.4], [-1.0, 1.5, 0.4]], requires_grad=True)
    loss = ClippedPolicyGradientLoss(entropy_bonus=0.1)
    value, metrics = loss(outputs, batch)
    value.backward()  # type: ignore[no-untyped-call]
    assert float(value.detach()) == pytest.approx(-0.1)
    assert outputs.grad is not None
    assert outputs.grad[:, 1].tolist() == pytest.approx([0, -0.05, -0.05])
    assert values(metrics)["entropy"] == pytest.approx(1.0)
    assert loss.has_gradient(batch).tolist() == [True]


def test_k2_has_the_gradient_of_its_mean_on_request() -> None:
    # policy - reference = 0.6: k2 = 0.18, slope 0.6; the score-function term adds k2 itself.
    policy, mask = torch.tensor([-1.0], requires_grad=True), torch.tensor([True])
    for gradient, slope in (("unbiased", 0.6), ("expectation", 0.78), ("estimator", 0.6)):
        term = KLTerm("k2", gradient=gradient).loss_term(policy, torch.tensor([-1.6]), policy.detach(), mask)  # type: ignore[arg-type]
        assert float(term.detach()) == pytest.approx(0.18)
        assert torch.autograd.grad(term.sum(), policy)[0].tolist() == pytest.approx([slope])


def test_raw_rewards_are_normalized_over_tokens() -> None:
    # Rewards 1 and 0 at one token each: mean 1/2, std 1/2. Equal rewards: (x - mean) / 1e-4 = 0.
    batch, _ = NormalizedRewards()(two_tokens((1.0, 0.0)), Samples(()))
    assert batch["advantages"].tolist() == pytest.approx([0, 1, -1])
    batch, _ = NormalizedRewards()(two_tokens((1.0, 1.0)), Samples(()))
    assert batch["advantages"].tolist() == [0, 0, 0]


def _baselines(rewards: list[list[float]], noise: list[list[float]], groups: list[int]) -> Tensor:
    lengths = torch.tensor([len(row) for row in rewards])
    flat = [torch.tensor([float(number) for row in table for number in row]) for table in (rewards, noise)]
    return token_baselines(flat[0], flat[1], torch.ones(int(lengths.sum()), dtype=torch.bool), lengths, groups)


def test_a_token_baseline_weighs_noisy_paths_more() -> None:
    # Paths: 1, 1 + 1 = 2 and 3, 3 + 1 = 4. Rewards 1 and 0: baselines 1/4 and 2/6.
    found = _baselines([[1, 1], [0, 0]], [[1, 1], [3, 1]], [7, 7])
    assert found.tolist() == pytest.approx([1 / 4, 1 / 3] * 2)


def test_a_token_with_nothing_to_compare_with_has_no_baseline() -> None:
    # The third token of the longest of a group, and all of a response alone in its group.
    found = _baselines([[1, 1, 1], [0, 0], [1]], [[1, 1, 1], [1, 1], [1]], [0, 0, 1])
    assert found.tolist() == pytest.approx([0.5, 0.5, 0, 0.5, 0.5, 0])


def test_all_sequences_of_an_episode_are_in_its_group() -> None:
    # An agent's two token sequences of one token each, reward 1, beside a response of reward 0: paths 1, 1 and 3.
    # Baseline (1 + 1 + 0) / (1 + 1 + 3) = 0.4. Noise is 1 - 2p + p^2 with p = 0: 1;   3 for the other.
    prompt = Prompt(0, "1+1=", (5,))
    agent = Sample(prompt, (5, 6), (False, True), (0.0, -1.0), Score(1.0), "2", "stop")
    agent = replace(agent, branches=(Branch((5, 7), (False, True), (0.0, -1.0)),))
    other = Sample(prompt, (5, 8), (False, True), (0.0, -1.0), Score(0.0), "3", "stop")
    samples = Samples([agent, other])
    batch = TokenBatch.from_samples(samples, [1.0, 0.0])
    batch = batch.with_tokens(
        old_logprobs=torch.full((6,), -math.inf), old_collisions=torch.tensor([0.0, 0, 0, 0, 0, 2])
    )
    found, _ = OptimalTokenBaseline()(batch, samples)
    assert found["advantages"][found.mask].tolist() == pytest.approx([0.6, 0.6, -0.4])


@pytest.mark.parametrize(
    ("knobs", "path"),
    [
        ({"algorithm": "dppo", "importance_correction": "truncated"}, "importance_correction"),
        ({"algorithm": "vespo", "importance_correction": "plain"}, "importance_correction"),
        ({"algorithm": "gspo", "importance_correction": "kpop"}, "importance_correction"),
        ({"algorithm": "gmpo", "importance_correction": "kpop"}, "importance_correction"),
        ({"algorithm": "grpo", "importance_correction": {"kind": "kpop", "per": "sequence"}}, "per"),
        ({"algorithm": "clip_cov", "cov_low": 6.0}, "cov_low"),
        (
            {"algorithm": "grpo", "entropy_bonus": 0.1, "filtered_logprobs": True, "generation": {"top_p": 0.9}},
            "entropy_bonus",
        ),
        ({"algorithm": "optimal_token_baseline", "advantage_clip_low": -1.0}, "advantage_clip_low"),
    ],
)
def test_what_cannot_stand_together_is_refused(knobs: dict[str, Any], path: str) -> None:
    with pytest.raises(ConfigError, match=path):
        load_config({"model": "org/model", **knobs})

"""Options that the reference system has: its own numbers, or worked out by hand.

# N = tokens of all sequences concatenated, B = sequences
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from nemorl.config.load import validate
from nemorl.errors import ConfigError
from nemorl.metrics import values
from nemorl.types import Prompt, Sample, Samples, Score
from nemorl_grpo import GRPOConfig
from nemorl_grpo.loss_cispo import CappedWeightLoss
from nemorl_rl.policy_gradient.advantages import group_advantages, has_spread, over_valid
from nemorl_rl.policy_gradient.config import ImportanceCorrection
from nemorl_rl.policy_gradient.correction import build_correction
from nemorl_rl.policy_gradient.disagreement import DropDisagreeing
from nemorl_tensors import TokenBatch, loss_weights

NAN = float("nan")
RATIOS = (1.0, 0.25, 4.0, 8.0, 1.0, 1.001)
"""exp(old - generation) of four tokens of one response and two of another. Products: 8 and 1.001."""


def disagreement() -> TokenBatch:
    shape = TokenBatch.from_sequences(
        [[5, 6, 7, 8, 9], [5, 6, 7]], [[False, True, True, True, True], [False, True, True]]
    )
    generation = torch.full((8,), NAN)
    generation[shape.mask] = -1.0 - torch.tensor(RATIOS).log()
    return shape.with_tokens(
        advantages=torch.where(shape.mask, 1.0, NAN),
        old_logprobs=torch.where(shape.mask, -1.0, NAN),
        generation_logprobs=generation,
    )


@pytest.mark.parametrize(
    ("written", "weights", "out_of_bounds"),
    [
        # clamp to [min, max], the share outside: truncated_importance_sampling_ratio 2 and _ratio_min 0.5 of NeMo RL
        ({"kind": "truncated", "cap": 2, "low": 0.5}, [1, 0.5, 2, 2, 1, 1.001], 3 / 6),
        ({"kind": "truncated", "cap": 0.75}, [0.75, 0.25, 0.75, 0.75, 0.75, 0.75], 5 / 6),
        ({"kind": "plain", "per": "sequence"}, [8, 8, 8, 8, 1.001, 1.001], None),
        ({"kind": "truncated", "per": "sequence"}, [2, 2, 2, 2, 1.001, 1.001], 4 / 6),
        ({"kind": "icepop", "per": "sequence"}, [0, 0, 0, 0, 1.001, 1.001], 4 / 6),
    ],
)
def test_bounds_and_products_of_ratios(
    written: dict[str, Any], weights: list[float], out_of_bounds: float | None
) -> None:
    correction = build_correction(ImportanceCorrection(**written))
    assert correction is not None
    batch = disagreement()
    log_ratio = torch.where(batch.mask, batch["old_logprobs"] - batch["generation_logprobs"], 0.0)
    found, metrics = correction(log_ratio, batch)
    assert found[batch.mask].tolist() == pytest.approx(weights, rel=1e-6)
    assert ("is_oob_ratio" in metrics) == (out_of_bounds is not None)
    if out_of_bounds is not None:
        assert values(metrics)["is_oob_ratio"] == pytest.approx(out_of_bounds)


def test_the_lower_bound_does_not_raise_what_the_sampler_cannot_have_drawn() -> None:
    correction = build_correction(ImportanceCorrection(kind="truncated", low=0.5))
    assert correction is not None
    batch = disagreement()
    weights, _ = correction(torch.where(batch.mask, torch.inf, 0.0), batch)
    assert weights[batch.mask].tolist() == [0.0] * 6


@pytest.mark.parametrize(
    ("written", "path"),
    [
        ({"kind": "truncated", "cap": 0.5, "low": 0.8}, "importance_correction.low"),
        ({"kind": "truncated", "cap": 0}, "importance_correction.cap"),
        ({"kind": "sequence_mask", "per": "sequence"}, "importance_correction.per"),
    ],
)
def test_bounds_that_contradict_each_other_are_refused(written: dict[str, Any], path: str) -> None:
    with pytest.raises(ConfigError) as error:
        validate(GRPOConfig, {"model": "none", "importance_correction": written})
    assert [problem.path for problem in error.value.problems] == [path]


def test_responses_on_which_the_engines_disagree_train_nothing() -> None:
    # NeMo RL 7ea279a, compute_and_apply_seq_logprob_error_masking, threshold 1.05, on these log-probs: errors
    # (1 + 4 + 4 + 8) / 4 = 4.25 and (1 + 1.001) / 2 = 1.0005, their mean 2.62525, one response masked.
    batch, metrics = DropDisagreeing(1.05)(disagreement(), Samples(()))
    assert batch.mask.tolist() == [False] * 6 + [True, True]
    assert batch.loss_weights.tolist() == [0.0] * 6 + [0.5, 0.5]
    assert values(metrics) == pytest.approx(
        {"sequence_mult_prob_error": 2.62525, "max_sequence_mult_prob_error": 4.25, "dropped_disagreeing": 1.0}
    )


def test_a_token_that_the_sampler_cannot_have_drawn_drops_its_response() -> None:
    batch = disagreement()
    generation = batch["generation_logprobs"].clone()
    generation[6] = -torch.inf
    kept, _ = DropDisagreeing(1e6)(batch.with_tokens(generation_logprobs=generation), Samples(()))
    assert kept.mask.tolist() == [False, True, True, True, True, False, False, False]


def test_cispo_raises_small_weights_to_its_floor() -> None:
    shape = TokenBatch.from_sequences([[5, 6, 7, 8]], [[False, True, True, True]])
    policy = torch.tensor([0.0, -1.0, -1.0, -1.0], requires_grad=True)
    # ratios 1/4, 1 and 8; NeMo RL clips them to [1 - 0.5, 1 + 4]
    old = torch.tensor([0.0, -1.0 + math.log(4), -1.0, -1.0 - math.log(8)])
    batch = shape.with_tokens(advantages=torch.ones(4), old_logprobs=old, generation_logprobs=old)
    loss, _ = CappedWeightLoss(5.0, 0.5)(policy, batch)
    loss.backward()
    assert policy.grad is not None
    assert policy.grad.tolist() == pytest.approx([0.0, -0.5 / 3, -1 / 3, -5 / 3])


def test_a_sum_over_tokens_is_averaged_over_responses() -> None:
    # verl's seq-mean-token-sum of these per-token losses: ((1 + 2 + 3) + (4)) / 2 = 5; the third trains nothing.
    batch = TokenBatch.from_sequences(
        [[9, 9, 9, 9], [9, 9], [9, 9]], [[False, True, True, True], [False, True], [False, False]]
    )
    weights = loss_weights(batch.mask, batch.lengths, "sequence_sum")
    per_token = torch.tensor([0, 1, 2, 3, 0, 4, 0, 0.0])
    assert float((per_token * weights).sum()) == 5.0
    assert float(loss_weights(batch.mask & False, batch.lengths, "sequence_sum").sum()) == 0.0


def sample(group: int, reward: float, *, valid: bool = True) -> Sample:
    prompt = Prompt(index=group, text="", token_ids=(1,), row={})
    return Sample(prompt, (1, 2), (False, True), (0.0, -1.0), Score(reward, valid=valid), "", "stop")


@pytest.mark.parametrize(
    ("leave_one_out", "expected"),
    [
        # NeMo RL 7ea279a, calculate_baseline_and_std_per_prompt with valid_mask 0 for the fourth reward. Its advantage
        # (23.3 and 17.0 there) is masked in the loss; here it is 0.
        (True, [2.121314, -2.121314, 0.0, 0.0, -0.132453, -0.132453, 3.175424, -1.732050]),
        (False, [0.999998, -0.999998, 0.0, 0.0, -0.121268, -0.121268, 1.333945, -1.091410]),
    ],
)
def test_a_response_that_nobody_could_judge_is_in_no_baseline(leave_one_out: bool, expected: list[float]) -> None:
    rewards = [1.0, 0.0, 0.5, 9.0, 2.0, 2.0, 5.0, 0.0]
    samples = Samples([sample(i // 4, reward, valid=i != 3) for i, reward in enumerate(rewards)])

    def credit(judged: Samples) -> list[float]:
        return group_advantages(judged.rewards, judged.group_ids, leave_one_out=leave_one_out)

    assert over_valid(samples, credit) == pytest.approx(expected, abs=1e-5)


def test_a_group_teaches_nothing_by_a_reward_that_is_not_one() -> None:
    group = [sample(0, 1.0), sample(0, 1.0), sample(0, 0.0, valid=False)]
    assert not has_spread([member for member in group if member.score.valid])
    trainer = GRPOConfig(model="none", dynamic_sampling=True).build()
    assert not trainer.keep_group(group)
    assert trainer.dropped(Samples(group)) == [False, False, True]

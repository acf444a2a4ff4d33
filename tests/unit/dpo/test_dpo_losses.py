"""The preference losses by hand.

Two pairs, beta = 0.5, sums of log-probs over the response (the reference's in brackets):

    pair   chosen                 rejected               log-ratios     delta
    1      -0.5 - 0.5    (-2.0)   -3.0          (-2.0)   +1.0, -1.0     +2.0
    2      -2.0          (-1.5)   -0.25 - 0.75  (-1.5)   -0.5, +0.5     -1.0

and a third one whose prompt filled the length limit: nothing of it is trained, and its slots hold NaN.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from nemorl_preference.dpo import DPOConfig
from nemorl_preference.dpo.hinge import HingeLoss
from nemorl_preference.dpo.ipo import IPOLoss
from nemorl_preference.dpo.preference import PreferenceLoss
from nemorl_preference.dpo.sigmoid import SigmoidLoss
from nemorl_preference.dpo.trainer import loss_of
from nemorl_tensors import TokenBatch, pair_batch

NAN = float("nan")
ONE, TWO, NONE = ([9, 1], [False, True]), ([9, 1, 1], [False, True, True]), ([9, 9], [False, False])
LOGPROBS = [NAN, -0.5, -0.5, NAN, -3.0, NAN, -2.0, NAN, -0.25, -0.75, NAN, NAN, NAN, NAN]


def batch() -> TokenBatch:
    pairs = pair_batch([TWO, ONE, NONE], [ONE, TWO, NONE])
    return pairs.with_sequences(reference_response_logprobs=torch.tensor([-2.0, -2.0, -1.5, -1.5, NAN, NAN]))


def value(loss: PreferenceLoss) -> float:
    return float(loss(torch.tensor(LOGPROBS), batch())[0])


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        # -log sigmoid(0.5 * 2) = 0.313262, -log sigmoid(0.5 * -1) = 0.974077; their mean
        (SigmoidLoss(0.5), 0.643669),
        # 0.9 * 0.313262 + 0.1 * 1.313262 = 0.413262; 0.9 * 0.974077 + 0.1 * 0.474077 = 0.924077
        (SigmoidLoss(0.5, label_smoothing=0.1), 0.668669),
        # per token, deltas are 1.0 / 2 + 1.0 = 1.5 and -0.5 - 0.5 / 2 = -0.75: log1p(e^-0.75), log1p(e^0.375)
        (SigmoidLoss(0.5, average=True), (math.log1p(math.exp(-0.75)) + math.log1p(math.exp(0.375))) / 2),
        # max(0, 1 - 1) = 0, 1 + 0.5 = 1.5
        (HingeLoss(0.5), 0.75),
        # (2 - 1)^2 = 1, (-1 - 1)^2 = 4
        (IPOLoss(0.5), 2.5),
        # (1.5 - 1)^2 = 0.25, (-0.75 - 1)^2 = 3.0625
        (IPOLoss(0.5, average=True), 1.65625),
        # 2 * 0.75 and the chosen responses' (1.0 + 2.0) / 2
        (HingeLoss(0.5, preference_weight=2.0, sft_weight=0.1), 1.5 + 0.15),
        # (1.0 / 2 + 2.0) / 2
        (HingeLoss(0.5, preference_weight=0.0, sft_weight=1.0, sft_average=True), 1.25),
    ],
    ids=["sigmoid", "smoothed", "sigmoid per token", "hinge", "ipo", "ipo per token", "with sft", "sft per token"],
)
def test_a_loss_is_the_mean_over_pairs(loss: PreferenceLoss, expected: float) -> None:
    assert value(loss) == pytest.approx(expected, abs=1e-6)


def test_the_gradient_pushes_chosen_up_and_rejected_down_and_nothing_else() -> None:
    logprobs = torch.tensor(LOGPROBS, requires_grad=True)
    SigmoidLoss(0.5)(logprobs, batch())[0].backward()
    # d / d delta = -0.5 * sigmoid(-0.5 * delta), at half the weight: 0.067235 and 0.155615
    one, two = 0.25 * 0.268941, 0.25 * 0.622459
    expected = [0, -one, -one, 0, one, 0, -two, 0, two, two, 0, 0, 0, 0]
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx(expected, abs=1e-6)


def test_metrics_are_those_of_implicit_rewards() -> None:
    _, metrics = SigmoidLoss(0.5, sft_weight=0.1)(torch.tensor(LOGPROBS), batch())
    found = {name: metric.value for name, metric in metrics.items()}
    assert found == pytest.approx({
        "accuracy": 0.5,
        "rewards_chosen_mean": 0.125,  # 0.5 * (1.0 - 0.5) / 2
        "rewards_rejected_mean": -0.125,
        "rewards_margin_mean": 0.25,
        "num_valid_samples": 2,
        "preference_loss": 0.643669,
        "sft_loss": 1.5,
    })  # fmt: skip


def test_parts_of_a_step_add_up() -> None:
    loss, whole = SigmoidLoss(0.5, sft_weight=0.3), batch()
    parts = [whole.select(pair) for pair in ([0, 1], [2, 3], [4, 5])]
    tokens = [torch.tensor(LOGPROBS[low:high]) for low, high in ((0, 5), (5, 10), (10, 14))]
    added = sum(float(loss(logprobs, part)[0]) for logprobs, part in zip(tokens, parts, strict=True))
    assert added == pytest.approx(value(loss))


def test_the_config_chooses_the_loss() -> None:
    assert loss_of(DPOConfig(model="m")) == SigmoidLoss(0.05)
    assert loss_of(DPOConfig(model="m", label_smoothing=0.2)) == SigmoidLoss(0.05, label_smoothing=0.2)
    assert loss_of(DPOConfig(model="m", loss="ipo")) == IPOLoss(0.05, average=True)
    assert loss_of(DPOConfig(model="m", loss="ipo", preference_average_log_probs=False)) == IPOLoss(0.05)
    hinge = loss_of(DPOConfig(model="m", loss="hinge", sft_loss_weight=0.5, sft_average_log_probs=True))
    assert hinge == replace(HingeLoss(0.05), sft_weight=0.5, sft_average=True)

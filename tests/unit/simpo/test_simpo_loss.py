"""SimPO's loss by hand, on two pairs of which the chosen responses have the means -0.5 and -2, the others -3 and -0.5.

With beta = 2 and gamma = 1, d = 2 * 2.5 - 1 = 4 and 2 * -1.5 - 1 = -4.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from nemorl.metrics import values
from nemorl_preference.likelihood import with_likelihood
from nemorl_preference.simpo import SimPOConfig
from nemorl_preference.simpo.loss import SimPOLoss
from nemorl_preference.simpo.trainer import SimPOTrainer
from nemorl_tensors import pair_batch

NAN = float("nan")
ONE, TWO = ([9, 1], [False, True]), ([9, 1, 1], [False, True, True])
LOGPROBS = torch.tensor([NAN, -0.5, -0.5, NAN, -3.0, NAN, -2.0, NAN, -0.25, -0.75])
BATCH = with_likelihood(pair_batch([TWO, ONE], [ONE, TWO]), "token")
UP, DOWN = math.log1p(math.exp(-4)), math.log1p(math.exp(4))
"""0.018150 and 4.018150."""


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (SimPOLoss(2.0), (UP + DOWN) / 2),
        (SimPOLoss(2.0, gamma=0.0), (math.log1p(math.exp(-5)) + math.log1p(math.exp(3))) / 2),
        (SimPOLoss(2.0, label_smoothing=0.1), (UP + DOWN) / 2),  # 0.9 * UP + 0.1 * DOWN and the other way round
        (SimPOLoss(2.0, 0.5), (UP + DOWN) / 2 + 0.5 * 1.0),  # nll: (0.5 + 0.5 + 2.0) / 3
    ],
    ids=["paper", "no margin", "smoothed", "with the likelihood"],
)
def test_a_loss_is_the_mean_over_pairs(loss: SimPOLoss, expected: float) -> None:
    assert float(loss(LOGPROBS, BATCH)[0]) == pytest.approx(expected, abs=1e-6)


def test_smoothing_counts_each_label_as_wrong_in_part() -> None:
    found, _ = SimPOLoss(2.0, label_smoothing=0.1)(LOGPROBS[:5], BATCH.select([0, 1]))
    assert float(found) == pytest.approx((0.9 * UP + 0.1 * DOWN) / 2, abs=1e-6)  # of a step of two pairs


def test_rewards_are_mean_log_probs_times_beta() -> None:
    found = values(SimPOLoss(2.0)(LOGPROBS, BATCH)[1])
    assert found["rewards_chosen_mean"] == pytest.approx(-2.5)  # 2 * (-0.5 - 2.0) / 2
    assert found["rewards_rejected_mean"] == pytest.approx(-3.5)
    assert found["accuracy"] == 0.5


def test_the_config_chooses_the_loss(tiny_model: Path) -> None:
    def loss_of(**knobs: Any) -> Any:
        trainer = SimPOTrainer(SimPOConfig(model=str(tiny_model), **knobs))
        trainer.setup()
        return trainer.loss

    assert loss_of() == SimPOLoss(2.0, gamma=1.0)
    assert loss_of(beta=10, gamma=3, label_smoothing=0.1, sft_loss_weight=0.5) == SimPOLoss(10, 0.5, 3, 0.1)

"""The Bradley-Terry loss by hand.

Rewards of two pairs are (2.0, 0.5) and (-1.0, 0.0), at the one scored token of each sequence. A third pair's prompt
filled the length limit: nothing of it is trained, and its slots hold NaN.
"""

from __future__ import annotations

import pytest
import torch
from nemorl_preference.rm.loss import BradleyTerryLoss
from nemorl_tensors import TokenBatch, pair_batch

NAN = float("nan")
LONG, SHORT, CUT = ([5, 5, 0], [False, False, True]), ([5, 0], [False, True]), ([5, 0], [False, False])
VALUES = [NAN, NAN, 2.0, NAN, 0.5, NAN, -1.0, NAN, NAN, 0.0, NAN, NAN, NAN, NAN]


def batch(*margins: float) -> TokenBatch:
    pairs = pair_batch([LONG, SHORT, CUT], [SHORT, LONG, CUT])
    given = torch.tensor([*(margins or (0.0, 0.0)), 0.0])
    return pairs.with_sequences(margins=given.repeat_interleave(2))


@pytest.mark.parametrize(
    ("loss", "margins", "expected"),
    [
        # differences 1.5 and -1.0: log1p(e^-1.5) = 0.201413, log1p(e^1) = 1.313262; their mean
        (BradleyTerryLoss(), (), 0.757338),
        # a margin of 0.5 on the first pair: log1p(e^-1.0) = 0.313262
        (BradleyTerryLoss(), (0.5, 0.0), 0.813262),
        # ((2.0 + 0.5)^2 + (-1.0)^2) / 2 = 3.625, weighed 0.01
        (BradleyTerryLoss(0.01), (), 0.757338 + 0.03625),
    ],
    ids=["plain", "margin", "centred"],
)
def test_the_loss_is_the_mean_over_pairs(loss: BradleyTerryLoss, margins: tuple[float, ...], expected: float) -> None:
    assert float(loss(torch.tensor(VALUES), batch(*margins))[0]) == pytest.approx(expected, abs=1e-6)


def test_the_gradient_is_at_the_ends_of_texts_only() -> None:
    values = torch.tensor(VALUES, requires_grad=True)
    BradleyTerryLoss()(values, batch())[0].backward()
    one, two = 0.5 * 0.182426, 0.5 * 0.731059  # sigmoid(-1.5), sigmoid(1.0)
    assert values.grad is not None
    assert values.grad.tolist() == pytest.approx([0, 0, -one, 0, one, 0, -two, 0, 0, two, 0, 0, 0, 0], abs=1e-6)


def test_metrics_are_those_of_rewards() -> None:
    _, metrics = BradleyTerryLoss(0.01)(torch.tensor(VALUES), batch())
    found = {name: metric.value for name, metric in metrics.items()}
    assert found == pytest.approx({
        "accuracy": 0.5,
        "rewards_chosen_mean": 0.5,
        "rewards_rejected_mean": 0.25,
        "rewards_margin_mean": 0.25,
        "num_valid_samples": 2,
        "preference_loss": 0.757338,
        "center_loss": 3.625,
    })  # fmt: skip

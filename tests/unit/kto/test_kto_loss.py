"""KTO's loss and reference point by hand.

Three responses, beta = 0.5, sums of log-probs (the reference's in brackets), z0 = 0.5:

    response        policy          log-ratio r    beta * (r - z0)
    1 desirable     -0.5 -0.5  (-2)     +1.0           +0.25
    2 undesirable   -3.0       (-2)     -1.0           -0.75
    3 desirable     -2.0     (-0.5)     -1.5           -1.0

and a fourth one whose prompt filled the length limit: nothing of it is trained, and its slots hold NaN.
"""

from __future__ import annotations

import math

import pytest
import torch
from nemorl.metrics import values
from nemorl_preference.kto.loss import KTOLoss, reference_point
from nemorl_preference.kto.rows import Judged, mismatched, to_batch
from nemorl_tensors import TokenBatch

NAN = float("nan")
ANSWERS = [
    Judged([9], [1, 1], [True, True], True),
    Judged([9], [2], [True], False),
    Judged([8], [3], [True], True),
    Judged([7, 7, 7], [4], [True], True),
]
LOGPROBS = [NAN, -0.5, -0.5, NAN, -3.0, NAN, -2.0, NAN, NAN, NAN]
REFERENCE = torch.tensor([-2.0, -2.0, -0.5, NAN])


def batch() -> TokenBatch:
    points = torch.full((4,), 0.5)
    return to_batch(ANSWERS, 3).with_sequences(reference_response_logprobs=REFERENCE, reference_points=points)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


ONE, TWO, THREE = 1 - sigmoid(0.25), 1 - sigmoid(0.75), 1 - sigmoid(-1.0)
"""0.437823, 0.320821, 0.731059."""


def value(loss: KTOLoss) -> float:
    return float(loss(torch.tensor(LOGPROBS), batch())[0])


def test_a_loss_is_the_mean_over_responses_that_are_trained() -> None:
    assert value(KTOLoss(0.5)) == pytest.approx((ONE + TWO + THREE) / 3, abs=1e-6)
    assert value(KTOLoss(0.5, 2.0, 0.1)) == pytest.approx((2 * ONE + 0.1 * TWO + 2 * THREE) / 3, abs=1e-6)


def test_desirable_responses_are_pushed_up_and_the_others_down() -> None:
    logprobs = torch.tensor(LOGPROBS, requires_grad=True)
    KTOLoss(0.5)(logprobs, batch())[0].backward()  # type: ignore[no-untyped-call]
    # d / dr of 1 - sigmoid(x) is -beta * sigmoid(x) * (1 - sigmoid(x)), a third of it each
    slopes = [0.5 * each * (1 - each) / 3 for each in (ONE, TWO, THREE)]
    expected = [0, -slopes[0], -slopes[0], 0, slopes[1], 0, -slopes[2], 0, 0, 0]
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx(expected, abs=1e-6)


def test_metrics_tell_the_two_kinds_apart() -> None:
    found = values(KTOLoss(0.5)(torch.tensor(LOGPROBS), batch())[1])
    assert found == pytest.approx({
        "accuracy": 2 / 3,  # 1 is above the point, 2 below it; 3 is on the wrong side
        "rewards_desirable_mean": -0.125,  # 0.5 * (1.0 - 1.5) / 2
        "rewards_undesirable_mean": -0.5,
        "num_valid_samples": 3,
    })  # fmt: skip


def test_each_prompt_meets_the_response_before_it() -> None:
    others = mismatched(ANSWERS)
    assert [(one.prompt, one.response) for one in others] == [([9], [4]), ([9], [1, 1]), ([8], [2]), ([7, 7, 7], [3])]


def test_the_reference_point_is_a_mean_and_never_negative() -> None:
    others = to_batch(ANSWERS, 3)
    # (1.0 - 1.0 - 1.5) / 3 = -0.5; by a reference that is 2 nats lower each, (3.0 + 1.0 + 0.5) / 3 = 1.5
    assert reference_point(torch.tensor(LOGPROBS), others, REFERENCE) == 0.0
    assert reference_point(torch.tensor(LOGPROBS), others, REFERENCE - 2) == pytest.approx(1.5)
    assert reference_point(torch.tensor(LOGPROBS[-3:]), others.select([3]), REFERENCE[3:]) == 0.0


def test_parts_of_a_step_add_up() -> None:
    parts = [
        float(KTOLoss(0.5)(torch.tensor(LOGPROBS[low:high]), batch().select(picked))[0])
        for low, high, picked in ((0, 3, [0]), (3, 10, [1, 2, 3]))
    ]
    assert sum(parts) == pytest.approx(value(KTOLoss(0.5)))

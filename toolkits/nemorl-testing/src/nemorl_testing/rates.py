"""Checks of a training backend whose learning rate can be scaled while it trains (capability ``rate_scale``)."""

from __future__ import annotations

from typing import Any

from nemorl.contracts import RateScalingBackend, TrainingBackend

from nemorl_testing.backends import build_trainer, difference, norm, weights_of
from nemorl_testing.batches import WeightedNLL, ragged_batch
from nemorl_testing.kit import NotApplicable, Subject, expect

LR = 1e-2
SETTINGS: dict[str, Any] = {"optimizer": {"lr": LR, "weight_decay": 0.0}}
TOLERANCE = 1e-3
"""Of an update's size, relative: weights of about 0.1 in float32 are exact to 1e-8, updates are of 1e-3."""


def check_a_scaled_rate_scales_the_update(subject: Subject) -> None:
    """After scale_rate(0.5) and scale_rate(0.25), ``lr`` and the update are 1/8 of what they would be. (DESIGN 5)"""
    scaled = _update(_scaled(subject, 0.5, 0.25), LR / 8)
    plain = _update(build_trainer(subject, **SETTINGS), LR)
    expect(abs(scaled / plain - 1 / 8) < TOLERANCE, f"its update is {scaled / plain:.4f} of one that is not scaled")


def check_a_scaled_rate_is_in_the_checkpoint(subject: Subject) -> None:
    """A backend that loads the checkpoint of one whose rate was scaled goes on at the scaled rate. (DESIGN 7.9)"""
    backend, folder = _scaled(subject, 0.25), subject.folder / "scaled"
    folder.mkdir()
    backend.save_checkpoint(folder)
    resumed = build_trainer(subject, **SETTINGS)
    resumed.load_checkpoint(folder)
    _update(resumed, LR / 4)


def _scaled(subject: Subject, *factors: float) -> TrainingBackend:
    if "rate_scale" not in subject.config.supports:
        raise NotApplicable("the backend does not declare supports={'rate_scale'}")
    backend = build_trainer(subject, **SETTINGS)
    expect(isinstance(backend, RateScalingBackend), "the backend has no scale_rate")
    assert isinstance(backend, RateScalingBackend)
    for factor in factors:
        backend.scale_rate(factor)
    return backend


def _update(backend: TrainingBackend, rate: float) -> float:
    """The size of the next update, whose rate it has to report."""
    before = weights_of(backend)
    reported = backend.train_step(ragged_batch(), WeightedNLL())["lr"].value
    expect(abs(reported - rate) < 1e-9, f"lr is reported as {reported}, not {rate}")
    return norm(difference(weights_of(backend), before))

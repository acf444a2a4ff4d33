"""Mistakes in a DPO config are found when it loads."""

from __future__ import annotations

from typing import Any

import pytest
from nemorl.config.load import validate
from nemorl.errors import ConfigError
from nemorl_preference.dpo import DPOConfig
from recorded_messages import Raises


@pytest.mark.parametrize(
    ("knobs", "path"),
    [
        ({"loss": "hinge", "label_smoothing": 0.1}, "label_smoothing"),
        ({"preference_loss_weight": 0.0}, "preference_loss_weight"),
        ({"loss": "simpo"}, "loss"),
        ({"beta": 0.0}, "beta"),
    ],
    ids=["smoothing", "weights", "unknown loss", "beta"],
)
def test_a_mistake_is_named(knobs: dict[str, Any], path: str, raises: Raises) -> None:
    with raises(ConfigError, path=path):
        validate(DPOConfig, {"model": "m", **knobs})


def test_only_a_reference_model_needs_one() -> None:
    assert not DPOConfig(model="m").needs_reference
    assert DPOConfig(model="m", reference="model").needs_reference

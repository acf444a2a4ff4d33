"""Checks of training backends that can be asked what their model computes (capability ``activations``)."""

from __future__ import annotations

from typing import Any

from nemorl_testing.activations import ACTIVATIONS, expect_those_of_transformers
from nemorl_testing.backends import build_trainer
from nemorl_testing.kit import NotApplicable, Subject

TOKENS = (9, 18, 10, 11, 12, 13, 40, 61)


def check_recorded_activations_are_those_of_transformers(subject: Subject) -> None:
    """What is recorded of a sequence is what transformers computes for all its tokens but the last. (DESIGN 5)"""
    if ACTIVATIONS not in subject.config.supports:
        raise NotApplicable("the backend does not declare supports={'activations'}")
    trainer: Any = build_trainer(subject)
    expect_those_of_transformers(subject, trainer.observe(TOKENS), TOKENS[:-1])

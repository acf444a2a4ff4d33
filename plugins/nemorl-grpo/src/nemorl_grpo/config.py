"""GRPO's knobs. Importing this imports no torch.

The blocks that it and its variants are made of are in :mod:`nemorl_rl.policy_gradient.config`.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from nemorl_rl.policy_gradient.config import ClippedConfig, RewardShaping


class GroupNormalization(RewardShaping):
    """A block of knobs: GRPO's advantage, a reward against mean and spread of its group."""

    leave_one_out: bool = True
    """Baseline and spread of a response come from the *other* responses of its group, which keeps them unbiased."""
    normalize_std: bool = True
    """Divide by the group's standard deviation. False: hard and easy prompts keep their natural weight."""


class GRPOConfig(GroupNormalization, ClippedConfig):
    """Group relative policy optimisation (arXiv:2402.03300)."""

    summary: ClassVar[str] = "Group relative policy optimisation: each response against others to its prompt"
    trainer: ClassVar[str] = "nemorl_grpo.trainer:GRPOTrainer"

    algorithm: Literal["grpo"] = "grpo"
    """Name of the algorithm."""

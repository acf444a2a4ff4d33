"""DAPO: GRPO without a KL penalty, with more room for rare tokens, for groups that teach, against endless responses.

arXiv:2503.14476. Clip-higher (section 3.1), dynamic sampling (3.2), a loss that averages over tokens (3.3), soft
punishment of overlong responses (3.4). All of it is defaults of GRPO's own knobs.

Differs from the paper: std is the unbiased one; groups are told apart by the reward of the environment, before the
length penalty; the penalty's buffer is a fifth of the limit, as the paper's 4,096 of 20,480 tokens.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from nemorl_rl.policy_gradient.config import ClippedConfig, OverlongPenalty
from nemorl_rl.policy_gradient.trainer import PolicyGradientTrainer
from pydantic import Field

from nemorl_grpo.config import GroupNormalization


def _soft_punishment(known: dict[str, Any]) -> OverlongPenalty:
    limit = known["generation"].max_new_tokens * known["max_turns"]
    return OverlongPenalty(max_response_tokens=limit, buffer_tokens=max(1, limit // 5))


class DAPOConfig(GroupNormalization, ClippedConfig):
    """Decoupled clip and dynamic sampling policy optimisation (arXiv:2503.14476)."""

    summary: ClassVar[str] = "GRPO with clip-higher, dynamic sampling, a length penalty and no KL"
    trainer: ClassVar[str] = "nemorl_grpo.variants.dapo:DAPOTrainer"

    algorithm: Literal["dapo"] = "dapo"
    """Name of the algorithm."""
    clip_high: float = Field(0.28, ge=0)
    """The probability ratio is clipped above at 1 + this: further than below, so that rare tokens can grow."""
    dynamic_sampling: bool = True
    """Train only on groups whose rewards differ, and sample more prompts until there are enough.
    ``rollouts.max_batches_per_step`` bounds how many."""
    leave_one_out: bool = False
    """Baseline and spread of a response come from the *other* responses of its group."""
    kl_penalty: float = Field(0.0, ge=0)
    """Weight of KL(policy || initial policy). 0 needs no reference model."""
    overlong_penalty: OverlongPenalty | None = Field(default_factory=_soft_punishment)
    """Punish responses that come close to the token limit. Unset: over the last fifth of ``generation.max_new_tokens``
    (times ``max_turns``). null: not at all."""


class DAPOTrainer(PolicyGradientTrainer[DAPOConfig]):
    """Decoupled clip and dynamic sampling policy optimisation (arXiv:2503.14476)."""

    config_class = DAPOConfig

"""GRPO: its step is that of ``PolicyGradientTrainer``, its advantages are those of ``GroupNormalization``."""

from __future__ import annotations

from nemorl_rl.policy_gradient.trainer import PolicyGradientTrainer

from nemorl_grpo.config import GRPOConfig


class GRPOTrainer(PolicyGradientTrainer[GRPOConfig]):
    """Group relative policy optimisation (arXiv:2402.03300)."""

    config_class = GRPOConfig

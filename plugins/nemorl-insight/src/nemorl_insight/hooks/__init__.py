"""Ready-made hooks."""

from nemorl_insight.hooks.config import EarlyStoppingConfig

__all__ = ["EarlyStoppingConfig"]

"""GRPO for nemorl."""

from nemorl_grpo.config import GRPOConfig

__all__ = ["GRPOConfig"]

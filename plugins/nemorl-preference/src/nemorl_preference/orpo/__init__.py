"""Odds ratio preference optimisation for nemorl."""

from nemorl_preference.orpo.config import ORPOConfig

__all__ = ["ORPOConfig"]

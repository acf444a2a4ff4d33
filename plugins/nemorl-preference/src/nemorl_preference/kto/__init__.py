"""Kahneman-Tversky optimisation for nemorl."""

from nemorl_preference.kto.config import KTOConfig

__all__ = ["KTOConfig"]

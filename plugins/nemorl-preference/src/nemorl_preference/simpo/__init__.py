"""Simple preference optimisation for nemorl."""

from nemorl_preference.simpo.config import SimPOConfig

__all__ = ["SimPOConfig"]

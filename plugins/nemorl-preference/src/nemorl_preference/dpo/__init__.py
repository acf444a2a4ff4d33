"""Direct preference optimisation for nemorl."""

from nemorl_preference.dpo.config import DPOConfig

__all__ = ["DPOConfig"]

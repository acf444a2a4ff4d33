"""Supervised fine-tuning for nemorl."""

from nemorl_sft.config import SFTConfig

__all__ = ["SFTConfig"]

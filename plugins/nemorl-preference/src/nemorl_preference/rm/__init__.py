"""Reward models for nemorl: the algorithm ``rm`` trains one, the environment ``reward_model`` scores with one."""

from nemorl_preference.rm.config import RewardModelConfig, RMConfig

__all__ = ["RMConfig", "RewardModelConfig"]

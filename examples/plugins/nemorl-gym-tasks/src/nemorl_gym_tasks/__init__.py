"""Mixtures of reasoning-gym tasks for nemorl."""

from nemorl_gym_tasks.config import GymMixtureConfig, GymTasksConfig

__all__ = ["GymMixtureConfig", "GymTasksConfig"]

"""Environments: what turns a response into a reward.

The class to derive from is :class:`nemorl.contracts.Environment`. ``functions``: a function as an environment.
``composition``: several environments as one. ``pool``: steps many episodes at once, bounded and timed, on the
``scheduler`` that agents' episodes run on as well. Which environments exist is the business of plugins; how episodes
and generation take turns is that of ``nemorl_rl.rollouts.engine``.
"""

from nemorl_rl.environments.composition import ChainEnvironment, Part, Stage, WeightedEnvironment
from nemorl_rl.environments.functions import FunctionalRewardWrapper, RewardFunction
from nemorl_rl.environments.pool import EnvironmentPool
from nemorl_rl.environments.sources import Unscored

__all__ = [
    "ChainEnvironment",
    "EnvironmentPool",
    "FunctionalRewardWrapper",
    "Part",
    "RewardFunction",
    "Stage",
    "Unscored",
    "WeightedEnvironment",
]

"""GRPO and its family for nemorl."""

from nemorl_grpo.config import GRPOConfig
from nemorl_grpo.variants.cispo import CISPOConfig
from nemorl_grpo.variants.dapo import DAPOConfig
from nemorl_grpo.variants.dr_grpo import DrGRPOConfig
from nemorl_grpo.variants.gdpo import GDPOConfig
from nemorl_grpo.variants.gspo import GSPOConfig
from nemorl_grpo.variants.maxrl import MaxRLConfig
from nemorl_grpo.variants.reinforce_baselines import ReinforcePlusPlusBaselineConfig, RLOOConfig
from nemorl_grpo.variants.reinforce_plus_plus import ReinforcePlusPlusConfig

__all__ = [
    "CISPOConfig",
    "DAPOConfig",
    "DrGRPOConfig",
    "GDPOConfig",
    "GRPOConfig",
    "GSPOConfig",
    "MaxRLConfig",
    "RLOOConfig",
    "ReinforcePlusPlusBaselineConfig",
    "ReinforcePlusPlusConfig",
]

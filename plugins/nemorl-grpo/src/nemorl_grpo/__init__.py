"""GRPO and its family for nemorl."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from nemorl_grpo.config import GRPOConfig

if TYPE_CHECKING:
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

_VARIANTS = {
    "CISPOConfig": "cispo",
    "DAPOConfig": "dapo",
    "DrGRPOConfig": "dr_grpo",
    "GDPOConfig": "gdpo",
    "GSPOConfig": "gspo",
    "MaxRLConfig": "maxrl",
    "RLOOConfig": "reinforce_baselines",
    "ReinforcePlusPlusBaselineConfig": "reinforce_baselines",
    "ReinforcePlusPlusConfig": "reinforce_plus_plus",
}
"""A variant's file holds its trainer beside its config: whoever asks for GRPO alone need not load them."""


def __getattr__(name: str) -> Any:
    if name not in _VARIANTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"nemorl_grpo.variants.{_VARIANTS[name]}"), name)

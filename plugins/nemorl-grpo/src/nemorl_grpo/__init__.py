"""GRPO and its family for nemorl."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

# ruff: noqa: F403
if TYPE_CHECKING:
    from nemorl_grpo.config import *
    from nemorl_grpo.variants.cispo import *
    from nemorl_grpo.variants.covariance import *
    from nemorl_grpo.variants.dapo import *
    from nemorl_grpo.variants.dppo import *
    from nemorl_grpo.variants.dr_grpo import *
    from nemorl_grpo.variants.dro import *
    from nemorl_grpo.variants.gdpo import *
    from nemorl_grpo.variants.gmpo import *
    from nemorl_grpo.variants.gspo import *
    from nemorl_grpo.variants.luspo import *
    from nemorl_grpo.variants.maxrl import *
    from nemorl_grpo.variants.optimal_token_baseline import *
    from nemorl_grpo.variants.raw_reward import *
    from nemorl_grpo.variants.reinforce_baselines import *
    from nemorl_grpo.variants.reinforce_plus_plus import *
    from nemorl_grpo.variants.sapo import *
    from nemorl_grpo.variants.vespo import *

_HOMES = {
    "GRPOConfig": "config",
    "CISPOConfig": "variants.cispo",
    "ClipCovConfig": "variants.covariance",
    "DAPOConfig": "variants.dapo",
    "DPPOConfig": "variants.dppo",
    "DROConfig": "variants.dro",
    "DrGRPOConfig": "variants.dr_grpo",
    "GDPOConfig": "variants.gdpo",
    "GMPOConfig": "variants.gmpo",
    "GSPOConfig": "variants.gspo",
    "KLCovConfig": "variants.covariance",
    "LUSPOConfig": "variants.luspo",
    "MaxRLConfig": "variants.maxrl",
    "OptimalTokenBaselineConfig": "variants.optimal_token_baseline",
    "RLOOConfig": "variants.reinforce_baselines",
    "RawRewardConfig": "variants.raw_reward",
    "ReinforcePlusPlusBaselineConfig": "variants.reinforce_baselines",
    "ReinforcePlusPlusConfig": "variants.reinforce_plus_plus",
    "SAPOConfig": "variants.sapo",
    "VESPOConfig": "variants.vespo",
}
"""A variant's file holds its trainer beside its config: whoever asks for GRPO alone need not load them."""
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"nemorl_grpo.{_HOMES[name]}"), name)

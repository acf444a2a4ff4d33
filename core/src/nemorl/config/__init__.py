"""Configuration: strict, typed, reported all at once.

Names load on first use: plugin configs import ``nemorl.config.base`` from here while the run config is still loading.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nemorl.config.base import RESUMABLE, Config
    from nemorl.config.cluster import ClusterConfig
    from nemorl.config.load import load_config
    from nemorl.config.models import GenerationConfig, LoraConfig, OptimizerConfig, PolicyConfig, ScheduleConfig
    from nemorl.config.plugin_lists import PluginsConfig
    from nemorl.config.run import CheckpointConfig, RunConfig, ValidationConfig
    from nemorl.config.scalars import ExpandsHome

__all__ = [
    "RESUMABLE",
    "CheckpointConfig",
    "ClusterConfig",
    "Config",
    "ExpandsHome",
    "GenerationConfig",
    "LoraConfig",
    "OptimizerConfig",
    "PluginsConfig",
    "PolicyConfig",
    "RunConfig",
    "ScheduleConfig",
    "ValidationConfig",
    "load_config",
]

_MODULES = {
    "Config": "base",
    "RESUMABLE": "base",
    "ClusterConfig": "cluster",
    "ExpandsHome": "scalars",
    "PluginsConfig": "plugin_lists",
    "load_config": "load",
    **dict.fromkeys(("GenerationConfig", "LoraConfig", "OptimizerConfig", "PolicyConfig", "ScheduleConfig"), "models"),
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES.get(name, 'run')}"), name)

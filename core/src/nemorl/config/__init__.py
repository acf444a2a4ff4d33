"""Configuration: strict, typed, reported all at once.

Names load on first use: plugin configs import ``nemorl.config.base`` from here while the run config is still loading.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

# ruff: noqa: F403
if TYPE_CHECKING:
    from nemorl.base.text.naming import *
    from nemorl.config.base import *
    from nemorl.config.cluster import *
    from nemorl.config.load import *
    from nemorl.config.models import *
    from nemorl.config.plugin_lists import *
    from nemorl.config.run import *

_HOMES = {
    "nemorl.base.text.naming": (
        "CodeName", "Command", "DatasetFile", "DatasetName", "FileName", "Interpreter", "ModelName", "Names", "Options",
        "PlainText", "SecretVariable", "ServedModel", "ServerURL", "Variables",
    ),
    "nemorl.config.base": ("RESUMABLE", "Config"),
    "nemorl.config.cluster": ("ClusterConfig",),
    "nemorl.config.load": ("load_config",),
    "nemorl.config.models": (
        "GenerationConfig", "LoraConfig", "OptimizerConfig", "PolicyConfig", "ScheduleConfig", "TrainingOptions",
    ),
    "nemorl.config.plugin_lists": ("PluginsConfig",),
    "nemorl.config.run": ("CheckpointConfig", "RunConfig", "ValidationConfig"),
}  # fmt: skip
_MODULES = {name: home for home, names in _HOMES.items() for name in names}
__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)

"""Configuration: strict, typed, reported all at once.

Names load on first use: plugin configs import ``nemorl.config.base`` from here while the run config is still loading.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nemorl.base.text.naming import (
        CodeName,
        Command,
        DatasetFile,
        DatasetName,
        FileName,
        Interpreter,
        ModelName,
        Names,
        Options,
        PlainText,
        SecretVariable,
        ServedModel,
        ServerURL,
        Variables,
    )
    from nemorl.config.base import RESUMABLE, Config
    from nemorl.config.cluster import ClusterConfig
    from nemorl.config.load import load_config
    from nemorl.config.models import (
        GenerationConfig,
        LoraConfig,
        OptimizerConfig,
        PolicyConfig,
        ScheduleConfig,
        TrainingOptions,
    )
    from nemorl.config.plugin_lists import PluginsConfig
    from nemorl.config.run import CheckpointConfig, RunConfig, ValidationConfig

__all__ = [
    "RESUMABLE", "CheckpointConfig", "ClusterConfig", "CodeName", "Command", "Config", "DatasetFile", "DatasetName",
    "FileName", "GenerationConfig", "Interpreter", "LoraConfig", "ModelName", "Names", "OptimizerConfig", "Options",
    "PlainText", "PluginsConfig", "PolicyConfig", "RunConfig", "ScheduleConfig", "SecretVariable", "ServedModel",
    "ServerURL", "TrainingOptions", "ValidationConfig", "Variables", "load_config",
]  # fmt: skip

_MODULES = {
    "Config": "nemorl.config.base",
    "RESUMABLE": "nemorl.config.base",
    "ClusterConfig": "nemorl.config.cluster",
    "PluginsConfig": "nemorl.config.plugin_lists",
    "load_config": "nemorl.config.load",
    **dict.fromkeys(
        ("GenerationConfig", "LoraConfig", "OptimizerConfig", "PolicyConfig", "ScheduleConfig", "TrainingOptions"),
        "nemorl.config.models",
    ),
    **dict.fromkeys(("CheckpointConfig", "RunConfig", "ValidationConfig"), "nemorl.config.run"),
}
"""Where names come from; the others are types of what fields name."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES.get(name, "nemorl.base.text.naming")), name)

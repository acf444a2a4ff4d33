"""nemorl: post-training of language models with reinforcement learning.

Names are loaded on first use, so ``import nemorl`` is fast and imports neither torch nor ray. Configs and trainers of
installed algorithm plugins are found here too: ``nemorl.GRPOConfig``, ``nemorl.SFTTrainer``, …
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_KERNEL = {
    "BaseTrainer": "nemorl.trainer",
    "ClusterConfig": "nemorl.config",
    "Environment": "nemorl.contracts.environment",
    "GenerationConfig": "nemorl.config",
    "NemorlError": "nemorl.errors",
    "PolicyConfig": "nemorl.config",
    "RayVirtualCluster": "nemorl.resources.ray_cluster",
    "RayWorkerGroup": "nemorl.resources.ray_workers",
    "RunConfig": "nemorl.config",
    "Score": "nemorl.types",
    "Step": "nemorl.types",
    "TrainResult": "nemorl.run",
    "hookimpl": "nemorl.plugins.hooks",
    "load_config": "nemorl.config",
}
"""The kernel's own names. All others come from the entry points ``nemorl.names`` of toolkits and plugins."""


def __getattr__(name: str) -> Any:
    if name in _KERNEL:
        return getattr(importlib.import_module(_KERNEL[name]), name)
    if name == "__all__":
        return __dir__()
    found = None if name.startswith("_") else _from_others(name)
    if found is None:
        raise AttributeError(f"module 'nemorl' has no attribute {name!r}")
    return found


def __dir__() -> list[str]:
    from nemorl.plugins.registry import registry

    return sorted({"__version__", *_KERNEL, *registry().index.names})


def _from_others(name: str) -> Any:
    """A name that an installed toolkit or plugin contributes, or the config or trainer of an installed algorithm."""
    from nemorl.plugins.registry import registry

    point = registry().index.names.get(name)
    return _from_algorithms(name) if point is None else point.load()


def _from_algorithms(name: str) -> Any:
    """``GRPOConfig`` or ``GRPOTrainer`` of an installed algorithm plugin, by the names of their classes."""
    from importlib.metadata import EntryPoint

    from nemorl.plugins import registry

    wanted = name.removesuffix("Trainer") + "Config" if name.endswith("Trainer") else name
    for entry in registry().index.of_kind("algorithms"):
        if entry.value.replace(":", ".").rpartition(".")[2] == wanted:
            config_class = registry().load("algorithms", entry.id)
            return config_class if wanted == name else EntryPoint(name, config_class.trainer, "nemorl").load()
    return None

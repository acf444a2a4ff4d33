"""nemorl: post-training of language models with reinforcement learning.

Names are loaded on first use, so ``import nemorl`` is fast and imports neither torch nor ray. Configs and trainers of
installed algorithm plugins are found here too: ``nemorl.GRPOConfig``, ``nemorl.SFTTrainer``, …
"""

from __future__ import annotations

import importlib
from importlib.machinery import PathFinder
from typing import Any

__version__ = "0.1.0"

_EXPORTS = {
    "BaseTrainer": "nemorl.trainer",
    "Callback": "nemorl.callbacks",
    "ChainEnvironment": "nemorl.environments",
    "CheckpointCallback": "nemorl.callbacks",
    "ClusterConfig": "nemorl.config",
    "EarlyStopping": "nemorl.callbacks",
    "Environment": "nemorl.environments",
    "FunctionalRewardWrapper": "nemorl.environments",
    "GenerationConfig": "nemorl.config",
    "LoggerCallback": "nemorl.callbacks",
    "NemorlError": "nemorl.errors",
    "PolicyConfig": "nemorl.config",
    "RayVirtualCluster": "nemorl.resources.ray_cluster",
    "RayWorkerGroup": "nemorl.resources.ray_workers",
    "RewardFunction": "nemorl.environments",
    "RunConfig": "nemorl.config",
    "Score": "nemorl.types",
    "TrainResult": "nemorl.results",
    "Trainer": "nemorl.api",
    "WandbCallback": "nemorl.callbacks",
    "WeightedEnvironment": "nemorl.environments",
    "get_generation_backend": "nemorl.registration",
    "get_training_backend": "nemorl.registration",
    "hookimpl": "nemorl.plugins.hooks",
    "load_config": "nemorl.config",
    "register_algorithm": "nemorl.registration",
    "register_dataset": "nemorl.registration",
    "register_environment": "nemorl.registration",
    "register_generation_backend": "nemorl.registration",
    "register_logger": "nemorl.registration",
    "register_training_backend": "nemorl.registration",
    "train": "nemorl.api",
    "train_dpo": "nemorl.api",
    "train_grpo": "nemorl.api",
    "train_sft": "nemorl.api",
}

__all__ = ["__version__", *_EXPORTS]  # noqa: PLE0604


def _find_distributions(*args: Any, **kwargs: Any) -> Any:
    from nemorl.distributions import find_distributions  # importlib.metadata takes as long as all of `import nemorl`

    return find_distributions(*args, **kwargs)


# Before pydantic or torch is imported, which one damaged distribution would prevent: see nemorl.distributions.
PathFinder.find_distributions = staticmethod(_find_distributions)  # type: ignore[method-assign]


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(importlib.import_module(_EXPORTS[name]), name)
    found = None if name.startswith("_") else _from_algorithms(name)
    if found is None:
        raise AttributeError(f"module 'nemorl' has no attribute {name!r}")
    return found


def __dir__() -> list[str]:
    return sorted(__all__)


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

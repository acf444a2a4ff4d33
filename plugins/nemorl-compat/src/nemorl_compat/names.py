"""The table: every module and name that ``nemo_rl`` serves, what stands for it, and what to use instead.

Nothing is imported here. ``same`` names are nemorl's own objects: renaming the import is all there is to do.
``adapted`` names are served by this package, because nemorl does that work in another shape; docs/migration.md shows
both side by side.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class New:
    """The meaning of an old name today."""

    served: str
    """Dotted name of the object that the old name gives."""
    use: str
    """Dotted name to use instead."""

    @property
    def is_same(self) -> bool:
        """Whether the new name can be put in place of the old one."""
        return self.served == self.use


def same(new: str) -> New:
    return New(new, new)


def adapted(served: str, *, use: str) -> New:
    return New(f"nemorl_compat.{served}", use)


TRAIN = {"train": same("nemorl.train")}
FUNCTIONS = {name: same(f"nemorl.{name}") for name in ("train_grpo", "train_sft", "train_dpo")}
GRPO = {"GRPOConfig": same("nemorl.GRPOConfig"), "GRPOTrainer": same("nemorl.GRPOTrainer")}
SFT = {"SFTConfig": same("nemorl.SFTConfig"), "SFTTrainer": same("nemorl.SFTTrainer")}
DPO = {"DPOConfig": same("nemorl.DPOConfig"), "DPOTrainer": same("nemorl.DPOTrainer")}
CONFIGS = {
    "PolicyConfig": same("nemorl.PolicyConfig"),
    "OptimizerConfig": same("nemorl.config.OptimizerConfig"),
    "GenerationConfig": same("nemorl.GenerationConfig"),
    "ClusterConfig": same("nemorl.ClusterConfig"),
    "BaseConfig": same("nemorl.config.Config"),
}
CALLBACKS = {
    "Callback": same("nemorl.Callback"),
    "CheckpointCallback": same("nemorl.CheckpointCallback"),
    "EarlyStopping": same("nemorl.EarlyStopping"),
    "WandbCallback": same("nemorl.WandbCallback"),
}
BASE_TRAINER = {"BaseTrainer": adapted("trainers.BaseTrainer", use="nemorl.BaseTrainer")}
TRAINING = {
    "TrainingBackend": same("nemorl.contracts.TrainingBackend"),
    "get_training_backend": same("nemorl.get_training_backend"),
    "register_training_backend": same("nemorl.register_training_backend"),
}
GENERATION = {
    "GenerationBackend": same("nemorl.contracts.GenerationBackend"),
    "get_generation_backend": same("nemorl.get_generation_backend"),
    "register_generation_backend": same("nemorl.register_generation_backend"),
}
REWARDS = {"FunctionalRewardWrapper": same("nemorl.FunctionalRewardWrapper")}
MATH = {"MathEnvironment": adapted("policies.MathEnvironment", use="nemorl.Environment")}
POLICIES = {
    "HuggingFacePolicy": adapted("policies.HuggingFacePolicy", use="nemorl.Trainer"),
    "MegatronPolicy": adapted("policies.MegatronPolicy", use="nemorl.Trainer"),
}
ENGINES = {"VllmGeneration": adapted("policies.VllmGeneration", use="nemorl.GenerationConfig")}
SCRIPTS = {
    "MasterConfig": adapted("scripts.MasterConfig", use="nemorl.GRPOConfig"),
    "setup": adapted("scripts.setup", use="nemorl.GRPOTrainer"),
    "grpo_train": adapted("scripts.grpo_train", use="nemorl.train"),
}
CLUSTERS = {
    "RayVirtualCluster": same("nemorl.RayVirtualCluster"),
    "RayWorkerGroup": same("nemorl.RayWorkerGroup"),
}


def pipelines(*algorithms: str) -> dict[str, New]:
    """Trainers that also take ``(policy, cluster)`` and have ``train(dataset)``."""
    return {f"{name}Trainer": adapted(f"policies.{name}Trainer", use=f"nemorl.{name}Trainer") for name in algorithms}


MODULES: Mapping[str, Mapping[str, New]] = {
    "nemo_rl": {**TRAIN, **FUNCTIONS, **GRPO, **SFT, **DPO, **CONFIGS, **CALLBACKS, **BASE_TRAINER, **REWARDS},
    "nemo_rl.api": FUNCTIONS,
    "nemo_rl.api.train": {
        **TRAIN,
        "_ALGORITHM_REGISTRY": adapted("trainers.ALGORITHM_REGISTRY", use="nemorl.register_algorithm"),
    },
    "nemo_rl.algorithms": {**GRPO, **SFT, **DPO, **pipelines("GRPO", "SFT", "DPO")},
    "nemo_rl.algorithms.grpo": {**GRPO, **SCRIPTS},
    "nemo_rl.algorithms.sft": SFT,
    "nemo_rl.algorithms.dpo": DPO,
    "nemo_rl.backends": {**TRAINING, **GENERATION},
    "nemo_rl.backends.training": TRAINING,
    "nemo_rl.backends.training.base": TRAINING,
    "nemo_rl.backends.generation": GENERATION,
    "nemo_rl.backends.generation.base": GENERATION,
    "nemo_rl.config": {**CONFIGS, **GRPO, **SFT, **DPO},
    "nemo_rl.config.base": {"BaseConfig": CONFIGS["BaseConfig"]},
    "nemo_rl.config.policy": {name: CONFIGS[name] for name in ("PolicyConfig", "OptimizerConfig")},
    "nemo_rl.config.training": {**GRPO, **SFT, **DPO},
    "nemo_rl.config.generation": {"GenerationConfig": CONFIGS["GenerationConfig"]},
    "nemo_rl.config.cluster": {"ClusterConfig": CONFIGS["ClusterConfig"]},
    "nemo_rl.data": {
        "BatchedDataLoader": adapted("policies.BatchedDataLoader", use="nemorl_rl.data.rows.RowDataModule")
    },
    "nemo_rl.distributed": CLUSTERS,
    "nemo_rl.distributed.virtual_cluster": {"RayVirtualCluster": CLUSTERS["RayVirtualCluster"]},
    "nemo_rl.distributed.worker_groups": {"RayWorkerGroup": CLUSTERS["RayWorkerGroup"]},
    "nemo_rl.environments": {**REWARDS, **MATH},
    "nemo_rl.environments.functional_reward": REWARDS,
    "nemo_rl.environments.math_environment": MATH,
    "nemo_rl.environments.interfaces": {
        "EnvironmentInterface": adapted("environments.EnvironmentInterface", use="nemorl.Environment"),
        "EnvironmentReturn": adapted("environments.EnvironmentReturn", use="nemorl.types.Step"),
    },
    "nemo_rl.models": {**POLICIES, **ENGINES},
    "nemo_rl.models.generation": ENGINES,
    "nemo_rl.models.interfaces": {
        "PolicyInterface": adapted("policies.PolicyInterface", use="nemorl.contracts.TrainingBackend")
    },
    "nemo_rl.models.policy": POLICIES,
    "nemo_rl.trainers": {**BASE_TRAINER, **CALLBACKS},
    "nemo_rl.trainers.base": BASE_TRAINER,
    "nemo_rl.trainers.callbacks": CALLBACKS,
}
"""Module -> name -> what it means."""

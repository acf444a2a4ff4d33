"""The resources of a run whose models on training backends may take turns in the memory of their devices.

Enough for a policy with its reference, a critic or teachers. Runs that sample add engines:
``nemorl_rl.placement.engines``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from nemorl.config.cluster import ClusterConfig
from nemorl.config.models import AuxiliaryModel, PolicyConfig
from nemorl.config.run import RunConfig
from nemorl.contracts import WorkerGroup
from nemorl.contracts.memory import DeviceMemoryError
from nemorl.errors import BackendError
from nemorl.resources.manager import ResourceManager
from nemorl.resources.policies import TrainingPolicy, Turn

from nemorl_rl.placement.tenants import POLICY, Phase, Tenancy, TrainingTenant, phases

if TYPE_CHECKING:
    from nemorl.contracts import Head, Loss
    from nemorl.metrics import Metrics
    from nemorl.trainer import BaseTrainer
    from nemorl_tensors import TokenBatch

    from nemorl_rl.planning.memory.watch import MemoryWatch

_log = logging.getLogger(__name__)
TRIED = frozenset({"cuda", "sim"})
"""Kinds of accelerator on which runs have been seen to train."""


class ProvenPolicy(TrainingPolicy):
    """``TrainingPolicy``, which refuses to train a model that does not see its inputs."""

    head: Head = "language_model"
    _is_proven = False

    def train_step(self, minibatch: TokenBatch, loss: Loss) -> Metrics:
        if not self._is_proven:
            from nemorl_rl.audit.dead_inputs import require_live_inputs

            require_live_inputs(self, minibatch, self.head)
            self._is_proven = True
        return super().train_step(minibatch, loss)


def _look_at_accelerator(cluster: ClusterConfig) -> None:
    """Refuse one that PyTorch does not see in this process, which would compute on it; say that one is untried."""
    if not cluster.uses_gpus or cluster.accelerator == "cuda":
        return
    import torch

    seen = torch.accelerator.current_accelerator(check_available=True)
    if not cluster.uses_ray and (seen is None or seen.type != cluster.accelerator):
        raise BackendError(
            f"PyTorch {torch.__version__} sees no {cluster.accelerator} on this machine, "
            f"but {'no accelerator' if seen is None else seen.type}",
            fix="name what it sees in cluster.accelerator, remove it to compute on the CPU, or install another build "
            "of PyTorch",
        )
    if cluster.accelerator not in TRIED:
        _log.warning("nemorl has not been run on %s yet: compare with a run on the CPU", cluster.accelerator)


class TenantResources(ResourceManager):
    """Decides, besides, who is in the devices' memory while a model works."""

    policy_class: ClassVar[type[TrainingPolicy]] = ProvenPolicy

    def __init__(self, config: RunConfig, run_dir: Path, *, on_restart: Callable[[str], None] = lambda _: None) -> None:
        models = {POLICY: config.policy, **{role: model.policy for role, model in config.auxiliary_models.items()}}
        adapted = [role for role, policy in models.items() if policy.lora is not None]
        self._planned = config
        _look_at_accelerator(config.cluster)
        placement = config.place()
        if placement.takes_turns is None:
            scene = self._watch.scene
            placement = replace(placement, takes_turns=scene is None or scene.takes_turns)
        self._tenancy: Tenancy | None = None
        if placement.takes_turns:
            table = phases([*models], shares_weights=placement.shares_weights, adapted=adapted)
            self._tenancy = Tenancy(table, self._watch, limit_s=config.cluster.worker_timeout_s)
        self._movable: dict[str, tuple[PolicyConfig, WorkerGroup]] = {}
        """Trained models that can leave the devices' memory, by role."""
        self._said: set[str] = set()
        self._is_first_step = True
        self._microbatch_tokens: int | None = None
        """Of those that fit the devices, where the config leaves their size open and that is known."""
        if config.policy.microbatch_tokens is None and self._watch.scene is not None:
            self._microbatch_tokens = self._watch.scene.policy.default_budget
        fitting = config.model_copy(update={"policy": self._fitting(config.policy)})
        super().__init__(fitting, run_dir, placement=placement, on_restart=on_restart)

    @cached_property
    def _watch(self) -> MemoryWatch:
        """The planner of memory, which is loaded where devices may be too small for all that a run has."""
        from nemorl_rl.planning.memory.watch import MemoryWatch

        return MemoryWatch(self._planned)

    def _fitting(self, policy: PolicyConfig) -> PolicyConfig:
        """With microbatches that fit, where it leaves their size open."""
        if self._microbatch_tokens is None or policy.microbatch_tokens is not None:
            return policy
        return policy.model_copy(update={"microbatch_tokens": self._microbatch_tokens})

    def training_policy(self, planned_updates: int) -> ProvenPolicy:
        self._make_room()
        policy = super().training_policy(planned_updates)
        assert isinstance(policy, ProvenPolicy), "it is of policy_class"
        self._admit(POLICY, self.config.policy, policy.workers)
        policy.head = self.config.policy_head
        return policy

    def auxiliary_policy(self, role: str, auxiliary: AuxiliaryModel, planned_updates: int) -> TrainingPolicy:
        self._make_room()
        fitting = replace(auxiliary, policy=self._fitting(auxiliary.policy))
        policy = super().auxiliary_policy(role, fitting, planned_updates)
        self._admit(role, auxiliary.policy, policy.workers)
        return policy

    def turn_of(self, role: str) -> Turn:
        return lambda work: self._during(Phase(role, work))

    def replace_training(self) -> None:
        super().replace_training()
        for role, (model, workers) in self._movable.items():
            self._admit(role, model, workers)

    def remarks(self) -> list[str]:
        found = super().remarks()
        self._said.update(found)
        return found

    def new_remarks(self) -> Sequence[str]:
        """Remarks since the last call: tenants that hold more than was planned and, the first time, what the
        policy's backend says of its first step."""
        found = [*self._watch.new_remarks()] if self._tenancy is not None else []
        if self._is_first_step:
            self._is_first_step, said = False, {*self._said}
            found += [text for text in self.remarks() if text not in said]
            if self._microbatch_tokens is not None:
                found.append(self._watch.chosen_microbatch())
        return found

    def _during(self, phase: Phase) -> AbstractContextManager[None]:
        return self._tenancy.during(phase) if self._tenancy is not None else self._explained(phase)

    @contextmanager
    def _explained(self, phase: Phase) -> Iterator[None]:
        """Of models that all stay in memory."""
        try:
            yield
        except DeviceMemoryError as error:
            raise self._watch.explained(phase, error) from error

    def _make_room(self) -> None:
        """Before a model is built: those that were built before it leave."""
        if self._tenancy is not None:
            self._tenancy.send_all_away()

    def _admit(self, role: str, model: PolicyConfig, workers: WorkerGroup) -> None:
        if self._tenancy is not None and "offload" in model.backend.supports:
            self._movable[role] = (model, workers)
            self._tenancy.admit(role, TrainingTenant(workers), ("weights", "optimizer", "gradients", "reference"))


class Remarks:
    """A hook that writes remarks into a run's events: what backends do otherwise than their defaults would, and what
    was found of memory. Of trainers whose resources are :class:`TenantResources`."""

    def on_step_end(self, trainer: BaseTrainer[Any], step: int) -> None:
        resources = trainer.run.resources
        assert isinstance(resources, TenantResources), "trainers with this hook have them"
        for text in resources.new_remarks():
            trainer.directory.event("remark", step=step, message=text)

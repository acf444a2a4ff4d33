"""The resources of a run that samples: besides training workers, engines that take the policy's weights from them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from nemorl.config.cluster import ClusterConfig
from nemorl.config.models import AuxiliaryModel, GenerationConfig, PolicyConfig
from nemorl.contracts import WorkerGroup
from nemorl.errors import WorkerLostError
from nemorl.plugins.kinds import TrainingBackendConfig
from nemorl.resources.manager import LocalLauncher, ResourceManager, short_name
from nemorl.resources.policies import TrainingPolicy, Turn
from nemorl.resources.worker import WorkerContext
from nemorl.weights import WeightHandle, in_process_handle

from nemorl_rl.config import RolloutRunConfig
from nemorl_rl.generation_policy import GenerationPolicy
from nemorl_rl.tenants import ENGINE, POLICY, SYNC, EngineTenant, Parts, Tenancy, TrainingTenant, phases

if TYPE_CHECKING:
    from nemorl.contracts import GenerationBackend, TrainingBackend


@dataclass(frozen=True)
class GenerationFactory:
    """Builds one engine, in its worker process."""

    generation: GenerationConfig
    policy: PolicyConfig
    weights: WeightHandle | None

    def __call__(self, context: WorkerContext) -> GenerationBackend:
        return self.generation.backend.build(self.generation, self.policy, context, self.weights)


@dataclass(frozen=True)
class AttachedEngineFactory:
    """Builds an engine in the process of a trainer, over its weights."""

    generation: GenerationConfig
    policy: PolicyConfig

    def __call__(self, trainer: TrainingBackend, context: WorkerContext) -> GenerationBackend:
        return self.generation.backend.build_in(trainer, self.generation, self.policy, context)


class RolloutResources(ResourceManager):
    """Decides, besides, where engines run and how weights travel to them."""

    config: RolloutRunConfig

    def __init__(
        self, config: RolloutRunConfig, run_dir: Path, *, on_restart: Callable[[str], None] = lambda _: None
    ) -> None:
        self._published: WeightHandle | None = None
        self._sampler = config.sampler  # it asks the registry, once for all updates
        self._tenancy: Tenancy | None = None
        if config.takes_turns:
            models = {POLICY: config.policy, **{role: model.policy for role, model in config.auxiliary_models.items()}}
            adapted = [role for role, policy in models.items() if policy.lora is not None]
            table = phases(list(models), shares_weights=config.shares_weights, adapted=adapted)
            self._tenancy = Tenancy(table, limit_s=config.cluster.worker_timeout_s)
        self._movable: dict[str, tuple[PolicyConfig, WorkerGroup]] = {}
        """Trained models that can leave the devices' memory, by role."""
        super().__init__(config, run_dir, on_restart=on_restart)

    def training_policy(self, planned_updates: int) -> TrainingPolicy:
        policy = super().training_policy(planned_updates)
        self._admit(POLICY, self.config.policy, policy.workers)
        return policy

    def auxiliary_policy(self, role: str, auxiliary: AuxiliaryModel, planned_updates: int) -> TrainingPolicy:
        policy = super().auxiliary_policy(role, auxiliary, planned_updates)
        self._admit(role, auxiliary.policy, policy.workers)
        return policy

    def turn_of(self, role: str) -> Turn:
        return lambda work: self._during(f"{role} {work}")

    def restart_training(self, error: WorkerLostError) -> None:
        if self._tenancy is not None and not self.config.shares_weights:
            self._tenancy.send_away(ENGINE)
        super().restart_training(error)
        for role, (model, workers) in self._movable.items():
            self._admit(role, model, workers)

    def generation_policy(self) -> GenerationPolicy:
        """The generation policy: starts from the training policy's weights if there is one, else from disk."""
        config, generation = self.config, self.config.generation
        if self._sampler.is_attached and self.training is not None:
            with self._during(SYNC):
                engine = AttachedEngineFactory(generation, config.policy)
                attached = self.launcher.attached_group(self.training, engine)
            self._admit_engine(attached, ("cache",))
            # Lost with its trainer, and replaced with it: there is nothing to revive alone.
            return GenerationPolicy(attached, turn=self._during)
        weights = self.weight_handle(version=0) if self.training is not None else None
        # Engines may live where the trainer's package is not installed: its config does not travel there.
        policy = config.policy.model_copy(update={"backend": TrainingBackendConfig()})
        factory = GenerationFactory(generation, policy, weights)
        name = f"generation backend {short_name(generation.backend)}"
        with self._during(SYNC):
            group = self.own(self.launcher.engine_group(factory, name))
        parts: Parts = ("cache",) if config.shares_weights else ("weights", "cache")
        self._admit_engine(group, parts)

        def revive(error: WorkerLostError) -> None:
            self.count_restart(error)
            self.launcher.restart(group, replace(factory, weights=self._published))
            self._admit_engine(group, parts)

        return GenerationPolicy(group, revive, self._during)

    def weight_handle(self, version: int) -> WeightHandle:
        """The training policy's current weights, over the transport that both sides declare."""
        assert self.training is not None, "weights were asked for before the training policy was built"
        if self._sampler.is_attached:
            return in_process_handle(None, version)  # nothing travels
        assert self._sampler.transport is not None, "the config checks that the backends share a transport"
        with self._during(SYNC):
            self._published = self.training.publish(self._sampler.transport, version)
        return self._published

    def _during(self, phase: str) -> AbstractContextManager[None]:
        return self._tenancy.during(phase) if self._tenancy is not None else nullcontext()

    def _admit(self, role: str, model: PolicyConfig, workers: WorkerGroup) -> None:
        if self._tenancy is not None and "offload" in model.backend.supports:
            self._movable[role] = (model, workers)
            self._tenancy.admit(role, TrainingTenant(workers), ("weights", "optimizer", "gradients", "reference"))

    def _admit_engine(self, workers: WorkerGroup, parts: Parts) -> None:
        if self._tenancy is not None and "sleep" in self.config.generation.backend.supports:
            self._tenancy.admit(ENGINE, EngineTenant(workers), parts)


def standalone_generation(generation: GenerationConfig, policy: PolicyConfig) -> GenerationPolicy:
    """A generator of a model on disk, outside any run, in this process."""
    launcher = LocalLauncher(WorkerContext(device=ClusterConfig().device))
    factory = GenerationFactory(generation, policy, None)
    return GenerationPolicy(launcher.engine_group(factory, f"generation backend {short_name(generation.backend)}"))

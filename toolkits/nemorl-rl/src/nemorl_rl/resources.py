"""The resources of a run that samples: besides training workers, engines that take the policy's weights from them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from nemorl.config.cluster import ClusterConfig
from nemorl.config.models import GenerationConfig, PolicyConfig
from nemorl.errors import WorkerLostError
from nemorl.plugins.kinds import TrainingBackendConfig
from nemorl.resources.manager import LocalLauncher, ResourceManager, short_name
from nemorl.resources.worker import WorkerContext
from nemorl.weights import WeightHandle, in_process_handle

from nemorl_rl.generation_policy import GenerationPolicy

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

    _published: WeightHandle | None = None

    def generation_policy(self) -> GenerationPolicy:
        """The generation policy: starts from the training policy's weights if there is one, else from disk."""
        config, sampler = self.config, self.config.sampler
        assert sampler is not None, "this kind of run samples nothing"
        generation = sampler.generation
        if sampler.is_attached and self.training is not None:
            engine = AttachedEngineFactory(generation, config.policy)
            # Lost with its trainer, and replaced with it: there is nothing to revive alone.
            return GenerationPolicy(self.launcher.attached_group(self.training, engine))
        weights = self.weight_handle(version=0) if self.training is not None else None
        # Engines may live where the trainer's package is not installed: its config does not travel there.
        policy = config.policy.model_copy(update={"backend": TrainingBackendConfig()})
        factory = GenerationFactory(generation, policy, weights)
        group = self.own(self.launcher.engine_group(factory, f"generation backend {short_name(generation.backend)}"))

        def revive(error: WorkerLostError) -> None:
            self.count_restart(error)
            self.launcher.restart(group, replace(factory, weights=self._published))

        return GenerationPolicy(group, revive)

    def weight_handle(self, version: int) -> WeightHandle:
        """The training policy's current weights, over the transport that both sides declare."""
        assert self.training is not None, "weights were asked for before the training policy was built"
        sampler = self.config.sampler
        assert sampler is not None, "nothing asks for weights where nothing samples"
        if sampler.is_attached:
            return in_process_handle(None, version)  # nothing travels
        assert sampler.transport is not None, "the config checks that the backends share a transport"
        self._published = self.training.publish(sampler.transport, version)
        return self._published


def standalone_generation(generation: GenerationConfig, policy: PolicyConfig) -> GenerationPolicy:
    """A generator of a model on disk, outside any run, in this process."""
    launcher = LocalLauncher(WorkerContext(device=ClusterConfig().device))
    factory = GenerationFactory(generation, policy, None)
    return GenerationPolicy(launcher.engine_group(factory, f"generation backend {short_name(generation.backend)}"))

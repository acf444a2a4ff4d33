"""ResourceManager: the one place that decides where worker groups run and how weights travel between them.

Algorithms ask it for policies and for a weight sync; they never learn whether training and generation share a
process, a node or nothing at all (REQ-1.2.2, REQ-2.2.5).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from nemorl.config.cluster import ClusterConfig
from nemorl.config.run import GenerationConfig, PolicyConfig, RunConfig
from nemorl.errors import boundary
from nemorl.policy import GenerationPolicy, TrainingPolicy
from nemorl.resources.local import LocalWorkerGroup
from nemorl.resources.worker import WorkerContext
from nemorl.weights import WeightHandle, in_process_handle

if TYPE_CHECKING:
    from nemorl.contracts import TrainingBackend


class ResourceManager:
    """Builds and owns the worker groups of one run, on the launcher that ``cluster`` asks for."""

    def __init__(self, config: RunConfig, scratch: Path) -> None:
        self.config = config
        self.context = WorkerContext(device=config.cluster.device, seed=config.seed, scratch=scratch)
        self._trainer: TrainingBackend | None = None

    def training_policy(self, planned_updates: int) -> TrainingPolicy:
        """The policy that learns, built on its devices; its learning rate decays over ``planned_updates``."""
        policy = self.config.policy
        if policy.schedule.decay_steps is None:
            schedule = policy.schedule.model_copy(update={"decay_steps": planned_updates})
            policy = policy.model_copy(update={"schedule": schedule})
        with boundary(f"training backend {type(policy.backend).__name__}"):
            self._trainer = policy.backend.build(policy, self.context, reference=self.config.needs_reference)
        return TrainingPolicy(LocalWorkerGroup(self._trainer, f"training backend {type(self._trainer).__name__}"))

    def generation_policy(self) -> GenerationPolicy:
        """The policy that speaks: starts from the training policy's weights if there is one, else from disk."""
        generation = self.config.generation
        weights = self.weight_handle(version=0) if self._trainer is not None else None
        return _generation_policy(generation, self.config.policy, self.context, weights)

    def weight_handle(self, version: int) -> WeightHandle:
        """The training policy's current weights, over the transport that both sides declare."""
        assert self._trainer is not None, "weights were asked for before the training policy was built"
        return in_process_handle(self._trainer.export_weights, version)


def standalone_generation(generation: GenerationConfig, policy: PolicyConfig) -> GenerationPolicy:
    """A generator of a model on disk, outside any run."""
    return _generation_policy(generation, policy, WorkerContext(device=ClusterConfig().device), None)


def _generation_policy(
    generation: GenerationConfig, policy: PolicyConfig, context: WorkerContext, weights: WeightHandle | None
) -> GenerationPolicy:
    with boundary(f"generation backend {type(generation.backend).__name__}"):
        engine = generation.backend.build(generation, policy, context, weights)
    return GenerationPolicy(LocalWorkerGroup(engine, f"generation backend {type(engine).__name__}"))

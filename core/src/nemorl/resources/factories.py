"""What is built in worker processes: each factory is plain data, and makes one object there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from nemorl.config.models import GenerationConfig, PolicyConfig
from nemorl.contracts import Head
from nemorl.resources.worker import WorkerContext
from nemorl.weights import WeightHandle

if TYPE_CHECKING:
    from nemorl.contracts import GenerationBackend, TrainingBackend


@dataclass(frozen=True)
class TrainingFactory:
    """Builds one rank of the training policy, or of an auxiliary model, in its worker process."""

    policy: PolicyConfig
    reference: bool = False
    head: Head = "language_model"

    def __call__(self, context: WorkerContext) -> TrainingBackend:
        return self.policy.backend.build(self.policy, context, reference=self.reference, head=self.head)


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

"""The options. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from nemorl.config import GenerationConfig, PolicyConfig
from nemorl.contracts import GenerationCapability
from nemorl.plugins.kinds import GenerationBackendConfig
from pydantic import Field

if TYPE_CHECKING:
    from nemorl.contracts import GenerationBackend
    from nemorl.resources.worker import WorkerContext
    from nemorl.weights import WeightHandle


class ExampleConfig(GenerationBackendConfig):
    """Generate with the Hugging Face model itself, prompt by prompt."""

    summary: ClassVar[str] = "transformers in one process, prompt by prompt"
    requires_modules: ClassVar[tuple[str, ...]] = ("torch", "transformers")
    install_hint: ClassVar[str] = "pip install nemorl-example"
    supports: ClassVar[frozenset[GenerationCapability]] = frozenset({"any_transport"})
    weight_transports: ClassVar[tuple[str, ...]] = ("in_process", "shared_memory", "object_store")

    max_batch_rows: int = Field(64, ge=1)
    """Most responses to one prompt that grow side by side. Lower it when memory is short."""

    def build(
        self, generation: GenerationConfig, policy: PolicyConfig, worker: WorkerContext, weights: WeightHandle | None
    ) -> GenerationBackend:
        from nemorl_example.generation import ExampleGeneration

        return ExampleGeneration(policy, worker, weights, self.max_batch_rows)

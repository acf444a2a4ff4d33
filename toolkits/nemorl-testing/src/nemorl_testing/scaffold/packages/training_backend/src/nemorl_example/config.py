"""The options, and what the backend can do. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar, Literal

from nemorl.config import TrainingOptions
from nemorl.contracts import TrainingCapability
from nemorl.errors import BackendError
from nemorl.plugins.kinds import TrainingBackendConfig

if TYPE_CHECKING:
    from nemorl.contracts import Head, TrainingBackend
    from nemorl.resources.worker import WorkerContext


class ExampleConfig(TrainingBackendConfig):
    """Train a Hugging Face model in one process, one sequence at a time."""

    summary: ClassVar[str] = "transformers and AdamW in one process, in float32"
    requires_modules: ClassVar[tuple[str, ...]] = ("torch", "transformers", "safetensors")
    install_hint: ClassVar[str] = "pip install nemorl-example"
    supports: ClassVar[frozenset[TrainingCapability]] = frozenset({"reference", "weights_only_checkpoint"})
    weight_transports: ClassVar[tuple[str, ...]] = ("in_process",)

    attn_implementation: Literal["sdpa", "eager"] = "sdpa"
    """Attention kernel of transformers. ``eager`` for models that cap their attention scores (Gemma 2)."""

    def build(
        self, policy: TrainingOptions, worker: WorkerContext, *, reference: bool, head: Head = "language_model"
    ) -> TrainingBackend:
        from nemorl_example.training import ExampleBackend

        refused = list(_refused(policy, worker))
        if refused:
            raise BackendError(f"this backend cannot do {', '.join(refused)}", fix="use another one, e.g. dtensor")
        return ExampleBackend(policy, worker, self.attn_implementation, reference=reference)


def _refused(policy: TrainingOptions, worker: WorkerContext) -> Iterator[str]:
    """What is asked for and not there: better an error than another result than the config says."""
    if worker.world_size > 1:
        yield f"training in {worker.world_size} processes"
    if policy.precision != "float32":
        yield f"precision {policy.precision}"
    if policy.activation_checkpointing:
        yield "activation_checkpointing"

"""What is built in the processes of training workers: plain data that makes one object there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from nemorl.config.models import PolicyConfig
from nemorl.contracts import Head
from nemorl.resources.worker import WorkerContext

if TYPE_CHECKING:
    from nemorl.contracts import TrainingBackend


@dataclass(frozen=True)
class TrainingFactory:
    """Builds one rank of the training policy, or of an auxiliary model, in its worker process."""

    policy: PolicyConfig
    reference: bool = False
    head: Head = "language_model"

    def __call__(self, context: WorkerContext) -> TrainingBackend:
        return self.policy.backend.build(self.policy, context, reference=self.reference, head=self.head)

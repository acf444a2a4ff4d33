"""A policy that proves before its first update that what it is shown reaches it (``audit.dead_inputs``)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nemorl.resources.policies import TrainingPolicy

if TYPE_CHECKING:
    from nemorl.contracts import Head, Loss
    from nemorl.metrics import Metrics
    from nemorl_tensors import TokenBatch


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

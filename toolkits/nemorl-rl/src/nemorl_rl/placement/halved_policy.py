"""The driver's handle of a model whose steps somebody else divides: passes whenever they like, then an update."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nemorl.contracts import AdamStep, HalvedSteps, Loss
from nemorl.contracts.workers import P, ShardVerb
from nemorl.metrics import Metrics, merge
from nemorl.resources.policies import TrainingPolicy

if TYPE_CHECKING:
    from nemorl_tensors import TokenBatch
    from torch import Tensor


class HalvedPolicy(TrainingPolicy):
    """``TrainingPolicy`` over backends with the capability ``halved_steps``.

    >>> for part in batches: policy.forward_backward(part, loss)  # doctest: +SKIP
    >>> policy.optimizer_step(AdamStep(lr=1e-4))  # doctest: +SKIP
    """

    def forward_backward(self, batch: TokenBatch, loss: Loss) -> tuple[Metrics, Tensor]:
        """Add the loss's gradient to those since the last update; metrics, and what the loss was given at each token of
        ``batch``, in its order: [N] or [N, K] float32."""
        return self._passed(HalvedSteps.forward_backward, batch, loss)

    def forward(self, batch: TokenBatch, loss: Loss) -> tuple[Metrics, Tensor]:
        """The same without gradient."""
        return self._passed(HalvedSteps.forward, batch, loss)

    def optimizer_step(self, adam: AdamStep | None = None) -> Metrics:
        """One update by the gradients of all passes since the last; as the config says, or by these values."""
        with self._turn("train"):
            return merge(self.workers.call(HalvedSteps.optimizer_step, adam))

    def clear_gradients(self) -> None:
        """Forget the passes since the last update."""
        with self._turn("train"):
            self.workers.call(HalvedSteps.clear_gradients)

    def _passed(
        self,
        verb: ShardVerb[TokenBatch, P, tuple[Metrics, Tensor]],
        batch: TokenBatch,
        *args: P.args,
        **named: P.kwargs,
    ) -> tuple[Metrics, Tensor]:
        with self._turn("train"):
            shards, parts = self._sharded(verb, batch, *args, **named)
        return merge([metrics for metrics, _ in parts]), batch.in_order(shards, [outputs for _, outputs in parts])

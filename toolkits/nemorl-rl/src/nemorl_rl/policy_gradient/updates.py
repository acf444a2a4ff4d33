"""The optimizer steps of one batch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, repeat
from typing import TYPE_CHECKING

from nemorl.contracts import Loss
from nemorl.metrics import Metric, Metrics, average

if TYPE_CHECKING:
    from nemorl.resources.policies import TrainingPolicy
    from nemorl_tensors import TokenBatch


def run_updates(
    learner: TrainingPolicy,
    loss: Loss,
    minibatches: Sequence[TokenBatch],
    *,
    epochs: int = 1,
    first_loss: Loss | None = None,
) -> dict[str, Metric]:
    """One optimizer step per minibatch, in order, ``epochs`` times; metrics are means over the steps.

    PPO's inner loop (arXiv:1707.06347, algorithm 1). From the second step on, the samples are older than the weights.

    Args:
        learner: The model that learns: ``trainer.run.policy``, or an auxiliary model such as a critic.
        loss: The minibatches hold the fields that it ``requires``.
        minibatches: Each with loss weights that sum to 1: ``batch.minibatches(count)``.
        epochs: Passes over the batch.
        first_loss: Of the very first step, before which no weight has moved. Unset: ``loss``, as in all others.

    Example:
        >>> from nemorl.metrics import Sum
        >>> class Model:
        ...     def train_step(self, minibatch, loss):
        ...         return {"loss": Sum(loss(minibatch))}
        >>> run_updates(Model(), lambda numbers: sum(numbers), [[1, 2], [5]], epochs=2)["loss"].value
        4.0
    """
    losses = chain([first_loss or loss], repeat(loss))
    steps = [minibatch for _ in range(epochs) for minibatch in minibatches]
    return average([learner.train_step(minibatch, each) for minibatch, each in zip(steps, losses, strict=False)])


def of_role(role: str, metrics: Metrics) -> dict[str, Metric]:
    """Metrics of another model than the policy, under its name.

    Example:
        >>> from nemorl.metrics import Mean
        >>> list(of_role("critic", {"loss": Mean(0.5), "performance/padding_frac": Mean(0.0)}))
        ['critic/loss', 'performance/critic/padding_frac']
    """
    folder = "performance/"
    return {
        f"{folder}{role}/{name.removeprefix(folder)}" if name.startswith(folder) else f"{role}/{name}": metric
        for name, metric in metrics.items()
    }

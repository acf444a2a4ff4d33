"""From a batch to its updates: batch transforms, then optimizer steps.

One knob, one transform: it leaves tokens out, charges a KL or penalises messages. A trainer builds its list once
(``PolicyGradientTrainer.build_transforms``), and ``train_step`` applies it in order. An algorithm may have its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain, repeat
from typing import TYPE_CHECKING, Protocol

from nemorl.contracts import Loss
from nemorl.metrics import Metric, Metrics, average
from nemorl.types import Samples

if TYPE_CHECKING:
    from nemorl.resources.policies import TrainingPolicy
    from nemorl_tensors import TokenBatch


class BatchTransform(Protocol):
    """One change of a batch, usually a frozen dataclass of the numbers that it needs.

    Example:
        >>> class HalfAdvantages:
        ...     requires = frozenset({"advantages"})
        ...
        ...     def __call__(self, batch, samples):
        ...         return batch.with_tokens(advantages=batch["advantages"] / 2), {}
    """

    @property
    def requires(self) -> frozenset[str]:
        """Fields that it reads of the batch; ``old_logprobs`` are computed before the update where one asks,
        ``reference_logprobs`` where the config's ``needs_reference`` is True."""

    def __call__(self, batch: TokenBatch, samples: Samples, /) -> tuple[TokenBatch, dict[str, Metric]]:
        """The changed batch, made of ``samples`` in their order, and metrics of the change."""


def transformed(
    batch: TokenBatch, samples: Samples, transforms: Iterable[BatchTransform]
) -> tuple[TokenBatch, dict[str, Metric]]:
    """The batch after all transforms, in order, and the metrics of all.

    Example:
        >>> class Doubled:
        ...     requires = frozenset()
        ...
        ...     def __call__(self, numbers, samples):
        ...         return [2 * number for number in numbers], {}
        >>> transformed([1, 2], Samples([]), [Doubled(), Doubled()])
        ([4, 8], {})
    """
    metrics: dict[str, Metric] = {}
    for transform in transforms:
        batch, found = transform(batch, samples)
        metrics |= found
    return batch, metrics


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

"""Batch transforms: what happens to a batch between the frozen log-probs and the updates.

One knob, one transform: it leaves tokens out, charges a KL or penalises messages. A trainer builds its list once
(``PolicyGradientTrainer.build_transforms``), and ``train_step`` applies it in order. An algorithm may have its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

from nemorl.metrics import Metric
from nemorl.types import Samples

if TYPE_CHECKING:
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
        """Fields that it reads of the batch; ``old_logprobs`` are computed before the update where one asks."""

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

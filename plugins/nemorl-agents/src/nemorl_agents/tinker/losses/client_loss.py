"""What every loss of the API is: a sum over all target tokens, which clients scale by their weights and advantages.

# N = tokens of all sequences concatenated, K = target tokens at each position
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, Self

import torch
from nemorl.metrics import Metric, Metrics, Sum
from nemorl_tensors import TokenBatch
from torch import Tensor

Fields = Mapping[str, Tensor]
"""A client's fields by its names, each [N] or [N, K], 0 in masked slots."""


@dataclass(frozen=True)
class Number:
    """A number that a client sends: a setting of a loss, or its field at each target token."""

    lowest: float = -math.inf
    highest: float = math.inf
    default: float | None = None
    """Of a field that a datum lacks. None: each datum must have it."""

    def admits(self, values: Tensor) -> Tensor:
        """Bool in the shape of ``values``: finite and within the bounds."""
        return values.isfinite() & (values >= self.lowest) & (values <= self.highest)

    @property
    def words(self) -> str:
        """What is admitted, for errors."""
        lower = f" from {self.lowest:g}" if math.isfinite(self.lowest) else ""
        upper = f" up to {self.highest:g}" if math.isfinite(self.highest) else ""
        return f"a finite number{lower}{upper}"


@dataclass(frozen=True)
class ClientLoss(ABC):
    """A loss of the API. Its settings are its dataclass fields, under the names of ``loss_fn_config``.

    loss = sum(per_token), over every target token of every datum; nothing is normalised.

    Its metrics are sums too, under the names that clients merge by, ``name:sum``. ``loss:sum`` is the loss.
    """

    settings: ClassVar[Mapping[str, Number]] = {}
    takes_several: ClassVar[bool] = False
    """A position may have several target tokens."""

    candidates: bool = field(default=False, kw_only=True)
    """The targets are the field ``candidate_ids`` [N, K] of the batch, and not the tokens that follow"""

    @property
    @abstractmethod
    def inputs(self) -> Mapping[str, Number]:
        """The fields that it reads of each datum beside ``target_tokens``."""

    @abstractmethod
    def terms(self, logprobs: Tensor, fields: Fields, batch: TokenBatch) -> tuple[Tensor, Mapping[str, Metric]]:
        """Loss of each target token, and metrics.

        Args:
            logprobs: [N] nats of the target tokens with gradient, or [N, K] if it takes several; 0 in masked slots.
            fields: Those of ``inputs``, in the same shape.
            batch: Where the sequences begin.
        """

    @property
    def requires(self) -> frozenset[str]:
        return frozenset({*self.inputs, *(["candidate_ids"] if self.candidates else [])})

    def over_candidates(self) -> Self:
        """The same loss of the tokens that a batch names in ``candidate_ids``."""
        return replace(self, candidates=True)

    def __call__(self, outputs: Tensor, batch: TokenBatch) -> tuple[Tensor, Metrics]:
        if not self.takes_several:
            outputs = outputs.reshape(batch.num_tokens)
        mask, weights = (
            values.view(-1, *[1] * (outputs.ndim - 1)).expand_as(outputs) for values in (batch.mask, batch.loss_weights)
        )
        fields = {name: torch.where(mask, batch[name], 0.0) for name in self.inputs}
        per_token, metrics = self.terms(torch.where(mask, outputs, 0.0), fields, batch)
        weighted = torch.where(mask, per_token, 0.0) * weights
        # The sum that is reported is that of the terms, without the rounding of a long float32 sum.
        return weighted.sum(), {"loss:sum": total(weighted), **metrics}


def total(values: Tensor) -> Sum:
    """The sum of values or of truths, as a metric."""
    return Sum(float(values.detach().double().sum()))

"""The loss of the critic.

# N = tokens of all sequences concatenated
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from nemorl.metrics import Metric, Metrics
from nemorl_tensors import TokenBatch, masked_mean
from torch import Tensor


@dataclass(frozen=True)
class ValueLoss:
    """Half the squared error of the critic.

    clipped = old_values + clamp(values - old_values, -clip, clip)
    loss = sum(loss_weights * max((values - returns)^2, (clipped - returns)^2) / 2)

    With ``clip``, a value that has come closer to its return by more than that gains nothing from coming closer still
    (arXiv:2005.12729 names it; it is in the code of PPO's authors, not in their paper).
    """

    clip: float | None = None

    @property
    def requires(self) -> frozenset[str]:
        return frozenset({"returns"} if self.clip is None else {"returns", "old_values"})

    def __call__(self, values: Tensor, batch: TokenBatch) -> tuple[Tensor, Metrics]:
        mask = batch.mask
        values, returns = torch.where(mask, values, 0.0), torch.where(mask, batch["returns"], 0.0)
        error = (values - returns).square()
        metrics: dict[str, Metric] = {}
        if self.clip is not None:
            old_values = torch.where(mask, batch["old_values"], 0.0)
            change = values - old_values
            clipped_error = (old_values + change.clamp(-self.clip, self.clip) - returns).square()
            # old + (value - old) is not quite the value: within the bound, only rounding tells the two errors apart.
            is_clipped = (change.abs() > self.clip) & (clipped_error > error)
            metrics["vf_clipfrac"] = masked_mean(is_clipped.float(), mask)
            error = torch.maximum(error, clipped_error)
        return (error * batch.loss_weights).sum() / 2, metrics

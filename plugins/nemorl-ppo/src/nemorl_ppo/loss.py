"""The losses of the policy and of the critic.

# N = tokens of all sequences concatenated
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from nemorl.metrics import Metric, Metrics, Sum
from nemorl_rl.policy_gradient.loss import ClippedPolicyGradientLoss
from nemorl_tensors import TokenBatch, masked_mean, segment_sum
from torch import Tensor


@dataclass(frozen=True)
class PPOLoss(ClippedPolicyGradientLoss):
    """PPO's clipped surrogate, per token, with a KL term and an imitation term where their weights are not 0.

    ratio = exp(policy_logprobs - old_logprobs)
    surrogate = min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A)                 arXiv:1707.06347, eq. 7
    loss = sum(loss_weights * (-surrogate + kl_penalty * KL(policy || reference)))
           - positive_nll_weight * sum(positive_weights * policy_logprobs)                  arXiv:2504.05118, 4.3

    Differs from the paper: no entropy bonus and no value term, since the critic is another model with a loss of its
    own; ``dual_clip`` bounds negative advantages (arXiv:1912.09729).
    """

    positive_nll_weight: float = 0.0

    @property
    def requires(self) -> frozenset[str]:
        return super().requires | ({"positive_weights"} if self.positive_nll_weight > 0 else set())

    def __call__(self, policy_logprobs: Tensor, batch: TokenBatch) -> tuple[Tensor, Metrics]:
        loss, metrics = super().__call__(policy_logprobs, batch)
        if self.positive_nll_weight > 0:
            weights = torch.where(batch.mask, batch["positive_weights"], 0.0)
            nll = -(torch.where(batch.mask, policy_logprobs, 0.0) * weights).sum()
            loss = loss + self.positive_nll_weight * nll
            metrics = {**metrics, "positive_nll_loss": Sum(float(nll.detach()))}
        return loss, metrics

    def has_gradient(self, batch: TokenBatch) -> Tensor:
        found = self.has_advantage(batch)
        if self.positive_nll_weight > 0:
            is_imitated = (batch["positive_weights"] != 0).float()
            found = found | (segment_sum(is_imitated, batch.mask, batch.lengths) > 0)
        return found


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

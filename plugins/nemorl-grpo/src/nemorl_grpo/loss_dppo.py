"""DPPO's objective: a token is left out when its probability has moved too far, not its ratio.

# N = tokens of all sequences concatenated
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from nemorl.metrics import Metric
from nemorl_rl.policy_gradient.loss import PolicyGradientLoss
from nemorl_tensors import TokenBatch, masked_mean
from nemorl_tensors.ratios import importance_weight, masked_log_ratio
from torch import Tensor

EPSILON = 1e-8
"""Added to the probability of all other tokens, which may round to 0."""


@dataclass(frozen=True)
class DivergenceMaskLoss(PolicyGradientLoss):
    """The ratio to the sampler without a clip, on tokens within a trust region measured in probabilities.

    p, q = exp(policy_logprobs), exp(generation_logprobs)
    tv: distance = |p - q|     kl: distance = q * log(q / p) + (1 - q) * log((1 - q) / (1 - p))
    A > 0: dropped where p > q and distance > divergence_high;   else: where p < q and distance > divergence_low
    weight = min(p / q, ratio_cap)
    surrogate = weight * A - drift_penalty * log(p / q)^2, 0 for the first part where dropped
                                                                                      arXiv:2602.04879, eq. 13 and 14

    The old policy is not read: the region is around the sampler, so that its disagreement with the trainer counts too.
    ``drift_penalty`` is the regulariser of arXiv:2602.02276, which prime-rl adds.

    Differs from the paper: ``ratio_cap`` bounds value and gradient (its section 5.4, where it is 20).
    """

    divergence: Literal["tv", "kl"] = "tv"
    divergence_low: float = 0.2
    divergence_high: float = 0.2
    ratio_cap: float = 20.0
    drift_penalty: float = 0.0

    def surrogate(
        self, policy_logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, batch: TokenBatch
    ) -> tuple[Tensor, dict[str, Metric]]:
        mask = batch.mask
        log_ratio = masked_log_ratio(policy_logprobs, batch["generation_logprobs"], mask)
        ratio = importance_weight(log_ratio.detach())
        kept = ~self._has_left(log_ratio.detach(), advantages, batch)
        policy = torch.where(mask, policy_logprobs, 0.0)
        # Value and gradient of ratio * A, with the ratio bounded in both.
        surrogate = ratio.clamp(max=self.ratio_cap) * advantages * torch.exp(policy - policy.detach())
        surrogate = torch.where(kept, surrogate, 0.0)
        if self.drift_penalty > 0:
            known = torch.where(log_ratio.isfinite(), log_ratio, 0.0)
            surrogate = surrogate - self.drift_penalty * known.square()
        return surrogate, {"probs_ratio": masked_mean(ratio, mask), "masked_frac": masked_mean((~kept).float(), mask)}

    def _has_left(self, log_ratio: Tensor, advantages: Tensor, batch: TokenBatch) -> Tensor:
        """[N] bool, the token is outside the region on the side that its advantage pushes it to."""
        old_log = torch.where(batch.mask, batch["generation_logprobs"], 0.0)
        old = old_log.exp()
        new = (old_log + log_ratio).exp()
        if self.divergence == "tv":
            distance = (new - old).abs()
        else:
            distance = -old * log_ratio + (1 - old) * torch.log((1 - old + EPSILON) / (1 - new + EPSILON))
        grown, shrunk = (new > old) & (distance > self.divergence_high), (new < old) & (distance > self.divergence_low)
        return torch.where(advantages > 0, grown, shrunk)

    def has_gradient(self, batch: TokenBatch) -> Tensor:
        if self.drift_penalty > 0:
            return super().has_gradient(batch)
        return self.has_advantage(batch)

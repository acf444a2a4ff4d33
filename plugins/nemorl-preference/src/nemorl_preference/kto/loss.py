"""The loss of Kahneman-Tversky optimisation.

# N = tokens of all sequences concatenated, B = sequences
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from nemorl.metrics import Mean, Metrics, Sum
from nemorl_tensors import TokenBatch, segment_sum
from torch import Tensor


@dataclass(frozen=True)
class KTOLoss:
    """loss = mean over responses of  w_d * (1 - sigmoid(beta * (r - z0)))   of a desirable one      arXiv:2402.01306
                                   w_u * (1 - sigmoid(beta * (z0 - r)))   of an undesirable one     eq. 7 and 8

    r = sum over response tokens of (policy_logprob - reference_logprob)
    z0, the :func:`reference_point`, is how far the policy has drifted as a whole; it has no gradient. w_d and w_u,
    ``desirable_weight`` and ``undesirable_weight``, are the paper's lambdas.
    """

    requires: ClassVar[frozenset[str]] = frozenset({"reference_response_logprobs", "reference_points", "desirable"})
    """[B] the sum of the reference's log-probs of each response; z0, the same for all; bool"""

    beta: float
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0

    def __call__(self, policy_logprobs: Tensor, batch: TokenBatch) -> tuple[Tensor, Metrics]:
        weights_B = segment_sum(batch.loss_weights, batch.mask, batch.lengths)
        counted_B, desirable_B = weights_B > 0, batch["desirable"]
        log_ratios_B = segment_sum(policy_logprobs, batch.mask, batch.lengths) - batch["reference_response_logprobs"]
        gains_B = self.beta * (log_ratios_B - batch["reference_points"]) * torch.where(desirable_B, 1.0, -1.0)
        of_label_B = torch.where(desirable_B, self.desirable_weight, self.undesirable_weight)
        losses_B = torch.where(counted_B, of_label_B * torch.sigmoid(-gains_B), 0.0)

        rewards_B, gained_B = self.beta * log_ratios_B.detach(), gains_B.detach() > 0
        sides = {"desirable": counted_B & desirable_B, "undesirable": counted_B & ~desirable_B}
        return (losses_B * weights_B).sum(), {
            "accuracy": Mean(float(gained_B[counted_B].sum()), int(counted_B.sum())),
            "num_valid_samples": Sum(float(counted_B.sum())),
            **{
                f"rewards_{side}_mean": Mean(float(rewards_B[found_B].sum()), int(found_B.sum()))
                for side, found_B in sides.items()
            },
        }


def reference_point(policy_logprobs: Tensor, batch: TokenBatch, reference_response_logprobs: Tensor) -> float:
    """z0 in nats: max(0, mean over responses of r), where each response is to the prompt of another row.

    The paper's estimate of KL(policy || reference), of which one point serves a whole optimizer step.
    """
    log_ratios_B = segment_sum(policy_logprobs, batch.mask, batch.lengths) - reference_response_logprobs
    counted_B = segment_sum(batch.loss_weights, batch.mask, batch.lengths) > 0
    return max(0.0, float(log_ratios_B[counted_B].mean())) if bool(counted_B.any()) else 0.0

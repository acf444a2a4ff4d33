"""Base of all losses on preference pairs: log-ratios of whole responses, the SFT term, metrics. No loss of its own.

# N = tokens of all sequences concatenated, B = sequences, P = pairs (B = 2P)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from nemorl.metrics import Metrics, Sum
from nemorl_tensors import TokenBatch, pair_weights, preference_metrics, segment_sum, split_pairs
from nemorl_tensors.pairs import over_pairs
from torch import Tensor


@dataclass(frozen=True)
class PreferenceLoss:
    """loss = preference_weight * mean over pairs of of_margins(delta) + sft_weight * mean over pairs of nll(chosen)

    log_ratio_b = sum over response tokens of (policy_logprob - reference_logprob)   [/ t_b, their number]
    delta_p = log_ratio of the chosen - log_ratio of the rejected response
    nll_b = - sum over response tokens of policy_logprob                             [/ t_b]

    A subclass says what a delta costs. Metrics report a response's implicit reward, beta * log_ratio.
    """

    requires: ClassVar[frozenset[str]] = frozenset({"reference_response_logprobs"})
    """[B] the sum of the reference's log-probs of each response"""

    beta: float
    average: bool = False
    """Divide log-ratios by the number of response tokens"""
    preference_weight: float = 1.0
    sft_weight: float = 0.0
    sft_average: bool = False
    """Divide the negative log-likelihood by the number of response tokens"""

    def of_deltas(self, delta_P: Tensor) -> Tensor:
        """[P] what each pair costs, given by how much the policy has moved towards its chosen response, in nats."""
        raise NotImplementedError(f"{type(self).__name__} must define of_deltas()")

    def __call__(self, policy_logprobs: Tensor, batch: TokenBatch) -> tuple[Tensor, Metrics]:
        policy_B = segment_sum(policy_logprobs, batch.mask, batch.lengths)
        tokens_B = segment_sum(batch.mask.float(), batch.mask, batch.lengths).clamp(min=1)
        weights_P = pair_weights(batch)

        log_ratios_B = policy_B - batch["reference_response_logprobs"]
        if self.average:
            log_ratios_B = log_ratios_B / tokens_B
        chosen_P, rejected_P = split_pairs(log_ratios_B)
        preference = over_pairs(self.of_deltas(chosen_P - rejected_P), weights_P)

        nll_P = -split_pairs(policy_B / tokens_B if self.sft_average else policy_B)[0]
        sft = over_pairs(nll_P, weights_P)
        return self.preference_weight * preference + self.sft_weight * sft, {
            **preference_metrics(self.beta * chosen_P, self.beta * rejected_P, weights_P > 0),
            "preference_loss": Sum(float(preference.detach())),
            "sft_loss": Sum(float(sft.detach())),
        }

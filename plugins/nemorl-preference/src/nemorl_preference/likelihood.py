"""Base of losses on pairs that need no reference: mean log-probs of responses, the likelihood term, metrics.

# N = tokens of all sequences concatenated, B = sequences, P = pairs (B = 2P)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from nemorl.metrics import Metrics, Sum
from nemorl_tensors import TokenBatch, pair_weights, preference_metrics, segment_sum, split_pairs
from nemorl_tensors.batch import LossAggregation, loss_weights
from nemorl_tensors.pairs import over_pairs
from torch import Tensor


@dataclass(frozen=True)
class LikelihoodPairLoss:
    """loss = preference_weight * mean over pairs of of_pairs(c, r) + sft_weight * sum of nll_weights * -policy_logprob

    c, r = mean over response tokens of policy_logprob, of the chosen and of the rejected response

    A subclass says what a pair costs. Metrics report a response's reward, ``beta`` times that mean.
    """

    requires: ClassVar[frozenset[str]] = frozenset({"response_mask", "nll_weights"})
    """[N] bool, True at tokens of responses. [N] float32, 0.0 but at the tokens whose likelihood is raised; they sum
    to 1 over an optimizer step."""

    beta: float
    sft_weight: float = 0.0

    @property
    def preference_weight(self) -> float:
        return 1.0

    def of_pairs(self, chosen_P: Tensor, rejected_P: Tensor) -> Tensor:
        """[P] what each pair costs, given the mean log-probs of its responses in nats per token."""
        raise NotImplementedError(f"{type(self).__name__} must define of_pairs()")

    def __call__(self, policy_logprobs: Tensor, batch: TokenBatch) -> tuple[Tensor, Metrics]:
        in_response = batch.mask & batch["response_mask"]
        tokens_B = segment_sum(in_response.float(), in_response, batch.lengths).clamp(min=1)
        chosen_P, rejected_P = split_pairs(segment_sum(policy_logprobs, in_response, batch.lengths) / tokens_B)
        weights_P = pair_weights(batch)
        preference = over_pairs(self.of_pairs(chosen_P, rejected_P), weights_P)

        nll_N = torch.where(batch.mask, -policy_logprobs, 0.0) * torch.where(batch.mask, batch["nll_weights"], 0.0)
        sft = nll_N.sum()
        return self.preference_weight * preference + self.sft_weight * sft, {
            **preference_metrics(self.beta * chosen_P, self.beta * rejected_P, weights_P > 0),
            "preference_loss": Sum(float(preference.detach())),
            "sft_loss": Sum(float(sft.detach())),
        }


def with_likelihood(batch: TokenBatch, aggregation: LossAggregation, *, of_prompts: bool = False) -> TokenBatch:
    """A batch of pairs with the fields of :class:`LikelihoodPairLoss`.

    Args:
        batch: Pairs whose mask is True at the tokens of responses.
        aggregation: What the likelihood of the chosen responses averages over.
        of_prompts: The tokens of their prompts count too, all but the very first.
    """
    sequence_N, place_N = batch.sequence_ids, torch.arange(batch.num_tokens)
    is_chosen_N = sequence_N % 2 == 0
    learnt_N = batch.mask & is_chosen_N
    if of_prompts:
        is_trained_B = segment_sum(batch.mask.float(), batch.mask, batch.lengths) > 0
        first_B = torch.cumsum(batch.lengths, 0) - batch.lengths
        learnt_N = is_chosen_N & is_trained_B[sequence_N] & (place_N > first_B[sequence_N])
    wider = replace(batch, mask=batch.mask | learnt_N)
    weights_N = loss_weights(learnt_N, batch.lengths, aggregation)
    return wider.with_tokens(response_mask=batch.mask, nll_weights=weights_N)

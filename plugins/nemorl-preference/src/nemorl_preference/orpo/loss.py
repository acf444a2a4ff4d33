"""The loss of odds ratio preference optimisation.

# P = pairs
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from nemorl_preference.likelihood import LikelihoodPairLoss

LARGEST = -1e-6
"""Nats per token. Beyond it, a response that is all but certain, 1 - p is rounding noise in float32."""
LOG_HALF = -0.6931472
"""log(1 / 2): where the better of two forms of log(1 - p) changes."""


@dataclass(frozen=True)
class ORPOLoss(LikelihoodPairLoss):
    """nll(chosen) - beta * log sigmoid(log odds(chosen) - log odds(rejected))                     arXiv:2403.07691

    log odds = m - log(1 - exp(m)),  m = mean log-prob of a response's tokens

    The first term is the supervised one, so neither a reference nor a stage of SFT is needed; ``beta`` is the paper's
    lambda.
    Differs from the paper: the likelihood may average over tokens instead of responses and may count the tokens of
    prompts, as its authors' code does (:func:`with_likelihood`).
    """

    sft_weight: float = 1.0

    @property
    def preference_weight(self) -> float:
        return self.beta

    def of_pairs(self, chosen_P: Tensor, rejected_P: Tensor) -> Tensor:
        return -logsigmoid((chosen_P - log_of_rest(chosen_P)) - (rejected_P - log_of_rest(rejected_P)))


def log_of_rest(logprobs: Tensor) -> Tensor:
    """log(1 - exp(logprobs)), exact at both ends."""
    bounded = logprobs.clamp(max=LARGEST)
    return torch.where(bounded < LOG_HALF, torch.log1p(-bounded.exp()), torch.log(-torch.expm1(bounded)))

"""Probability ratios out of log-probs: the only place where a loss exponentiates a difference of them.

# N = tokens of all sequences concatenated, B = sequences

float32 overflows at exp(88.7), and inf times 0 is NaN: a token that clipping has already removed would still poison the
gradient of the whole step. A log ratio is therefore bounded before ``exp``; beyond the bound its gradient is 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0
"""Nats. exp(20) is 4.9e8: already meaningless as a ratio, still finite in float32."""


def masked_log_ratio(logprobs: Tensor, base_logprobs: Tensor, mask: Tensor) -> Tensor:
    """[N] log of the probability ratio, 0 in masked slots.

    They are emptied before anyone takes ``exp``: whatever stands there must reach neither loss nor gradient.
    """
    return torch.where(mask, logprobs - base_logprobs, 0.0)


def probability_ratio(log_ratio: Tensor) -> Tensor:
    """``exp`` of a log ratio of any shape, within exp(±20)."""
    return torch.exp(log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))


def importance_weight(log_ratio: Tensor) -> Tensor:
    """As :func:`probability_ratio`, and 0 where the log ratio is not finite.

    A sampler that gives a token probability 0 cannot have drawn it: its log-prob is wrong, and so is any weight made
    of it.
    """
    is_known = log_ratio.isfinite()
    return torch.where(is_known, probability_ratio(torch.where(is_known, log_ratio, 0.0)), 0.0)

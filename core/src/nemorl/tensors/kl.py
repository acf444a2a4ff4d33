"""Estimators of KL(policy || reference) from the log-probs of sampled tokens (http://joschu.net/blog/kl-approx.html).

# N = tokens of all sequences concatenated

Each takes ``policy_logprobs`` and ``reference_logprobs`` [N] in nats and returns [N], differentiable in the policy's.
The log-ratio is clamped so that one absurd token cannot overflow ``exp``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

import torch
from torch import Tensor

KLType = Literal["k1", "k2", "k3"]

LOG_RATIO_LIMIT = 20.0
"""Nats. exp(20) is 4.9e8: already meaningless as a ratio, still finite in float32."""


def _reference_log_ratio(policy_logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    return (reference_logprobs - policy_logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def kl_k1(policy_logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """``-log r`` with ``r = reference / policy``. Unbiased, high variance, can be negative."""
    return -_reference_log_ratio(policy_logprobs, reference_logprobs)


def kl_k2(policy_logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """``(log r)^2 / 2``. Biased, low variance; its gradient is that of the reverse KL."""
    return _reference_log_ratio(policy_logprobs, reference_logprobs).square() / 2


def kl_k3(policy_logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """``r - 1 - log r``. Unbiased and never negative: GRPO's choice (arXiv:2402.03300, eq. 4)."""
    log_ratio = _reference_log_ratio(policy_logprobs, reference_logprobs)
    return torch.exp(log_ratio) - 1 - log_ratio


KL_ESTIMATORS: Mapping[KLType, Callable[[Tensor, Tensor], Tensor]] = {"k1": kl_k1, "k2": kl_k2, "k3": kl_k3}

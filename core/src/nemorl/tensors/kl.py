"""Estimators of KL(policy || reference) from the log-probs of sampled tokens (http://joschu.net/blog/kl-approx.html).

# N = tokens of all sequences concatenated

Each takes ``policy_logprobs`` and ``reference_logprobs`` [N] in nats and returns [N], differentiable in the policy's.
The log ratio is clamped so that one absurd token cannot overflow ``exp``. ``KLTerm`` is what a loss or reward charges.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from nemorl.tensors.ratios import LOG_RATIO_LIMIT

KLType = Literal["k1", "k2", "k3"]


def _reference_log_ratio(policy_logprobs: Tensor, reference_logprobs: Tensor, limit: float) -> Tensor:
    return (reference_logprobs - policy_logprobs).clamp(-limit, limit)


def kl_k1(policy_logprobs: Tensor, reference_logprobs: Tensor, limit: float = LOG_RATIO_LIMIT) -> Tensor:
    """``-log r`` with ``r = reference / policy``. Unbiased, high variance, can be negative."""
    return -_reference_log_ratio(policy_logprobs, reference_logprobs, limit)


def kl_k2(policy_logprobs: Tensor, reference_logprobs: Tensor, limit: float = LOG_RATIO_LIMIT) -> Tensor:
    """``(log r)^2 / 2``. Biased, low variance; its gradient is that of the reverse KL."""
    return _reference_log_ratio(policy_logprobs, reference_logprobs, limit).square() / 2


def kl_k3(policy_logprobs: Tensor, reference_logprobs: Tensor, limit: float = LOG_RATIO_LIMIT) -> Tensor:
    """``r - 1 - log r``. Unbiased and never negative: GRPO's choice (arXiv:2402.03300, eq. 4)."""
    log_ratio = _reference_log_ratio(policy_logprobs, reference_logprobs, limit)
    return torch.exp(log_ratio) - 1 - log_ratio


KL_ESTIMATORS: Mapping[KLType, Callable[..., Tensor]] = {"k1": kl_k1, "k2": kl_k2, "k3": kl_k3}
"""``(policy_logprobs, reference_logprobs, limit) -> [N]``"""


@dataclass(frozen=True)
class KLTerm:
    """What a token is charged for its distance from the reference.

    log_ratio = clamp(reference_logprobs - policy_logprobs, -input_clamp, input_clamp)
    kl = clamp(estimator(log_ratio), -output_clamp, output_clamp)

    A token beyond either clamp has no gradient: without them a single one, e.g. 18 nats off, outweighs all others.
    """

    kind: KLType = "k3"
    input_clamp: float = LOG_RATIO_LIMIT
    """Nats."""
    output_clamp: float | None = 10.0

    def __call__(self, policy_logprobs: Tensor, reference_logprobs: Tensor, mask: Tensor) -> Tensor:
        """[N] estimate of KL(policy || reference) per token, 0 in masked slots; differentiable in the policy's."""
        policy_logprobs, reference_logprobs = (torch.where(mask, x, 0.0) for x in (policy_logprobs, reference_logprobs))
        kl = KL_ESTIMATORS[self.kind](policy_logprobs, reference_logprobs, self.input_clamp)  # of two zeros: 0
        return kl if self.output_clamp is None else kl.clamp(-self.output_clamp, self.output_clamp)

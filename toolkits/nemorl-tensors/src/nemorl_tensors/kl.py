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

from nemorl_tensors.ratios import LOG_RATIO_LIMIT, importance_weight, masked_log_ratio

KLType = Literal["k1", "k2", "k3"]
"""Which estimator of the KL.

Example:
    >>> kind: KLType = "k3"
"""
KLGradient = Literal["unbiased", "expectation", "estimator"]
KLWeights = Literal["generation", "old"]


def _reference_log_ratio(policy_logprobs: Tensor, reference_logprobs: Tensor, limit: float) -> Tensor:
    return (reference_logprobs - policy_logprobs).clamp(-limit, limit)


def kl_k1(policy_logprobs: Tensor, reference_logprobs: Tensor, limit: float = LOG_RATIO_LIMIT) -> Tensor:
    """``-log r`` with ``r = reference / policy``. Unbiased, high variance, can be negative; derivative 0 on average.

    Example:
        >>> kl_k1(torch.tensor([-1.0]), torch.tensor([-3.0])).tolist()  # log r = -2
        [2.0]
    """
    return -_reference_log_ratio(policy_logprobs, reference_logprobs, limit)


def kl_k2(policy_logprobs: Tensor, reference_logprobs: Tensor, limit: float = LOG_RATIO_LIMIT) -> Tensor:
    """``(log r)^2 / 2``. Biased, low variance; its derivative is that of the reverse KL.

    Example:
        >>> kl_k2(torch.tensor([-1.0]), torch.tensor([-3.0])).tolist()  # (-2)^2 / 2
        [2.0]
    """
    return _reference_log_ratio(policy_logprobs, reference_logprobs, limit).square() / 2


def kl_k3(policy_logprobs: Tensor, reference_logprobs: Tensor, limit: float = LOG_RATIO_LIMIT) -> Tensor:
    """``r - 1 - log r``. Unbiased and never negative; its derivative is that of the forward KL (arXiv:2402.03300).

    Example:
        >>> round(float(kl_k3(torch.tensor([-1.0]), torch.tensor([-3.0]))), 4)  # exp(-2) - 1 + 2
        1.1353
    """
    log_ratio = _reference_log_ratio(policy_logprobs, reference_logprobs, limit)
    return torch.exp(log_ratio) - 1 - log_ratio


KL_ESTIMATORS: Mapping[KLType, Callable[..., Tensor]] = {"k1": kl_k1, "k2": kl_k2, "k3": kl_k3}
"""The estimators by name: ``(policy_logprobs, reference_logprobs, limit) -> [N]``.

Example:
    >>> KL_ESTIMATORS["k1"](torch.tensor([-1.0]), torch.tensor([-3.0])).tolist()
    [2.0]
"""


@dataclass(frozen=True)
class KLTerm:
    """The KL to the reference, as a reward is charged for it or as a term of a loss.

    d = clamp(reference_logprobs - policy_logprobs, -input_clamp, input_clamp)
    estimate = clamp(estimator(d), -output_clamp, output_clamp)                              for rewards
    term = clamp(w * estimator(d), -output_clamp, output_clamp)                              for losses

    A token beyond either clamp has no gradient: without them a single one, e.g. 18 nats off, outweighs all others.

    Tokens are drawn from the policy, so the gradient of E[k] is E[dk + k * dlog policy] and not E[dk], which is 0 for
    k1 and that of the forward KL for k3 (arXiv:2506.09477). With ``gradient`` ``unbiased``, w = exp(policy - policy
    without gradient) = 1 adds the second part for k1 and k3; the derivative of k2 is that of KL(policy || reference) as
    it is; ``expectation`` adds it for k2 too, which gives the gradient of E[k2] (NeMo RL). ``weighted_by``: w =
    exp(policy - generation), or exp(policy - old), instead, for tokens that another policy has drawn; its gradient is
    kept in the same cases.

    Example:
        >>> mask = torch.tensor([True, False])
        >>> KLTerm("k1").estimate(torch.tensor([-1.0, 0.0]), torch.tensor([-3.0, 0.0]), mask).abs().tolist()
        [2.0, 0.0]
    """

    kind: KLType = "k3"
    input_clamp: float = LOG_RATIO_LIMIT
    """Nats."""
    output_clamp: float | None = 10.0
    gradient: KLGradient = "unbiased"
    weighted_by: KLWeights | None = None
    """The policy under whose log-probs the tokens count as drawn; ``None``: the one at hand."""

    def estimate(self, policy_logprobs: Tensor, reference_logprobs: Tensor, mask: Tensor) -> Tensor:
        """[N] KL(policy || reference) per token, 0 in masked slots."""
        return self._bounded(self._estimator(policy_logprobs, reference_logprobs, mask))

    def loss_term(
        self, policy_logprobs: Tensor, reference_logprobs: Tensor, drawn_logprobs: Tensor, mask: Tensor
    ) -> Tensor:
        """[N] what a loss adds per token, 0 in masked slots; differentiable in the policy's.

        Args:
            policy_logprobs: [N] with gradient.
            reference_logprobs: [N].
            drawn_logprobs: [N] of the policy that ``weighted_by`` names; without it they are not read.
            mask: [N] bool.
        """
        base = policy_logprobs.detach() if self.weighted_by is None else drawn_logprobs.detach()
        weight = importance_weight(masked_log_ratio(policy_logprobs, base, mask))
        if self.gradient == "expectation" or (self.gradient == "unbiased" and self.kind != "k2"):
            is_clamped = masked_log_ratio(policy_logprobs, reference_logprobs, mask).abs() > self.input_clamp
            weight = torch.where(is_clamped, weight.detach(), weight)
        else:
            weight = weight.detach()
        return self._bounded(weight * self._estimator(policy_logprobs, reference_logprobs, mask))

    def _estimator(self, policy_logprobs: Tensor, reference_logprobs: Tensor, mask: Tensor) -> Tensor:
        policy_logprobs, reference_logprobs = (torch.where(mask, x, 0.0) for x in (policy_logprobs, reference_logprobs))
        return KL_ESTIMATORS[self.kind](policy_logprobs, reference_logprobs, self.input_clamp)  # of two zeros: 0

    def _bounded(self, kl: Tensor) -> Tensor:
        return kl if self.output_clamp is None else kl.clamp(-self.output_clamp, self.output_clamp)

"""What the losses of the family have in common: all but the surrogate.

# N = tokens of all sequences concatenated

Not here: the surrogates, one file each (``loss.py``, ``loss_gspo.py``, ``loss_cispo.py``), and what PPO shares with
them (``nemorl_tensors.surrogate``).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from nemorl.metrics import Metric, Metrics
from nemorl_tensors import KLTerm, TokenBatch, masked_mean
from nemorl_tensors.ratios import masked_log_ratio
from nemorl_tensors.surrogate import sampler_metrics
from torch import Tensor

from nemorl_grpo.correction import Correction


@dataclass(frozen=True, kw_only=True)
class PolicyGradientLoss:
    """A surrogate of the advantages, weighed by a correction, with a KL penalty to the reference.

    loss = sum(loss_weights * (-w * surrogate + kl_penalty * KL(policy || reference)))

    The correction never touches the KL term. A subclass says what the surrogate is.
    """

    kl_penalty: float = 0.0
    kl: KLTerm = field(default_factory=KLTerm)
    """How the KL is estimated and bounded, and which gradient it has."""
    on_policy: bool = False
    """One update per batch: the old policy is the one at hand, the ratio is exactly 1."""
    correction: Correction | None = None
    """Weights w of the surrogate from old and generation log-probs; without gradient."""

    @property
    def requires(self) -> frozenset[str]:
        fields = {"advantages", "generation_logprobs"}
        if not self.on_policy:
            fields.add("old_logprobs")
        if self.kl_penalty > 0:
            fields.add("reference_logprobs")
        return frozenset(fields)

    def surrogate(
        self, policy_logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, batch: TokenBatch
    ) -> tuple[Tensor, dict[str, Metric]]:
        """[N] to be maximised, 0 in masked slots, and how far the policy has moved.

        Args:
            policy_logprobs: [N] with gradient.
            old_logprobs: [N], on policy those at hand without gradient.
            advantages: [N], 0 in masked slots.
            batch: What is trained on. Masked slots of log-probs may hold anything.
        """
        raise NotImplementedError(f"{type(self).__name__} must define surrogate()")

    def sampler_log_ratio(self, old_logprobs: Tensor, batch: TokenBatch) -> Tensor:
        """[N] what the correction is told of the sampler: old - generation, without gradient, 0 in masked slots."""
        return masked_log_ratio(old_logprobs.detach(), batch["generation_logprobs"], batch.mask)

    def __call__(self, policy_logprobs: Tensor, batch: TokenBatch) -> tuple[Tensor, Metrics]:
        mask = batch.mask
        advantages = torch.where(mask, batch["advantages"], 0.0)
        old_logprobs = policy_logprobs.detach() if self.on_policy else batch["old_logprobs"]

        surrogate, metrics = self.surrogate(policy_logprobs, old_logprobs, advantages, batch)
        metrics |= sampler_metrics(policy_logprobs, old_logprobs, batch["generation_logprobs"], mask)
        per_token = -surrogate
        if self.correction is not None:
            weights, correction_metrics = self.correction(self.sampler_log_ratio(old_logprobs, batch), batch)
            per_token = weights * per_token
            metrics |= correction_metrics
        if self.kl_penalty > 0:
            kl = self.kl.loss_term(policy_logprobs, batch["reference_logprobs"], batch["generation_logprobs"], mask)
            per_token = per_token + self.kl_penalty * kl
            metrics["kl_penalty"] = masked_mean(kl, mask)
        return (per_token * batch.loss_weights).sum(), metrics

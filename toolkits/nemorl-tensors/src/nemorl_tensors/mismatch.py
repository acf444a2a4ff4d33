"""How far the sampler's log-probs are from the trainer's: the numbers that say whether two engines run one model.

# N = tokens of all sequences concatenated

Both sides describe the same tokens under the same weights, so every difference is an error of one of them: see
:mod:`nemorl_rl.audit.mismatch` for what causes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from nemorl.metrics import Histogram, Max, Mean, Metric, Metrics, Sum
from torch import Tensor

from nemorl_tensors.batch import TokenBatch
from nemorl_tensors.kl import kl_k3
from nemorl_tensors.ratios import probability_ratio


def mismatch_metrics(old_logprobs: Tensor, generation_logprobs: Tensor, mask: Tensor) -> dict[str, Metric]:
    """Distances between two views of the same tokens, over the masked-in ones.

    With gap = old - generation, in nats:

    token_mult_prob_error = mean exp(|gap|)                       1.0 when the engines agree
    gen_kl_error = mean exp(gap) - 1 - gap                        k3 estimate of KL(generation || old)
    logprob_error/mean, /max, /p50, /p99, /p999                   mean, maximum and quantiles of |gap|
    nonfinite_sampler_logprobs                                    tokens that the sampler gives probability 0, or NaN

    In ``exp`` a gap counts as 20 nats at most.

    Args:
        old_logprobs: [N] the training backend's, float32 nats.
        generation_logprobs: [N] the sampler's.
        mask: [N] bool, True where the policy chose the token. Other slots may hold anything.
    """
    generation_logprobs = torch.where(mask, generation_logprobs, 0.0)
    old_logprobs = torch.where(mask, old_logprobs.detach(), 0.0)
    error = (old_logprobs - generation_logprobs).abs()
    per_token = torch.stack([probability_ratio(error), kl_k3(generation_logprobs, old_logprobs), error])
    sums = torch.where(mask, per_token, 0.0).sum(1)
    nonfinite = (~generation_logprobs.isfinite()).sum().reshape(1)
    nothing = error.new_full((1,), -torch.inf)
    largest = torch.cat([torch.where(mask, error, -torch.inf), nothing]).amax(0, keepdim=True)

    # Everything crosses to the CPU in one transfer: on a GPU each crossing waits for all work before it.
    numbers = torch.cat([part.double() for part in (sums, largest, nonfinite, _counts(error, mask))]).tolist()
    count = sum(numbers[5:])
    return {
        "token_mult_prob_error": Mean(numbers[0], count),
        "gen_kl_error": Mean(numbers[1], count),
        "logprob_error/mean": Mean(numbers[2], count),
        "logprob_error/max": Max(numbers[3]),
        "logprob_error": Histogram(tuple(int(number) for number in numbers[5:])),
        "nonfinite_sampler_logprobs": Sum(numbers[4]),
    }


def _counts(values: Tensor, mask: Tensor) -> Tensor:
    """[Histogram.CELLS] of the masked-in ``values`` [N], by the rule of ``Histogram.cell_of``."""
    steps = torch.log10(values.double() / Histogram.LOWEST) * Histogram.CELLS_PER_DECADE
    last = Histogram.CELLS - 1
    cells = (torch.floor(steps).clamp(-1, last - 1) + 1).nan_to_num(last).long()
    outside = torch.where(mask, cells, Histogram.CELLS)  # one more cell, for the masked-out slots
    return torch.bincount(outside, minlength=Histogram.CELLS + 1)[: Histogram.CELLS]


@dataclass(frozen=True)
class PolicyGradient:
    """The plainest loss that moves a policy, for audits of what happens to its weights afterwards.

    loss = -sum(loss_weights * advantages * policy_logprobs)                  (REINFORCE)
    """

    requires: ClassVar[frozenset[str]] = frozenset({"advantages"})

    def __call__(self, policy_logprobs: Tensor, batch: TokenBatch) -> tuple[Tensor, Metrics]:
        per_token = torch.where(batch.mask, -batch["advantages"] * policy_logprobs, 0.0)
        return (per_token * batch.loss_weights).sum(), {}

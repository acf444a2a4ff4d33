"""A KL charged to the reward: advantages that depend on log-probs.

# N = tokens of all sequences concatenated, B = sequences
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from nemorl.metrics import Metric
from nemorl.types import Samples
from nemorl_tensors import KLTerm, TokenBatch, segment_sum
from torch import Tensor

from nemorl_rl.policy_gradient.advantages import group_advantages


def with_kl(batch: TokenBatch, term: KLTerm) -> TokenBatch:
    """The batch with ``kl``: [N] nats by which the policy before the update has left the reference, token by token.

    Args:
        batch: With ``old_logprobs`` and ``reference_logprobs``, [N] nats.
        term: The estimator and its bounds: ``config.kl_term()``.

    Returns:
        The batch; ``kl`` is 0 in masked slots.

    Example:
        >>> batch = TokenBatch.from_sequences([[5, 6, 7]], [[False, True, True]])
        >>> old, reference = torch.tensor([0.0, -1.0, -2.0]), torch.tensor([0.0, -1.5, -2.0])
        >>> with_kl(batch.with_tokens(old_logprobs=old, reference_logprobs=reference), KLTerm("k2"))["kl"].tolist()
        [0.0, 0.125, 0.0]
    """
    return batch.with_tokens(kl=term.estimate(batch["old_logprobs"], batch["reference_logprobs"], batch.mask))


def kl_to_go(kl: Tensor, mask: Tensor, lengths: Tensor) -> Tensor:
    """[N] float32: the KL of each trained token and all trained ones after it in its sequence.

    kl_to_go_t = sum over s >= t of kl_s                                                 arXiv:2501.03262, eq. 8 and 9

    Args:
        kl: [N] nats, of the policy before the update from the reference.
        mask: [N] bool. Other slots may hold anything and are 0 in the result.
        lengths: [B], sums to N.

    Example:
        >>> kl_to_go(torch.tensor([9.0, 1.0, 2.0]), torch.tensor([False, True, True]), torch.tensor([3])).tolist()
        [0.0, 3.0, 2.0]
    """
    # float64: one running sum over all N tokens would leave float32 few digits for the last sequences.
    kl = torch.where(mask, kl, 0.0).double()
    until_here = torch.cumsum(kl, 0)
    until_the_end = torch.cumsum(segment_sum(kl, mask, lengths), 0)
    to_go = torch.repeat_interleave(until_the_end, lengths) - until_here + kl
    return torch.where(mask, to_go, 0.0).float()


@dataclass(frozen=True)
class ChargeKL:
    """``kl_in: reward``: advantages less how much more KL an episode has than the others of its group that train.

    A_t <- A_t - weight * (KL_i - mean of KL over the other episodes of the group)        KL_i = sum over t of kl_t

    What is charged is not divided by the spread of rewards: where these are all equal, the spread is nothing but the
    KL's own noise, and dividing by it would blow that up.

    Example:
        >>> from nemorl.types import Prompt, Sample, Score
        >>> def response(token_id: int) -> Sample:
        ...     prompt = Prompt(0, "1+1=", (5,))
        ...     return Sample(prompt, (5, token_id), (False, True), (0.0, -1.0), Score(0.0), "2", "stop")
        >>> samples = Samples([response(6), response(7)])
        >>> batch = TokenBatch.from_samples(samples, [1.0, 0.0])
        >>> old, reference = torch.tensor([0.0, -1.0, 0.0, -2.0]), torch.tensor([0.0, -1.5, 0.0, -2.0])
        >>> batch = batch.with_tokens(old_logprobs=old, reference_logprobs=reference)
        >>> charged, _ = ChargeKL(0.5, KLTerm("k1"))(batch, samples)
        >>> charged["advantages"].tolist()  # of 1 and 0; KL 0.5 and 0
        [1.0, 0.75, 0.0, 0.25]
    """

    requires: ClassVar[frozenset[str]] = frozenset({"advantages", "old_logprobs", "reference_logprobs"})

    weight: float
    """How much of the reward a nat costs."""
    term: KLTerm
    """The estimator and its bounds: ``config.kl_term()``."""

    def __call__(self, batch: TokenBatch, samples: Samples) -> tuple[TokenBatch, dict[str, Metric]]:
        batch, group_ids = with_kl(batch, self.term), samples.group_ids
        kl_E, tokens_E = torch.zeros(2, len(group_ids), dtype=torch.float64)  # E episodes, numbered from 0
        kl_E.index_add_(0, batch.episodes, segment_sum(batch["kl"].double(), batch.mask, batch.lengths))
        tokens_E.index_add_(0, batch.episodes, segment_sum(batch.mask.double(), batch.mask, batch.lengths))
        trained = (tokens_E > 0).nonzero().squeeze(1)
        groups = [group_ids[index] for index in trained.tolist()]
        excess = group_advantages(kl_E[trained].tolist(), groups, normalize_std=False, leave_one_out=True)
        excess_E = torch.zeros(len(group_ids))
        excess_E[trained] = torch.tensor(excess, dtype=torch.float32)
        charge = self.weight * torch.where(batch.mask, excess_E[batch.episodes][batch.sequence_ids], 0.0)
        return batch.with_tokens(advantages=batch["advantages"] - charge), {}

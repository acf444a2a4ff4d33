"""``gspo``: one ratio per sequence, and a gradient for each of its tokens by its own advantage.

# N = tokens of all sequences concatenated, B = sequences
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nemorl_tensors import TokenBatch, segment_mean
from torch import Tensor

from nemorl_agents.tinker.losses.client_loss import Fields, Number
from nemorl_agents.tinker.losses.ratio_loss import ClippedRatioLoss


@dataclass(frozen=True)
class GSPOTokenLoss(ClippedRatioLoss):
    """The clipped surrogate with the length-normalised ratio of the whole sequence, in GSPO's token variant.

    m_b = mean of sg(p) - q over the tokens of sequence b where sequence_ratio_mask is not 0 (0 if it is 0 everywhere)
    r = exp(m_b + p - sg(p))
    loss = -sum(min(r * A, clip(r, clip_low_threshold, clip_high_threshold) * A))     arXiv:2507.18071, eq. 13 and 14

    sg: without gradient. So r has the value of the sequence's ratio, and p the gradient r.

    Differs from the paper: a sum over tokens, not a mean. Default bounds are the paper's, the API documents none. The
    mask has no default: what a client fills in for a prompt's q would count as the sampler's.
    """

    clip_low_threshold: float = 1 - 3e-4
    clip_high_threshold: float = 1 + 4e-4

    @property
    def inputs(self) -> Mapping[str, Number]:
        return {**super().inputs, "sequence_ratio_mask": Number()}

    def log_ratio(self, log_ratio: Tensor, fields: Fields, batch: TokenBatch) -> Tensor:
        counts = batch.mask & (fields["sequence_ratio_mask"] != 0)
        mean_B = segment_mean(log_ratio.detach(), counts, batch.lengths)
        return mean_B[batch.sequence_ids] + (log_ratio - log_ratio.detach())

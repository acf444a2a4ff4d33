"""Credit that differs from token to token of one response: a KL charged to the reward.

# N = tokens of all sequences concatenated, B = sequences
"""

from __future__ import annotations

import torch
from nemorl.tensors import segment_sum
from torch import Tensor


def kl_to_go(kl: Tensor, mask: Tensor, lengths: Tensor) -> Tensor:
    """[N] float32: the KL of each trained token and all trained ones after it in its sequence.

    kl_to_go_t = sum over s >= t of kl_s                                                 arXiv:2501.03262, eq. 8 and 9

    Args:
        kl: [N] nats, of the policy before the update from the reference.
        mask: [N] bool. Other slots may hold anything and are 0 in the result.
        lengths: [B], sums to N.
    """
    # float64: one running sum over all N tokens would leave float32 few digits for the last sequences.
    kl = torch.where(mask, kl, 0.0).double()
    until_here = torch.cumsum(kl, 0)
    until_the_end = torch.cumsum(segment_sum(kl, mask, lengths), 0)
    to_go = torch.repeat_interleave(until_the_end, lengths) - until_here + kl
    return torch.where(mask, to_go, 0.0).float()

"""The worth of each token: rewards per token, generalised advantage estimation, and how good the critic was.

# N = tokens of all sequences concatenated, B = sequences, M = trained tokens, all sequences' one after the other

Only trained tokens are steps of the decision process. What stands between two of them, such as an environment's answer
in a conversation, is skipped: the last word of a turn is followed by the first of the next. A sequence ends with its
last trained token, also where the token limit cut it. Masked slots may hold anything and are 0 in the results.
"""

from __future__ import annotations

import torch
from nemorl.types import Samples
from nemorl_tensors import segment_ids, segment_sum
from torch import Tensor

EPSILON = 1e-6
"""Standard deviations below it are rounding noise and count as zero."""


def terminal_rewards(rewards_B: Tensor, mask: Tensor, lengths: Tensor) -> Tensor:
    """[N] float32: the reward of each response at its last trained token, 0 elsewhere."""
    trained = mask.nonzero().squeeze(1)
    sequences = segment_ids(lengths)[trained]
    ends = _ends(sequences)
    rewards = torch.zeros(mask.shape, dtype=torch.float32)
    rewards[trained[ends]] = rewards_B[sequences[ends]].float()
    return rewards


def turn_rewards(samples: Samples, mask: Tensor) -> Tensor:
    """[N] float32: what each turn earned at its last token, 0 elsewhere and where that token is not trained.

    Args:
        samples: Episodes whose ``sequences`` are the batch.
        mask: [N] bool.
    """
    paid = torch.zeros(mask.shape, dtype=torch.float32)
    start = 0
    for part in samples.sequences:
        for place, reward in part.turn_rewards:
            paid[start + place] += reward
        start += len(part.token_ids)
    return torch.where(mask, paid, 0.0)


def advantages(
    rewards: Tensor, values: Tensor, mask: Tensor, lengths: Tensor, *, gamma: float, lambdas_B: Tensor
) -> Tensor:
    """[N] float32: how much better than the critic expected it went from here on.

    delta_t = r_t + gamma * V_(t+1) - V_t                                      V is 0 after the last trained token
    A_t = delta_t + gamma * lambda * A_(t+1)                                        GAE, arXiv:1506.02438, eq. 16

    Args:
        rewards: [N] reward for choosing token t.
        values: [N] the critic's value of the state before token t.
        mask: [N] bool, True on the trained tokens.
        lengths: [B], sums to N.
        gamma: Discount per trained token.
        lambdas_B: [B] trust in the rewards (1) or in the critic (0), for each sequence.
    """
    trained = mask.nonzero().squeeze(1)
    sequences_M = segment_ids(lengths)[trained]
    # float64: with a decay close to 1, thousands of terms add up.
    values_M = values[trained].double()
    next_values_M = values_M.roll(-1).masked_fill(_ends(sequences_M), 0.0)
    deltas_M = rewards[trained].double() + gamma * next_values_M - values_M
    decays_M = gamma * lambdas_B.double()[sequences_M]
    found = torch.zeros(mask.shape, dtype=torch.float32)
    found[trained] = discounted_sums(deltas_M, decays_M, sequences_M).float()
    return found


def discounted_sums(terms_M: Tensor, decays_M: Tensor, sequences_M: Tensor) -> Tensor:
    """[M]: each term plus those after it in its sequence, faded by ``decay`` per position.

    s_t = x_t + d * x_(t+1) + d^2 * x_(t+2) + …

    A segmented scan that doubles its reach: after pass k every sum spans 2^k terms, so a batch takes log2(longest
    sequence) passes over all of its tokens, however they are cut into sequences, and no loop over time.

    Args:
        terms_M: [M] float64.
        decays_M: [M] float64, equal within a sequence.
        sequences_M: [M] index of the sequence of each term; equal ones are neighbours.
    """
    sums, reach = terms_M, 1
    while reach < len(sums):
        is_inside = sequences_M[:-reach] == sequences_M[reach:]
        if not bool(is_inside.any()):
            break
        further = torch.where(is_inside, decays_M[:-reach] * sums[reach:], 0.0)
        sums = torch.cat([sums[:-reach] + further, sums[-reach:]])
        decays_M, reach = decays_M.square(), 2 * reach
    return sums


def length_adaptive_lambdas(mask: Tensor, lengths: Tensor, alpha: float) -> Tensor:
    """[B] 1 - 1 / (alpha * trained tokens), at least 0: a reward then fades over 1/alpha-th of any response.

    VAPO, arXiv:2504.05118, section 4.2.
    """
    tokens_B = segment_sum(mask.double(), mask, lengths)
    return (1 - 1 / (alpha * tokens_B.clamp(min=1))).clamp(min=0.0)


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> float:
    """1 - Var(returns - values) / Var(returns) over the trained tokens: 1 foresees all, 0 no more than a constant.

    Returns that are all the same leave nothing to explain: 0. Negative: worse than a constant.
    """
    returns_M, errors_M = returns[mask].double(), (returns - values)[mask].double()
    if returns_M.numel() == 0:
        return 0.0
    spread, left = (float((x - x.mean()).square().mean()) for x in (returns_M, errors_M))
    return 1 - left / spread if spread > EPSILON**2 else 0.0


def _ends(sequences_M: Tensor) -> Tensor:
    """[M] bool: True at the last trained token of each sequence."""
    ends = torch.ones_like(sequences_M, dtype=torch.bool)
    ends[:-1] = sequences_M[1:] != sequences_M[:-1]
    return ends

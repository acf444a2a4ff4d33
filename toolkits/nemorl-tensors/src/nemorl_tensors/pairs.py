"""Preference pairs in a batch: its sequences 2p and 2p + 1 are the chosen and the rejected response of pair p.

# N = tokens of all sequences concatenated, B = sequences, P = pairs (B = 2P)

What DPO and reward models share: how pairs are laid out, what each weighs, and the metrics of a comparison.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from nemorl.media import Media
from nemorl.metrics import Mean, Metrics, Sum
from torch import Tensor

from nemorl_tensors.batch import TokenBatch
from nemorl_tensors.functional import segment_sum


def pair_batch(
    chosen: Sequence[tuple[Sequence[int], Sequence[bool]]],
    rejected: Sequence[tuple[Sequence[int], Sequence[bool]]],
    media: Iterable[Media] = (),
) -> TokenBatch:
    """P pairs of (token ids, mask) as one batch. Every pair weighs the same, whatever its length.

    A pair one side of which has nothing to train on has nothing to compare: its other side is masked too, so that it
    takes no weight from the rest. ``media``: the items that they show.

    Example:
        >>> batch = pair_batch([([5, 7], [False, True])], [([5, 8, 9], [False, True, True])])
        >>> batch.loss_weights.tolist(), batch.sequences_per_group
        ([0.0, 0.5, 0.0, 0.25, 0.25], 2)
    """
    sequences, masks = [], []
    for pair in zip(chosen, rejected, strict=True):
        is_complete = all(any(mask[1:]) for _, mask in pair)  # the first token of a sequence is never trained
        sequences += [ids for ids, _ in pair]
        masks += [[keep and is_complete for keep in mask] for _, mask in pair]
    return TokenBatch.from_sequences(sequences, masks, loss_aggregation="sequence", sequences_per_group=2, media=media)


def split_pairs(values_B: Tensor) -> tuple[Tensor, Tensor]:
    """[B] of sequences -> [P] of the chosen, [P] of the rejected.

    Example:
        >>> [side.tolist() for side in split_pairs(torch.tensor([1.0, 2.0, 3.0, 4.0]))]
        [[1.0, 3.0], [2.0, 4.0]]
    """
    return values_B[0::2], values_B[1::2]


def pair_weights(batch: TokenBatch) -> Tensor:
    """[P] what each pair contributes to a mean over the pairs of its optimizer step; 0.0 for one that trains nothing.

    A sequence with trained tokens has 1 / S of the weight of a step, S being their number, and a pair has two of them
    or none (:func:`pair_batch`).

    Example:
        >>> batch = pair_batch([([5, 7], [False, True])], [([5, 8, 9], [False, True, True])])
        >>> pair_weights(batch).tolist()
        [1.0]
    """
    chosen, rejected = split_pairs(segment_sum(batch.loss_weights, batch.mask, batch.lengths))
    return torch.where((chosen > 0) & (rejected > 0), chosen + rejected, 0.0)


def over_pairs(values_P: Tensor, weights_P: Tensor) -> Tensor:
    """The sum of what pairs cost, by their weights; what stands at a pair of weight 0 plays no part.

    Example:
        >>> float(over_pairs(torch.tensor([2.0, torch.nan]), torch.tensor([0.5, 0.0])))
        1.0
    """
    return (torch.where(weights_P > 0, values_P, 0.0) * weights_P).sum()


def preference_metrics(rewards_chosen: Tensor, rewards_rejected: Tensor, counted: Tensor) -> Metrics:
    """How often the chosen response is rewarded more, and by how much.

    Args:
        rewards_chosen: [P] any scale.
        rewards_rejected: [P]
        counted: [P] bool, the pairs to count.

    Example:
        >>> chosen, rejected = torch.tensor([2.0, 1.0]), torch.tensor([1.0, 3.0])
        >>> preference_metrics(chosen, rejected, torch.tensor([True, True]))["accuracy"].value
        0.5
    """
    chosen, rejected = rewards_chosen.detach()[counted], rewards_rejected.detach()[counted]
    count = chosen.numel()
    return {
        "accuracy": Mean(float((chosen > rejected).sum()), count),
        "rewards_chosen_mean": Mean(float(chosen.sum()), count),
        "rewards_rejected_mean": Mean(float(rejected.sum()), count),
        "rewards_margin_mean": Mean(float((chosen - rejected).sum()), count),
        "num_valid_samples": Sum(float(count)),
    }

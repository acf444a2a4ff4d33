"""Reductions over ragged, masked token fields.

# N = tokens of all sequences concatenated, B = sequences

A masked-out slot may hold anything, NaN included: values are selected with ``torch.where`` before they are used.
"""

from __future__ import annotations

import numpy
import torch
from nemorl.metrics import Max, Mean, Min
from torch import Tensor

SPREAD_EPSILON = 1e-6
"""Added to a standard deviation. Spreads below it are rounding noise and count as zero."""


def segment_ids(lengths: Tensor, total: int | None = None) -> Tensor:
    """[B] lengths -> [N] index of the sequence each token belongs to: ``[2, 1] -> [0, 0, 1]``.

    Args:
        lengths: Tokens of each sequence.
        total: Their sum, if known: the host then does not wait for the device to tell it.

    Example:
        >>> segment_ids(torch.tensor([2, 1])).tolist()
        [0, 0, 1]
    """
    return torch.repeat_interleave(torch.arange(lengths.numel(), device=lengths.device), lengths, output_size=total)


def segment_sum(values: Tensor, mask: Tensor, lengths: Tensor) -> Tensor:
    """Sum of the masked-in ``values`` [N] of each sequence -> [B].

    Example:
        >>> mask = torch.tensor([True, True, False])
        >>> segment_sum(torch.tensor([1.0, 2.0, 9.0]), mask, torch.tensor([2, 1])).tolist()
        [3.0, 0.0]
    """
    kept = torch.where(mask, values, torch.zeros_like(values))
    # `unsafe` leaves out its own look at the lengths, which costs as much as the sum and fails without tokens.
    return torch.segment_reduce(kept, "sum", lengths=lengths, initial=0.0, unsafe=True)


def segment_any(flags: Tensor, lengths: Tensor) -> Tensor:
    """[B] bool: any of the ``flags`` [N] bool of each sequence is True.

    Example:
        >>> segment_any(torch.tensor([False, True, False]), torch.tensor([2, 1])).tolist()
        [True, False]
    """
    found = torch.zeros(lengths.shape, dtype=torch.bool)
    filled = lengths.cpu() > 0
    starts = (torch.cumsum(lengths, 0) - lengths).cpu()[filled]
    if starts.numel():
        found[filled] = torch.from_numpy(numpy.logical_or.reduceat(flags.cpu().numpy(), starts.numpy()))
    return found.to(flags.device)


def segment_mean(values: Tensor, mask: Tensor, lengths: Tensor) -> Tensor:
    """Mean of the masked-in ``values`` [N] of each sequence -> [B]; 0 for a sequence with none.

    Example:
        >>> mask = torch.tensor([True, True, False])
        >>> segment_mean(torch.tensor([1.0, 2.0, 9.0]), mask, torch.tensor([2, 1])).tolist()
        [1.5, 0.0]
    """
    counts = segment_sum(mask.to(values.dtype), mask, lengths)
    return segment_sum(values, mask, lengths) / counts.clamp(min=1)


def standardized(values: Tensor, mask: Tensor, *, unbiased: bool) -> Tensor:
    """[N] float32 with mean 0 and standard deviation 1 over the masked-in slots, 0 elsewhere.

    (x - mean) / (std + 1e-6), in float64 and two passes; a spread that is rounding noise is not divided by.

    Args:
        values: [N]. Masked-out slots may hold anything.
        mask: [N] bool.
        unbiased: Divide the squares by their number less one.

    Example:
        >>> mask = torch.tensor([True, True, False])
        >>> standardized(torch.tensor([1.0, 3.0, 9.0]), mask, unbiased=False).round().tolist()
        [-1.0, 1.0, 0.0]
    """
    kept = values[mask].double()
    count = kept.numel()
    centred = kept - kept.sum() / max(count, 1)
    spread = float((centred.square().sum() / max(count - unbiased, 1)).sqrt())
    normal = centred / (spread + SPREAD_EPSILON) if spread > SPREAD_EPSILON else centred
    return torch.zeros(mask.shape, dtype=torch.float32, device=values.device).masked_scatter(mask, normal.float())


def masked_mean(values: Tensor, mask: Tensor) -> Mean:
    """Mean over masked-in slots, as a metric that can be merged across microbatches and ranks.

    Example:
        >>> masked_mean(torch.tensor([1.0, 2.0, 9.0]), torch.tensor([True, True, False]))
        Mean(total=3.0, count=2.0)
    """
    kept = torch.where(mask, values.detach(), torch.zeros_like(values))
    return Mean(float(kept.sum()), float(mask.sum()))


def masked_min(values: Tensor, mask: Tensor) -> Min:
    """Minimum over masked-in slots; ``inf`` when there are none, so that it never wins a merge.

    Example:
        >>> masked_min(torch.tensor([4.0, 2.0, 1.0]), torch.tensor([True, True, False])).value
        2.0
    """
    return Min(float(torch.where(mask, values.detach(), torch.inf).min()) if values.numel() else float("inf"))


def masked_max(values: Tensor, mask: Tensor) -> Max:
    """Maximum over masked-in slots; ``-inf`` when there are none.

    Example:
        >>> masked_max(torch.tensor([4.0, 2.0, 9.0]), torch.tensor([True, True, False])).value
        4.0
    """
    return Max(float(torch.where(mask, values.detach(), -torch.inf).max()) if values.numel() else float("-inf"))

"""Sequences that a loss takes no gradient from are computed without a backward pass.

# N = tokens of all sequences concatenated, B = sequences, G = groups of ``sequences_per_group`` neighbours

A loss may say which sequences these are (:class:`SelectiveLoss`). A backend splits its shard with
:func:`split_by_gradient`, runs the first part as ever and the second under ``torch.no_grad``, where
:func:`evaluate_without_gradient` gives its loss and metrics: weights and metrics are those of the whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from nemorl.contracts import SelectiveLoss
from nemorl.errors import boundary
from nemorl.metrics import Mean, Metrics
from torch import Tensor

from nemorl_tensors.batch import TokenBatch
from nemorl_tensors.engines.rows import MICROBATCH_COST_TOKENS, fed_lengths
from nemorl_tensors.engines.steps import evaluate_loss, loss_owner

if TYPE_CHECKING:
    from nemorl.contracts import Loss

FORWARD_SHARE = 1 / 3
"""Of the cost of a microbatch: a backward pass has two matrix products for each of the forward pass."""


def split_by_gradient(
    batch: TokenBatch, loss: Loss, budget: int, computed: Callable[[TokenBatch], int]
) -> tuple[TokenBatch, TokenBatch]:
    """Sequences that are trained on, and those only measured: none, where that saves nothing.

    Loss weights stay as they are. Groups of sequences stay together and in order. Something is always trained on, so
    that parameters have gradients, if only zeros: AdamW moves those that have none not at all.

    Args:
        batch: This rank's shard of a minibatch.
        loss: The objective.
        budget: Tokens of a microbatch.
        computed: How many tokens a forward pass over a batch computes, in the backend's layout.

    Raises:
        ForeignError: the loss's answer is no [B] bool.

    Example:
        >>> batch = TokenBatch.from_sequences([[5, 6], [5, 7]], [[False, True], [False, True]])
        >>> says_nothing = lambda logprobs, batch: (logprobs.sum(), {})
        >>> trained, measured = split_by_gradient(batch, says_nothing, 8, lambda part: part.num_tokens)
        >>> len(trained), len(measured)
        (2, 0)
    """
    if not isinstance(loss, SelectiveLoss):
        return batch, batch.select([])
    size = batch.sequences_per_group
    fed_G = fed_lengths(batch).view(-1, size).sum(1)
    trained_G = _has_gradient(batch, loss).view(-1, size).any(1)
    if not trained_G.any() and len(fed_G):
        trained_G[torch.where(fed_G > 0, fed_G, fed_G.max() + 1).argmin()] = True
    if trained_G.all():
        return batch, batch.select([])
    trained_B = trained_G.repeat_interleave(size)
    trained, measured = (batch.select(torch.nonzero(part).squeeze(1).tolist()) for part in (trained_B, ~trained_B))
    if _saves_time(computed(batch), computed(trained), computed(measured), budget):
        return trained, measured
    return batch, batch.select([])


def _has_gradient(batch: TokenBatch, loss: Any) -> Tensor:
    """[B] bool"""
    with boundary(loss_owner(loss)):
        found: Any = loss.has_gradient(batch)
        if not isinstance(found, Tensor) or found.dtype != torch.bool or found.shape != batch.lengths.shape:
            raise TypeError(f"has_gradient() returned {found!r:.80}, not a bool for each of {len(batch)} sequences")
    return found.cpu()


def _saves_time(together: int, trained: int, measured: int, budget: int) -> bool:
    """Two kinds of microbatches may be one or two more than one kind; each costs something besides its tokens, and what
    sequences of both kinds have in common is computed twice."""

    def cost(tokens: int) -> int:
        return tokens + -(-tokens // budget) * MICROBATCH_COST_TOKENS

    return cost(trained) + FORWARD_SHARE * cost(measured) < cost(together)


def evaluate_without_gradient(loss: Loss, outputs: Tensor, batch: TokenBatch) -> tuple[Tensor, Metrics]:
    """The loss and the metrics of a microbatch that gets no backward pass.

    That this is right is checked: the loss is derived by what the model said, which costs next to nothing.

    Args:
        loss: The objective.
        outputs: [N] or [N, K] what the model says of the tokens, without gradient.
        batch: The microbatch, of the second part of :func:`split_by_gradient`.

    Raises:
        ForeignError: a derivative is not 0, so ``has_gradient`` is wrong; or what :func:`evaluate_loss` raises.
    """
    with torch.enable_grad():
        leaf = outputs.detach().requires_grad_()
        value, metrics = evaluate_loss(loss, leaf, batch)
        if value.requires_grad:
            with boundary(loss_owner(loss)):
                (slope,) = torch.autograd.grad(value, leaf, allow_unused=True)
                if slope is not None and bool((slope.nan_to_num() != 0).any()):
                    raise ValueError(
                        "its has_gradient() is False for a sequence by whose tokens its derivative is up to "
                        f"{float(slope.nan_to_num().abs().max()):.3g}: it must be True for this one"
                    )
    return value.detach(), metrics


def gradient_metrics(loss: Loss, trained: TokenBatch, measured: TokenBatch) -> Metrics:
    """``skipped_backward_frac``: the share of sequences without backward pass, where the loss says which need none."""
    if not isinstance(loss, SelectiveLoss):
        return {}
    return {"skipped_backward_frac": Mean(float(len(measured)), float(len(trained) + len(measured)))}

"""What every training backend does around an optimizer step: check what the loss reads, say what happened.

# N = tokens of all sequences concatenated
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from nemorl.errors import UsageError, boundary
from nemorl.metrics import Last, Mean, Metric, Metrics, Sum, merge
from torch import Tensor

from nemorl_tensors.batch import TokenBatch
from nemorl_tensors.functional import segment_sum

if TYPE_CHECKING:
    from nemorl.contracts import Loss

PLACE = "place"
"""Field of :func:`with_places`."""


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did."""

    grad_norm: float
    """Global L2 norm before clipping"""
    lr: float
    skipped: bool
    """The norm was not finite, so the weights did not change"""


def require_fields(batch: TokenBatch, loss: Loss) -> None:
    """Refuse a batch that lacks what the loss reads.

    Raises:
        UsageError: names the fields.
    """
    missing = sorted(name for name in loss.requires if name not in batch)
    if missing:
        have = ", ".join([*batch.token_fields, *batch.sequence_fields]) or "none"
        raise UsageError(
            f"{type(loss).__name__} reads {', '.join(missing)}, which this batch does not have (fields: {have})",
            fix="compute them before train_step and add them with batch.with_tokens() or with_sequences()",
        )


def evaluate_loss(loss: Loss, outputs: Tensor, batch: TokenBatch) -> tuple[Tensor, Metrics]:
    """The loss of one microbatch and its metrics; what is wrong with either is said in the loss's name.

    Args:
        loss: The objective.
        outputs: [N] or [N, K] what the model says of the tokens.
        batch: The microbatch.

    Raises:
        ForeignError: it raised, or returned something else than a scalar tensor and a mapping.
        torch.OutOfMemoryError: unchanged, since the batch is to blame.
    """
    out_of_memory: torch.OutOfMemoryError | None = None
    with boundary(loss_owner(loss)):
        try:
            answer: Any = loss(outputs, batch)
        except torch.OutOfMemoryError as error:
            out_of_memory = error
        else:
            is_pair = isinstance(answer, tuple) and len(answer) == 2
            if not is_pair or not isinstance(answer[0], Tensor) or not isinstance(answer[1], Mapping):
                raise TypeError(f"returned {answer!r:.80}, not (scalar tensor, metrics)")
            if answer[0].numel() != 1:
                raise TypeError(f"returned a tensor of shape {tuple(answer[0].shape)}, not a scalar")
            for name, metric in answer[1].items():
                if not isinstance(metric, Metric):
                    raise TypeError(f"its metric {name!r} is {metric!r:.80}, which does not say how it adds up")
    if out_of_memory is not None:
        raise out_of_memory
    value, metrics = answer
    return value, metrics


def loss_owner(loss: Loss) -> str:
    """What errors call a loss: its class and where that is defined."""
    return f"loss {type(loss).__name__} ({type(loss).__module__})"


def step_metrics(batch: TokenBatch, parts: Sequence[Metrics], losses: Sequence[Tensor], result: StepResult) -> Metrics:
    """What ``train_step`` returns.

    Args:
        batch: This rank's shard of the minibatch.
        parts: The loss's metrics of each microbatch.
        losses: Its value for each, float64 scalars.
        result: The optimizer's part.
    """
    trained_B = segment_sum(batch.mask.float(), batch.mask, batch.lengths)
    return {
        **merge(parts),
        "loss": Sum(float(torch.stack(list(losses)).sum()) if losses else 0.0),
        "grad_norm": Mean(result.grad_norm),
        "lr": Last(result.lr),
        "skipped_updates": Mean(float(result.skipped)),  # every rank says the same
        "global_valid_toks": Sum(float(batch.mask.sum())),
        "global_valid_seqs": Sum(float((trained_B > 0).sum())),
    }


def output_shape(batch: TokenBatch, *, candidates: bool) -> tuple[int, ...]:
    """Of what a loss is given of a microbatch: [N], [N, K] for candidates, or what its filter asks for."""
    if candidates:
        return tuple(batch["candidate_ids"].shape)
    columns = batch.keep.columns if batch.keep is not None else 1
    return (batch.num_tokens,) if columns == 1 else (batch.num_tokens, columns)


def with_places(batch: TokenBatch) -> TokenBatch:
    """The bare sequences with one field, ``PLACE``: where in the batch each token stands.

    A microbatch reorders sequences; this says where what was found of its tokens belongs.
    """
    place = torch.arange(batch.num_tokens, device=batch.token_ids.device)
    return replace(batch, token_fields={PLACE: place}, sequence_fields={}, sequences_per_group=1)

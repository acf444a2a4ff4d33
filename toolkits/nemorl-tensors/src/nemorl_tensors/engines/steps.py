"""Parts of an optimizer step that all training backends share: checks of a loss's fields, metrics, the learning rate.

# N = tokens of all sequences concatenated
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from nemorl.errors import BackendError, UsageError, boundary
from nemorl.metrics import Last, Mean, Metric, Metrics, Sum, merge
from torch import Tensor

from nemorl_tensors.batch import ROUTES, TokenBatch
from nemorl_tensors.functional import segment_sum

if TYPE_CHECKING:
    from nemorl.config.models import ScheduleConfig
    from nemorl.contracts import Loss


PLACE = "place"
"""Field of :func:`with_places`."""


Evaluate = Callable[["Loss", Tensor, TokenBatch], tuple[Tensor, Metrics]]
"""(loss, what it is given, microbatch) -> (scalar, metrics)"""


@dataclass(frozen=True)
class StepResult:
    """Result of one optimizer step."""

    grad_norm: float
    """Global L2 norm before clipping"""
    lr: float
    skipped: bool
    """The norm was not finite, so the weights did not change"""
    metrics: Metrics = field(default_factory=dict)
    """What else a backend says of the update, the same on every rank"""


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
    """Name of a loss in errors: its class and where that is defined."""
    return f"loss {type(loss).__name__} ({type(loss).__module__})"


def pass_metrics(batch: TokenBatch, parts: Sequence[Metrics], losses: Sequence[Tensor]) -> Metrics:
    """Metrics of the passes over a batch, as ``train_step`` and ``forward_backward`` return them.

    Args:
        batch: This rank's shard of the minibatch.
        parts: The loss's metrics of each microbatch.
        losses: Its value for each, float64 scalars.
    """
    trained_B = segment_sum(batch.mask.float(), batch.mask, batch.lengths)
    return {
        **merge(parts),
        "loss": Sum(float(torch.stack(list(losses)).sum()) if losses else 0.0),
        "global_valid_toks": Sum(float(batch.mask.sum())),
        "global_valid_seqs": Sum(float((trained_B > 0).sum())),
    }


def update_metrics(result: StepResult) -> Metrics:
    """Metrics of an update, as ``train_step`` and ``optimizer_step`` return them."""
    return {
        "grad_norm": Mean(result.grad_norm),
        "lr": Last(result.lr),
        "skipped_updates": Mean(float(result.skipped)),  # every rank says the same
        **result.metrics,
    }


def output_shape(batch: TokenBatch, *, candidates: bool) -> tuple[int, ...]:
    """Of what a loss is given of a microbatch: [N], [N, K] for candidates, or what its filter asks for."""
    if candidates:
        return tuple(batch["candidate_ids"].shape)
    columns = batch.keep.columns if batch.keep is not None else 1
    return (batch.num_tokens,) if columns == 1 else (batch.num_tokens, columns)


def with_places(batch: TokenBatch) -> TokenBatch:
    """The batch with a field ``PLACE``: where in it each token stands.

    A microbatch reorders sequences; this says where what was found of its tokens belongs.
    """
    return batch.with_tokens(**{PLACE: torch.arange(batch.num_tokens, device=batch.token_ids.device)})


def bare(batch: TokenBatch) -> TokenBatch:
    """The sequences and their routes, without other fields: what is measured reads no more."""
    kept = {ROUTES: batch[ROUTES]} if ROUTES in batch else {}
    return replace(batch, token_fields=kept, sequence_fields={}, sequences_per_group=1)


# The learning rate over optimizer steps


def require_end(schedule: ScheduleConfig) -> None:
    """Refuse a decay whose length nobody knows.

    Raises:
        BackendError: ``decay_steps`` is unset.
    """
    if schedule.kind != "constant" and schedule.decay_steps is None:
        raise BackendError(
            f"the {schedule.kind} schedule does not know the number of optimizer steps",
            fix="set policy.schedule.decay_steps; a trainer that plans its steps fills it in",
        )


def schedule_factor(schedule: ScheduleConfig, step: int) -> float:
    """Fraction of the peak rate at optimizer step ``step`` (1 is the first), as transformers' schedules have it.

    They count completed steps: the first step of a warm-up has rate 0, the first after it the peak, and a decay would
    reach its floor in the step after the last.
    """
    done = step - 1
    if done < schedule.warmup_steps:
        return done / schedule.warmup_steps
    if schedule.kind == "constant" or schedule.decay_steps is None:
        return 1.0
    span = max(1, schedule.decay_steps - schedule.warmup_steps)
    progress = min(1.0, (done - schedule.warmup_steps) / span)
    shape = 1.0 - progress if schedule.kind == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return schedule.min_lr_frac + (1.0 - schedule.min_lr_frac) * shape

"""The learning rate over optimizer steps, the same in every training backend."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from nemorl.errors import BackendError

if TYPE_CHECKING:
    from nemorl.config.models import ScheduleConfig


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

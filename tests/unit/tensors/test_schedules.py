"""Learning-rate schedules, step by step those of transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from nemorl.config.models import ScheduleConfig
from nemorl_tensors.engines.steps import schedule_factor
from transformers import get_scheduler


def rates_of_transformers(kind: str, warmup: int, steps: int, floor: float) -> list[float]:
    """The rate that each of ``steps`` updates is made with, the peak being 1."""
    name = {"constant": "constant_with_warmup", "cosine": "cosine_with_min_lr"}.get(kind, kind)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = get_scheduler(
        name,
        optimizer,
        num_warmup_steps=warmup,
        num_training_steps=steps,
        scheduler_specific_kwargs={"min_lr_rate": floor} if kind == "cosine" else None,
    )
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine"])
@pytest.mark.parametrize(("warmup", "steps"), [(0, 1), (0, 2), (0, 7), (1, 1), (1, 2), (3, 10), (10, 10), (20, 100)])
@pytest.mark.parametrize("floor", [0.0, 0.1])
def test_every_update_has_the_rate_that_transformers_gives_it(kind: Any, warmup: int, steps: int, floor: float) -> None:
    schedule = ScheduleConfig(kind=kind, warmup_steps=warmup, decay_steps=steps, min_lr_frac=floor)
    found = [schedule_factor(schedule, step) for step in range(1, steps + 1)]
    expected = rates_of_transformers(kind, warmup, steps, floor)
    if kind == "linear":  # transformers' has no floor: what it gives is the part above ours, after the warm-up
        expected = [floor + (1 - floor) * rate if step >= warmup else rate for step, rate in enumerate(expected)]
    assert found == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_a_single_update_has_the_peak_rate_and_the_last_of_many_is_above_the_floor(kind: Any) -> None:
    assert schedule_factor(ScheduleConfig(kind=kind, decay_steps=1), 1) == 1.0
    assert schedule_factor(ScheduleConfig(kind=kind, decay_steps=10, min_lr_frac=0.1), 10) > 0.1
    assert schedule_factor(ScheduleConfig(kind=kind, decay_steps=10, min_lr_frac=0.1), 11) == pytest.approx(0.1)

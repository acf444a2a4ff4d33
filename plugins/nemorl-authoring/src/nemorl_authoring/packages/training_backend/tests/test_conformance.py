"""The contract of training backends, and what this one promises besides."""

from __future__ import annotations

from pathlib import Path

import pytest
from nemorl.config import PolicyConfig
from nemorl.config.models import ScheduleConfig
from nemorl.errors import BackendError
from nemorl.resources.worker import WorkerContext
from nemorl.testing import conformance

from nemorl_example.config import ExampleConfig
from nemorl_example.training import schedule_factor

test_conformance = conformance("training_backends", "example")


def test_what_it_cannot_do_is_refused(tiny_model: Path) -> None:
    policy = PolicyConfig(model_name=str(tiny_model), precision="bfloat16")
    with pytest.raises(BackendError, match="training in 2 processes, precision bfloat16"):
        ExampleConfig().build(policy, WorkerContext(world_size=2), reference=False)


def test_the_rate_rises_to_its_peak_and_falls_to_the_floor() -> None:
    schedule = ScheduleConfig(kind="linear", warmup_steps=2, decay_steps=6, min_lr_frac=0.5)
    assert [schedule_factor(schedule, step) for step in (1, 2, 4, 6, 9)] == [0.5, 1.0, 0.75, 0.5, 0.5]

"""``checkpoint.must_save_by``, on a clock of our own."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nemorl
import pytest
from nemorl_cli.console import Console
from nemorl_rl.models.save_deadline import SaveDeadline, process_age_s

ROWS = [{"prompt": f"{i}+1=", "response": str(i + 1)} for i in range(8)]


class Asked:
    """A trainer that remembers why it was stopped."""

    def __init__(self, must_save_by: str | None) -> None:
        self.config = SimpleNamespace(checkpoint=SimpleNamespace(must_save_by=must_save_by))
        self.reasons: list[str] = []

    def stop(self, reason: str) -> None:
        self.reasons.append(reason)


def steps_until_stopped(must_save_by: str | None, ages_s: list[float]) -> int | None:
    """Which step end is the first to stop the run; the first age is that at its beginning."""
    trainer, clock = Asked(must_save_by), iter(ages_s)
    hook = SaveDeadline(lambda: next(clock))
    hook.on_fit_begin(trainer)
    for step in range(1, len(ages_s)):
        hook.on_step_end(trainer)
        if trainer.reasons:
            return step
    return None


def test_the_last_step_is_the_one_after_which_no_other_would_fit() -> None:
    # 13,500 s from the start of the process, of which loading took 500. Steps of 1,000 s end at 1,500, 2,500, …: after
    # the one at 12,500 the next would end at 13,500, which is too late.
    ages = [500.0 + 1_000 * step for step in range(20)]
    assert steps_until_stopped("00:03:45:00", ages) == 12
    assert steps_until_stopped("3h45m", ages) == 12
    assert steps_until_stopped("3h46m", ages) == 13
    assert steps_until_stopped(None, [0.0, 1e9]) is None


def test_the_longest_step_so_far_is_reckoned_with() -> None:
    # The second step took 400 s: at 700 s another like it would pass 1,000 s, though the third took 100 s only.
    assert steps_until_stopped("1000s", [0.0, 200.0, 600.0, 700.0]) == 2
    assert steps_until_stopped("1001s", [0.0, 200.0, 600.0, 700.0]) == 3


@pytest.mark.slow
def test_the_run_is_saved_and_can_be_continued(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {
        "algorithm": "sft",
        "model": str(tiny_model),
        "run_dir": str(tmp_path / "run"),
        "batch_size": 2,
        "max_steps": 4,
        "validation": {"every": 0, "at_end": False},
        "checkpoint": {"every": 0, "export": False, "must_save_by": "00:00:01:00"},
        "policy": {"init": "random", "max_sequence_tokens": 32},
    }
    ages = iter([10.0, 25.0, 45.0])
    monkeypatch.setattr("nemorl_rl.models.save_deadline.process_age_s", lambda: next(ages))
    result = nemorl.load_config(settings).build().fit(ROWS, console=Console(quiet=True))
    assert result.steps == 2
    assert result.stopped == "checkpoint.must_save_by: 00:00:01:00 since the process began"
    assert (tmp_path / "run/checkpoints/step_000002").is_dir()

    settings["checkpoint"]["must_save_by"] = None
    assert nemorl.load_config(settings).build().fit(ROWS, resume=True, console=Console(quiet=True)).steps == 4


def test_the_age_is_that_of_the_process_and_not_of_the_module() -> None:
    first = process_age_s()
    assert 0 < first < time.clock_gettime(time.CLOCK_BOOTTIME)
    assert process_age_s() >= first

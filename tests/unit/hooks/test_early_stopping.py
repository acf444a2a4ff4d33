"""The hook ``early_stopping``: the callback of the same name, from a config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nemorl
import pytest
from nemorl.errors import ConfigError
from nemorl_cli.console import Console
from recorded_messages import Raises

ROWS = [{"prompt": f"{i}+1=", "response": str(i + 1)} for i in range(8)]


def run_config(model: Path, run_dir: Path, **options: Any) -> dict[str, Any]:
    return {
        "algorithm": "sft",
        "model": str(model),
        "run_dir": str(run_dir),
        "batch_size": 2,
        "max_steps": 6,
        "validation": {"every": 1},
        "checkpoint": {"every": 0, "export": False},
        "policy": {"init": "random", "max_sequence_tokens": 32},
        "plugins": {"hooks": [{"name": "early_stopping", **options}]},
    }


def test_a_run_ends_when_the_metric_of_the_config_stops_improving(tiny_model: Path, tmp_path: Path) -> None:
    # Nothing improves by more than 100 nats: the second and third validation count against it.
    options = {"metric": "val_loss", "mode": "min", "patience": 2, "min_delta": 100.0}
    config = nemorl.load_config(run_config(tiny_model, tmp_path, **options))
    result = config.build().fit(ROWS, val_dataset=ROWS, console=Console(quiet=True))
    assert (result.steps, result.stopped) == (3, "val_loss has not improved for 2 validations")
    assert (tmp_path / "checkpoints/step_000003").is_dir()


def test_the_direction_is_that_of_the_config(tiny_model: Path, tmp_path: Path) -> None:
    # The first loss is below 100 nats, which is good enough where lower is better.
    options = {"metric": "val_loss", "mode": "min", "threshold": 100.0}
    config = nemorl.load_config(run_config(tiny_model, tmp_path, **options))
    assert config.build().fit(ROWS, val_dataset=ROWS, console=Console(quiet=True)).steps == 1


@pytest.mark.parametrize(
    ("options", "path"),
    [
        ({}, "plugins.hooks.0.patience"),
        ({"patience": 1, "metric": "validation/val_loss"}, "plugins.hooks.0.metric"),
        ({"patience": 1, "mode": "lower"}, "plugins.hooks.0.mode"),
        ({"patienc": 1}, "plugins.hooks.0.patienc"),
    ],
)
def test_options_that_would_do_nothing_are_refused(
    options: dict[str, Any], path: str, tiny_model: Path, tmp_path: Path, raises: Raises
) -> None:
    with raises(ConfigError, path=path):
        nemorl.load_config(run_config(tiny_model, tmp_path, **options))

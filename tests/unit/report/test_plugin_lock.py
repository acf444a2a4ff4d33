"""The record of a run's plugins: what is in it, what counts as a difference, and what --locked refuses."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from nemorl.config.load import load_config
from nemorl.config.run import RunConfig
from nemorl.errors import UsageError
from nemorl_trust.lock import (
    LockedPlugin,
    differences,
    locked_plugins,
    read_lock,
    refuse_other_plugins,
    write_lock,
)
from recorded_messages import Raises

GRPO = LockedPlugin("nemorl-grpo", "0.1.0", "aa", ("algorithms:grpo",))
MATH = LockedPlugin("nemorl-math-env", "0.1.0", "bb", ("environments:math",))


def run_config(model: Path, **changes: Any) -> RunConfig:
    data = {"algorithm": "grpo", "model": str(model), "data": "arithmetic", "policy": {"init": "random"}}
    return load_config({**data, **changes})


@pytest.mark.parametrize(
    ("now", "line"),
    [
        ([GRPO, MATH], None),
        ([GRPO], "nemorl-math-env 0.1.0 is not used any more"),
        ([GRPO, MATH, LockedPlugin("acme", "3", "c")], "acme 3 was not used"),
        ([dataclasses.replace(GRPO, version="0.2.0"), MATH], "nemorl-grpo was 0.1.0, is 0.2.0"),
        ([dataclasses.replace(GRPO, files_sha256="ab"), MATH], "nemorl-grpo 0.1.0: its files have changed"),
        (
            [dataclasses.replace(GRPO, parts=("algorithms:dapo",)), MATH],
            "nemorl-grpo: the run used algorithms:grpo, now algorithms:dapo",
        ),
    ],
)
def test_a_difference_is_a_line(now: list[LockedPlugin], line: str | None) -> None:
    assert differences([GRPO, MATH], now) == ([] if line is None else [line])


def test_a_lock_names_every_part_that_a_config_selects(tiny_model: Path) -> None:
    nested = {
        "name": "weighted",
        "parts": {"a": {"environment": "math"}, "b": {"environment": {"name": "format", "pattern": "x"}}},
    }
    locked = {plugin.distribution: plugin for plugin in locked_plugins(run_config(tiny_model, environment=nested))}
    assert locked["nemorl-grpo"].parts == ("algorithms:grpo",)
    assert locked["nemorl-math-env"].parts == ("datasets:arithmetic", "environments:math")
    assert locked["nemorl-tasks"].parts == ("environments:format", "environments:weighted")
    assert locked["nemorl-dtensor"].parts == ("generation_backends:hf", "training_backends:dtensor")
    assert locked["nemorl-core"].parts == ("weight_transports:in_process",)
    assert all(len(plugin.files_sha256) == 64 for plugin in locked.values())


def test_a_lock_is_read_as_it_was_written(tmp_path: Path) -> None:
    write_lock(tmp_path, [GRPO, MATH])
    assert read_lock(tmp_path / "plugins.lock.json") == [GRPO, MATH]


def test_no_record_and_an_unreadable_one_are_different_mistakes(tmp_path: Path, raises: Raises) -> None:
    with raises(UsageError):
        read_lock(tmp_path / "plugins.lock.json")
    (tmp_path / "plugins.lock.json").write_text('{"plugins": [{"name": 1}]}')
    with raises(UsageError):
        read_lock(tmp_path / "plugins.lock.json")


@pytest.mark.slow
def test_locked_refuses_other_plugins_and_says_how_they_differ(
    tiny_model: Path, tmp_path: Path, raises: Raises
) -> None:
    config = run_config(tiny_model, environment="math")
    write_lock(tmp_path, locked_plugins(config))
    record = tmp_path / "plugins.lock.json"
    refuse_other_plugins(config, record)
    data = json.loads(record.read_text())
    data["plugins"][0]["version"] = "0.0.9"
    record.write_text(json.dumps(data))
    name = data["plugins"][0]["distribution"]
    with raises(UsageError, name, "0.0.9"):
        refuse_other_plugins(config, record)


@pytest.mark.slow
def test_a_run_that_goes_on_with_other_plugins_is_warned(tiny_model: Path, tmp_path: Path) -> None:
    from nemorl_cli.console import Console

    short: dict[str, Any] = {
        "run_dir": str(tmp_path / "run"),
        "num_prompts_per_step": 2,
        "num_generations_per_prompt": 2,
        "generation": {"max_new_tokens": 3},
        "policy": {"init": "random", "max_sequence_tokens": 32},
        "environment": "math",
        "checkpoint": {"export": False},
    }
    run_config(tiny_model, **short, max_steps=1).build().fit(console=Console(quiet=True))
    record = tmp_path / "run" / "plugins.lock.json"
    plugins = [dataclasses.replace(plugin, version="0.0.1") for plugin in read_lock(record)]
    write_lock(tmp_path / "run", plugins)
    run_config(tiny_model, **short, max_steps=2).build().fit(resume=True, console=Console(quiet=True))
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    warnings = [event["message"] for event in events if event["event"] == "warning"]
    assert any("other plugins than before: nemorl-grpo was 0.0.1, is " in message for message in warnings)
    assert read_lock(record) != plugins  # what is used now is recorded


@pytest.mark.slow
def test_the_command_line_holds_a_run_to_its_record(tiny_model: Path, tmp_path: Path) -> None:
    from nemorl_cli.app import app
    from typer.testing import CliRunner

    config = tmp_path / "run.yaml"
    config.write_text(
        f"algorithm: grpo\nmodel: {tiny_model}\ndata: arithmetic\nenvironment: math\nrun_dir: {tmp_path / 'run'}\n"
    )
    refused = CliRunner().invoke(app, ["train", str(config), "--locked", "--dry-run"])
    assert isinstance(refused.exception, UsageError)
    assert "no record of plugins" in str(refused.exception)
    write_lock(tmp_path, locked_plugins(load_config(config)))
    held = CliRunner().invoke(
        app, ["train", str(config), "--lock-file", str(tmp_path / "plugins.lock.json"), "--dry-run"]
    )
    assert held.exit_code == 0, held.output

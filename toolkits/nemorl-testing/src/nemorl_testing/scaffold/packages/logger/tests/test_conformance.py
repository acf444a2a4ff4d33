"""The contract of loggers, and what this one promises besides."""

from __future__ import annotations

import csv
from pathlib import Path

from nemorl_testing import conformance

from nemorl_example.config import ExampleConfig

test_conformance = conformance("loggers", "example")


def test_a_resumed_run_appends_below_one_header(tmp_path: Path) -> None:
    for step in (1, 2):
        logger = ExampleConfig(file="found.csv").build(tmp_path)
        logger.log({"train/reward": step / 4}, step)
        logger.close()
    with (tmp_path / "found.csv").open(newline="") as file:
        assert list(csv.reader(file)) == [
            ["step", "name", "value"],
            ["1", "train/reward", "0.25"],
            ["2", "train/reward", "0.5"],
        ]

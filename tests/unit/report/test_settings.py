"""The settings of a run as the page shows them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nemorl_report.run_data import RunData
from nemorl_report.viewing.settings import settings_of


def settings(folder: Path, config: str) -> dict[str, Any]:
    (folder / "config.yaml").write_text(config)
    return settings_of(RunData.load(folder))


def test_settings_are_told_also_where_the_model_is_gone(tmp_path: Path) -> None:
    found = settings(tmp_path, f"algorithm: grpo\nmodel: {tmp_path}/moved\nmax_steps: 7\n")
    assert found["problem"] == ""
    told = {row["key"]: (row["value"], row["default"]) for row in found["rows"]}
    assert told["max_steps"] == ("7", "null")
    assert told["policy.model_name"][0] == f"{tmp_path}/moved"
    assert "records.every" not in told


def test_a_config_that_no_longer_loads_says_what_is_wrong_with_it(tmp_path: Path) -> None:
    found = settings(tmp_path, "algorithm: grpo\nmodel: org/model\nnum_minibatchs: 2\n")
    assert found["rows"] == []
    assert "num_minibatchs" in found["problem"]

"""The settings of a run as the page shows them, and folders that are no run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from nemorl_cli.report.charts import _label
from nemorl_cli.report.run_data import RunData, no_run
from nemorl_cli.report.viewing.settings import settings_of


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


def test_a_folder_of_runs_is_no_run_and_they_are_named(tmp_path: Path) -> None:
    for name in ("sft", "grpo"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").touch()
    assert f"fix: give one of the runs in it: {tmp_path}/grpo, {tmp_path}/sft" in str(no_run(tmp_path))


def test_a_part_is_shown_by_the_name_that_a_config_writes(tmp_path: Path) -> None:
    config = {
        "algorithm": "grpo", "model": "org/model", "data": "arithmetic", "environment": "math",
        "policy": {"backend": "megatron", "lora": {}},
    }  # fmt: skip
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    (tmp_path / "metrics.jsonl").write_text("")
    told = {row["key"]: row["value"] for row in settings_of(RunData.load(tmp_path))["rows"]}
    assert (told["environment"], told["data"], told["policy.backend"]) == ("math", "arithmetic", "megatron")
    assert told["policy.lora"] == "set"
    assert not [value for value in told.values() if value.endswith("Config")]


def test_a_curve_is_labelled_in_words() -> None:
    names = ["system/node.0.mem_gib", "system/node.0.mem_total_gib"]
    assert [_label(name, names) for name in names] == ["node 0 memory", "node 0 memory total"]
    assert _label("validation/pass@8_of_0.9", ["validation/pass@8_of_0.9"]) == "pass@8 of 0.9"

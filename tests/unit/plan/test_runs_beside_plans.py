"""A run beside its plan: what it refits, and the section of the report."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from nemorl.errors import UsageError
from nemorl.plugins.index import PluginPolicy
from nemorl.plugins.registry import registry
from nemorl_cli.report.run_data import RunData
from nemorl_cli.report.sections import sections_of
from nemorl_insight.plan.command import app
from nemorl_insight.plan.measured import compare
from nemorl_insight.plan.section import PlanSectionConfig
from typer.testing import CliRunner

LLAMA_8B = {
    **{"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32},
    **{"num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256, "tie_word_embeddings": False},
}
GRPO = {"algorithm": "grpo", "model": "org/llama-8b", "data": "arithmetic", "environment": "math"}


def called(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run of three steps, each 4 s of training and 3 s of sampling."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    folder = tmp_path / "run"
    folder.mkdir()
    config = {**GRPO, "model": str(tmp_path), "generation": {"backend": "vllm"}, "policy": {"precision": "bfloat16"}}
    (folder / "config.yaml").write_text(json.dumps(config))
    timings = {"timing/train/policy_training": 4.0, "timing/train/generation": 3.0}
    lengths = {"train/mean_gen_tokens_per_sample": 64.0, "train/max_gen_tokens_per_sample": 128.0}
    lines = [json.dumps({"step": step, "time": float(step), **timings, **lengths}) for step in (1, 2, 3)]
    (folder / "metrics.jsonl").write_text("\n".join(lines))
    (folder / "environment.json").write_text(json.dumps({"platform": platform.platform(), "cpus": os.cpu_count()}))
    return folder


def test_efficiencies_are_refitted_from_a_run(run_dir: Path) -> None:
    found = compare(run_dir, fleet_from=(1, "8xH100", None))
    rows = {name: (planned, measured, ratio) for name, planned, measured, ratio in found.rows()}
    planned, measured, ratio = rows["policy_training"]
    assert (measured, ratio) == (4.0, 4.0 / planned)
    assert found.refitted.training == pytest.approx(0.40 * planned / 4.0)  # as much slower as the run was
    assert found.refitted.decode == pytest.approx(0.6 * rows["generation"][0] / 3.0)


def test_a_refit_plans_with_the_lengths_of_the_run_and_writes(run_dir: Path, tmp_path: Path) -> None:
    config_file = tmp_path / "grpo.yaml"
    config_file.write_text(json.dumps({**GRPO, "policy": {"precision": "bfloat16"}, "generation": {"backend": "vllm"}}))
    target, flags = tmp_path / "planned.yaml", ("--gpus", "8xH100", "--json", "--top", 2, "--write")
    done = called(config_file, "--from", run_dir, "--model-config", tmp_path / "config.json", *flags, target)
    assert done.exit_code == 0, done.output
    answer = json.loads(done.output)
    assert answer["work"]["response_tokens"] == 64
    assert answer["work"]["longest_response"] == 128
    assert len(answer["candidates"]) == 2
    assert answer["refitted"]["phases"]["policy_training"]["measured_s"] == 4.0
    assert target.is_file()
    done = called("--from", run_dir, "--gpus", "8xH100", "--write", target)
    assert isinstance(done.exception, UsageError)


def test_lengths_of_data_without_responses_are_those_of_a_step(run_dir: Path) -> None:
    config = {"algorithm": "sft", "model": str(run_dir.parent), "data": "arithmetic", "batch_size": 8}
    (run_dir / "config.yaml").write_text(json.dumps(config))
    line = {"step": 1, "time": 1.0, "timing/train/policy_training": 4.0, "train/total_num_tokens": 8 * 100.0}
    (run_dir / "metrics.jsonl").write_text(json.dumps(line))
    found = compare(run_dir, fleet_from=(1, "8xH100", None)).lengths
    assert (found.prompt, found.response) == (pytest.approx(25), pytest.approx(75))


def test_the_report_shows_predicted_beside_measured(run_dir: Path) -> None:
    section = PlanSectionConfig(gpus="8xH100").build()(RunData.load(run_dir))
    _, table = section.blocks
    assert [row[0] for row in table.rows] == ["generation", "policy training"]
    assert [row[2] for row in table.rows] == [3.0, 4.0]


def test_a_run_that_cannot_be_planned_has_that_section_only_where_it_is_asked_for(run_dir: Path) -> None:
    run = RunData.load(run_dir)
    unknown = replace(run, config={**run.config, "model": "nobody/knows"})
    assert PlanSectionConfig().build()(unknown) is None
    (text,) = PlanSectionConfig(gpus="8xH100").build()(unknown).blocks
    assert "nobody/knows" in text.text


def test_a_report_has_the_section_unasked_where_the_run_was(run_dir: Path) -> None:
    run = RunData.load(run_dir)
    run = replace(run, config={**run.config, "cluster": {"gpus_per_node": 0}})
    (section,) = sections_of(run, registry(), print)
    assert section.title == "Predicted and measured"
    assert "1 x 1 CPU" in section.blocks[0].text  # type: ignore[union-attr]
    elsewhere = replace(run, environment={**run.environment, "cpus": 1 + (os.cpu_count() or 0)})
    assert [*sections_of(elsewhere, registry(), print)] == []
    blocked = registry().restricted(PluginPolicy(block=("nemorl-insight",)))
    assert [*sections_of(run, blocked, print)] == []


def test_sampling_beside_training_is_measured_by_how_long_the_generator_was_busy(run_dir: Path) -> None:
    config = json.loads((run_dir / "config.yaml").read_text())
    apart = {"rollouts": {"mode": "async"}, "cluster": {"colocated": False, "gpus_per_node": 8}}
    (run_dir / "config.yaml").write_text(json.dumps({**config, **apart}))
    timings = {"timing/train/policy_training": 4.0, "timing/train/total_step_time": 10.0}
    for step, busy in ((1, 1.0), (2, 1.0), (3, 7.5)):  # the first two steps build
        line = {"step": step, "time": float(step), **timings, "performance/generator_busy_s": busy}
        with (run_dir / "metrics.jsonl").open("w" if step == 1 else "a") as file:
            file.write(json.dumps(line) + "\n")
    found = compare(run_dir, fleet_from=(1, "8xH100", None))
    rows = {name: measured for name, _, measured, _ in found.rows()}
    assert rows["generation"] == 7.5
    assert found.refitted.decode == pytest.approx(0.6 * found.predicted["generation"] / 7.5)


def test_a_part_that_took_no_time_refits_nothing(run_dir: Path) -> None:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    text = "\n".join(json.dumps({**line, "timing/train/weight_sync": 0.0}) for line in lines)
    (run_dir / "metrics.jsonl").write_text(text)
    found = compare(run_dir, fleet_from=(1, "8xH100", None))
    assert found.measured["weight_sync"] == 0.0
    assert found.refitted.links > 0

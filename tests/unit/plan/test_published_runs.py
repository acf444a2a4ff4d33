"""NeMo RL's published runs beside their plans: the ratios are kept as data, so that none drifts unseen."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from nemorl_insight.plan.seconds import step_time
from nemorl_rl.planning.devices import Fleet, device_named, parse_fleet
from nemorl_rl.planning.memory.budgets import fullest

RATIOS = Path(__file__).parent / "published_ratios.json"
BOUND = 1.5
FAR = {
    "0.4 deepseek-v3, 512 H100, 1 off",
    "0.6 deepseek-v3, 512 H100, 1 off",
    "0.6 deepseek-v3, 256 GB200, 1 off",
    "0.6 qwen3-235b-a22b, 128 GB200, on policy",
}
"""Why: docs/results/planner.md."""
LARGE = ("deepseek-v3", "qwen3-235b-a22b")
"""Models of which no constant was fitted to any run."""


@pytest.fixture(scope="module")
def published() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[3] / "benchmarks"))
        yield importlib.import_module("nemo_rl_runs")


def test_published_seconds_are_planned_within_a_factor_of_one_and_a_half(published: Any) -> None:
    kept = json.loads(RATIOS.read_text())
    found = {run.name: published.ratio(run, run.scene()) for run in published.runs()}
    assert {name: round(ratio, 2) for name, ratio in found.items()} == kept, (
        "update the file and docs/results/planner.md"
    )
    assert {name for name, ratio in found.items() if not 1 / BOUND <= ratio <= BOUND} == FAR
    assert len(found) - len(FAR) >= len(found) * 15 / 18


def test_constants_that_were_fitted_to_other_runs_do_as_well(published: Any) -> None:
    runs = {run: run.scene() for run in published.runs() if run.release != "0.4" and run.model not in LARGE}
    ratios = [ratio for ratio, _ in published.left_out(runs).values()]
    assert sum(1 / BOUND <= ratio <= BOUND for ratio in ratios) >= len(ratios) - 1


def test_every_set_up_that_ran_fits_with_the_reference_where_it_was(published: Any) -> None:
    """NeMo RL has the frozen reference in the host's memory while the policy trains; on the device two do not fit."""
    large = {run.name for run in published.runs() if not fullest(run.scene(open_microbatch=True)).fits}
    assert large == {"0.5 llama-3.1-8b, 16 H100, 1 off", "0.5 qwen3-32b, 32 GB200, 1 off"}
    for run in published.runs():
        assert fullest(run.scene(open_microbatch=True, offload={"reference": True})).fits, run.name


def test_the_largest_models_fit_and_are_planned_as_published(published: Any) -> None:
    runs = {run.name: run for run in published.runs() if run.model in LARGE}
    for name in ("0.4 deepseek-v3, 256 H100, on policy", "0.4 qwen3-235b-a22b, 128 H100, on policy"):
        scene = runs[name].scene()
        assert fullest(scene).fits
        assert 1 / BOUND <= published.ratio(runs[name], scene) <= BOUND
    # 671 G parameters without the module for multi-token prediction, 235 G: as their model cards have them.
    sizes = {run.model: run.scene().policy.geometry.parameters() for run in runs.values()}
    assert {name: round(size / 1e9) for name, size in sizes.items()} == {"deepseek-v3": 671, "qwen3-235b-a22b": 235}


def test_training_needs_no_more_than_the_device_has(published: Any) -> None:
    for run in published.runs():
        assert 0 < step_time(run.scene()).mfu < 0.5


def test_a_batch_that_is_sampled_over_several_steps_does_not_wait_for_its_longest_response(published: Any) -> None:
    # 32 engines with 64 rows each: alone they need as many steps as the longest response has tokens, 3,840, at
    # 64 * 3206 / 3840 = 53 rows. Over eight steps of training the wait is 480, at 427 rows.
    (deep,) = (run for run in published.runs() if run.max_staleness == 8)
    scene = deep.scene()
    seconds = {depth: _decoding(replace(scene, staleness=depth)) for depth in (1, 2, 4, 8)}
    assert seconds[1] > seconds[2] > seconds[4] > seconds[8]
    assert seconds[8] < seconds[1] / 2


def _decoding(scene: Any) -> float:
    return next(phase.seconds for phase in step_time(scene).phases if phase.name == "decoding")


def test_a_rack_of_nvl72_is_one_island() -> None:
    rack, node = parse_fleet(18, "4xGB200"), parse_fleet(18, "4xB200")
    assert [rack.link_gb_s(ranks) for ranks in (4, 72, 73)] == [900, 900, 50]
    assert [node.link_gb_s(ranks) for ranks in (4, 5)] == [900, 50]
    assert Fleet(device_named("H100"), 2, 8).island == 8


def test_published_pretraining_is_planned_at_most_a_half_slower() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[3] / "benchmarks"))
        runs = importlib.import_module("plan_published").RUNS
    found = [step_time(run.scene).seconds / run.seconds for run in runs]
    assert len(found) == 5
    assert all(0.95 < ratio < BOUND for ratio in found), found

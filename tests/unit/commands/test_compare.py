"""``nemorl compare``: chance is told from difference, and a planted cause is named."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from command_line import Command
from nemorl_cli.report.comparing.causes import first_parting
from nemorl_cli.report.comparing.numbers import Contrast, Estimate
from nemorl_cli.report.comparing.variants import variants_of
from record_files import write_records

CONFIG = {
    "algorithm": "grpo",
    "model": "org/model",
    "data": "arithmetic",
    "environment": "math",
    "max_steps": 10,
    "generation": {"max_new_tokens": 64},
    "policy": {"optimizer": {"lr": 1e-5}},
}
SAME = {
    "train/mean_prompt_length": 9.0,
    "train/mean_gen_tokens_per_sample": 20.0,
    "train/reward": 0.5,
    "train/loss": 0.1,
    "train/grad_norm": 1.0,
    "train/lr": 1e-5,
}


def make(folder: Path, *steps: Mapping[str, float], seed: int = 1, **config: Any) -> Path:
    """A run with these metrics, one mapping per step, and those of all others that are the same."""
    folder.mkdir()
    (folder / "config.yaml").write_text(yaml.safe_dump({**CONFIG, "seed": seed, **config}))
    lines = [{"step": number, **SAME, **step} for number, step in enumerate(steps, start=1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def contrast(first: list[float], second: list[float]) -> Contrast:
    def estimate(values: list[float]) -> Estimate:
        mean = sum(values) / len(values)
        variance = sum((value - mean) ** 2 for value in values) / (len(values) - 1)
        return Estimate(mean, (variance / len(values)) ** 0.5, len(values), of_seeds=True)

    return Contrast("m", estimate(first), estimate(second))


def test_the_margin_is_that_of_scipys_welch_interval() -> None:
    found = contrast([0.50, 0.60, 0.55], [0.70, 0.80, 0.66, 0.74])
    assert found.difference == pytest.approx(0.175)
    # scipy.stats.ttest_ind(second, first, equal_var=False).confidence_interval(0.95) is 0.06731 … 0.28269, with 4.86
    # degrees of freedom: half of it is 0.10769.
    assert found.margin == pytest.approx(0.10769, rel=1e-4)
    assert found.verdict == "differs"
    assert contrast([0.5, 0.7], [0.6, 0.8]).verdict == "noise"
    assert contrast([0.5, 0.5], [0.5, 0.5]).verdict == "same"


@pytest.mark.parametrize(
    ("count", "quantile"),
    [
        (1.5, 12.706),
        (1.75, 6.0167),
        (2, 4.303),
        (2.25, 3.5747),
        (6, 2.228),
        (8, 2.145),
        (9, 2.120),
        (16, 2.042),
        (31, 2.000),
        (61, 1.980),
    ],
)
def test_a_margin_widens_by_students_t_as_tables_have_it(count: float, quantile: float) -> None:
    """Two sides of equal errors and counts n: 2 (n - 1) degrees of freedom, error sqrt(2). NIST handbook, 1.3.6.7.2;
    for 1.5 and 2.5 degrees of freedom, ``scipy.stats.t.ppf(0.975, v)``."""
    side = Estimate(0.0, 1.0, count, of_seeds=True)
    margin = Contrast("m", side, side).margin
    assert margin is not None
    assert margin / 2**0.5 == pytest.approx(quantile, abs=1e-3)


def test_runs_that_differ_in_the_seed_alone_are_one_variant(tmp_path: Path) -> None:
    runs = [make(tmp_path / f"a{seed}", {}, seed=seed, run_dir=f"runs/a{seed}") for seed in (1, 2)]
    other = make(tmp_path / "b", {}, generation={"max_new_tokens": 32})
    first, second = variants_of([runs[0], other, runs[1], runs[0]])
    assert (first.name, first.seeds) == ("a1 (2 seeds)", [1, 2])
    assert second.name == "b"


@pytest.mark.slow
def test_seeds_give_the_noise(tmp_path: Path, nemorl: Command) -> None:
    rewards = {"a": (0.5, 0.6, 0.55), "b": (0.9, 1.0, 0.95)}
    folders = [
        make(tmp_path / f"{name}{seed}", {"train/reward": reward, "train/loss": 0.1 * seed}, seed=seed, max_steps=steps)
        for (name, values), steps in zip(rewards.items(), (10, 11), strict=True)
        for seed, reward in enumerate(values)
    ]
    done = nemorl("compare", *folders, "--json")
    assert done.code == 0, done.err
    (answer,) = done.json["compared"]
    reward = answer["metrics"]["train/reward"]
    assert reward["difference"] == pytest.approx(0.4)
    # both errors are 0.05 / sqrt(3); 4 degrees of freedom: 2.776 * sqrt(2) * 0.05 / sqrt(3) = 0.1133
    assert reward["margin"] == pytest.approx(0.1133, abs=1e-4)
    assert reward["verdict"] == "differs"
    assert answer["metrics"]["train/loss"]["verdict"] == "same"


PLANTED = [
    ("generation.max_new_tokens", {"generation": {"max_new_tokens": 32}}, 1, "train/mean_gen_tokens_per_sample"),
    ("environment", {"environment": "exact_match"}, 1, "train/reward"),
    ("clip_high", {"clip_high": 0.4}, 1, "train/loss"),
    ("policy.optimizer.lr", {"policy": {"optimizer": {"lr": 1e-3}}}, 1, "train/grad_norm"),
    ("policy.optimizer.lr", {"policy": {"optimizer": {"lr": 1e-3}}}, 2, "train/mean_gen_tokens_per_sample"),
    ("data", {"data": "word_problems"}, 1, "train/mean_prompt_length"),
]


@pytest.mark.parametrize(
    ("key", "change", "step", "metric"),
    [*PLANTED[:2], *(pytest.param(*planted, marks=pytest.mark.full) for planted in PLANTED[2:])],
)
@pytest.mark.slow
def test_the_planted_cause_is_the_likely_one(
    key: str, change: dict[str, Any], step: int, metric: str, tmp_path: Path, nemorl: Command
) -> None:
    """Beside the cause there are keys that change no result: a longer run, which saves more often."""
    neutral = {"max_steps": 20, "checkpoint": {"every": 3}}
    first = make(tmp_path / "first", {}, {}, {})
    steps = [{metric: 7.0, "train/grad_norm": 8.0} if number >= step else {} for number in (1, 2, 3)]
    second = make(tmp_path / "second", *steps, **neutral, **change)
    done = nemorl("compare", first, second, "--json")
    (answer,) = done.json["compared"]
    assert answer["likely_causes"] == [key]
    assert (answer["parting"]["step"], answer["parting"]["metric"]) == (step, metric)
    shown = nemorl("compare", first, second).out.partition("Likely causes")[2]
    assert 0 < shown.index(f"  {key}: ") < shown.index("No cause: ") < shown.index("max_steps")


@pytest.mark.slow
def test_runs_of_different_seeds_say_nothing_of_where_they_part(tmp_path: Path, nemorl: Command) -> None:
    first = make(tmp_path / "first", {})
    second = make(tmp_path / "second", {"train/reward": 0.9}, seed=2, clip_high=0.4)
    assert first_parting(*variants_of([first, second])) is None
    shown = nemorl("compare", first, second).out
    assert "where a cause takes effect is not known" in shown
    assert "clip_high" in shown
    assert "unknown" in shown  # one value each: nothing is known of the noise


def test_any_two_runs_of_one_seed_show_where_they_part(tmp_path: Path) -> None:
    steps = [{}, {"train/reward": 0.75}]
    runs = [make(tmp_path / "a", {}, {}), make(tmp_path / "b", {}, {}, max_steps=11)]
    runs += [make(tmp_path / "a2", {}, {}, seed=2), make(tmp_path / "b2", *steps, seed=2, max_steps=11)]
    found = first_parting(*variants_of(runs))
    assert found is not None
    assert (found.step, found.metric) == (2, "train/reward")


def plugins(folder: Path, version: str) -> None:
    plugin = {"distribution": "acme-env", "version": version, "files_sha256": "", "parts": ["environments:acme"]}
    (folder / "plugins.lock.json").write_text(json.dumps({"plugins": [plugin]}))
    (folder / "environment.json").write_text(json.dumps({"libraries": {"torch": f"2.{version}"}}))


@pytest.mark.slow
def test_another_version_of_the_environment_explains_other_rewards(tmp_path: Path, nemorl: Command) -> None:
    first, second = make(tmp_path / "first", {}), make(tmp_path / "second", {"train/reward": 0.9}, max_steps=11)
    plugins(first, "1.0")
    plugins(second, "1.1")
    (answer,) = nemorl("compare", first, second, "--json").json["compared"]
    assert answer["likely_causes"] == ["acme-env was 1.0, is 1.1"]
    assert {one["key"] for one in answer["differences"]} == {"max_steps", "plugin", "environment.libraries.torch"}
    shown = nemorl("compare", first, second).out
    assert shown.index("Possible causes") < shown.index("environment.libraries.torch")


AGENT = {"train/environment/outcome_finished": 1.0}
DEBATE = {"train/avg_turns_per_sample": 3.0}
SHORTER = {"train/mean_gen_tokens_per_sample": 12.0, "train/reward": 0.2}


def inputs(folder: Path, **changes: Any) -> None:
    (folder / "inputs.json").write_text(json.dumps({"data": "40 rows 1a", "validation": None, "code": {}, **changes}))


@pytest.mark.parametrize("kind", [AGENT, DEBATE], ids=["agent", "conversation"])
def test_another_program_that_drives_the_policy_explains_other_responses(
    kind: dict[str, float], tmp_path: Path, nemorl: Command
) -> None:
    agents = [{"name": "agent", "command": ["python", f"agent{number}.py"]} for number in (1, 2)]
    first = make(tmp_path / "a", kind, environment=agents[0])
    second = make(tmp_path / "b", {**kind, **SHORTER}, environment=agents[1])
    [answer] = nemorl("compare", first, second, "--json").json["compared"]
    assert answer["likely_causes"] == ["environment.command"]


@pytest.mark.parametrize(
    ("change", "parting", "cause"),
    [
        ({"code": {"agent.py": "2"}}, {**AGENT, **SHORTER}, "the code of agent.py"),
        ({"code": {"rewards.py": "2"}}, {"train/reward": 0.2}, "the code of rewards.py"),
        ({"data": "40 rows 2b"}, {"train/mean_prompt_length": 8.0}, "the training rows"),
    ],
    ids=["agent", "reward", "rows"],
)
def test_other_code_or_rows_of_one_config_are_a_likely_cause(
    change: dict[str, Any], parting: dict[str, float], cause: str, tmp_path: Path, nemorl: Command
) -> None:
    agent = AGENT if "agent" in cause else {}
    first, second = make(tmp_path / "a", agent), make(tmp_path / "b", parting)
    inputs(first, code=dict.fromkeys(change.get("code", {}), "1"))
    inputs(second, **change)
    [answer] = nemorl("compare", first, second, "--json").json["compared"]
    assert answer["likely_causes"] == [cause]


def test_runs_of_other_code_are_no_repetitions(tmp_path: Path) -> None:
    folders = [make(tmp_path / name, {}, seed=seed) for seed, name in enumerate("abc")]
    for folder, digest in zip(folders, "112", strict=True):
        inputs(folder, code={"rewards.py": digest})
    assert [len(variant.runs) for variant in variants_of(folders)] == [2, 1]


@pytest.mark.parametrize("width", [50, 160])
@pytest.mark.slow
def test_the_same_prompts_are_side_by_side_and_do_not_act(
    width: int, tmp_path: Path, nemorl: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    first, second = make(tmp_path / "first", {}), make(tmp_path / "second", {"train/reward": 1.0}, seed=2)
    for run, rewards in ((first, (1.0, 0.0)), (second, (1.0, 1.0))):
        rows = [
            {
                "split": "validation",
                "step": 10,
                "prompt": f"task {i}",
                "response": f"\x1b[2J of {run.name}",
                "reward": r,
            }
            for i, r in enumerate(rewards)
        ]
        write_records(run, rows)
    shown = nemorl("compare", first, second, "--prompts", 1).out
    words = " ".join(shown.split())
    assert "both right 1, only the first 0, only the second 1, neither 0." in words
    assert "task 1" in shown  # their rewards differ most
    assert "task 0" not in shown
    assert "\x1b" not in shown
    assert "\\x1b[2J of first" in shown
    (answer,) = nemorl("compare", first, second, "--json").json["compared"]
    assert answer["prompts"] == {
        "split": "validation", "step": 10, "both": 1, "first_only": 0, "second_only": 1, "neither": 0
    }  # fmt: skip


@pytest.mark.slow
def test_what_cannot_be_compared_is_refused(tmp_path: Path, nemorl: Command) -> None:
    run = make(tmp_path / "run", {})
    assert "one run is nothing to compare" in nemorl("compare", run).err
    assert "one and the same run" in nemorl("compare", run, run).err
    assert "not a run directory" in nemorl("compare", run, tmp_path).err
    other = make(tmp_path / "other", {}, seed=2)
    done = nemorl("compare", run, other, "--metric", "rewrad")
    assert done.code == 2
    assert "no metric has 'rewrad' in its name" in done.err

"""``compare bisect``: of many differences those that matter are found, in as few probes as the algorithms promise."""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from command_line import Command
from installed_plugins import write_distribution
from made_runs import CONFIG, LOCK, changed, make_run, with_config, with_version
from nemorl.base.files.ownership import Ownership
from nemorl_cli.report.comparing.numbers import Estimate
from nemorl_insight.diff.bisecting import BudgetSpent, Judge, guilty_checkpoint, guilty_settings
from nemorl_insight.diff.deltas import Delta, as_installed, config_deltas, folders_in_front, plugin_deltas
from nemorl_insight.diff.journal import Journal
from nemorl_insight.diff.probing import Evaluations, Measured, ShortRuns
from nemorl_insight.diff.run_files import RunFiles
from nemorl_insight.diff.searching import Outcome, first_bad, minimal
from recorded_messages import Raises


class Asked:
    """A test that counts how often it is asked anew."""

    def __init__(self, fails: Callable[[frozenset[int]], bool]) -> None:
        self._fails, self.tried = fails, set[frozenset[int]]()

    def __call__(self, chosen: Sequence[int]) -> Outcome:
        self.tried.add(frozenset(chosen))
        return "falls" if self._fails(frozenset(chosen)) else "holds"


@pytest.mark.parametrize("size", [2, 8, 64])
def test_one_cause_takes_at_most_twice_the_logarithm(size: int) -> None:
    """Zeller and Hildebrandt 2002, proposition 12: with one failure-inducing change, t <= 2 log2(n)."""
    for cause in range(size):
        asked = Asked(lambda chosen, cause=cause: cause in chosen)
        assert minimal(range(size), asked) == [cause]
        assert len(asked.tried) <= 2 * math.log2(size)


def test_the_papers_example_is_minimised() -> None:
    """The same paper, figure 3: of changes 1 to 8, the failure needs 1, 7 and 8."""
    asked = Asked(lambda chosen: {1, 7, 8} <= chosen)
    assert minimal(range(1, 9), asked) == [1, 7, 8]


def test_what_is_left_needs_each_of_its_parts() -> None:
    """1-minimality, proposition 11, and the bound n^2 + 3n of proposition 10, where causes need each other."""
    chance = random.Random(0)
    for _ in range(100):
        size = chance.randint(2, 20)
        causes = [frozenset(chance.sample(range(size), chance.randint(1, min(4, size)))) for _ in range(2)]
        asked = Asked(lambda chosen, causes=causes: any(cause <= chosen for cause in causes))
        found = minimal(range(size), asked)
        assert asked(found) == "falls"
        assert all(asked([one for one in found if one != left_out]) == "holds" for left_out in found)
        assert len(asked.tried) <= size * size + 3 * size


def git(folder: Path, *arguments: str) -> str:
    environment = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    author = ["-c", "user.name=a", "-c", "user.email=a@b"]
    done = subprocess.run(
        ["git", *author, *arguments], cwd=folder, capture_output=True, text=True, check=True, env=environment
    )
    return done.stdout


def test_checkpoints_are_searched_in_as_few_probes_as_git_bisect_takes(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    for number in range(10):
        git(tmp_path, "commit", "-q", "--allow-empty", "-m", str(number))
    for bad in (1, 4, 9):
        git(tmp_path, "bisect", "start", "HEAD", "HEAD~9")
        script = f'echo >> asked; test "$(git log -1 --format=%s)" -lt {bad}'
        found = git(tmp_path, "bisect", "run", "sh", "-c", script)
        gits = len((tmp_path / "asked").read_text().splitlines())
        (tmp_path / "asked").unlink()
        git(tmp_path, "bisect", "reset")
        asked: list[int] = []

        def test(step: int, bad: int = bad, asked: list[int] = asked) -> Outcome:
            asked.append(step)
            return "falls" if step >= bad else "holds"

        assert first_bad(range(10), test) == (bad - 1, bad)
        assert "is the first bad commit" in found
        assert len(asked) <= math.ceil(math.log2(9))
        assert abs(len(asked) - gits) <= 1  # of 9 or 8, one may take a step more


def test_a_checkpoint_that_says_nothing_is_passed_over() -> None:
    outcomes: dict[int, Outcome] = {2: "unresolved", 3: "falls", 1: "holds"}
    assert first_bad(range(5), lambda step: outcomes[step]) == (1, 3)


def test_differences_are_keys_and_whole_parts_where_another_part_takes_the_place(tmp_path: Path) -> None:
    good = make_run(tmp_path / "good")
    muon = {"optimizer": {"name": "muon", "lr": 1e-5}, "max_grad_norm": 0.1}
    bad = changed(good, tmp_path / "bad", with_config(policy=muon, seed=3, max_steps=9, kl_penalty=0.5))
    found = config_deltas(RunFiles.of(good), RunFiles.of(bad))
    assert [delta.text.partition(":")[0] for delta in found] == [
        "kl_penalty", "policy.max_grad_norm", "policy.optimizer"
    ]  # fmt: skip
    data: dict[str, Any] = json.loads(json.dumps(CONFIG))
    for delta in found:
        delta.apply(data)
    assert (data["kl_penalty"], data["policy"]["optimizer"]["name"], data["seed"]) == (0.5, "muon", 42)


def test_a_plugins_other_version_comes_first_where_it_is_tried(tmp_path: Path, raises: Raises) -> None:
    good = RunFiles.of(make_run(tmp_path / "good"))
    bad = RunFiles.of(changed(good.path, tmp_path / "bad", with_version("0.2.0")))
    folders = {version: tmp_path / version for version in ("0.1.0", "0.2.0", "0.3.0")}
    for version, folder in folders.items():
        folder.mkdir()
        write_distribution(folder, LOCK["distribution"], {}, version=version)
    assert plugin_deltas(good, bad, []) == []
    newer = plugin_deltas(good, bad, [folders["0.2.0"]])
    assert (folders_in_front(newer, []), folders_in_front(newer, [0])) == ([], [folders["0.2.0"]])
    older = plugin_deltas(good, bad, [folders["0.1.0"]])
    assert (folders_in_front(older, []), folders_in_front(older, [0])) == ([folders["0.1.0"]], [])
    with raises(ValueError):
        plugin_deltas(good, bad, [folders["0.3.0"]])
    (told,) = as_installed(good, bad, [])  # the good run's version is installed, with other files
    assert told == "nemorl-grpo 0.1.0 (the good run had other files, the bad run had 0.2.0)"
    assert as_installed(good, bad, newer) == []


class Pretended(ShortRuns):
    """Probes whose metric is a formula."""

    def measure(self, name: str, chosen: Sequence[int]) -> Measured:
        keys = {self.deltas[number].text.partition(":")[0] for number in chosen}
        if "clip_low" in keys and "num_minibatches" not in keys:
            return Measured(None, "these settings do not go together")
        return Measured(Estimate(0.2 if "policy.optimizer.lr" in keys else 0.9, 0.01, 20, of_seeds=False))


@pytest.fixture
def pretended(tmp_path: Path) -> Pretended:
    good = make_run(tmp_path / "good")
    policy = {"optimizer": {"lr": 1e-2}, "max_grad_norm": 9.0}
    changes = with_config(policy=policy, kl_penalty=0.5, normalize_std=False, clip_low=0.1, num_minibatches=2)
    bad = changed(good, tmp_path / "bad", changes)
    deltas: list[Delta] = [*config_deltas(RunFiles.of(good), RunFiles.of(bad))]
    (tmp_path / "found").mkdir()
    return Pretended(RunFiles.of(good), deltas, "train/reward", 20, 1, 0, tmp_path / "found")


def test_a_search_goes_on_where_its_budget_ended(pretended: Pretended, raises: Raises) -> None:
    told: list[str] = []

    def judge(budget: int) -> Judge:
        return Judge(Journal(pretended.folder, {"metric": "train/reward"}), "train/reward", budget, told.append)

    with pytest.raises(BudgetSpent):
        guilty_settings(pretended, judge(3), lower_is_better=False)
    assert len(told) == 3
    (found,) = guilty_settings(pretended, judge(50), lower_is_better=False)
    assert found.text == "policy.optimizer.lr: 1e-05 -> 0.01"
    assert told[0] == "1. the good run's settings: train/reward 0.9 ± 0.01, the good end"
    assert told[1] == "2. all of the bad run's settings: train/reward 0.2 ± 0.01, the bad end"
    assert any("which says nothing" in line for line in told)
    assert len(told) == len({line.partition(". ")[2] for line in told})  # none was made twice
    before = len(told)
    guilty_settings(pretended, judge(50), lower_is_better=False)
    assert len(told) == before
    with raises(ValueError):
        Journal(pretended.folder, {"metric": "train/accuracy"})


def test_a_probe_that_was_cut_off_is_made_again_and_no_other(
    pretended: Pretended, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    whole = Pretended.measure

    def measure(runs: Pretended, name: str, chosen: Sequence[int]) -> Measured:
        made.append(name)
        if made == ["probe_001", "probe_002", "probe_003"]:
            raise KeyboardInterrupt  # as SIGKILL, it leaves what was written before
        return whole(runs, name, chosen)

    def search() -> Judge:
        judge = Judge(Journal(pretended.folder, {}), "train/reward", 50, lambda _: None)
        assert [delta.text for delta in guilty_settings(pretended, judge, lower_is_better=False)] == [
            "policy.optimizer.lr: 1e-05 -> 0.01"
        ]
        return judge

    monkeypatch.setattr(Pretended, "measure", measure)
    with pytest.raises(KeyboardInterrupt):
        search()
    names = [probe.name for probe in search().journal.probes]
    assert made == [*names[:3], *names[2:]]
    assert len(set(names)) == len(names)


def test_a_probe_whose_run_still_goes_on_is_not_judged(pretended: Pretended, raises: Raises) -> None:
    left = pretended.folder / "probe_001/seed_0"
    left.mkdir(parents=True)
    judge = Judge(Journal(pretended.folder, {}), "train/reward", 50, lambda _: None)
    runs = ShortRuns(pretended.good, pretended.deltas, "train/reward", 20, 1, 0, pretended.folder)
    with closing(Ownership(left)), raises(RuntimeError, left):
        guilty_settings(runs, judge, lower_is_better=False)
    assert judge.journal.probes == []


def test_an_export_that_was_cut_off_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def command(arguments: Sequence[str], log: Path, in_front: Sequence[Path], answer: Path | None = None) -> str:
        if arguments[0] == "export":
            exported = Path(arguments[2])
            assert not exported.exists()
            exported.mkdir()
            (exported / "config.json").write_text("{}")
            if not cut_off:
                cut_off.append(True)
                raise KeyboardInterrupt
        elif answer is not None:
            assert [path.name for path in Path(arguments[3]).iterdir()] == ["config.json"]
            answer.write_text('{"accuracy": 0.5}')
        return ""

    cut_off: list[bool] = []
    monkeypatch.setattr("nemorl_insight.diff.probing.run_command", command)
    runs = Evaluations(RunFiles.of(make_run(tmp_path / "a")), "validation/accuracy", 1, tmp_path / "found")
    with pytest.raises(KeyboardInterrupt):
        runs.measure("probe_001", 2)
    found = runs.measure("probe_001", 2).estimate
    assert found is not None
    assert found.mean == 0.5


@pytest.mark.parametrize(
    ("metric", "answer", "mean"),
    [
        ("validation/accuracy", {"dataset": "validation", "accuracy": 0.5}, 0.5),
        ("validation/eyes/accuracy", {"dataset": "eyes", "accuracy": 0.5}, 0.5),
        ("validation/eyes/accuracy", {"datasets": {"ears": {"accuracy": 0.1}, "eyes": {"accuracy": 0.5}}}, 0.5),
        ("validation/accuracy", {"datasets": {"ears": {"accuracy": 0.1}, "eyes": {"accuracy": 0.5}}}, None),
    ],
)
def test_an_evaluation_of_several_sets_has_the_metrics_of_each(
    tmp_path: Path, metric: str, answer: dict[str, Any], mean: float | None
) -> None:
    runs = Evaluations(RunFiles.of(make_run(tmp_path / "a")), metric, 1, tmp_path / "found")
    (tmp_path / "found/probe_001/model").mkdir(parents=True)
    (tmp_path / "found/probe_001/eval.json").write_text(json.dumps(answer))
    found = runs.measure("probe_001", 2)
    assert found == Measured(None if mean is None else Estimate(mean, None, 1, False), found.problem)
    assert (mean is None) == ("validation/ears/accuracy" in found.problem)


def test_two_searches_do_not_share_a_folder(tmp_path: Path, nemorl: Command) -> None:
    good = make_run(tmp_path / "good")
    bad = changed(good, tmp_path / "bad", with_config(kl_penalty=0.5))
    folder = tmp_path / "bisect-good-bad"
    folder.mkdir()
    with closing(Ownership(folder)):
        done = nemorl("compare", "bisect", good, bad, "--metric", "train/reward")
    assert (done.code, done.out) == (2, "")
    assert "is in use by process" in done.err


def test_ends_that_are_alike_are_refused(pretended: Pretended, raises: Raises) -> None:
    judge = Judge(Journal(pretended.folder, {}), "train/reward", 9, lambda _: None)
    with raises(ValueError, "train/reward", 0.9):
        guilty_settings(pretended, judge, lower_is_better=True)


def test_checkpoints_are_judged_by_their_evaluation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(_: Evaluations, name: str, step: int) -> Measured:
        return Measured(Estimate(0.8 if step < 60 else 0.3, None, 1, of_seeds=False))

    monkeypatch.setattr(Evaluations, "measure", measure)
    runs = Evaluations(RunFiles.of(make_run(tmp_path / "a")), "validation/accuracy", 1, tmp_path / "found")
    runs.folder.mkdir()
    judge = Judge(Journal(tmp_path / "found", {}), "validation/accuracy", 9, lambda _: None)
    assert guilty_checkpoint(runs, range(10, 101, 10), judge, lower_is_better=False) == (50, 60)
    assert len(judge.journal.probes) <= 2 + math.ceil(math.log2(9))


def test_no_probe_falls_that_is_as_good_or_says_nothing(pretended: Pretended, tmp_path: Path, raises: Raises) -> None:
    """What is told of a probe agrees with its number: equal ends, the middle, a metric that is bad when it rises."""
    told: list[str] = []
    ends = [("a", "one end", 0.5), ("b", "the other", 0.5)]

    def probes(values: Sequence[tuple[str, str, float]]) -> list[tuple[str, str, Callable[[str], Measured]]]:
        return [(key, words, lambda _, value=value: measured(value)) for key, words, value in values]

    def measured(value: float) -> Measured:
        return Measured(Estimate(value, 0.001, 20, of_seeds=False))

    judge = Judge(Journal(pretended.folder, {}), "train/reward", 9, told.append)
    with raises(ValueError):
        judge.ends(probes(ends), lower_is_better=False)
    assert not [line for line in told if "falls" in line]
    (tmp_path / "loss").mkdir()
    judge = Judge(Journal(tmp_path / "loss", {}), "train/loss", 9, told.append)
    judge.ends(probes([("a", "one end", 0.25), ("b", "the other", 0.75)]), lower_is_better=True)
    assert [judge.outcome(str(v), f"with {v}", lambda _, v=v: measured(v)) for v in (0.3, 0.5, 0.7)] == [
        "holds", "unresolved", "falls"
    ]  # fmt: skip
    assert told[-1].endswith("it rises")
    assert "falls" not in " ".join(told)

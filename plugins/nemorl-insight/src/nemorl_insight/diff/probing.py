"""Probes of a bisection: each a run of its own in the bisection's folder, made by a process of its own.

A probe that is there is not made again, and one that was interrupted goes on: ``nemorl train`` sees to that.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemorl.base.files.atomic import replace_text
from nemorl.base.files.jsonl import read_jsonl
from nemorl.base.files.ownership import Ownership
from nemorl.base.files.sealed_folders import discard
from nemorl.base.text.reading import parse_json
from nemorl.config.load import load_config
from nemorl.errors import NemorlError
from nemorl.storage.run_directory import to_yaml
from nemorl_cli.report.comparing.numbers import Estimate
from nemorl_cli.report.comparing.variants import Variant
from nemorl_cli.report.run_data import RunData

from nemorl_insight.diff.deltas import ConfigDelta, Delta, folders_in_front
from nemorl_insight.diff.replaying import link_checkpoint
from nemorl_insight.diff.run_files import RunFiles


@dataclass(frozen=True)
class Measured:
    """Result of a probe."""

    estimate: Estimate | None
    """``None``: it has no value, and ``problem`` says why."""
    problem: str = ""


@dataclass(frozen=True)
class ShortRuns:
    """Probes that train for some steps: the good run's config with some of the bad run's settings."""

    good: RunFiles
    deltas: Sequence[Delta]
    metric: str
    steps: int
    seeds: int
    from_step: int
    """The good run's checkpoint that they start from; 0: from the beginning."""
    folder: Path

    def measure(self, name: str, chosen: Sequence[int]) -> Measured:
        """The metric with these deltas on, over all seeds.

        Raises:
            RunInUseError: a search that was killed has left the run of this probe behind, and it still goes on.
        """
        runs = []
        for number in range(self.seeds):
            run_dir = self.folder / name / f"seed_{number}"
            if run_dir.is_dir():
                Ownership(run_dir).close()
            try:
                problem = self._run(run_dir, chosen, number)
            except NemorlError as error:  # settings that do not go together
                problem = error.message
            if problem:
                return Measured(None, problem)
            runs.append(run_dir)
        variant = Variant([RunData.load(run_dir) for run_dir in runs], runs)
        estimate = Estimate.of(variant, self.metric)
        return Measured(estimate, "" if estimate is not None else f"it logged no {self.metric}")

    def _run(self, run_dir: Path, chosen: Sequence[int], seed: int) -> str:
        """Why it failed; empty where it did not."""
        last = self.from_step + self.steps
        if any(line.get("step") == last and self.metric in line for line in read_jsonl(run_dir / "metrics.jsonl")):
            return ""
        config = load_config(self._settings(run_dir, chosen, seed), for_launch=True)
        recipe = run_dir.with_suffix(".yaml")
        run_dir.parent.mkdir(parents=True, exist_ok=True)
        replace_text(recipe, to_yaml(config))
        if self.from_step and not (run_dir / "checkpoints").exists():
            link_checkpoint(self.good.checkpoints[self.from_step], self.from_step, run_dir, config)
        command = ["train", str(recipe), "--run-dir", str(run_dir), "--accept-changed-data", "--json"]
        return run_command(command, run_dir.with_suffix(".log"), folders_in_front(self.deltas, chosen))

    def _settings(self, run_dir: Path, chosen: Sequence[int], seed: int) -> dict[str, Any]:
        data = deepcopy(dict(self.good.data.config))
        for number in chosen:
            delta = self.deltas[number]
            if isinstance(delta, ConfigDelta):
                delta.apply(data)
        validates = self.metric.startswith("validation/")
        data["validation"] = {**data.get("validation", {}), "every": 0, "at_start": False, "at_end": validates}
        data["checkpoint"] = {"every": 0, "export": False, "keep_last": 1000}
        data |= {"loggers": [], "max_steps": self.from_step + self.steps, "run_dir": str(run_dir)}
        data["seed"] = int(data["seed"]) + seed
        return data


@dataclass(frozen=True)
class Evaluations:
    """Probes that evaluate a checkpoint of a run on its validation data."""

    run: RunFiles
    metric: str
    seeds: int
    folder: Path

    def measure(self, name: str, step: int) -> Measured:
        """The metric of a checkpoint: of its own process, as ``nemorl eval`` computes it."""
        place = self.folder / name
        model, answer = place / "model", place / "eval.json"
        place.mkdir(parents=True, exist_ok=True)
        if not model.exists():
            draft = place / "model-draft"
            discard(draft)
            command = ["export", str(self.run.path), str(draft), "--step", str(step)]
            problem = run_command(command, place / "export.log", ())
            if problem:
                return Measured(None, problem)
            draft.rename(model)
        if not answer.exists():
            command = ["eval", str(self.run.path), "--model", str(model), "--seeds", str(self.seeds), "--json"]
            problem = run_command(command, place / "eval.log", (), answer)
            if problem:
                return Measured(None, problem)
        return self._read(answer)

    def _read(self, answer: Path) -> Measured:
        found: Mapping[str, Any] = parse_json(answer.read_text(encoding="utf-8"))
        sets = found.get("datasets") or {found.get("dataset"): found}
        short = self.metric.removeprefix("validation/")
        for name, measured in sets.items():
            own = short.removeprefix(f"{name}/")
            value = measured.get(own)
            if isinstance(value, int | float) and (own != short or len(sets) == 1):
                error = (measured.get("standard_errors") or {}).get(own)
                return Measured(Estimate(float(value), error, self.seeds, self.seeds > 1))
        kept = f", but of each set: validation/{next(iter(sets))}/{short}" if len(sets) > 1 else ""
        return Measured(None, f"the evaluation has no {short}{kept}")


def run_command(arguments: Sequence[str], log: Path, in_front: Sequence[Path], answer: Path | None = None) -> str:
    """Run ``nemorl …`` in a process of its own; its words go to ``log``, its answer to a file.

    Returns:
        The last thing that it said, if it failed; else nothing.
    """
    paths = [*map(str, in_front), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, **({"PYTHONPATH": os.pathsep.join(paths)} if paths else {})}
    draft = answer.with_suffix(".part") if answer is not None else log.with_suffix(".out")
    with log.open("a", encoding="utf-8") as words, draft.open("w", encoding="utf-8") as out:
        command = [sys.executable, "-m", "nemorl", *arguments]
        done = subprocess.run(command, stdout=out, stderr=words, stdin=subprocess.DEVNULL, env=environment, check=False)
    if done.returncode:
        said = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
        named = [line for line in said if line.startswith("error:")]
        return (named or said or [f"exit code {done.returncode}"])[-1].removeprefix("error: ")
    if answer is not None:
        draft.rename(answer)
    return ""

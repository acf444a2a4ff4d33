"""Runs under schedules of random blows, each from a seed, each run continued until it is finished.

``python random_blows.py FOLDER --subject NAME --seeds 0:100`` writes one line per seed to ``FOLDER/results.jsonl``, and
goes on where it was when it is started again; without ``--subject`` all are played. A failure prints its seed, its
schedule and the command that plays it again.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

from blows import BALLAST, Blow, schedule

sys.path.insert(0, str(Path(__file__).parents[1]))
from forked_workers import python_that_forks
from lives import SIZES, files, warm
from ray_nodes import can_be_made
from run_checks import broken_promises, differences, metrics
from stand_ins import STAND_INS, StandIn
from subjects import SUBJECTS
from tiny_runs import STEPS
from warm import HUNG, Warm

DEADLINE_S = 300.0
"""Of one life, however many of its processes stand still."""
DISK = "16m"
INSIDE = "NEMORL_CHAOS_NETWORK"
"""Set in a network namespace of our own, where nodes may be cut off."""
ENDS_DRIVER = {"kill driver": -9, "kill raylet": 1, "kill gcs_server": 1, "headless node": 1}
"""How the driver may end by these: Ray itself exits drivers that have lost it (the supervisor of commands says so)."""


class RandomBlows:
    """Runs of one subject, on a small disk of their own where this machine lets us mount one."""

    def __init__(self, folder: Path, name: str, forks: Warm) -> None:
        self.folder, self.name, self.subject, self.forks = folder, name, SUBJECTS[name], forks
        folder.mkdir(parents=True, exist_ok=True)
        self.model = self.subject.write_model(folder / "tiny", **SIZES)
        self.whole, self.disk = folder / "whole", folder / "disk"
        shutil.rmtree(self.whole, ignore_errors=True)
        self.disk.mkdir(exist_ok=True)
        self.stack = ExitStack()
        mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", str(self.disk)]
        self.has_disk = subprocess.run(mount, capture_output=True, check=False).returncode == 0
        if self.has_disk:
            self.stack.callback(subprocess.run, ["umount", "--lazy", str(self.disk)], check=False)
        self.python = ""
        self.stand_in: StandIn | None = None
        with ExitStack() as undo:
            undo.callback(self.stack.close)
            self._begin()
            undo.pop_all()

    def _begin(self) -> None:
        """What the lives need, and the life in peace that they are compared with."""
        if self.subject.stand_in:
            self.stand_in = self.stack.enter_context(STAND_INS[self.subject.stand_in](self.model))
            self.stand_in.fresh()
        if self.subject.is_on_ray and not self.subject.has_nodes:
            short = Path(self.stack.enter_context(TemporaryDirectory(prefix="nemorl-fork-")))  # of a socket's address
            self.python = str(self.stack.enter_context(python_that_forks(short)))
        end = self._live(self.whole, [], self.folder / "struck")
        assert end == 0, [end, *((self.folder / name).read_text()[-3000:] for name in ("outcome", "said"))]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stack.close()

    def play(self, seed: int) -> dict[str, Any]:
        """The run of one seed: its blows that fell, how each life ended, and what is wrong."""
        place, struck = self.disk / "run", self.folder / "struck"
        shutil.rmtree(place, ignore_errors=True)
        struck.unlink(missing_ok=True)
        kinds = [kind for kind in self.subject.blows if self.has_disk or kind != "full disk"]
        if self.stand_in is not None:
            self.stand_in.fresh()
        problems: list[str] = []
        ends: list[int | str] = []
        lives = schedule(seed, kinds, self.name)
        for blows in [*lives, []]:
            (self.disk / BALLAST).unlink(missing_ok=True)
            if self.stand_in is not None:
                self.stand_in.mend()
            ends.append(self._live(place, blows, struck))
            problems += [*self._bad_end(ends[-1], blows), *broken_promises(place)]
            if ends[-1] == 0:
                break
        fallen = struck.read_text().splitlines() if struck.exists() else []
        problems += self._result(place, fallen)
        if self.stand_in is not None:
            problems += self.stand_in.problems(place)
        return {"seed": seed, "fallen": fallen, "ends": ends, "problems": problems}

    def _result(self, place: Path, fallen: Sequence[str]) -> Iterator[str]:
        if self.subject.is_exact and not any(blow.startswith(self.subject.inexact_after) for blow in fallen):
            is_forked = not self.subject.has_nodes
            yield from differences(self.whole, place, records_may_lack=True, same_generators=is_forked)
        steps = [record["step"] for record in metrics(place) if "train/loss" in record]
        if steps != list(range(1, STEPS + 1)):
            yield f"the steps are {steps}"

    def _live(self, place: Path, blows: Sequence[Blow], struck: Path) -> int | str:
        outcome, said = self.folder / "outcome", self.folder / "said"
        outcome.unlink(missing_ok=True)
        said.unlink(missing_ok=True)
        arguments = {**self._arguments(place), "blows": [asdict(blow) for blow in blows], "struck": str(struck)}
        return self.forks.run("tiny_runs:train", arguments, said=said, deadline_s=DEADLINE_S)

    def _arguments(self, place: Path) -> dict[str, Any]:
        return {
            "model": str(self.model),
            "run_dir": str(place),
            "subject": self.name,
            "python": self.python,
            "address": self.stand_in.address if self.stand_in else "",
            "control": self.stand_in.control if self.stand_in else "",
            **files(self.folder),
        }

    def _bad_end(self, end: int | str, blows: Sequence[Blow]) -> Iterator[str]:
        """An end other than a good one, one by a kill, and an error of ours that says how to fix it."""
        outcome, text = self.folder / "outcome", (self.folder / "said").read_text()[-1500:]
        if end == HUNG:
            yield f"hung for {DEADLINE_S:g} s under {blows}"
        elif end == 2 and "fix: " not in (words := json.loads(outcome.read_text())["text"]):
            yield f"does not say how to fix it: {words}"
        elif end not in (0, 2) and not any(
            blow.what in ENDS_DRIVER and end == ENDS_DRIVER[blow.what] for blow in blows
        ):
            yield f"ended with {end} under {blows}: {text}"
        if end != 0 and not blows:
            yield f"could not be continued in peace ({end}): {outcome.read_text() if outcome.exists() else text}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--subject", choices=SUBJECTS, action="append", help="unset: all")
    parser.add_argument("--seeds", default="0:10", help="FIRST:END,… of each subject")
    options = parser.parse_args(arguments)
    folder, names = options.folder.resolve(), options.subject or list(SUBJECTS)
    if not can_be_made():
        names = [name for name in names if not SUBJECTS[name].has_nodes]
        print("no network namespaces here: runs on two nodes are left out", flush=True)
    if any(SUBJECTS[name].has_nodes for name in names) and INSIDE not in os.environ:
        begin = ["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$0" "$@"', sys.executable, *sys.argv]
        os.execvpe("unshare", begin, {**os.environ, INSIDE: "1"})
    parts = [[int(number) for number in part.split(":")] for part in options.seeds.split(",")]
    seeds = [seed for first, end in parts for seed in range(first, end)]
    results = folder / "results.jsonl"
    lines = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    done = {(line["subject"], line["seed"]) for line in lines}
    alone = [name for name in names if SUBJECTS[name].is_on_ray]  # no cluster is to find another's processes
    groups = [[name for name in names if name not in alone], *([name] for name in alone)]
    has_failed = False
    with warm(folder, names) as forks:
        for group in groups:
            with ExitStack() as stack:
                runs: dict[str, RandomBlows] = {}
                for seed, name in product(seeds, group):
                    if (name, seed) not in done:
                        if name not in runs:
                            runs[name] = stack.enter_context(RandomBlows(folder / name.replace(" ", "_"), name, forks))
                        has_failed |= _play(runs[name], seed, results)
    sys.exit(has_failed)


def _play(runs: RandomBlows, seed: int, results: Path) -> bool:
    """Play a seed, note what came of it; whether it failed."""
    found = {"subject": runs.name, **runs.play(seed)}
    with results.open("a") as file:
        file.write(json.dumps(found) + "\n")
    if found["problems"]:
        again = f"again: python {sys.argv[0]} OTHER_FOLDER --subject '{runs.name}' --seeds {seed}:{seed + 1}"
        lives = schedule(seed, runs.subject.blows, runs.name)
        print(f"{runs.name}, seed {seed}: {lives}", *found["problems"], again, sep="\n    ", flush=True)
    return bool(found["problems"])


if __name__ == "__main__":
    main()

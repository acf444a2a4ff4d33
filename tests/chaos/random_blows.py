"""Runs under schedules of random blows, each from a seed, each run continued until it is finished.

``python random_blows.py FOLDER --subject NAME --seeds 0:100`` writes one line per seed to ``FOLDER/results.jsonl``, and
goes on where it was when it is started again. A failure prints its seed, its schedule and the command that plays it
again.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

from blows import BALLAST, LOCAL, ON_RAY, Blow, schedule
from faulty_files import build

sys.path.insert(0, str(Path(__file__).parents[1]))
from forked_workers import python_that_forks
from nemorl_testing.tiny import write_tiny_model
from run_checks import broken_promises, differences, metrics
from tiny_runs import STEPS, SUBJECTS
from warm import HUNG, Warm

DEADLINE_S = 300.0
"""Of one life, however many of its processes stand still."""
DISK = "16m"
ENDS_DRIVER = {"kill driver": -9, "kill raylet": 1, "kill gcs_server": 1}
"""How the driver may end by these: Ray itself exits drivers that have lost it (the supervisor of commands says so)."""
SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


class RandomBlows:
    """Runs of one subject, on a small disk of their own where this machine lets us mount one."""

    def __init__(self, folder: Path, subject: str) -> None:
        self.folder, self.subject, self.is_on_ray = folder, subject, "ray" in subject
        self.is_exact = "asynchronous" not in subject
        """Its results are promised to the byte: an asynchronous run depends on who was first."""
        folder.mkdir(parents=True, exist_ok=True)
        self.model = write_tiny_model(folder / "tiny", **SIZES)
        self.whole, self.disk = folder / "whole", folder / "disk"
        for left in (self.whole, folder / "first"):
            shutil.rmtree(left, ignore_errors=True)
        self.disk.mkdir(exist_ok=True)
        mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", str(self.disk)]
        self.has_disk = subprocess.run(mount, capture_output=True, check=False).returncode == 0
        self.stack = ExitStack()
        self.python = ""
        if self.is_on_ray:
            short = Path(self.stack.enter_context(TemporaryDirectory(prefix="nemorl-fork-")))  # of a socket's address
            self.python = str(self.stack.enter_context(python_that_forks(short)))
        arguments = self._arguments(self.whole)
        if self.is_on_ray:  # forks of a process that had Ray would share its connection
            arguments |= {"subject": "grpo", "run_dir": str(folder / "first")}
        self.warm = self.stack.enter_context(Warm("tiny_runs:train", arguments, preload=build(folder)))
        if self.is_on_ray:
            assert self._live(self.whole, [], folder / "struck") == 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stack.close()
        if self.has_disk:
            subprocess.run(["umount", str(self.disk)], check=False)

    def play(self, seed: int) -> dict[str, Any]:
        """The run of one seed: its blows that fell, how each life ended, and what is wrong."""
        place, struck = self.disk / "run", self.folder / "struck"
        shutil.rmtree(place, ignore_errors=True)
        struck.unlink(missing_ok=True)
        kinds = [kind for kind in (ON_RAY if self.is_on_ray else LOCAL) if self.has_disk or kind != "full disk"]
        problems: list[str] = []
        ends: list[int | str] = []
        lives = schedule(seed, kinds)
        for blows in [*lives, []]:
            (self.disk / BALLAST).unlink(missing_ok=True)
            ends.append(self._live(place, blows, struck))
            problems += [*self._bad_end(ends[-1], blows), *broken_promises(place)]
            if ends[-1] == 0:
                break
        problems += self._result(place)
        fallen = struck.read_text().splitlines() if struck.exists() else []
        return {"seed": seed, "fallen": fallen, "ends": ends, "problems": problems}

    def _result(self, place: Path) -> Iterator[str]:
        if self.is_exact:
            yield from differences(self.whole, place, records_may_lack=True)
        steps = [record["step"] for record in metrics(place) if "train/loss" in record]
        if steps != list(range(1, STEPS + 1)):
            yield f"the steps are {steps}"

    def _live(self, place: Path, blows: Sequence[Blow], struck: Path) -> int | str:
        outcome, said = self.folder / "outcome", self.folder / "said"
        outcome.unlink(missing_ok=True)
        said.unlink(missing_ok=True)
        arguments = {**self._arguments(place), "blows": [asdict(blow) for blow in blows], "struck": str(struck)}
        return self.warm.run("tiny_runs:train", arguments, said=said, deadline_s=DEADLINE_S)

    def _arguments(self, place: Path) -> dict[str, Any]:
        files = {"trace": str(self.folder / "trace"), "outcome": str(self.folder / "outcome")}
        return {
            "model": str(self.model),
            "run_dir": str(place),
            "subject": self.subject,
            "python": self.python,
            **files,
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
    parser.add_argument("--subject", choices=SUBJECTS, default="grpo")
    parser.add_argument("--seeds", default="0:10", help="FIRST:END")
    options = parser.parse_args(arguments)
    options.folder = options.folder.resolve()
    has_failed = False
    first, end = (int(number) for number in options.seeds.split(":"))
    results = options.folder / "results.jsonl"
    done = {json.loads(line)["seed"] for line in results.read_text().splitlines()} if results.exists() else set()
    with RandomBlows(options.folder, options.subject) as runs:
        for seed in (seed for seed in range(first, end) if seed not in done):
            found = runs.play(seed)
            with results.open("a") as file:
                file.write(json.dumps(found) + "\n")
            if found["problems"]:
                has_failed = True
                again = f"{sys.argv[0]} OTHER_FOLDER --subject '{options.subject}' --seeds {seed}:{seed + 1}"
                lives = schedule(seed, ON_RAY if runs.is_on_ray else LOCAL)
                print(f"seed {seed}: {lives}", *found["problems"], f"again: python {again}", sep="\n    ", flush=True)
    sys.exit(has_failed)


if __name__ == "__main__":
    main()

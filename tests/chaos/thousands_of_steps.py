"""Runs of thousands of steps under random signals, for hours: memory flat, files bounded, the end the same.

    python tests/chaos/thousands_of_steps.py .chaos/long --subject grpo --steps 2000 --mean-s 60 --seed 0

The run is played twice through the command line: undisturbed, and with a signal (SIGKILL, SIGTERM, SIGINT, or SIGSTOP
for some seconds) to its processes about every ``--mean-s`` seconds, started again whenever it has ended before its last
step. One JSON line per quarter of its steps: memory of all its processes while it was played, files and bytes of its
folder. The last line: lives, blows, promises that were broken, and what differs at the end (where agents talk at the
same time, who was first decides how sums are rounded).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from run_checks import broken_promises, differences
from subjects import HERE, SUBJECTS
from tiny_runs import settings

REWARD = """def digits(prompt, response):
    return float(sum(character.isdigit() for character in response))
"""
BLOWS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGSTOP)
LOOK_S, STOPPED_S, PAGE = 1.0, 5.0, os.sysconf("SC_PAGE_SIZE")
MOST_LIVES = 500
"""Of a run that does not get on: more would only take longer to say so."""


class Watch:
    """Memory and files of a run, by quarter of its steps."""

    def __init__(self, place: Path, steps: int) -> None:
        self._place, self._steps = place, steps
        self._memory: dict[int, list[int]] = {}
        self._files: dict[int, tuple[int, int]] = {}

    def look(self, group: int) -> None:
        """Note how the processes of a group are doing."""
        quarter = min(3, 4 * self.step() // self._steps)
        self._memory.setdefault(quarter, []).append(sum(resident(group)))
        paths = [Path(folder) / name for folder, _, names in os.walk(self._place) for name in names]
        sizes = [size for path in paths if (size := size_of(path)) is not None]
        self._files[quarter] = (len(sizes), sum(sizes))

    def lines(self) -> Iterator[dict[str, Any]]:
        """Of each quarter: median and largest memory, files and bytes at its end."""
        for quarter, seen in sorted(self._memory.items()):
            count, size = self._files[quarter]
            memory = {"median": round(statistics.median(seen) / 2**20), "largest": round(max(seen) / 2**20)}
            yield {"quarter": quarter + 1, "memory_mib": memory, "files": count, "mib": round(size / 2**20, 1)}

    def step(self) -> int:
        with suppress(OSError, ValueError, KeyError):
            return int(json.loads(tail(self._place / "metrics.jsonl"))["step"])
        return 0


def tail(path: Path) -> bytes:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 65536))
        return (file.read().splitlines() or [b""])[-1]


def size_of(path: Path) -> int | None:
    with suppress(OSError):  # others remove files meanwhile
        return path.stat().st_size
    return None


def resident(group: int) -> Iterator[int]:
    """Bytes of each process of a process group."""
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, IndexError):
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(fields[2]) == group:
                yield int(fields[21]) * PAGE


def lived(config: Path, watch: Watch, chance: random.Random | None, mean_s: float) -> tuple[int, int]:
    """One life of the run: its exit status and the blows that it got."""
    command, blows = [sys.executable, "-m", "nemorl", "train", str(config)], 0
    with config.with_suffix(".log").open("ab") as log:
        run = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        next_s = time.monotonic() + (chance.expovariate(1 / mean_s) if chance else float("inf"))
        while run.poll() is None:
            time.sleep(LOOK_S)
            watch.look(run.pid)
            if chance is not None and time.monotonic() > next_s:
                blow, blows = chance.choice(BLOWS), blows + 1
                next_s = time.monotonic() + chance.expovariate(1 / mean_s)
                with suppress(ProcessLookupError):
                    os.killpg(run.pid, blow)
                    if blow == signal.SIGSTOP:
                        time.sleep(STOPPED_S)
                        os.killpg(run.pid, signal.SIGCONT)
        return run.returncode, blows


def played(folder: Path, name: str, arguments: argparse.Namespace, mean_s: float | None) -> tuple[Path, dict[str, Any]]:
    """A run to its last step; the folder that it leaves, and how often it lived and was struck."""
    place, config = folder / name, folder / f"{name}.json"
    (folder / "reward.py").write_text(REWARD)
    model = folder / "model"
    if not model.is_dir():
        SUBJECTS[arguments.subject].write_model(model)
    made = settings(str(model), str(place), arguments.subject, "")
    if SUBJECTS[arguments.subject].has_reward:
        made["environment"] = f"{folder.resolve() / 'reward.py'}:digits"
    made |= {"max_steps": arguments.steps, "validation": {"every": arguments.steps, "max_samples": 2}}
    made["checkpoint"] = {"every": max(1, arguments.steps // 40), "keep_last": 2, "keep_best": 1}
    config.write_text(json.dumps(made))
    watch, chance = Watch(place, arguments.steps), random.Random(arguments.seed) if mean_s is not None else None
    lives = blows = 0
    while lives < MOST_LIVES:
        status, struck = lived(config, watch, chance, mean_s or 0.0)
        lives, blows = lives + 1, blows + struck
        if status == 0 and watch.step() >= arguments.steps:
            break
    for line in watch.lines():
        print(json.dumps({"run": name, **line}), flush=True)
    return place, {"lives": lives, "blows": blows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--subject", default="grpo", choices=sorted(SUBJECTS))
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--mean-s", type=float, default=60.0, help="seconds between two blows, on average")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    folder = arguments.folder / arguments.subject.replace(" ", "-")
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["PYTHONPATH"] = str(HERE)  # of the environments that its runs name
    whole, _ = played(folder, "undisturbed", arguments, None)
    struck, told = played(folder, "struck", arguments, arguments.mean_s)
    broken = broken_promises(struck)
    differs = differences(whole, struck, records_may_lack=True, same_generators=False)
    told |= {"broken": broken, "differs": differs}
    print(json.dumps({"subject": arguments.subject, "steps": arguments.steps, **told}), flush=True)
    sys.exit(bool(broken or (differs and SUBJECTS[arguments.subject].is_exact)))


if __name__ == "__main__":
    main()

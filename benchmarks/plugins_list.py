"""What listing plugins costs as more of them are installed, beside a tool that imports what it lists.

    python benchmarks/plugins_list.py --plugins 40 --repeats 9 --json

Each synthetic plugin is a distribution on disk with a config class and an import that takes 20 ms. The peer is
stevedore's ``ExtensionManager``, which loads every entry point of a group: how most tools list their plugins.
Medians of wall and CPU seconds of a fresh process, all variants in turn; CPU seconds tell more where other jobs run.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from _common import machine, print_table

GROUP = "nemorl.environments"
CONFIG = '''
import time
from typing import ClassVar

from nemorl.plugins.kinds import EnvironmentConfig
from pydantic import Field

time.sleep(0.02)  # what a light plugin imports


class Plugin{number}Config(EnvironmentConfig):
    """Synthetic environment {number}."""

    summary: ClassVar[str] = "synthetic environment {number}"

    scale: float = Field(1.0, gt=0)
    """Factor of its reward."""
'''
PEER = f"from stevedore import ExtensionManager; print(len(ExtensionManager({GROUP!r}).extensions))"


def write_plugin(site: Path, number: int) -> None:
    package = f"synthetic_{number}"
    (site / package).mkdir()
    (site / package / "__init__.py").touch()
    (site / package / "config.py").write_text(CONFIG.format(number=number))
    info = site / f"{package}-1.0.dist-info"
    info.mkdir()
    metadata = f"Metadata-Version: 2.1\nName: synthetic-{number}\nVersion: 1.0\nRequires-Dist: nemorl-core>=0.1.0\n"
    (info / "METADATA").write_text(metadata)
    (info / "entry_points.txt").write_text(f"[{GROUP}]\nsynthetic{number} = {package}.config:Plugin{number}Config\n")


def seconds(command: Sequence[str], environment: Mapping[str, str]) -> tuple[float, float]:
    """Wall and CPU seconds of a process."""
    began, used = time.perf_counter(), cpu_of_children()
    subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began, cpu_of_children() - used


def cpu_of_children() -> float:
    found = resource.getrusage(resource.RUSAGE_CHILDREN)
    return found.ru_utime + found.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--plugins", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for number in range(asked.plugins):
            write_plugin(Path(folder), number)
        bare, more = dict(os.environ), {**os.environ, "PYTHONPATH": folder}
        nemorl = [sys.executable, "-m", "nemorl"]
        variants = {
            "python -c pass": ([sys.executable, "-c", "pass"], bare),
            "nemorl --help": ([*nemorl, "--help"], bare),
            f"nemorl --help, {asked.plugins} more": ([*nemorl, "--help"], more),
            "nemorl plugins list": ([*nemorl, "plugins", "list"], bare),
            f"nemorl plugins list, {asked.plugins} more": ([*nemorl, "plugins", "list"], more),
            f"stevedore ExtensionManager, {asked.plugins} more": ([sys.executable, "-c", PEER], more),
        }
        for command, environment in variants.values():
            seconds(command, environment)  # warm: bytecode written, files cached
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in variants}
        for _ in range(asked.repeats):
            for name, (command, environment) in variants.items():
                times[name].append(seconds(command, environment))
    medians = {name: [statistics.median(column) for column in zip(*t, strict=True)] for name, t in times.items()}
    if asked.json:
        print(json.dumps({"machine": machine(1), "repeats": asked.repeats, "median_wall_and_cpu_s": medians}, indent=1))
        return
    print_table(
        f"{asked.plugins} plugins",
        ("variant", "wall s", "CPU s"),
        [(n, *(f"{v:.3f}" for v in m)) for n, m in medians.items()],
    )


if __name__ == "__main__":
    main()

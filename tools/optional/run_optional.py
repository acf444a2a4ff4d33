"""Runs the tests that skip where an optional package or program is missing, each where it is installed.

``environments.toml`` says what is installed and which tests need it. Every environment is made by uv below
``.venv/optional``, with nemorl's packages editable, and kept until something that it is made of changes. A test that
still skips there fails the target as one that fails does.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT / "tools" / "release"))

from steps import StepFailedError, find_python, run, say, tool  # noqa: E402

HOME = ROOT / ".venv" / "optional"
TOOLKITS = tuple(f"toolkits/nemorl-{name}" for name in ("tensors", "media", "rl", "trust", "cli", "testing"))
ALGORITHMS = tuple(f"plugins/nemorl-{name}" for name in ("grpo", "ppo", "sft", "preference", "distillation", "tasks"))
BASE = ("core", *TOOLKITS, "nemorl-dtensor", "nemorl-math-env", *ALGORITHMS)
"""Folders of the packages that every environment has: what ``pip install nemorl`` brings, and the tests' own."""
TORCH = "torch==2.13.0"
RUNNER = ("pytest==9.1.1", "pytest-xdist==3.8.0")
MAKING_S, TESTING_S = 1800, 7200


@dataclass(frozen=True)
class Environment:
    """One table of ``environments.toml``, which explains the fields."""

    name: str
    packages: tuple[str, ...] = ()
    ours: tuple[str, ...] = ()
    constraints: bool = True

    def make(self) -> Path:
        """Its folder."""
        own = [word for folder in (*BASE, *self.ours) for word in ("--editable", f"./{folder}")]
        limits = [ROOT / "constraints.txt"] if self.constraints else []
        python = f"{sys.version_info.major}.{sys.version_info.minor}"
        return make_environment(self.name, [TORCH, *RUNNER, *self.packages, *own], python=python, constraints=limits)


@dataclass(frozen=True)
class Group:
    """Tests that need the same."""

    name: str
    environment: Environment
    tests: tuple[str, ...]
    wheel: str = ""
    peer: tuple[str, ...] = ()
    python: str = ""
    variable: str = ""
    programs: tuple[str, ...] = ()
    debian: tuple[str, ...] = ()
    version: tuple[str, ...] = ()
    not_available: str = ""

    @property
    def asked_for(self) -> str:
        """What the group is about, as it is asked for."""
        packages = self.environment.packages if self.environment.name == self.name else ()
        return next(iter((*filter(None, [self.wheel]), *self.peer, *packages)), self.name)


@dataclass(frozen=True)
class Outcome:
    """What the tests of one group did."""

    version: str
    ran: int = 0
    passed: int = 0
    problems: tuple[str, ...] = ()
    not_available: str = ""

    @property
    def verdict(self) -> str:
        if self.not_available:
            return f"not available: {self.not_available}"
        return f"FAILED: {self.problems[0]}" if self.problems else "passed"


def read_groups(file: Path) -> list[Group]:
    """The groups of ``environments.toml``, in its order."""
    told = tomllib.loads(file.read_text(encoding="utf-8"))
    environments = {name: Environment(name, **_frozen(table)) for name, table in told["environments"].items()}
    groups = []
    for name, table in told["groups"].items():
        environment = environments[table.pop("environment", name)]
        groups.append(Group(name, environment, **_frozen(table)))
    return groups


def _frozen(table: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in table.items()}


# Environments


def make_environment(name: str, requirements: Sequence[str], *, python: str, constraints: Sequence[Path] = ()) -> Path:
    """An environment with these requirements of pip; one that has them already is left alone.

    Returns:
        Its folder.
    """
    place, mark = HOME / name, HOME / name / ".installed"
    parts = [*requirements, python, *(path.read_text("utf-8") for path in constraints), *_own_metadata(requirements)]
    identity = hashlib.sha256("\n".join(parts).encode()).hexdigest()
    if mark.is_file() and mark.read_text("utf-8") == identity:
        say(f"{name}: the environment is there")
        return place
    say(f"{name}: making the environment")
    if isinstance(interpreter := find_python(python), str):
        raise StepFailedError(interpreter)
    run(tool("uv"), "venv", "--quiet", "--clear", "--python", interpreter, place)
    words = ["pip", "install", "--quiet", "--python", place / "bin" / "python"]
    limits = [word for path in constraints for word in ("--constraint", path)]
    run(tool("uv"), *words, *limits, *requirements, limit_s=MAKING_S, env=_uv_settings(), cwd=ROOT)
    mark.write_text(identity, "utf-8")
    return place


def _own_metadata(requirements: Sequence[str]) -> list[str]:
    """What our packages in an environment require: where that changes, the environment is made anew."""
    folders = [ROOT / word.partition("[")[0] for word in requirements if word.startswith("./")]
    return [(folder / "pyproject.toml").read_text("utf-8") for folder in folders]


def _uv_settings() -> dict[str, str]:
    """uv reads its own settings and not pip's: wheels that pip finds in folders, it shall find as well."""
    given = {"UV_FIND_LINKS": ",".join(os.environ.get("PIP_FIND_LINKS", "").split())}
    return {**given, **os.environ}


def variables_of(group: Group) -> dict[str, str]:
    """What tells the tests where a wheel, or an environment without nemorl, is."""
    if group.wheel:
        return {group.variable: str(fetch_wheel(group.wheel))}
    if group.peer:
        return {group.variable: str(make_environment(f"{group.name}-alone", group.peer, python=group.python))}
    return {}


def fetch_wheel(requirement: str) -> Path:
    """The wheel of a package, without what it requires."""
    folder = HOME / "wheels" / requirement
    if not list(folder.glob("*.whl")):
        say(f"{requirement}: fetching the wheel")
        words = ["-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:", "--dest", folder]
        run(sys.executable, *words, requirement, limit_s=MAKING_S)
    return next(folder.glob("*.whl"))


def require_programs(group: Group) -> None:
    """
    Raises:
        StepFailedError: Programs are missing, and cannot be installed here.
    """
    if not (absent := _absent(group)):
        return
    command = ["apt-get", "install", "-y", "-q", "--no-install-recommends", *group.debian]
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise StepFailedError(f"{', '.join(absent)} missing; as root: {' '.join(command)}")
    say(f"{group.name}: {' '.join(command)}")
    run("apt-get", "update", "-q")
    run(*command, env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"})
    if absent := _absent(group):
        raise StepFailedError(f"{', '.join(absent)} missing after {' '.join(command)}")


def _absent(group: Group) -> list[str]:
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    return [name for name in group.programs if shutil.which(name, path=path) is None]


# Tests


def run_group(group: Group) -> Outcome:
    """Installs what a group needs, and runs its tests."""
    if group.not_available:
        return Outcome(group.asked_for, not_available=group.not_available)
    try:
        require_programs(group)
        place, variables = group.environment.make(), variables_of(group)
        version = _told_by(group.version) if group.version else group.asked_for
    except (StepFailedError, OSError, subprocess.SubprocessError) as error:
        say(f"{group.name}: {error}")
        return Outcome(group.asked_for, problems=(str(error),))
    report, log = HOME / "results" / f"{group.name}.xml", HOME / "results" / f"{group.name}.log"
    report.parent.mkdir(parents=True, exist_ok=True)
    report.unlink(missing_ok=True)
    words = [
        str(place / "bin" / "python"),
        "-m",
        "pytest",
        "-m",
        "full or not full",
        f"--junitxml={report}",
        *group.tests,
    ]
    say(f"{group.name}: running {', '.join(group.tests)}; all that pytest says is in {log.relative_to(ROOT)}")
    with log.open("w", encoding="utf-8") as file:
        done = subprocess.run(
            words, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, timeout=TESTING_S, check=False,
            env={**os.environ, **variables},
        )  # fmt: skip
    outcome = judge(version, report, done.returncode)
    say(f"{group.name}: {outcome.passed} of {outcome.ran} passed")
    for problem in outcome.problems:
        say(f"{group.name}: {problem}")
    return outcome


def _told_by(command: Sequence[str]) -> str:
    """The first line of what a program says of its version, on either output."""
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    return (done.stdout + done.stderr).strip().splitlines()[0].partition(" (")[0]


def judge(version: str, report: Path, returncode: int) -> Outcome:
    """What pytest's report of a group says: all that is not passed is a problem, also a test that skips.

    Args:
        version: Of what was installed.
        report: As ``--junitxml`` writes it.
        returncode: pytest's, which is not 0 where it found no test or broke.
    """
    if not report.is_file():
        return Outcome(version, problems=(f"pytest ended with {returncode} and wrote no report",))
    cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    problems = []
    for case in cases:
        for kind in ("failure", "error", "skipped"):
            for found in case.iter(kind):
                name = f"{case.get('classname')}::{case.get('name')}".strip(":")
                problems.append(f"{kind}: {name}: {(found.get('message') or '').splitlines()[:1]}")
    bad = {id(case) for case in cases if any(case.find(kind) is not None for kind in ("failure", "error", "skipped"))}
    skipped = sum(case.find("skipped") is not None for case in cases)
    if not cases or (returncode and not problems):
        problems.append(f"pytest ended with {returncode} and {len(cases)} tests")
    return Outcome(version, len(cases) - skipped, len(cases) - len(bad), tuple(problems))


def table(outcomes: dict[str, Outcome]) -> str:
    """One row per group."""
    rows = [("group", "package, version", "tests run", "passed", "")]
    rows += [(name, o.version, str(o.ran), str(o.passed), o.verdict.splitlines()[0]) for name, o in outcomes.items()]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return "\n".join(
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[4]]).rstrip()
        for row in rows
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    groups = {group.name: group for group in read_groups(HERE / "environments.toml")}
    parser.add_argument("only", nargs="*", metavar="GROUP", help=f"some of {', '.join(groups)}")
    chosen = parser.parse_args().only
    if unknown := [name for name in chosen if name not in groups]:
        parser.error(f"no group {', '.join(unknown)}; there are {', '.join(groups)}")
    (HOME / "results").mkdir(parents=True, exist_ok=True)
    with (HOME / "lock").open("w") as lock:  # a second one waits: it would make the same environments
        fcntl.flock(lock, fcntl.LOCK_EX)
        outcomes = {name: run_group(group) for name, group in groups.items() if not chosen or name in chosen}
    told = {name: [o.version, o.ran, o.passed, list(o.problems)] for name, o in outcomes.items()}
    (HOME / "results" / "outcomes.json").write_text(json.dumps(told, indent=1) + "\n", "utf-8")
    print(f"\n{table(outcomes)}")
    return int(any(outcome.problems for outcome in outcomes.values()))


if __name__ == "__main__":
    sys.exit(main())

"""One version of a package, tried: everything that is run in its environment, and the verdict."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from nemorl.plugins import PluginEntry, registry

from nemorl_insight.doctor.installed import Installed
from nemorl_insight.doctor.upgrades.bounds import broken_requirements
from nemorl_insight.doctor.upgrades.overlays import Overlay, overlay
from nemorl_insight.doctor.upgrades.resolving import Change
from nemorl_insight.doctor.upgrades.steps import Numbers, StepError, compare_step, record_step
from nemorl_insight.doctor.upgrades.touching import by_kind, modules_of, touched
from nemorl_insight.doctor.upgrades.trials import (
    Outcome,
    Side,
    Trial,
    doctor_findings,
    try_imports,
    try_listing,
    try_plugin,
)

Verdict = Literal["works", "works, numbers differ", "breaks"]
STEP = "step made again"
DEFAULT_PAIR = ("dtensor", "hf")
"""Training and generation backend of the built-in step, where the package is used by both."""


@dataclass(frozen=True)
class Asked:
    """What to run in each environment."""

    run: Path | None = None
    """Whose step is made again; ``None``: a built-in one."""
    step: int | None = None
    plugins: Sequence[str] = ()
    """Names of those to check. Empty: all that use the package."""
    full: bool = False
    """All conformance checks, not the quick ones."""
    tolerance: float = 0.0
    """Numbers this close are equal."""
    timeout_s: float = 600.0
    """Of each thing that is run."""
    keep: bool = False
    """Keep the environment."""


@dataclass
class Drill:
    """What became of a version."""

    changes: Sequence[Change]
    broken_requirements: Sequence[str]
    trials: list[Trial] = field(default_factory=list)
    doctor: list[str] = field(default_factory=list)
    numbers: Numbers | None = None
    step_of: str = ""
    """The backends of the built-in step, or the run."""
    tolerance: float = 0.0
    seconds: float = 0.0

    @property
    def name(self) -> str:
        return self.changes[0].name

    @property
    def version(self) -> str:
        return self.changes[0].version

    @property
    def failed(self) -> list[Trial]:
        return [trial for trial in self.trials if trial.outcome == "failed"]

    @property
    def verdict(self) -> Verdict:
        if self.failed:
            return "breaks"
        numbers = self.numbers
        close = numbers is None or (numbers.equal_samples == numbers.samples and numbers.largest <= self.tolerance)
        return "works" if close else "works, numbers differ"

    @property
    def why(self) -> str:
        """What differs or breaks, in a line."""
        if self.failed:
            return f"{self.failed[0].name}: {self.failed[0].error}"
        return self.numbers.text() if self.numbers is not None else "no step was compared"

    def as_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "version": self.version,
            "verdict": self.verdict,
            "why": self.why,
            "seconds": round(self.seconds, 1),
            "changes": [asdict(change) for change in self.changes],
            "broken_requirements": list(self.broken_requirements),
            "doctor": self.doctor,
            "trials": [asdict(trial) for trial in self.trials],
            "step_of": self.step_of,
            "numbers": None if self.numbers is None else self.numbers.as_dict(),
        }


def drill(
    changes: Sequence[Change],
    asked: Asked,
    scratch: Path,
    pip_args: Sequence[str] = (),
    tell: Callable[[str], None] = lambda _: None,
) -> Drill:
    """Try a version.

    Args:
        changes: What pip would install for it, the package itself first.
        asked: What to run.
        scratch: A folder for runs and replays; those of the present environment serve the next version too.
        pip_args: More for pip.
        tell: Is given the name of what runs now.
    """
    began = time.monotonic()
    here = Installed()
    conflicts = broken_requirements({change.name: change.version for change in changes}, here)
    found = Drill(changes, list(conflicts), tolerance=asked.tolerance)
    tell("installing")
    with overlay(changes, pip_args, keep=asked.keep) as made:
        _run(found, made, here, asked, scratch, tell)
    found.seconds = time.monotonic() - began
    return found


def _run(
    found: Drill, made: Overlay, here: Installed, asked: Asked, scratch: Path, tell: Callable[[str], None]
) -> None:
    new, present = Side(made, asked.timeout_s), Side(None, asked.timeout_s)
    package = Installed([str(made.site_packages)]).get(found.name)
    assert package is not None, "pip has installed it"
    old = here.get(found.name)
    modules, old_modules = modules_of(package), modules_of(old) if old is not None else []
    tell("imports")
    # Those that came or went concern nobody here, or a plugin whose checks will say so.
    found.trials += try_imports([name for name in modules if not old or name in old_modules], new, present)
    found.trials.append(try_listing(new, present))
    if found.failed:  # the rest would say the same again
        return
    tell("doctor")
    found.doctor = doctor_findings(new, present)
    using = by_kind(touched(package, sorted({*modules, *old_modules}), here))
    for entry in using:
        if not asked.plugins or {entry.name, entry.id, entry.distribution} & {*asked.plugins}:
            tell(f"{entry.kind} {entry.name}")
            found.trials.append(try_plugin(entry, new, present, full=asked.full))
    tell("a step")
    _make_step(found, using, asked, scratch, new, present)


def _make_step(
    found: Drill, using: Sequence[PluginEntry], asked: Asked, scratch: Path, new: Side, present: Side
) -> None:
    began = time.monotonic()
    training, generation = backends_of_step(using)
    on_ray = found.name == "ray"
    place = scratch / "-".join((training, generation, *(["ray"] if on_ray else [])))
    found.step_of = str(asked.run or f"built-in: {training}, {generation}{', on Ray' if on_ray else ''}")
    try:
        run = asked.run or record_step(place, training, generation, present, ray=on_ray)
        found.numbers = compare_step(run, asked.step, new, present, place)
        found.trials.append(Trial(STEP, "passed", time.monotonic() - began))
    except StepError as error:
        outcome: Outcome = "failed" if error.blames_version else "skipped"
        found.trials.append(Trial(STEP, outcome, time.monotonic() - began, str(error), error.done.err))


def backends_of_step(using: Sequence[PluginEntry]) -> tuple[str, str]:
    """Backends of the built-in step: the default ones where they use the package or none does, else one that does."""
    pair = []
    for kind, default in zip(("training_backends", "generation_backends"), DEFAULT_PAIR, strict=True):
        names = [entry.name for entry in using if entry.kind == kind and not _asks_for_options(entry)]
        pair.append(default if default in names or not names else names[0])
    if DEFAULT_PAIR[0] != pair[0] and pair[1] == pair[0]:  # one of each side says more than a backend with itself
        pair[1] = DEFAULT_PAIR[1]
    return pair[0], pair[1]


def _asks_for_options(entry: PluginEntry) -> bool:
    """It has an option without a default, such as the address of a server."""
    fields = registry().load(entry.kind, entry.id).model_fields
    return any(field.is_required() for field in fields.values())

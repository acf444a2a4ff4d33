"""One plugin, looked at in a process of its own: ``python -m nemorl_testing.smoke KIND ID ANSWER``.

For ``nemorl plugins check``. The answer goes to a file, so a plugin may print what it likes; one that hangs or exits
takes only this process with it.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from nemorl.errors import ConfigError, NemorlError
from nemorl.plugins import PluginEntry, registry
from nemorl.plugins.index import requirement_on_kernel
from nemorl_trust.source import diagnose

from nemorl_testing.kit import CONFIG_KINDS, Settings, Subject, checks_for, run_checks

ONE_CHECK_KINDS = frozenset({"algorithms", "training_backends", "generation_backends", "templates"})
"""Kinds whose checks run models, or need files of their user: the first of theirs shows that the plugin works. The
losses of algorithms are certified, too, which takes seconds."""
PRINTED_CHARACTERS = 200
LOSSES = "losses"
"""No kind of plugin: what ``nemorl plugins check MODULE:NAME`` asks for."""


def look(kind: str, name: str, *, full: bool, device: str = "cpu") -> dict[str, Any]:
    """Faults of a plugin, and the checks that were tried. Of the kind ``losses``: a loss, named as ``module:name``.
    Backends are built on ``device``; ``sim`` is the simulated one."""
    if kind == LOSSES:
        from nemorl_testing.losses.looking import look_at_loss

        return look_at_loss(name)
    problems: list[dict[str, str]] = []
    notes: list[str] = []
    answer: dict[str, Any] = {"problems": problems, "notes": notes, "passed": [], "skipped": {}, "import_s": None}
    try:
        entry = registry().index.find(kind, name)
        if kind != "templates":  # files
            answer["import_s"] = _load(entry, notes)
    except NemorlError as error:
        problems.append({"what": error.message, "fix": error.fix or "", "traceback": _traceback(error.__cause__)})
        return answer
    if entry.point.dist is not None and requirement_on_kernel(entry) is None:
        notes.append('states no requirement on nemorl-core: add e.g. "nemorl-core>=0.1.0,<0.2" to its dependencies')
    stop = diagnose(entry, registry()) if kind in CONFIG_KINDS else None
    if stop is not None:
        problems.append({"what": stop.message, "fix": stop.fix})
        return answer
    required = _required_options(entry)
    if required:
        notes.append(f"not built: it needs a value for {', '.join(required)}")
        return answer
    missing = _missing_of_algorithm(entry)
    if missing:
        notes.append(f"not run: {missing}")
        return answer
    report = run_checks(kind, name, only=_chosen(kind, full=full), device=_made(device))
    answer["passed"], answer["skipped"] = list(report.passed), dict(report.skipped)
    fix = f"a defect of {entry.distribution}: mend it, if it is yours; else update it, or tell its authors"
    problems += [{"what": broken.message, "fix": fix} for broken in report.failed.values()]
    return answer


def _made(device: str) -> str:
    """A device's name for PyTorch."""
    if device != "sim":
        return device
    from nemorl_testing import simulated_device

    return simulated_device.install()


def _traceback(cause: BaseException | None) -> str:
    """Frames of the plugin's own code, from its first on."""
    if cause is None:
        return ""
    frames = traceback.extract_tb(cause.__traceback__)
    loading = [n for n, frame in enumerate(frames) if "importlib" in frame.filename or "/nemorl/" in frame.filename]
    own = frames[loading[-1] + 1 :] if loading else frames
    return "".join([*traceback.format_list(own), *traceback.format_exception_only(cause)]).rstrip()


def _required_options(entry: PluginEntry) -> list[str]:
    """Options without a default. The checks of algorithms give them values."""
    if entry.kind not in CONFIG_KINDS or entry.kind == "algorithms":
        return []
    fields = registry().load(entry.kind, entry.id).model_fields
    return [option for option, field in fields.items() if field.is_required()]


def _missing_of_algorithm(entry: PluginEntry) -> str:
    """What a small run of an algorithm lacks and only its user can say, e.g. a teacher; empty where that is nothing."""
    if entry.kind != "algorithms":
        return ""
    try:
        _ = Subject(entry.kind, entry.id, Settings(), Path()).config
    except ConfigError as error:
        return " ".join(error.message.split())
    return ""


def _load(entry: PluginEntry, notes: list[str]) -> float:
    """Seconds that loading took; what it printed is a note."""
    printed = io.StringIO()
    began = time.perf_counter()
    with contextlib.redirect_stdout(printed):
        registry().load(entry.kind, entry.id)
    seconds = time.perf_counter() - began
    if printed.getvalue().strip():
        notes.append(f"prints on import: {printed.getvalue().strip()[:PRINTED_CHARACTERS]!r}")
    return round(seconds, 3)


def _chosen(kind: str, *, full: bool) -> list[str]:
    checks = checks_for(kind)
    if full:
        return [check.name for check in checks]
    own = [check for check in checks if check.function.__module__.rpartition(".")[2] == kind and not check.is_slow]
    general = [check for check in checks if check not in own and not check.is_slow]
    if kind not in ONE_CHECK_KINDS:
        return [check.name for check in (*general, *own)]
    static = [check for check in general if check.function.__module__.endswith(("every_config", "entry_points"))]
    losses = [check for check in general if check.name == "losses_are_certified"]
    return [check.name for check in (*static, *own[:1], *losses)]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("kind")
    parser.add_argument("name")
    parser.add_argument("answer", type=Path)
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--device", default="cpu")
    asked = parser.parse_args()
    found = look(asked.kind, asked.name, full=asked.full, device=asked.device)
    asked.answer.write_text(json.dumps(found))
    sys.exit(1 if found["problems"] else 0)

"""Which launches there are: a record of each in its folder, written before it is submitted and after.

Whoever submits may be killed in between. The record then has no handle, and the launcher is asked for the job: none is
forgotten, and none submitted twice.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from nemorl.base.files.atomic import replace_text
from nemorl.base.files.ownership import Ownership
from nemorl.errors import NemorlError, UsageError

from nemorl_ops.launch import launchers
from nemorl_ops.launch.base import RECORD, Launch, LauncherConfig, Status
from nemorl_ops.launch.prepare import Prepared

CUT_OFF = "its submission was cut off, and nothing of it is found"


def submitted(prepared: Prepared) -> dict[str, Any]:
    """Submit a job, once: the record says so beforehand.

    Returns:
        The launcher's handle.

    Raises:
        UsageError: the launch has a job that is not over, or whose state cannot be known.
        RunInUseError: somebody else is submitting it.
        ResourceError: it was refused.
    """
    job, launcher = prepared.job, prepared.launcher
    job.folder.mkdir(parents=True, exist_ok=True)
    owner = Ownership(job.folder)
    try:
        _refuse_second(job.folder.parent, job.name)
        record = job.folder / RECORD
        before = record.read_text() if record.is_file() else None
        prepared.write()
        launch = Launch(job, prepared.launcher_name, launcher.model_dump(mode="json"), {}, time.time())
        launch.write()
        try:
            handle = launcher.submit(job)
        except NemorlError:
            record.unlink() if before is None else replace_text(record, before)
            raise
        replace(launch, handle=handle).write()
        return handle
    finally:
        owner.close()


def _refuse_second(folder: Path, name: str) -> None:
    if not (folder / name / RECORD).is_file():
        return
    launch, _, status = find(folder, name)
    if launch.handle and status.state in ("pending", "running", "unknown"):
        why = f": {status.detail}" if status.state == "unknown" else ""
        message = f"{name} is {status.state} on {launch.launcher}{why}"
        raise UsageError(message, fix=f"nemorl launch cancel {name}, or --name OTHER")


def find(folder: Path, name: str) -> tuple[Launch, LauncherConfig, Status]:
    """A launch, its launcher, and how it is now: ``unknown`` where that cannot be asked.

    Raises:
        UsageError: nothing was launched under the name.
        PluginError: its launcher is no longer installed, or broken.
    """
    launch = Launch.read(folder.absolute() / name)
    launcher = launchers.recorded(launch.launcher, launch.options)
    try:
        if not launch.handle:
            handle = launcher.recover(launch.job)
            if handle is None:
                return launch, launcher, Status("failed", CUT_OFF)
            launch = replace(launch, handle=handle)
            launch.write()
        return launch, launcher, launcher.status(launch)
    except NemorlError as error:
        return launch, launcher, Status("unknown", error.message)


def facts(folder: Path, name: str) -> dict[str, Any]:
    """The answer of ``nemorl launch status NAME --json``.

    Raises:
        UsageError: nothing was launched under the name.
    """
    launch, _, status = find(folder, name)
    return {
        "name": launch.job.name,
        "launcher": launch.launcher,
        "state": status.state,
        "detail": status.detail,
        "attempt": status.attempt,
        "nodes": list(status.nodes),
        "run_dir": str(launch.job.run_dir),
        "folder": str(launch.job.folder),
        "handle": launch.handle,
    }


def all_facts(folder: Path) -> list[dict[str, Any]]:
    """Those of all launches; one whose record is damaged is ``unknown``, and hides no other."""
    found = []
    for path in sorted(folder.glob(f"*/{RECORD}")):
        try:
            found.append(facts(folder, path.parent.name))
        except NemorlError as error:
            place = path.parent.absolute()
            told = {"name": place.name, "launcher": "", "state": "unknown", "detail": error.message, "attempt": 0}
            found.append({**told, "nodes": [], "run_dir": "", "folder": str(place), "handle": {}})
    return found

"""Launcher ``local``: the run in the background of this machine, which outlives the terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

from nemorl.errors import ConfigIssue, ResourceError, UsageError

from nemorl_ops.launch import detached
from nemorl_ops.launch.attempts import CANCELLED, Attempt, Outcome
from nemorl_ops.launch.base import CONFIG, Job, Launch, LauncherConfig, State, Status

STATES: dict[str, State] = {
    "finished": "finished",
    "continue": "stopped",
    "cancelled": "cancelled",
    "failed": "failed",
}
"""States of a job whose attempt has ended and that nobody starts again."""


def train_command(python: str, job: Job) -> list[str]:
    """The command of the run itself."""
    return [python, "-m", "nemorl", "train", str(job.folder / CONFIG)]


def tail(launch: Launch, *, follow: bool, part: str = "") -> list[str]:
    """The command that prints the run's output of the newest attempt, or what there is before the run begins.

    Raises:
        UsageError: there is nothing yet, and nobody waits for it.
    """
    folder = launch.job.folder
    attempt = Attempt.latest(folder / part)
    run = folder / "output.log" if attempt is None else attempt.folder / "run.log"
    before = [] if attempt is None else sorted(attempt.folder.glob("node-*.log"))
    outside = sorted([*folder.glob("slurm-*.log"), *folder.glob("output.log")])
    found = [run] if run.is_file() else before or outside
    if not follow and not found:
        name = launch.job.name
        raise UsageError(f"{name} has no output yet", fix=f"nemorl launch logs {name} -f waits for it")
    return ["tail", "-n", "+1", *(["-F"] if follow else []), *map(str, found or [run])]


class LocalConfig(LauncherConfig):
    """A detached process on this machine.

    >>> LocalConfig().nodes is None
    True
    """

    summary: ClassVar[str] = "in the background of this machine"

    def problems(self) -> Iterator[ConfigIssue]:
        yield from super().problems()
        if (self.nodes or 1) > 1:
            yield ConfigIssue("nodes", "this machine is one node", "use --on ssh or --on slurm")
        if self.template is not None:
            yield ConfigIssue("template", "there is nothing to render", "remove it")

    def check(self, job: Job) -> Iterator[ConfigIssue]:
        if job.num_nodes > 1:
            yield ConfigIssue("nodes", f"the run asks for {job.num_nodes} nodes", "use --on ssh or --on slurm")

    def submission(self, job: Job) -> list[str]:
        python = self.python or sys.executable
        agent = [
            *(python, "-m", "nemorl_ops.launch.node", "--attempt", str(next_attempt(job))),
            *("--name", os.uname().nodename, "--grace-s", f"{self.grace_s:g}", "--", *train_command(python, job)),
        ]
        return ["bash", "-c", f'set -e\n{self.setup}\nexec "$@"', "bash", *agent] if self.setup else agent

    def submit(self, job: Job) -> dict[str, Any]:
        command = self.submission(job)
        attempt = next_attempt(job)
        attempt.mkdir(parents=True)  # at once: whoever asks before the process does something means this attempt
        try:
            return detached.start(command, job.folder / "output.log", job.working_directory, self.variables)
        except OSError as error:
            attempt.rmdir()
            raise ResourceError(f"{command[0]} cannot be run: {error.strerror}", fix="check launch.python") from error

    def recover(self, job: Job) -> dict[str, Any] | None:
        return detached.find(f"{job.folder}/attempt-")

    def status(self, launch: Launch) -> Status:
        attempt = Attempt.latest(launch.job.folder)
        number = 0 if attempt is None else attempt.number
        if attempt is not None and attempt.outcome is not None:
            return Status(STATES[attempt.outcome.result], attempt.outcome.reason, number)
        if detached.is_alive(launch.handle):
            return Status("running", f"process {launch.handle['pid']}", number, (os.uname().nodename,))
        return Status("failed", "its process is gone, and said nothing; launch it again to continue", number)

    def cancel(self, launch: Launch, *, now: bool) -> None:
        attempt = Attempt.latest(launch.job.folder)
        if attempt is not None:
            attempt.request_stop(CANCELLED)
        if now or attempt is None:
            detached.kill(launch.handle)
            conclude_cancelled(launch.job)

    def logs(self, launch: Launch, *, follow: bool) -> list[str]:
        return tail(launch, follow=follow)

    def attach(self, launch: Launch, node: int) -> list[str]:
        return [os.environ.get("SHELL", "/bin/sh")]


def next_attempt(job: Job) -> Path:
    """Folder of the attempt that comes after those there are."""
    latest = Attempt.latest(job.folder)
    return job.folder / f"attempt-{0 if latest is None else latest.number + 1}"


def conclude_cancelled(job: Job) -> None:
    """Say of the newest attempt, whose processes were killed, that it was cancelled."""
    attempt = Attempt.latest(job.folder) or Attempt(next_attempt(job))
    attempt.folder.mkdir(exist_ok=True)
    if attempt.outcome is None:
        attempt.conclude(Outcome("cancelled", "killed"))

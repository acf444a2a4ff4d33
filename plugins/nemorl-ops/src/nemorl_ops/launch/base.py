"""The interface of a launcher, and the options that all launchers have.

A launcher is its config class, an entry point of the group ``nemorl.launchers``. It renders the files of a job
(``files``), says what submits them (``submission``), submits, and answers for the job afterwards.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from nemorl.base.files.atomic import replace_text
from nemorl.base.text.secrets import NAMED, SECRET_NAME
from nemorl.base.text.suggest import did_you_mean
from nemorl.config import CodeName, FileName, SecretVariable, Variables
from nemorl.errors import ConfigIssue, UsageError
from nemorl.plugins.kinds import PluginConfig
from pydantic import Field

RECORD = "launch.json"
CONFIG = "config.yaml"
State = Literal["pending", "running", "finished", "stopped", "failed", "cancelled", "unknown"]
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True)
class Job:
    """One run that is about to be started somewhere."""

    name: str
    folder: Path
    """Absolute: the files of the launch, on a file system that all nodes see."""
    run_dir: Path
    """Absolute: the directory of the run."""
    working_directory: Path
    """Where relative paths of the config begin."""
    num_nodes: int
    gpus_per_node: int
    """0: the run is on the CPU."""
    workers_per_node: int
    """Worker processes of a node: one per GPU, or ``cluster.workers_per_node``."""
    plaintext: bool = False
    """``cluster.security.plaintext``: Ray between the nodes encrypts nothing."""
    generation_devices: int = 0
    """Devices that generation has to itself; 0: it shares those of training, or nothing samples."""
    engine_devices: int = 1
    """Devices that one engine spreads over."""
    token: str = ""
    """Another one for each submission."""
    cores_per_node: int = 1
    """Cores that what runs on a node keeps busy: its workers, engines, graders, Ray and the driver."""


@dataclass(frozen=True)
class Launch:
    """The record of a job that was submitted: ``launch.json`` in its folder."""

    job: Job
    launcher: str
    options: dict[str, Any]
    """The launcher's, as they were."""
    handle: dict[str, Any]
    """How the launcher finds the job again, e.g. ``{"job_id": "4711"}``. Empty: it was being submitted when this was
    written, and whoever submitted it did not live to say."""
    submitted: float
    """Epoch seconds."""

    def write(self) -> None:
        """Write the record into the job's folder."""
        replace_text(self.job.folder / RECORD, json.dumps(asdict(self), indent=2, default=str) + "\n")

    @classmethod
    def read(cls, folder: Path) -> Launch:
        """The record in a folder.

        Raises:
            UsageError: there is none, or it is damaged.
        """
        try:
            found = json.loads((folder / RECORD).read_text())
            paths = {name: Path(found["job"][name]) for name in ("folder", "run_dir", "working_directory")}
            return cls(**{**found, "job": Job(**{**found["job"], **paths})})
        except FileNotFoundError:
            known = sorted(path.parent.name for path in folder.parent.glob(f"*/{RECORD}"))
            raise UsageError(
                f"nothing was launched as {folder.name!r} from {folder.parent}",
                fix=did_you_mean(folder.name, known) or f"launched are: {', '.join(known)}"
                if known
                else "`nemorl launch CONFIG --on LAUNCHER` starts one",
            ) from None
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise UsageError(f"{folder / RECORD} cannot be read: {error}", fix="launch the run again") from error


@dataclass(frozen=True)
class Status:
    """How a job is at the moment."""

    state: State
    detail: str = ""
    """In words: why it waits, which node was lost."""
    attempt: int = 0
    """How many times it was started again."""
    nodes: tuple[str, ...] = ()


class LauncherConfig(PluginConfig):
    """Base of launchers (entry-point group ``nemorl.launchers``).

    >>> LauncherConfig(environment={"NCCL_DEBUG": "WARN"}, secrets=["HF_TOKEN"]).secrets
    ('HF_TOKEN',)
    """

    joins_ray: ClassVar[bool] = False
    """Whether there is a Ray cluster even for one node, which the run then joins."""
    passes_secrets: ClassVar[bool] = True
    """Whether the values of secrets come from the environment of the command."""

    nodes: int | None = Field(None, ge=1, le=100_000)
    """Machines. Unset: ``cluster.num_nodes`` of the run, which it otherwise sets."""
    gpus_per_node: int | None = Field(None, ge=0, le=1024)
    """GPUs of each. Unset: ``cluster.gpus_per_node`` of the run, which it otherwise sets; unset there as well: none."""
    gpu_type: str | None = None
    """Kind of the GPUs, e.g. ``h100``: ``nemorl plan`` counts with it, and Slurm is asked for it (its type of GRES)."""
    plan: bool = True
    """Let ``nemorl plan`` choose nodes, GPUs and a layout that neither this section nor the run says, and refuse what
    cannot fit. It needs ``gpu_type``."""
    environment: Variables = Field(default_factory=dict)
    """Environment variables of the run, e.g. ``NCCL_SOCKET_IFNAME: eth0``. They are written to files: no secrets."""
    secrets: tuple[SecretVariable, ...] = ()
    """Names of variables whose values the run needs and no file, log or process list may show, e.g. ``HF_TOKEN``."""
    setup: CodeName = ""
    """Shell commands that each node runs before anything else, e.g. ``module load cuda``."""
    python: FileName | None = None
    """Python of the nodes, with nemorl. Unset: the one that runs this command; in a container, ``python``."""
    template: Path | None = None
    """A file of your own in place of the launcher's template."""
    grace_s: float = Field(120.0, ge=1, le=86_400)
    """Time for finishing a step and saving, once the run has to stop."""

    def problems(self) -> Iterator[ConfigIssue]:
        yield from super().problems()
        for name in (*self.environment, *self.secrets):
            if not _VARIABLE.fullmatch(name):
                where = "environment" if name in self.environment else "secrets"
                yield ConfigIssue(where, f"{name!r} is no name of a variable", "use letters, digits and _")
        for name in self.environment:
            if SECRET_NAME.search(name) and not self.environment[name].startswith("/"):
                yield ConfigIssue(
                    f"environment.{name}", "looks like a secret, and would be written to files", f"secrets: [{name}]"
                )
            if name in self.secrets:
                yield ConfigIssue("secrets", f"{name} is in environment as well", "remove it there")
        if self.template is not None and not self.template.is_file():
            yield ConfigIssue("template", f"no file {str(self.template)!r}", "give the path of a file", here=True)

    @property
    def is_uniform(self) -> bool:
        """Whether all nodes are of one kind."""
        return True

    @property
    def variables(self) -> dict[str, str]:
        """Variables set on the nodes: ``environment``, and which variables hold secrets, for whoever writes logs."""
        return {**self.environment, **({NAMED: ",".join(self.secrets)} if self.secrets else {})}

    def check(self, job: Job) -> Iterator[ConfigIssue]:
        """Problems with this job. Paths begin at the ``launch`` section."""
        yield from ()

    def files(self, job: Job, config: str) -> Mapping[str, str]:
        """The files that the job needs beside its config, by name.

        Args:
            job: The job.
            config: Text of its ``config.yaml``.
        """
        return {}

    def submission(self, job: Job) -> list[str]:
        """The command that submits, for ``--dry-run``."""
        raise NotImplementedError(f"{type(self).__name__} must define submission()")

    def submit(self, job: Job) -> dict[str, Any]:
        """Submit; the files are in place.

        Returns:
            How to find the job again: plain data for the record.

        Raises:
            ResourceError: it was refused; says why.
        """
        raise NotImplementedError(f"{type(self).__name__} must define submit()")

    def recover(self, job: Job) -> dict[str, Any] | None:
        """The result of ``submit`` for a job whose submission was cut off; ``None``: there is no such job."""
        raise NotImplementedError(f"{type(self).__name__} must define recover()")

    def status(self, launch: Launch) -> Status:
        """How a job of this launcher is now."""
        raise NotImplementedError(f"{type(self).__name__} must define status()")

    def cancel(self, launch: Launch, *, now: bool) -> None:
        """End a job: after its step, saved, or at once."""
        raise NotImplementedError(f"{type(self).__name__} must define cancel()")

    def logs(self, launch: Launch, *, follow: bool) -> list[str]:
        """The command that prints a job's output."""
        raise NotImplementedError(f"{type(self).__name__} must define logs()")

    def attach(self, launch: Launch, node: int) -> list[str]:
        """The command that opens a shell on a node of a running job."""
        raise NotImplementedError(f"{type(self).__name__} must define attach()")

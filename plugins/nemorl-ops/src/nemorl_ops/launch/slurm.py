"""Launcher ``slurm``: a batch script whose one step runs on all nodes, and that puts itself back into the queue."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from nemorl.errors import ConfigIssue, ResourceError
from pydantic import Field

from nemorl_ops.launch import sbatch
from nemorl_ops.launch.attempts import CANCELLED, Attempt
from nemorl_ops.launch.base import Job, Launch, LauncherConfig, State, Status
from nemorl_ops.launch.local import STATES, tail, train_command
from nemorl_ops.launch.sbatch import LATE_S, GenerationNodes
from nemorl_ops.launch.templates import rendered

SCRIPT = "job.sbatch"
UNKNOWN_JOB = "Invalid job id specified"
"""squeue's message on a job that it has forgotten."""
CANCEL_MARK = "cancelled"
"""File in the folder of a launch that no attempt shall follow on."""
KEPT = ("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG")
"""Variables of the submitting shell that a job gets, beside its secrets."""
RUNNING = ("RUNNING", "COMPLETING", "STOPPED", "SUSPENDED", "SIGNALING", "STAGE_OUT")
WAITING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD")


class SlurmConfig(LauncherConfig):
    """A job of Slurm.

    >>> SlurmConfig(partition="gpu", time_limit="04:00:00", secrets=["HF_TOKEN"]).max_requeues
    100
    """

    summary: ClassVar[str] = "a batch job of Slurm, which requeues itself"

    partition: str | None = None
    """Partitions that may take the job, separated by commas. Unset: the site's default."""
    account: str | None = None
    """Account that pays."""
    qos: str | None = None
    """Quality of service."""
    reservation: str | None = None
    """Reservation to use."""
    time_limit: str | None = None
    """As Slurm writes it: minutes, ``HH:MM:SS`` or ``D-HH:MM:SS``. ``grace_s`` before it ends, the run saves and the
    job is requeued. Unset: the partition's."""
    constraint: str | None = None
    """Features of the nodes."""
    cpus_per_node: int | None = Field(None, ge=1)
    """Cores of each node. Unset: all, where the nodes are exclusive; else what runs there keeps busy: the workers
    (``cluster.cpus_per_worker``), a scheduler per engine, graders, Ray and the driver."""
    memory_gib_per_node: float | None = Field(None, gt=0)
    """Memory of each node. Unset: all of exclusive nodes; else the site's default, mostly so much per core."""
    exclusive: bool = False
    """Share nodes with no other job."""
    segment_size: int | None = Field(None, ge=1)
    """Nodes that lie together in the network's topology, e.g. an NVLink domain (Slurm 24.05 and later). Each segment is
    the Ray resource ``segment_<number>``."""
    seeds: tuple[int, ...] = ()
    """One run per seed, as a job array; each has a directory of its own, ``<run_dir>-seed-<seed>``."""
    max_requeues: int = Field(100, ge=0)
    """How often the job may go back into the queue."""
    container_image: str | None = None
    """Image for the nodes (pyxis): a file or an address."""
    container_mounts: tuple[str, ...] = ()
    """``source:target`` on the nodes, each; the folders of launch and run are mounted anyway."""
    interface: str | None = None
    """Network interface of Ray, e.g. ``ib0``. Unset: that of the default route."""
    object_store_gib: float | None = Field(None, gt=0)
    """Size of each node's object store. Unset: Ray's choice, 30 % of the memory."""
    join_timeout_s: float = Field(600.0, gt=0)
    """Longest wait for all nodes to join Ray."""
    sbatch_options: tuple[str, ...] = ()
    """Further options of sbatch, each as ``--name=value``."""
    generation: GenerationNodes | None = None
    """Nodes of another kind, for generation: the last ones of ``nodes``, as the second part of a heterogeneous job. The
    run must generate apart from training, on all of their devices: ``cluster.colocated: false``."""

    def problems(self) -> Iterator[ConfigIssue]:
        yield from super().problems()
        if self.time_limit is not None:
            yield from sbatch.time_problems(self.time_limit, self.grace_s)
        yield from sbatch.problems(self, "", ("partition", "account", "qos", "reservation", "constraint", "gpu_type"))
        if self.generation is not None:
            yield from sbatch.problems(
                self.generation, "generation.", ("partition", "reservation", "constraint", "gpu_type")
            )
            if self.seeds:
                yield ConfigIssue("seeds", "Slurm has no arrays of heterogeneous jobs", "launch each seed by itself")
        if len(set(self.seeds)) < len(self.seeds):
            yield ConfigIssue("seeds", "one is there twice", "give each once")
        if self.container_mounts and self.container_image is None:
            yield ConfigIssue("container_mounts", "without a container nothing is mounted", "set container_image")

    @property
    def is_uniform(self) -> bool:
        return self.generation is None

    def check(self, job: Job) -> Iterator[ConfigIssue]:
        count = job.num_nodes
        if self.generation is not None:
            count -= self.generation.nodes
            yield from sbatch.generation_problems(self.generation, job)
        if self.segment_size is not None and count % self.segment_size:
            message = f"{count} nodes are no multiple of {self.segment_size}"
            yield ConfigIssue("segment_size", message, "choose a divisor of the number of nodes")

    def files(self, job: Job, config: str) -> Mapping[str, str]:
        python = self.python or ("python" if self.container_image else sys.executable)
        node = rendered(
            "node.sh.j2", None, setup=self.setup, python=shlex.quote(python), options=self._node_options(job)
        )
        run_dir = f"run_dir={job.run_dir}"
        facts: dict[str, Any] = {
            "job": job,
            "launch": self,
            "folder": shlex.quote(str(job.folder)),
            "directives": sbatch.directives(self, job),
            "groups": "" if self.is_uniform else "--het-group=0,1 ",
            "seeds": self.seeds,
            "environment": [(name, shlex.quote(value)) for name, value in self.variables.items()],
            "srun_options": "".join(f"{shlex.quote(option)} " for option in self._srun_options(job)),
            "node_script": shlex.quote(node),
            "run": shlex.join(train_command(python, job)),
            "run_dir": shlex.quote(run_dir),
            "run_folder": shlex.quote(str(job.run_dir)),
            "patience_s": LATE_S,
            "max_requeues": self.max_requeues,
        }
        return {SCRIPT: rendered("job.sbatch.j2", self.template, **facts)}

    def submission(self, job: Job) -> list[str]:
        exported = ",".join([*KEPT, *self.secrets])
        return ["sbatch", "--parsable", f"--export={exported}", str(job.folder / SCRIPT)]

    def submit(self, job: Job) -> dict[str, Any]:
        (job.folder / CANCEL_MARK).unlink(missing_ok=True)
        answer = _called(self.submission(job))
        return {"job_id": answer.strip().partition(";")[0]}

    def recover(self, job: Job) -> dict[str, Any] | None:
        lines = _called(["squeue", "--noheader", "--me", "--format=%F|%o"]).splitlines()
        found = [line.partition("|")[0] for line in lines if line.partition("|")[2] == str(job.folder / SCRIPT)]
        return {"job_id": min(found, key=int)} if found else None

    def status(self, launch: Launch) -> Status:
        job_id = str(launch.handle["job_id"])
        attempts = [Attempt.latest(part) for part in self._parts(launch.job)]
        newest = next((attempt for attempt in reversed(attempts) if attempt is not None), None)
        number = 0 if newest is None else newest.number
        asked = ["squeue", "--noheader", "--jobs", job_id, "--states=all", "--format=%T|%r|%N"]
        lines = [line.split("|") for line in _called(asked, otherwise=(UNKNOWN_JOB, "")).splitlines()]
        live = [line for line in lines if line[0] in (*RUNNING, *WAITING)]
        if live:
            state: State = "running" if any(line[0] in RUNNING for line in live) else "pending"
            why = ", ".join(sorted({line[1] for line in live if line[1] not in ("None", "")}))
            detail = f"job {job_id}" + (f": {why}" if state == "pending" and why else "")
            return Status(state, detail, number, tuple(sorted({line[2] for line in live if line[2]})))
        if (launch.job.folder / CANCEL_MARK).exists() or any(line[0] == "CANCELLED" for line in lines):
            return Status("cancelled", f"job {job_id}", number)
        outcomes = [attempt.outcome for attempt in attempts if attempt is not None and attempt.outcome is not None]
        if len(outcomes) == len(attempts):
            worst = next((each for each in outcomes if each.result != "finished"), outcomes[0])
            return Status(STATES[worst.result], worst.reason, number)
        said = f"Slurm says {lines[0][0]}" if lines else "Slurm does not know it any more"
        return Status("failed", f"job {job_id}: {said}, see {launch.job.folder}", number)

    def cancel(self, launch: Launch, *, now: bool) -> None:
        job_id = str(launch.handle["job_id"])
        is_running = self.status(launch).state == "running"
        (launch.job.folder / CANCEL_MARK).touch()
        for part in self._parts(launch.job):
            attempt = Attempt.latest(part)
            if attempt is not None and attempt.outcome is None:
                attempt.request_stop(CANCELLED)
        if now or not is_running:
            _called(["scancel", job_id])

    def logs(self, launch: Launch, *, follow: bool) -> list[str]:
        parts = self._parts(launch.job)
        begun = [part for part in parts if Attempt.latest(part) is not None]
        return tail(launch, follow=follow, part=str((begun or parts)[-1].relative_to(launch.job.folder)))

    def attach(self, launch: Launch, node: int) -> list[str]:
        attempt = Attempt.latest(self._parts(launch.job)[0])
        noted = attempt.noted(f"node-{node}") if attempt is not None else None
        if noted is None:
            raise ResourceError(f"node {node} of {launch.job.name} has not come up yet", fix="wait, and try again")
        container = ["--container-image=" + self.container_image] if self.container_image else []
        trains = launch.job.num_nodes - (self.generation.nodes if self.generation is not None else 0)
        part = [] if self.is_uniform else [f"--het-group={int(node >= trains)}"]
        where = ["srun", *part, f"--jobid={launch.handle['job_id']}", "--overlap", "--nodes=1", "--ntasks=1"]
        return [*where, f"--nodelist={noted['name']}", *container, "--pty", "bash", "-l"]

    def _parts(self, job: Job) -> list[Path]:
        return [job.folder / f"seed-{seed}" for seed in self.seeds] or [job.folder]

    def _node_options(self, job: Job) -> str:
        options: dict[str, object] = {
            "gpus": job.gpus_per_node,
            "segment-size": self.segment_size,
            "generation-nodes": self.generation.nodes if self.generation is not None else None,
            "object-store-gib": self.object_store_gib,
            "interface": self.interface,
            "join-s": self.join_timeout_s,
            "grace-s": self.grace_s,
        }
        given = [f"--{name}={value}" for name, value in options.items() if value is not None]
        return shlex.join([*given, *(["--plaintext"] if job.plaintext else [])])

    def _srun_options(self, job: Job) -> Sequence[str]:
        if self.container_image is None:
            return []
        folders = dict.fromkeys([job.folder, job.run_dir.parent, job.working_directory])
        mounts = ",".join([*self.container_mounts, *(f"{path}:{path}" for path in folders)])
        workdir = f"--container-workdir={job.working_directory}"
        return [f"--container-image={self.container_image}", f"--container-mounts={mounts}", workdir]


def _called(command: list[str], otherwise: tuple[str, str] | None = None) -> str:
    """The output of one of Slurm's programs.

    Args:
        command: Program and arguments.
        otherwise: Words of a refusal that is an answer as well, and that answer.

    Raises:
        ResourceError: it is not installed, or refuses; with its words.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=dict(os.environ))
    except OSError as error:
        raise ResourceError(
            f"{command[0]} cannot be run: {error.strerror}", fix="launch from a login node of a Slurm cluster"
        ) from error
    if otherwise is not None and otherwise[0] in done.stderr:
        return otherwise[1]
    if done.returncode != 0:
        words = " ".join(line.removeprefix(f"{command[0]}: error: ") for line in done.stderr.strip().splitlines())
        raise ResourceError(f"{command[0]} refused: {words}", fix="see `sinfo` for partitions and their limits")
    return done.stdout

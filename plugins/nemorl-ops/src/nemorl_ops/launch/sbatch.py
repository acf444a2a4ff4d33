"""The ``#SBATCH`` lines of a job: one part of like nodes, or two, of which the second generates."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING

from nemorl.config.base import Config
from nemorl.errors import ConfigIssue
from pydantic import Field

from nemorl_ops.launch.base import Job

if TYPE_CHECKING:
    from nemorl_ops.launch.slurm import SlurmConfig

LATE_S = 30
"""How long the step may take to end once the first node has said how the attempt ended."""
NEXT_PART = "hetjob"
"""Line between the parts of a heterogeneous job."""
EARLY_S = 60
"""How much before its time Slurm may send a signal."""
_TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<first>\d+)(?::(?P<second>\d\d))?(?::(?P<third>\d\d))?")
_FLAGS = re.compile(r"--?[A-Za-z][A-Za-z0-9-]*(=.*)?")


class GenerationNodes(Config):
    """Machines of another kind, on which a run generates: the second part of a heterogeneous job.

    >>> GenerationNodes(nodes=2, partition="l40s", gpu_type="l40s").nodes
    2
    """

    nodes: int = Field(ge=1, le=100_000)
    """How many of the job's nodes they are; the others train."""
    partition: str | None = None
    """Partitions that may take them. Unset: the site's default."""
    constraint: str | None = None
    """Features of these nodes."""
    reservation: str | None = None
    """Reservation to use for them."""
    gpu_type: str | None = None
    """Kind of their GPUs. Each has as many as a node that trains."""
    cpus_per_node: int | None = Field(None, ge=1)
    """Cores of each. Unset: as ``cpus_per_node`` of the others."""
    memory_gib_per_node: float | None = Field(None, gt=0)
    """Memory of each. Unset: the site's default."""
    sbatch_options: tuple[str, ...] = ()
    """Further options of sbatch for them, each as ``--name=value``."""


def seconds_of(time: str) -> int | None:
    """A time as Slurm writes it, in seconds; ``None`` for what is none.

    >>> [seconds_of(time) for time in ("90", "90:30", "1:30:00", "2-12", "2-12:30", "2-12:30:15", "4h")]
    [5400, 5430, 5400, 216000, 217800, 217815, None]
    """
    found = _TIME.fullmatch(time)
    if found is None:
        return None
    days, parts = found["days"], [int(found[name]) for name in ("first", "second", "third") if found[name]]
    if days is not None or len(parts) == 3:  # hours come first
        hours, minutes, seconds = (*parts, 0, 0)[:3]
    else:
        hours, minutes, seconds = (0, *parts, 0)[:3]
    return int(days or 0) * 86_400 + hours * 3600 + minutes * 60 + seconds


def time_problems(time_limit: str, grace_s: float) -> Iterator[ConfigIssue]:
    """Problems of a time limit: it is none, or ends a run before that has trained."""
    limit = seconds_of(time_limit)
    if limit is None:
        yield ConfigIssue("time_limit", f"{time_limit!r} is no time", 'in quotes: "04:00:00", or "2-00:00:00"')
        return
    told = int(grace_s) + LATE_S + EARLY_S
    if 0 < limit <= told:
        message = f"{time_limit} is {limit} s, and the run is told to stop up to {told} s before: it would never train"
        yield ConfigIssue("time_limit", message, "raise it, or lower grace_s")


def problems(part: SlurmConfig | GenerationNodes, prefix: str, names: Sequence[str]) -> Iterator[ConfigIssue]:
    """Values of a part that no line can hold.

    Args:
        part: The options.
        prefix: Of their paths.
        names: Options that are one word.
    """
    for name in names:
        value = getattr(part, name)
        if value is not None and not re.fullmatch(r"[^\s;'\"$`\\]+", value):
            yield ConfigIssue(prefix + name, f"{value!r} has blanks or quotes", "give the name alone")
    for option in part.sbatch_options:
        if not _FLAGS.fullmatch(option) or '"' in option:
            message = f"{option!r} is no option"
            yield ConfigIssue(f"{prefix}sbatch_options", message, "write e.g. --comment=mine")


def generation_problems(generation: GenerationNodes, job: Job) -> Iterator[ConfigIssue]:
    """Problems of a run with nodes that only generate. Paths begin at the section."""
    if generation.nodes >= job.num_nodes:
        message = f"all {job.num_nodes} nodes would generate, and none train"
        yield ConfigIssue("generation.nodes", message, "raise launch.nodes, which counts these as well")
        return
    devices = generation.nodes * job.workers_per_node
    if job.generation_devices == devices:
        return
    has = f"{job.generation_devices} of its own" if job.generation_devices else "none of its own"
    engines = devices // job.engine_devices
    yield ConfigIssue(
        "generation",
        f"these nodes have {devices} devices, and the run's generation has {has}",
        f"cluster.colocated=false cluster.generation_workers={engines}"
        if engines * job.engine_devices == devices
        else f"choose a number of nodes that engines of {job.engine_devices} devices fill",
    )


def directives(launch: SlurmConfig, job: Job) -> list[str]:
    """Options of sbatch, one a line of the script; ``hetjob`` between two parts."""
    generation = launch.generation
    count = job.num_nodes - (generation.nodes if generation is not None else 0)
    whole: dict[str, object] = {
        "job-name": job.name,
        "array": f"0-{len(launch.seeds) - 1}" if launch.seeds else None,
        "output": f"{_literal(job.folder)}/slurm-{'%A_%a' if launch.seeds else '%j'}.log",
        "open-mode": "append",
        "chdir": job.working_directory,
        "signal": f"B:USR1@{int(launch.grace_s) + LATE_S}",
        "segment": launch.segment_size,
    }
    found = [*_lines(whole), *_part(launch, launch, job, count)]
    if generation is not None:
        found += [NEXT_PART, *_part(launch, generation, job, generation.nodes)]
    return found


def _part(launch: SlurmConfig, part: SlurmConfig | GenerationNodes, job: Job, nodes: int) -> list[str]:
    gpu = f"gpu:{part.gpu_type}" if part.gpu_type else "gpu"
    memory = part.memory_gib_per_node
    options: dict[str, object] = {
        "nodes": nodes,
        "ntasks-per-node": 1,
        "cpus-per-task": part.cpus_per_node or (None if launch.exclusive else job.cores_per_node),
        "gres": f"{gpu}:{job.gpus_per_node}" if job.gpus_per_node else None,
        # An exclusive node's memory is not the job's own before it asks: 0 is all there is.
        "mem": f"{int(memory * 1024)}M" if memory is not None else 0 if launch.exclusive else None,
        "partition": part.partition,
        "account": launch.account,
        "qos": launch.qos,
        "reservation": part.reservation,
        "constraint": part.constraint,
        "time": launch.time_limit,
    }
    others = (option.partition("=") for option in part.sbatch_options)
    given = [f"{name}{equals}{_quoted(value)}" for name, equals, value in others]
    return [*_lines(options), "--requeue", *(["--exclusive"] if launch.exclusive else []), *given]


def _literal(path: PurePath) -> str:
    """A path in which sbatch finds no pattern: ``%j`` in a folder's name is no job id."""
    return str(path).replace("%", "%%")


def _lines(options: dict[str, object]) -> list[str]:
    return [f"--{name}={_quoted(str(value))}" for name, value in options.items() if value is not None]


def _quoted(value: str) -> str:
    """A value that sbatch would split at blanks."""
    return '"' + value + '"' if re.search(r"\s", value) else value

"""Where a run executes."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field

from nemorl.base.text.naming import Names, ServerURL, Variables
from nemorl.config.base import Config
from nemorl.errors import ConfigIssue
from nemorl.weights import Distance


class SecurityConfig(Config):
    """Who may talk to the Ray cluster."""

    token_auth: bool | None = None
    """Ray's token authentication: clients without the token are refused. Unset: on for a private cluster and for one
    beyond this machine, unless the environment (``RAY_AUTH_MODE``) says otherwise."""
    token_file: Path | None = None
    """File with the token. Unset: ``RAY_AUTH_TOKEN``, else Ray's default file, else a new token (private cluster)."""
    tls_certificate: Path | None = None
    """PEM certificate of this machine. With ``tls_key`` and ``tls_ca``, all of Ray's traffic is encrypted and each
    side must show a certificate signed by the authority. Unset, for a cluster beyond this machine: ``RAY_USE_TLS`` of
    the environment, else this machine's in ``~/.config/nemorl/certs``."""
    tls_key: Path | None = None
    """PEM private key of ``tls_certificate``."""
    tls_ca: Path | None = None
    """PEM certificate of the authority that signed every node's certificate."""
    plaintext: bool = False
    """Let what goes to Ray on other machines be read and changed on its way, where there is no certificate."""

    def problems(self) -> Iterator[ConfigIssue]:
        yield from super().problems()
        files = {name: getattr(self, name) for name in ("tls_certificate", "tls_key", "tls_ca")}
        for name, path in {"token_file": self.token_file, **files}.items():
            if path is not None and not path.is_file():
                yield ConfigIssue(name, f"no file {str(path)!r}", "give the path of an existing file", here=True)
        missing = [name for name, path in files.items() if path is None]
        if missing and len(missing) < len(files):
            yield ConfigIssue(missing[0], f"TLS also needs {', '.join(missing)}", "give all three, or none")
        if self.token_file is not None and self.token_auth is False:
            yield ConfigIssue("token_file", "excludes token_auth: false", "remove one of them")
        if self.plaintext and self.tls_certificate is not None:
            yield ConfigIssue("plaintext", "excludes tls_certificate", "remove one of them")


class ClusterConfig(Config):
    """Nodes, devices and the launcher that uses them.

    >>> ClusterConfig(launcher="local").uses_ray
    False
    """

    launcher: Literal["auto", "local", "ray"] = "auto"
    """``local``: one process, nothing else started. ``ray``: workers in processes of their own, on any nodes.
    ``auto``: local where one process suffices."""
    num_nodes: int = Field(1, ge=1, le=100_000)
    """Machines in the run."""
    gpus_per_node: int | None = Field(None, ge=0, le=1024)
    """GPUs used on each node. Unset: one if the machine has any, else the CPU."""
    accelerator: str = Field("cuda", pattern=r"^[a-z]+$")
    """Kind of GPU, as PyTorch names it: ``cuda`` (AMD's too), ``xpu``, ``mps``, ... Only ``cuda`` is looked for."""
    workers_per_node: int | None = Field(None, ge=1, le=1024)
    """Worker processes per node on machines without GPUs. Unset: one. With GPUs there is one per GPU."""
    colocated: bool = True
    """Generation takes turns with training on the same devices. False: it has devices of its own, so that both can
    run at the same time (``rollouts.mode: async``)."""
    take_turns: bool | None = None
    """Models that share devices leave their memory while others work: the engine sleeps while the policy trains, whose
    weights and optimizer state wait in the host's memory while it generates. Unset: on GPUs where they do not all fit
    at once, if both backends can and the engine has weights of its own."""
    lend_training_devices: bool = False
    """Engines apart get help while the trainer waits for rollouts: engines on its devices, which sleep while it works.
    For ``colocated: false`` without overlap (``rollouts.mode: sync``)."""
    generation_workers: int | None = Field(None, ge=1, le=100_000)
    """Generation engines. Unset: colocated, as many as fit the devices; apart, one. Apart, they take their devices from
    those given above and training has the rest."""
    cpus_per_worker: float = Field(1.0, gt=0, le=10_000)
    """CPU cores reserved for each worker process."""
    address: ServerURL | None = None
    """Ray cluster to join: ``auto``, ``host:port`` or ``host`` (port 6379). Unset: a private one on this machine."""
    env_vars: Variables = Field(default_factory=dict)
    """Environment variables of worker processes, e.g. ``NCCL_SOCKET_IFNAME: eth0``. They stand in the run's
    ``config.yaml``: keep secrets out."""
    runtime_env: Annotated[dict[str, Any], Names("text")] = Field(default_factory=dict)
    """Ray's runtime environment for worker processes (``working_dir``, ``pip``, ...), as Ray documents it. Variables
    belong into ``env_vars``, another interpreter into the backend's ``python``."""
    placement_timeout_s: float = Field(300.0, gt=0)
    """Longest wait for devices that other jobs hold."""
    worker_timeout_s: float = Field(1800.0, gt=0)
    """Longest time for one call on a worker (a training step, a rollout, loading the model). On expiry the run says who
    did not answer."""
    hang_timeout_s: float | None = Field(600.0, gt=0)
    """Seconds that the ranks of a training group stand still, at least one of them waiting for another, until the run
    takes the group for hung: it names who has not come and replaces the group. Unset: only ``worker_timeout_s`` ends
    such a wait."""
    max_restarts: int = Field(3, ge=0)
    """How many times within ``restart_window_s`` a run replaces workers that died or hang before it gives up. Engines
    with devices of their own are counted each for itself."""
    restart_window_s: float = Field(3600.0, gt=0)
    """Seconds after which a replaced worker no longer counts, if the run has got further since: runs survive rare
    losses, not workers that always die."""
    weight_transport: str | None = None
    """How weights get from training to generation, e.g. ``shared_memory``. Unset: the best that both backends, the
    distance between them and the devices allow."""
    security: SecurityConfig = SecurityConfig()
    """Authentication and encryption of Ray's traffic."""

    @classmethod
    def auto_detect(cls) -> Self:
        """This machine: its GPUs if it has any, else its CPU."""
        return cls(num_nodes=1, gpus_per_node=count_gpus())

    @property
    def devices_per_node(self) -> int:
        """Worker places on each node: one per GPU, or ``workers_per_node`` on the CPU."""
        return self.gpus_per_node or self.workers_per_node or 1

    @property
    def world_size(self) -> int:
        """Devices of the whole run, each with a worker process."""
        return self.num_nodes * self.devices_per_node

    @property
    def uses_ray(self) -> bool:
        """Whether workers run in processes of their own."""
        if self.launcher != "auto":
            return self.launcher == "ray"
        return self.world_size > 1 or not self.colocated or self.address is not None

    @property
    def uses_gpus(self) -> bool:
        if self.gpus_per_node is None:
            return self.workers_per_node is None and (self.accelerator != "cuda" or count_gpus() > 0)
        return self.gpus_per_node > 0

    @property
    def device(self) -> str:
        """torch device string of a worker: Ray shows each its own GPU only."""
        return f"{self.accelerator}:0" if self.uses_gpus else "cpu"

    @property
    def shares_devices(self) -> bool:
        """Whether training and generation are on the same devices, all of them or the trainer's."""
        return self.colocated or self.lend_training_devices

    @property
    def weight_distance(self) -> Distance:
        """How far weights travel from training to generation."""
        if not self.uses_ray:
            return "process"
        # On an existing cluster, groups that are apart may land on different nodes.
        on_one_node = self.num_nodes == 1 and (self.colocated or self.address is None)
        return "node" if on_one_node else "cluster"

    def training_workers(self, devices_per_replica: int = 1) -> int:
        """Training ranks: all devices, less those of generation where that is apart."""
        apart = 0 if self.colocated else self.generation_replicas(devices_per_replica) * devices_per_replica
        return self.world_size - apart

    def generation_replicas(self, devices_per_replica: int = 1) -> int:
        """Generation engines."""
        if self.generation_workers is not None:
            return self.generation_workers
        return max(1, self.world_size // devices_per_replica) if self.colocated else 1

    def problems(self) -> Iterator[ConfigIssue]:
        yield from super().problems()
        if self.gpus_per_node and self.workers_per_node:
            yield ConfigIssue("workers_per_node", "with GPUs there is one worker per GPU", "remove it")
        if self.lend_training_devices and self.colocated:
            message = "colocated engines are on the trainer's devices already"
            yield ConfigIssue("lend_training_devices", message, "remove it, or set colocated: false")
        if self.launcher == "local":
            yield from self._local_problems()
        elif self.num_nodes > 1 and self.address is None:
            yield ConfigIssue(
                "num_nodes",
                f"{self.num_nodes} nodes need a Ray cluster that spans them",
                "start one (`ray start --head`, `ray start --address …`) and set cluster.address: auto",
            )
        yield from self._worker_environment_problems()
        if self.address is None and self.accelerator == "cuda" and (self.gpus_per_node or 0) > count_gpus():
            yield ConfigIssue(
                "gpus_per_node",
                f"asked for {self.gpus_per_node} GPUs, this machine has {count_gpus()}",
                "lower it, or leave it out",
                here=True,
            )

    def _worker_environment_problems(self) -> Iterator[ConfigIssue]:
        if not self.uses_ray:
            for name in ("env_vars", "runtime_env"):
                if getattr(self, name):
                    yield ConfigIssue(
                        name,
                        "is for worker processes, and this run has one process",
                        "set the variables in the shell that starts the run, or set launcher: ray",
                    )
        for key, instead in {"env_vars": "cluster.env_vars", "py_executable": "the backend's python"}.items():
            if key in self.runtime_env:
                yield ConfigIssue("runtime_env", f"has {key!r}", f"use {instead}")

    def _local_problems(self) -> Iterator[ConfigIssue]:
        text = "the local launcher runs one process"
        if self.num_nodes > 1:
            yield ConfigIssue("num_nodes", f"{text}, not {self.num_nodes} nodes", "set launcher: ray, or num_nodes: 1")
        elif self.world_size > 1:
            name = "gpus_per_node" if self.gpus_per_node else "workers_per_node"
            yield ConfigIssue(name, f"{text}, not {self.world_size}", f"set launcher: ray, or {name}: 1")
        if not self.colocated:
            yield ConfigIssue("colocated", f"{text}: generation has no device of its own", "set launcher: ray")
        if self.address is not None:
            yield ConfigIssue("address", f"{text} and joins no cluster", "set launcher: ray, or remove it")


NO_DEVICES = "NoDevFiles"
"""What Slurm puts into CUDA_VISIBLE_DEVICES of jobs without GPUs."""


def count_gpus() -> int:
    """GPUs visible to this process, without importing torch: by CUDA_VISIBLE_DEVICES, else by nvidia-smi."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([device for device in visible.split(",") if device.strip() not in ("", "-1", NO_DEVICES)])
    tool = shutil.which("nvidia-smi")
    return _gpus_listed_by(tool) if tool is not None else 0


@cache
def _gpus_listed_by(tool: str) -> int:
    try:
        listing = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.SubprocessError):  # it hangs where the driver does
        return 0
    return sum(line.startswith("GPU ") for line in listing.stdout.splitlines())

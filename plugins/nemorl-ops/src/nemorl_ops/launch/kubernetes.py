"""Launcher ``kubernetes``: a RayJob of KubeRay, submitted and asked about by ``kubectl``."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any, ClassVar, Literal

from nemorl.config.base import Config
from nemorl.errors import ConfigIssue, ResourceError
from pydantic import Field

from nemorl_ops.launch import manifests
from nemorl_ops.launch.base import Job, Launch, LauncherConfig, State, Status

MANIFEST = "rayjob.yaml"
CLUSTER_MANIFEST = "raycluster.yaml"
LONGEST_NAME = 47
"""Of a RayJob: KubeRay makes names of it that may have 63 characters."""
_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_LOG_LINE = re.compile(r"[EFIW]\d{4} \d\d:")
"""How lines of kubectl's log begin; it says the same again in words."""
STATES: dict[str, State] = {
    "": "pending",
    "New": "pending",
    "Initializing": "pending",
    "Waiting": "pending",
    "Suspended": "pending",
    "Suspending": "pending",
    "Retrying": "pending",
    "Running": "running",
    "Complete": "finished",
    "Failed": "failed",
    "ValidationFailed": "failed",
}
"""``status.jobDeploymentStatus`` of a RayJob."""


class Storage(Config):
    """A persistent volume in all pods.

    >>> Storage(claim="datasets", path="/data", read_only=True).path
    '/data'
    """

    claim: str
    """PersistentVolumeClaim; with several nodes its access mode must be ReadWriteMany."""
    path: str
    """Where the pods see it."""
    sub_path: str | None = None
    """Folder of the volume. Unset: all of it."""
    read_only: bool = False


class Toleration(Config):
    """A taint that the pods bear.

    >>> Toleration(key="nvidia.com/gpu", operator="Exists", effect="NoSchedule").operator
    'Exists'
    """

    key: str | None = None
    """Unset: all keys."""
    operator: Literal["Equal", "Exists"] = "Equal"
    value: str | None = None
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """Unset: all effects."""

    def problems(self) -> Iterator[ConfigIssue]:
        yield from super().problems()
        if self.operator == "Exists" and self.value is not None:
            yield ConfigIssue("value", "Exists compares no value", "remove it, or use Equal")
        if self.key is None and self.operator == "Equal":
            yield ConfigIssue("key", "Equal needs a key", "give one, or operator: Exists")


class KubernetesConfig(LauncherConfig):
    """A RayJob of KubeRay.

    >>> KubernetesConfig(image="example/nemorl:1").namespace
    'default'
    """

    summary: ClassVar[str] = "a RayJob of KubeRay, which gets another cluster when it loses one"
    joins_ray: ClassVar[bool] = True
    passes_secrets: ClassVar[bool] = False

    image: str = ""
    """Container image with Python, nemorl, nemorl-ops and Ray with its dashboard (``ray[default]``)."""
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] = "IfNotPresent"
    """When nodes fetch the image."""
    image_pull_secrets: tuple[str, ...] = ()
    """Secrets of the namespace that open the image's registry."""
    namespace: str = "default"
    """Where the objects live."""
    context: str | None = None
    """Context of kubectl. Unset: its current one."""
    service_account: str | None = None
    """Of the pods. Unset: the namespace's default."""
    secret: str = "nemorl"
    """The Kubernetes Secret whose keys are the names in ``secrets``."""
    tls_secret: str = "nemorl-ca"
    """The Kubernetes Secret with ``ca.pem`` and ``ca.key`` of an authority (``nemorl certs make FOLDER``). Each pod
    gives itself a certificate by it. Unused with ``cluster.security.plaintext: true``."""
    storage: tuple[Storage, ...] = ()
    """Volumes of all pods. One must hold the directory of the run: what else the pods write goes with them."""
    working_dir: str = "/tmp"
    """Where relative paths of the config begin, in the pods."""
    cpus_per_node: float | None = Field(None, gt=0)
    """Cores of each pod. Unset: what runs there keeps busy: the workers (``cluster.cpus_per_worker``), a scheduler per
    engine, graders, Ray and the driver."""
    memory_gib_per_node: float = Field(64.0, gt=0)
    """Memory of each pod, /dev/shm included."""
    shm_gib: float = Field(16.0, gt=0)
    """Size of /dev/shm, in which Ray keeps objects and workers share weights."""
    gpu_resource: str = "nvidia.com/gpu"
    """How the cluster calls a GPU."""
    extended_resources: dict[str, int] = Field(default_factory=dict)
    """Further amounts of each pod, e.g. ``rdma/hca: 8``."""
    node_selector: dict[str, str] = Field(default_factory=dict)
    """Labels that nodes must have."""
    tolerations: tuple[Toleration, ...] = ()
    """Taints that the pods bear."""
    priority_class: str | None = None
    """PriorityClass of the pods: who preempts whom."""
    queue: str | None = None
    """LocalQueue of Kueue, which admits all pods together or none. Unset: no Kueue."""
    queue_priority: str | None = None
    """WorkloadPriorityClass of Kueue."""
    retries: int = Field(10, ge=0)
    """How many further clusters the run may get, after preemption or the loss of a pod; each continues it."""
    time_limit_s: int | None = Field(None, ge=1)
    """Longest time of all attempts together. Unset: none."""
    start_timeout_s: int | None = Field(None, ge=1)
    """Longest time until the run begins. Unset: none."""
    keep_s: int = Field(3600, ge=0)
    """Time for which pods and their logs are kept after the end."""
    ray_version: str = "2.60.0"
    """Version of Ray in the image, for the operator, which makes the cluster's token where it is 2.52 or later."""
    interactive: bool = False
    """Submit an idle RayCluster in place of the run, to attach to."""

    def problems(self) -> Iterator[ConfigIssue]:
        yield from super().problems()
        if not self.image:
            yield ConfigIssue("image", "no image given", "launch.image=registry.example.org/nemorl:1")
        if self.setup:
            yield ConfigIssue("setup", "pods run what their image holds", "put it into the image")
        if self.python is not None:
            yield ConfigIssue("python", "pods have the Python of their image", "remove it")
        if self.queue_priority is not None and self.queue is None:
            yield ConfigIssue("queue_priority", "is Kueue's, and there is no queue", "set queue")
        for place in self.storage:
            if not place.path.startswith("/"):
                yield ConfigIssue("storage", f"{place.path!r} is no absolute path", "begin with /")

    def check(self, job: Job) -> Iterator[ConfigIssue]:
        if len(job.name) > LONGEST_NAME or not _NAME.fullmatch(job.name):
            message = f"{job.name!r} is no name of a RayJob: a-z, 0-9 and '-', beginning with a letter, at most 47"
            yield ConfigIssue("", message, "--name NAME")
        places = [PurePosixPath(place.path) for place in self.storage if not place.read_only]
        if not self.interactive and not any(job.run_dir.is_relative_to(place) for place in places):
            held = ", ".join(map(str, places)) or "none"
            yield ConfigIssue(
                "storage",
                f"the directory of the run, {job.run_dir}, is on no volume that outlives the pods (writable: {held})",
                f"run_dir={places[0] if places else '/data'}/runs/{job.run_dir.name}, and storage for it",
            )

    def files(self, job: Job, config: str) -> Mapping[str, str]:
        from nemorl.base.text.yaml_text import format_yaml

        mounted = format_yaml(manifests.config_map(self, job, config))
        both = {MANIFEST: manifests.ray_job(self, job), CLUSTER_MANIFEST: manifests.ray_cluster(self, job)}
        over = self._overlay()
        return {name: f"{mounted}---\n{format_yaml(manifests.merged(found, over))}" for name, found in both.items()}

    def _overlay(self) -> dict[str, Any]:
        if self.template is None:
            return {}
        from nemorl.base.text.mappings import read_source

        return read_source(self.template)

    def submission(self, job: Job) -> list[str]:
        return self._kubectl("apply", "-f", str(job.folder / (CLUSTER_MANIFEST if self.interactive else MANIFEST)))

    def submit(self, job: Job) -> dict[str, Any]:
        kind = self._kind
        # What is left of an earlier launch with this name: the spec of a RayJob cannot be changed.
        _called(self._kubectl("delete", kind, job.name, "--ignore-not-found", "--wait"))
        _called(self.submission(job))
        return {"kind": kind, "namespace": self.namespace}

    def recover(self, job: Job) -> dict[str, Any] | None:
        handle = {"kind": self._kind, "namespace": self.namespace}
        return handle if self._object(handle["kind"], job.name) is not None else None

    @property
    def _kind(self) -> str:
        return "raycluster" if self.interactive else "rayjob"

    def status(self, launch: Launch) -> Status:
        found = self._object(launch.handle["kind"], launch.job.name)
        if found is None:
            return Status("cancelled", "the cluster has no such object any more")
        status = found.get("status") or {}
        if launch.handle["kind"] == "raycluster":
            state: State = "running" if status.get("state") == "ready" else "pending"
            return Status(state, str(status.get("reason", "")))
        phase = str(status.get("jobDeploymentStatus", ""))
        words = [phase, status.get("jobStatus"), status.get("reason"), status.get("message")]
        detail = ": ".join(str(word) for word in words if word)
        state = STATES.get(phase, "unknown")
        if status.get("jobStatus") == "STOPPED":
            state = "cancelled"
        return Status(state, detail, int(status.get("failed", 0)), tuple(self._pods(launch)))

    def cancel(self, launch: Launch, *, now: bool) -> None:
        found = self._object(launch.handle["kind"], launch.job.name) or {}
        job_id = (found.get("status") or {}).get("jobId")
        pods = self._pods(launch)
        if now or launch.handle["kind"] == "raycluster" or not job_id or not pods:
            _called(self._kubectl("delete", launch.handle["kind"], launch.job.name, "--ignore-not-found"))
            return
        _called(self._kubectl("exec", pods[0], "--", "ray", "job", "stop", "--no-wait", str(job_id)))

    def logs(self, launch: Launch, *, follow: bool) -> list[str]:
        return self._kubectl("logs", *(["--follow"] if follow else []), f"job/{launch.job.name}")

    def attach(self, launch: Launch, node: int) -> list[str]:
        pods = self._pods(launch)
        if node >= len(pods):
            raise ResourceError(
                f"{launch.job.name} has {len(pods)} pods now", fix=f"nemorl launch status {launch.job.name}"
            )
        return self._kubectl("exec", "--stdin", "--tty", pods[node], "--", "bash")

    def _kubectl(self, *arguments: str) -> list[str]:
        context = [] if self.context is None else ["--context", self.context]
        return ["kubectl", *context, "--namespace", self.namespace, *arguments]

    def _object(self, kind: str, name: str) -> dict[str, Any] | None:
        asked = self._kubectl("get", kind, name, "--ignore-not-found", "--output", "json")
        text = _called(asked)
        found: dict[str, Any] | None = json.loads(text) if text.strip() else None
        return found

    def _pods(self, launch: Launch) -> list[str]:
        """Names of the run's pods, the head's first."""
        selector = f"{manifests.LABEL}={launch.job.name},ray.io/node-type"
        asked = self._kubectl("get", "pods", "--selector", selector, "--output", "json")
        items = json.loads(_called(asked))["items"]
        labelled = [
            (item["metadata"]["labels"]["ray.io/node-type"] != "head", item["metadata"]["name"]) for item in items
        ]
        return [name for _, name in sorted(labelled)]


def _called(command: list[str]) -> str:
    """The output of kubectl.

    Raises:
        ResourceError: it is not installed, or the cluster refuses; with its words.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise ResourceError(
            f"{command[0]} cannot be run: {error.strerror}", fix="install kubectl, and check `kubectl get nodes`"
        ) from error
    if done.returncode != 0:
        words = [line.strip() for line in done.stderr.splitlines() if not _LOG_LINE.match(line)]
        raise ResourceError(
            f"kubectl refused: {' '.join(words) or done.stderr.strip()}",
            fix="check `kubectl config current-context`, and that KubeRay is there: `kubectl get crd rayjobs.ray.io`",
        )
    return done.stdout

"""KubeRay's objects for a run: a RayJob, or an idle RayCluster, and the ConfigMap with the run's config.

Plain data, from options and a job; ``kubernetes`` writes and applies it. Field names are those of KubeRay's
``ray.io/v1`` and of Kueue.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from nemorl_trust.ray_security import tls_variables

from nemorl_ops.launch import entry, pod_certificate
from nemorl_ops.launch.base import CONFIG, Job

if TYPE_CHECKING:
    from nemorl_ops.launch.kubernetes import KubernetesConfig

CONFIG_FOLDER = "/etc/nemorl"
AUTHORITY_FOLDER, TLS_FOLDER = "/etc/nemorl-ca", "/etc/nemorl-tls"
LABEL = "nemorl.launch/name"
QUEUE = "kueue.x-k8s.io/queue-name"
PRIORITY = "kueue.x-k8s.io/priority-class"
AGENT_PORT, DASHBOARD_PORT = 52365, 8265
"""Where Ray's dashboard and its agents listen unless told otherwise."""
NAMES = ("mountPath", "groupName", "name")
"""Fields by which items of a list are told apart; a volume may be mounted at several paths."""
HANDLERS = {"exec", "httpGet", "tcpSocket", "grpc"}
"""Ways of asking a container, of which there is one at a time."""
MARGIN_S = 30
"""Seconds that a pod has beyond the time for saving."""


def config_map(options: KubernetesConfig, job: Job, config: str) -> dict[str, Any]:
    """The run's config, which the pods mount."""
    metadata = {"name": f"{job.name}-config", "namespace": options.namespace, "labels": {LABEL: job.name}}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {CONFIG: config}}


def ray_job(options: KubernetesConfig, job: Job) -> dict[str, Any]:
    """The RayJob: a cluster, the run on it, and another cluster when that one is lost."""
    begun = f"--run-dir={shlex.quote(str(job.run_dir))} --launch={job.token}"
    wait = f"python -m {entry.MARK} --nodes={job.num_nodes} {begun} --"
    command = f"{wait} python -m nemorl train {CONFIG_FOLDER}/{CONFIG}"
    spec: dict[str, Any] = {
        "entrypoint": command,
        "submissionMode": "K8sJobMode",
        "backoffLimit": options.retries,
        "shutdownAfterJobFinishes": True,
        "ttlSecondsAfterFinished": options.keep_s,
        "rayClusterSpec": cluster_spec(options, job),
    }
    if options.queue is not None:
        spec["suspend"] = True  # until Kueue admits all of its pods together
    if options.time_limit_s is not None:
        spec["activeDeadlineSeconds"] = options.time_limit_s
    if options.start_timeout_s is not None:
        spec["preRunningDeadlineSeconds"] = options.start_timeout_s
    return {"apiVersion": "ray.io/v1", "kind": "RayJob", "metadata": _metadata(options, job), "spec": spec}


def ray_cluster(options: KubernetesConfig, job: Job) -> dict[str, Any]:
    """An idle RayCluster of the same pods, to attach to."""
    metadata = _metadata(options, job)
    spec = cluster_spec(options, job)
    if options.queue is not None:
        spec["suspend"] = True
    return {"apiVersion": "ray.io/v1", "kind": "RayCluster", "metadata": metadata, "spec": spec}


def cluster_spec(options: KubernetesConfig, job: Job) -> dict[str, Any]:
    """One pod per node, the head among them: it works like the others."""
    head = {"rayStartParams": {"dashboard-host": "0.0.0.0"}, "template": _pod(options, job, is_head=True)}
    workers = {
        "groupName": "workers",
        "replicas": job.num_nodes - 1,
        "minReplicas": job.num_nodes - 1,
        "maxReplicas": job.num_nodes - 1,
        "rayStartParams": {},
        "template": _pod(options, job, is_head=False),
    }
    return {
        "rayVersion": options.ray_version,
        "authOptions": {"mode": "token"},
        "headGroupSpec": head,
        "workerGroupSpecs": [workers] if job.num_nodes > 1 else [],
    }


def merged(base: Any, over: Any) -> Any:
    """``over`` put over ``base``: mappings are merged, and lists of named things item by item: containers, volumes,
    variables, groups of workers. What has a new name is added; all else is replaced.

    >>> merged({"a": {"b": 1, "c": 2}, "d": [1, 2]}, {"a": {"b": 3}, "d": [4]})
    {'a': {'b': 3, 'c': 2}, 'd': [4]}
    >>> merged([{"name": "ray", "image": "x"}], [{"name": "ray", "tty": True}, {"name": "beside"}])
    [{'name': 'ray', 'image': 'x', 'tty': True}, {'name': 'beside'}]
    """
    key = next((key for key in NAMES if _are_named(base, key) and _are_named(over, key)), None)
    if key is not None:
        changes = {item[key]: item for item in over}
        kept = [merged(item, changes.pop(item[key], {})) for item in base]
        return [*kept, *changes.values()]
    if not isinstance(base, Mapping) or not isinstance(over, Mapping) or _is_other_source(base, over):
        return over
    both = {key: merged(base[key], over[key]) for key in base if key in over}
    given_up = HANDLERS if HANDLERS & over.keys() else ()
    return {**{key: value for key, value in base.items() if key not in given_up}, **over, **both}


def _is_other_source(base: Mapping[str, Any], over: Mapping[str, Any]) -> bool:
    """A variable or volume, which has its name and where it comes from, comes from elsewhere: from there alone."""
    return len(base) == len(over) == 2 and "name" in base and base.keys() != over.keys()


def _are_named(value: Any, key: str) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, Mapping) and key in item for item in value)


def _literal(value: str) -> str:
    """The value of a variable in which Kubernetes finds no other variable: ``$(HOME)`` stays what it is."""
    return value.replace("$(", "$$(")


def _probes(*, is_head: bool) -> dict[str, Any]:
    """KubeRay's own ask by ``wget``, which an image need not have: a head without it never gets ready.

    Raylet and, on the head, the store of the cluster's state are asked as KubeRay does, and given the same time.
    """
    ports = {"raylet": f"{AGENT_PORT}/api/local_raylet_healthz", "gcs": f"{DASHBOARD_PORT}/api/gcs_healthz"}
    places = [f"http://localhost:{place}" for name, place in ports.items() if is_head or name == "raylet"]
    asking = "import sys, urllib.request as web; [web.urlopen(url, timeout=4).read() for url in sys.argv[1:]]"
    probe = {
        "exec": {"command": ["python", "-I", "-S", "-c", asking, *places]},
        "timeoutSeconds": 10,
        "periodSeconds": 10,
    }
    return {
        "livenessProbe": {**probe, "initialDelaySeconds": 30, "failureThreshold": 60},
        "readinessProbe": {**probe, "initialDelaySeconds": 10, "failureThreshold": 10},
    }


def _metadata(options: KubernetesConfig, job: Job) -> dict[str, Any]:
    labels = {LABEL: job.name}
    if options.queue is not None:
        labels[QUEUE] = options.queue
    if options.queue_priority is not None:
        labels[PRIORITY] = options.queue_priority
    return {"name": job.name, "namespace": options.namespace, "labels": labels}


def _pod(options: KubernetesConfig, job: Job, *, is_head: bool) -> dict[str, Any]:
    volumes: list[dict[str, Any]] = [
        {"name": "config", "configMap": {"name": f"{job.name}-config"}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": f"{options.shm_gib:g}Gi"}},
    ]
    for position, place in enumerate(options.storage):
        claim = {"claimName": place.claim, **({"readOnly": True} if place.read_only else {})}
        volumes.append({"name": f"storage-{position}", "persistentVolumeClaim": claim})
    if not job.plaintext:
        volumes.append({"name": "authority", "secret": {"secretName": options.tls_secret}})
        volumes.append({"name": "tls", "emptyDir": {"medium": "Memory"}})
    spec: dict[str, Any] = {
        **({} if job.plaintext else {"initContainers": [_certifying(options)]}),
        "containers": [_container(options, job, is_head=is_head)],
        "volumes": volumes,
        "terminationGracePeriodSeconds": int(options.grace_s) + MARGIN_S,
    }
    optional: dict[str, Any] = {
        "serviceAccountName": options.service_account,
        "imagePullSecrets": [{"name": name} for name in options.image_pull_secrets],
        "nodeSelector": dict(options.node_selector),
        "tolerations": [each.model_dump(exclude_none=True) for each in options.tolerations],
        "priorityClassName": options.priority_class,
    }
    spec |= {name: value for name, value in optional.items() if value}
    return {"metadata": {"labels": {LABEL: job.name}}, "spec": spec}


def _container(options: KubernetesConfig, job: Job, *, is_head: bool) -> dict[str, Any]:
    cores = options.cpus_per_node or job.cores_per_node
    amounts: dict[str, Any] = {"cpu": f"{cores:g}", "memory": f"{options.memory_gib_per_node:g}Gi"}
    if job.gpus_per_node:
        amounts[options.gpu_resource] = job.gpus_per_node
    amounts |= options.extended_resources
    mounts: list[dict[str, Any]] = [
        {"name": "config", "mountPath": CONFIG_FOLDER, "readOnly": True},
        {"name": "shm", "mountPath": "/dev/shm"},
    ]
    for position, place in enumerate(options.storage):
        mount: dict[str, Any] = {"name": f"storage-{position}", "mountPath": place.path}
        mount |= {"subPath": place.sub_path} if place.sub_path else {}
        mounts.append(mount | ({"readOnly": True} if place.read_only else {}))
    values = {"RAY_JOB_STOP_WAIT_TIME_S": f"{options.grace_s:g}", **options.variables}
    if not job.plaintext:
        folder = PurePosixPath(TLS_FOLDER)
        values |= tls_variables(*(folder / name for name in ("pod.pem", "pod.key", "ca.pem")))
        mounts.append({"name": "tls", "mountPath": TLS_FOLDER, "readOnly": True})
    variables: list[dict[str, Any]] = [{"name": name, "value": _literal(value)} for name, value in values.items()]
    for name in options.secrets:
        variables.append({"name": name, "valueFrom": {"secretKeyRef": {"name": options.secret, "key": name}}})
    variables.append({"name": entry.POD, "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}})
    stop = ["python", "-m", entry.MARK, "--stop", f"{options.grace_s:g}"]
    return {
        "name": "ray",
        "image": options.image,
        "imagePullPolicy": options.image_pull_policy,
        "workingDir": options.working_dir,
        "env": variables,
        "resources": {"requests": dict(amounts), "limits": dict(amounts)},
        "volumeMounts": mounts,
        **_probes(is_head=is_head),
        "lifecycle": {"preStop": {"exec": {"command": stop}}},
    }


def _certifying(options: KubernetesConfig) -> dict[str, Any]:
    """The container that gives a pod its certificate before Ray starts; it alone sees the authority's key."""
    address = {"name": pod_certificate.POD_IP, "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
    return {
        "name": "certificate",
        "image": options.image,
        "imagePullPolicy": options.image_pull_policy,
        "command": ["python", "-m", pod_certificate.__name__, AUTHORITY_FOLDER, TLS_FOLDER],
        "env": [address],
        "resources": {"requests": {"cpu": "1", "memory": "1Gi"}, "limits": {"cpu": "1", "memory": "1Gi"}},
        "volumeMounts": [
            {"name": "authority", "mountPath": AUTHORITY_FOLDER, "readOnly": True},
            {"name": "tls", "mountPath": TLS_FOLDER},
        ],
    }

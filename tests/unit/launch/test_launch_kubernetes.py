"""KubeRay's objects: what KubeRay publishes of their form, what its operator refuses beyond that, and golden files."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from command_line import Command
from kuberay_schema import mistakes, rules_that_apply
from nemorl.errors import ConfigError, DeadlineError
from nemorl_ops.launch import entry, pod_certificate
from nemorl_ops.launch.manifests import merged
from nemorl_ops.launch.prepare import prepare
from nemorl_trust import authority
from recorded_messages import Raises

ROOT = Path("launches")
GOLDEN = Path(__file__).parents[2] / "golden" / "launch"
LEAST = ["launch.image=example/nemorl:1", "run_dir=/data/runs/a", "launch.storage=[{claim: runs, path: /data}]"]
ALL = [
    *LEAST[:2],
    "launch.storage=[{claim: runs, path: /data}, {claim: sets, path: /sets, sub_path: math, read_only: true}]",
    "launch.nodes=4",
    "launch.gpus_per_node=8",
    "launch.namespace=alignment",
    "launch.image_pull_secrets=[registry]",
    "launch.service_account=trainer",
    "launch.secrets=[HF_TOKEN]",
    "launch.secret=tokens",
    "launch.environment={NCCL_DEBUG: WARN}",
    "launch.extended_resources={rdma/hca: 8}",
    "launch.node_selector={gpu: h100}",
    "launch.tolerations=[{key: nvidia.com/gpu, operator: Exists, effect: NoSchedule}]",
    "launch.priority_class=low",
    "launch.queue=team",
    "launch.queue_priority=batch",
    "launch.time_limit_s=86400",
    "launch.start_timeout_s=3600",
    "launch.ray_version=2.60.0",
]


def objects(run_yaml: Path, overrides: list[str]) -> dict[str, dict[str, Any]]:
    """What is submitted, by kind."""
    files = prepare(run_yaml, overrides, on="kubernetes", name="a", root=ROOT).files
    texts = [
        re.sub("--launch=[0-9a-f]{8}", "--launch=<token>", files[name]) for name in ("rayjob.yaml", "raycluster.yaml")
    ]
    found = [each for text in texts for each in yaml.safe_load_all(text)]
    return {each["kind"]: each for each in found}


@pytest.mark.parametrize("overrides", [LEAST, ALL], ids=["least", "all"])
def test_objects_are_as_the_published_schemas_want_them(run_yaml: Path, overrides: list[str]) -> None:
    found = objects(run_yaml, overrides)
    for kind in ("RayJob", "RayCluster"):
        assert mistakes(found[kind]) == []
        # No rule in CEL is on any part that these objects have, so none can be broken.
        assert rules_that_apply(found[kind]) == []


def test_kubernetes_puts_no_other_variable_into_a_value(run_yaml: Path) -> None:
    job = objects(run_yaml, [*LEAST, "launch.environment={A: '$(HOME)/x', B: '$HOME'}"])["RayJob"]
    (container,) = job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"]
    values = {each["name"]: each.get("value") for each in container["env"]}
    assert (values["A"], values["B"]) == ("$$(HOME)/x", "$HOME")  # the API: "$$(X)" is the text "$(X)"


def test_a_template_adds_to_containers_and_groups(run_yaml: Path, tmp_path: Path) -> None:
    own = {
        "spec": {
            "rayClusterSpec": {
                "headGroupSpec": {
                    "template": {
                        "metadata": {"annotations": {"owner": "me"}},
                        "spec": {
                            "containers": [
                                {
                                    "name": "ray",
                                    "securityContext": {"runAsUser": 1000},
                                    "env": [{"name": "X", "value": "1"}],
                                },
                                {"name": "beside", "image": "example/logs:1"},
                            ]
                        },
                    }
                },
                "workerGroupSpecs": [{"groupName": "workers", "template": {"spec": {"hostNetwork": True}}}],
            }
        }
    }
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(own))
    options = [*LEAST, "launch.nodes=2", f"launch.template={tmp_path / 'own.yaml'}"]
    plain = objects(run_yaml, options[:-1])["RayJob"]["spec"]["rayClusterSpec"]
    found = objects(run_yaml, options)["RayJob"]
    assert mistakes(found) == []
    head, (group,) = (found["spec"]["rayClusterSpec"][key] for key in ("headGroupSpec", "workerGroupSpecs"))
    ray, beside = head["template"]["spec"]["containers"]
    assert head["template"]["metadata"]["annotations"] == {"owner": "me"}
    assert (ray["securityContext"], ray["image"], beside["name"]) == ({"runAsUser": 1000}, "example/nemorl:1", "beside")
    before = plain["headGroupSpec"]["template"]["spec"]["containers"][0]["env"]
    assert ray["env"] == [*before, {"name": "X", "value": "1"}]
    assert (group["replicas"], group["template"]["spec"]["hostNetwork"]) == (1, True)
    assert group["template"]["spec"]["containers"] == plain["workerGroupSpecs"][0]["template"]["spec"]["containers"]


@pytest.mark.parametrize(
    ("base", "over", "expected"),
    [
        ({"name": "A", "value": "1"}, {"name": "A", "valueFrom": {"fieldRef": {}}}, "over"),
        ({"name": "shm", "emptyDir": {"medium": "Memory"}}, {"name": "shm", "hostPath": {"path": "/dev/shm"}}, "over"),
        ({"name": "shm", "emptyDir": {"a": 1}}, {"name": "shm", "emptyDir": {"b": 2}},
         {"name": "shm", "emptyDir": {"a": 1, "b": 2}}),
        ({"exec": {"command": ["x"]}, "periodSeconds": 9}, {"httpGet": {"port": 1}},
         {"httpGet": {"port": 1}, "periodSeconds": 9}),
    ],
)  # fmt: skip
def test_of_two_sources_or_probes_that_of_the_template_stays(base: Any, over: Any, expected: Any) -> None:
    """The API refuses `value` beside `valueFrom`, two kinds of one volume and two handlers of one probe."""
    assert merged([base] if "name" in base else base, [over] if "name" in over else over) == (
        [over] if expected == "over" else [expected] if "name" in base else expected
    )


def test_a_template_mounts_a_volume_at_several_paths() -> None:
    base = [{"name": "storage", "mountPath": "/a"}, {"name": "shm", "mountPath": "/dev/shm"}]
    over = [{"name": "storage", "mountPath": "/b"}, {"name": "storage", "mountPath": "/c"}]
    assert merged(base, over) == [*base, *over]


def test_cores_are_those_of_what_runs_there(run_yaml: Path) -> None:
    def cores(*options: str) -> str:
        job = objects(run_yaml, [*LEAST, *options])["RayJob"]
        (container,) = job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"]
        return str(container["resources"]["requests"]["cpu"])

    # 8 workers of 4, 8 engines with a scheduler each, 8 graders, 2 for Ray and the driver.
    assert cores("launch.gpus_per_node=8", "cluster.cpus_per_worker=4") == "50"
    assert cores("launch.gpus_per_node=8", "launch.cpus_per_node=12.5") == "12.5"


@pytest.mark.ray
@pytest.mark.slow
def test_a_real_head_answers_the_probes_and_a_dead_one_does_not(run_yaml: Path) -> None:
    job = objects(run_yaml, LEAST)["RayJob"]
    (container,) = job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"]
    command = [sys.executable, *container["readinessProbe"]["exec"]["command"][1:]]
    assert "wget" not in json.dumps(container)
    assert subprocess.run(command, capture_output=True, check=False).returncode != 0, "nothing runs yet"
    ports = ["--port=26379", "--dashboard-port=8265", "--dashboard-agent-listen-port=52365", "--num-cpus=1"]
    ray = [str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", "--disable-usage-stats", *ports]
    with tempfile.TemporaryDirectory(prefix="r") as folder:  # paths of sockets are short
        environment = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "x" * 64, "RAY_TMPDIR": folder}
        head = subprocess.Popen(ray, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            deadline = time.monotonic() + 90
            while subprocess.run(command, capture_output=True, check=False).returncode != 0:
                assert head.poll() is None
                assert time.monotonic() < deadline
                time.sleep(1)
        finally:
            head.terminate()
            head.wait(30)


def test_the_schemas_refuse_what_an_api_server_would(run_yaml: Path) -> None:
    job = objects(run_yaml, ALL)["RayJob"]
    workers = job["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]
    workers["replica"] = workers.pop("replicas")
    container = workers["template"]["spec"]["containers"][0]
    container["resorces"] = container.pop("resources")
    job["spec"]["backoffLimit"] = "ten"
    said = "\n".join(mistakes(job))
    assert all(word in said for word in ("'replica'", "'resorces'", "'ten' is not of type 'integer'"))
    job["spec"]["managedBy"] = "somebody"
    assert any("kueue.x-k8s.io/multikueue" in rule for rule in rules_that_apply(job))


def test_the_operator_refuses_none_of_it(run_yaml: Path) -> None:
    # From ValidateRayJobMetadata, ValidateRayJobSpec and ValidateRayClusterSpec of KubeRay's operator.
    job = objects(run_yaml, ALL)["RayJob"]
    assert len(job["metadata"]["name"]) <= 47
    spec = job["spec"]
    assert spec["suspend"]
    assert spec["shutdownAfterJobFinishes"], "only then a job may be suspended, and have a time to live"
    assert "clusterSelector" not in spec, "excludes suspend and backoffLimit"
    assert spec["submissionMode"] == "K8sJobMode", "InteractiveMode excludes backoffLimit"
    (group,) = spec["rayClusterSpec"]["workerGroupSpecs"]
    assert group["minReplicas"] == group["maxReplicas"] == group["replicas"] == 3, "with the head, 4 nodes"
    # Kueue's limits: no autoscaling, and at most 7 groups of workers.
    assert "enableInTreeAutoscaling" not in spec["rayClusterSpec"]
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team"


@pytest.mark.parametrize("name", ["least", "all"])
def test_manifests_are_the_golden_ones(run_yaml: Path, name: str) -> None:
    found = objects(run_yaml, LEAST if name == "least" else ALL)
    assert json.loads((GOLDEN / f"kubernetes-{name}.json").read_text()) == [found["RayJob"], found["RayCluster"]]


def test_ray_is_encrypted_unless_somebody_says_that_it_need_not_be(run_yaml: Path) -> None:
    def pod(*more: str) -> tuple[dict[str, Any], dict[str, str]]:
        spec = objects(run_yaml, [*ALL, *more])["RayJob"]["spec"]["rayClusterSpec"]
        (group,) = spec["workerGroupSpecs"]
        pods = [yaml.safe_load(yaml.safe_dump(each["template"])) for each in (group, spec["headGroupSpec"])]
        for each in pods:
            for probe in ("livenessProbe", "readinessProbe"):  # a head is asked for the cluster's state besides
                del each["spec"]["containers"][0][probe]
        assert pods[0] == pods[1]
        assert spec["authOptions"] == {"mode": "token"}
        found: dict[str, Any] = group["template"]["spec"]
        return found, {each["name"]: each.get("value", "") for each in found["containers"][0]["env"]}

    encrypted, variables = pod()
    assert variables["RAY_USE_TLS"] == "1"
    assert variables["RAY_TLS_SERVER_CERT"] == "/etc/nemorl-tls/pod.pem"
    (init,) = encrypted["initContainers"]
    mounts = [{mount["name"] for mount in each["volumeMounts"]} for each in (init, encrypted["containers"][0])]
    assert ["authority" in names for names in mounts] == [True, False], "the run does not see the authority's key"
    plain, variables = pod("cluster.security.plaintext=true")
    assert "initContainers" not in plain
    assert "RAY_USE_TLS" not in variables


def test_a_pod_gives_itself_a_certificate_for_its_address_and_the_heads_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority.make(tmp_path / "secret", [], days=30)
    (tmp_path / "tls").mkdir()
    monkeypatch.setenv("POD_IP", "10.1.2.3")
    monkeypatch.setenv("FQ_RAY_IP", "a-head-svc.alignment.svc.cluster.local")
    pod_certificate.main(tmp_path / "secret", tmp_path / "tls")
    assert sorted(path.name for path in (tmp_path / "tls").iterdir()) == ["ca.pem", "pod.key", "pod.pem"]
    (found,) = authority.read(tmp_path / "tls" / "pod.pem")
    assert found.names[:3] == ("pod", "10.1.2.3", "a-head-svc.alignment.svc.cluster.local")
    assert (tmp_path / "tls" / "pod.key").stat().st_mode & 0o777 == 0o600


def test_a_secret_is_a_reference(run_yaml: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_planted-value")
    prepared = prepare(run_yaml, ALL, on="kubernetes", name="a", root=ROOT)
    job = yaml.safe_load_all(prepared.files["rayjob.yaml"])
    (container,) = list(job)[1]["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"]
    reference = {"secretKeyRef": {"name": "tokens", "key": "HF_TOKEN"}}
    assert {"name": "HF_TOKEN", "valueFrom": reference} in container["env"]
    assert all("hf_planted-value" not in text for text in prepared.files.values())


def test_the_run_joins_the_ray_of_its_pods_also_with_one_node(run_yaml: Path) -> None:
    mapped = objects(run_yaml, LEAST)["ConfigMap"]
    assert "address: auto" in mapped["data"]["config.yaml"]


@pytest.mark.parametrize(
    ("changes", "fact", "path"),
    [
        (["run_dir=runs/a"], "run_dir=/data/runs/a", "launch.storage"),
        (["launch.storage=[{claim: runs, path: /data, read_only: true}]"], "none", "launch.storage"),
        (["launch.image=null"], "image", "launch.image"),
        (["launch.setup=module load cuda"], "pods", "launch.setup"),
        (["launch.queue_priority=high"], "Kueue", "launch.queue_priority"),
        (["launch.tolerations=[{operator: Equal}]"], "Equal", "launch.tolerations.0.key"),
    ],
)
def test_mistakes(run_yaml: Path, raises: Raises, changes: list[str], fact: str, path: str) -> None:
    with raises(ConfigError, fact, path=path):
        prepare(run_yaml, [*LEAST, *changes], on="kubernetes", name="a", root=ROOT)


def test_a_name_that_kubernetes_refuses(run_yaml: Path, raises: Raises) -> None:
    for name in ("Mine", "a_b", "1st", "a" * 48):
        with raises(ConfigError, name, 47, path="launch"):
            prepare(run_yaml, LEAST, on="kubernetes", name=name, root=ROOT)


def test_a_file_of_the_user_is_merged_over_the_manifest(run_yaml: Path) -> None:
    own = run_yaml.parent / "own.yaml"
    own.write_text("spec:\n  backoffLimit: 3\n  rayClusterSpec:\n    headGroupSpec: {serviceType: ClusterIP}\n")
    job = objects(run_yaml, [*LEAST, f"launch.template={own}"])["RayJob"]
    assert job["spec"]["backoffLimit"] == 3
    assert job["spec"]["rayClusterSpec"]["headGroupSpec"]["serviceType"] == "ClusterIP"
    assert job["spec"]["rayClusterSpec"]["headGroupSpec"]["rayStartParams"] == {"dashboard-host": "0.0.0.0"}
    assert mistakes(job) == []


KUBECTL = """#!{python}
import json, sys
words = sys.argv[1:]
with open({calls!r}, "a") as file:
    file.write(" ".join(words) + "\\n")
if "rayjob" in words and "get" in words:
    print(open({status!r}).read())
elif "pods" in words:
    pods = [("w", "worker"), ("h", "head")]
    items = [{{"metadata": {{"name": n, "labels": {{"ray.io/node-type": t}}}}}} for n, t in pods]
    print(json.dumps({{"items": items}}))
"""


@pytest.mark.slow
def test_kubectl_is_asked_and_told(run_yaml: Path, nemorl: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = run_yaml.parent
    (folder / "bin").mkdir()
    program = folder / "bin" / "kubectl"
    calls, status = folder / "calls", folder / "status.json"
    program.write_text(KUBECTL.format(python=sys.executable, calls=str(calls), status=str(status)))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")

    assert nemorl("launch", "run.yaml", *LEAST, "--on", "kubernetes", "--name", "a").code == 0
    manifest = folder / "launches" / "a" / "rayjob.yaml"
    expected = ["delete rayjob a --ignore-not-found --wait", f"apply -f {manifest}"]
    assert calls.read_text().splitlines() == [f"--namespace default {line}" for line in expected]

    for phase, job_status, state in (
        ("Initializing", "", "pending"),
        ("Running", "RUNNING", "running"),
        ("Retrying", "", "pending"),
        ("Complete", "SUCCEEDED", "finished"),
        ("Complete", "STOPPED", "cancelled"),
        ("Failed", "FAILED", "failed"),
    ):
        facts = {"jobDeploymentStatus": phase, "jobStatus": job_status, "failed": 2, "jobId": "a-x1"}
        status.write_text(json.dumps({"status": facts}))
        found = nemorl("launch", "status", "a", "--json").json
        assert (found["state"], found["attempt"], found["nodes"]) == (state, 2, ["h", "w"])

    status.write_text(json.dumps({"status": {"jobDeploymentStatus": "Running", "jobId": "a-x1"}}))
    assert nemorl("launch", "cancel", "a").code == 0
    assert calls.read_text().splitlines()[-1] == "--namespace default exec h -- ray job stop --no-wait a-x1"


@pytest.mark.slow
def test_a_cluster_that_does_not_answer_is_said_once_and_leaves_no_launch(
    run_yaml: Path, nemorl: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = run_yaml.parent
    (folder / "bin").mkdir()
    program = folder / "bin" / "kubectl"
    log = 'E1123 04:32:16.589147 22668 memcache.go:265] "Unhandled Error" err="connection refused"'
    program.write_text(
        f"#!/bin/bash\necho '{log}' >&2\necho '{log}' >&2\necho 'The connection was refused' >&2\nexit 1\n"
    )
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    done = nemorl("launch", "run.yaml", *LEAST, "--on", "kubernetes", "--name", "a")
    assert done.code == 2
    assert "kubectl refused: The connection was refused\n" in done.err
    assert "memcache" not in done.err
    assert nemorl("launch", "status", "--json").json == []


SAVES = """
import os, signal, sys, time

signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
open("ready", "w").close()
time.sleep(60)
"""
"""A run that ends well when it is asked to stop."""


def run_in_pod(folder: Path) -> subprocess.Popen[bytes]:
    """Such a run in the pod ``folder``, once it can be asked to stop."""
    folder.mkdir()
    command = [sys.executable, "-m", entry.MARK, "--", sys.executable, "-c", SAVES]
    run = subprocess.Popen(command, cwd=folder, env={**os.environ, entry.POD: str(folder)})
    while not (folder / "ready").exists():
        assert run.poll() is None
        time.sleep(0.01)
    return run


def test_in_a_pod_a_run_that_was_asked_to_stop_wants_another_try(tmp_path: Path) -> None:
    runs = {name: run_in_pod(tmp_path / name) for name in ("drained", "beside")}
    stop = [sys.executable, "-m", entry.MARK, "--stop", "2"]
    subprocess.run(stop, env={**os.environ, entry.POD: str(tmp_path / "drained")}, check=True)
    # 75 is EX_TEMPFAIL of sysexits.h: with backoffLimit the job gets another cluster, and the run continues.
    assert runs["drained"].wait(60) == 75
    # Another pod, whose processes this one sees where both have those of their node.
    assert runs["beside"].poll() is None
    runs["beside"].terminate()
    assert runs["beside"].wait(60) == 75


def test_a_run_that_is_asked_to_stop_as_it_starts_is_not_left_behind(tmp_path: Path) -> None:
    program = f"""
import os, signal, subprocess, sys, time
from nemorl_ops.launch import entry

class SlowlyStarted(subprocess.Popen):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        while not os.path.exists("ready"):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

subprocess.Popen = SlowlyStarted
sys.exit(entry.run([sys.executable, "-c", {SAVES!r}]))
"""
    assert subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=False).returncode == 75


def test_nodes_that_do_not_come_are_counted(raises: Raises) -> None:
    with raises(DeadlineError, 2, 0):
        entry.await_nodes(2, 0.0)


@pytest.mark.parametrize("code", [0, 3])
def test_in_a_pod_a_run_that_ends_by_itself_ends_with_its_own_code(code: int) -> None:
    command = [sys.executable, "-m", entry.MARK, "--", sys.executable, "-c", f"raise SystemExit({code})"]
    assert subprocess.run(command, check=False).returncode == code

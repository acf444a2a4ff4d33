"""A Ray cluster with a token and with TLS: who has neither is refused."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from nemorl_trust.authority import make

pytestmark = [pytest.mark.full, pytest.mark.ray, pytest.mark.slow]

SERVER = """
import json, sys
from nemorl.config import ClusterConfig
from nemorl.resources.ray_cluster import RayVirtualCluster
from nemorl.resources.ray_workers import RayWorkerGroup

class Echo:
    def __init__(self, context): pass
    def say(self, word): return word
    def shutdown(self): pass

cluster = RayVirtualCluster([1], ClusterConfig(launcher="ray", cpus_per_worker=0.5, security=json.loads(sys.argv[1])))
group = RayWorkerGroup(cluster, Echo)
assert group.call(Echo.say, "hello") == ["hello"]
import ray
print(ray.get_runtime_context().gcs_address, flush=True)
sys.stdin.readline()
cluster.shutdown()
"""
CLIENT = """
import json, sys
from nemorl.config import ClusterConfig
from nemorl.errors import ResourceError
from nemorl.resources.ray_session import RaySession
try:
    RaySession(ClusterConfig(launcher="ray", address=sys.argv[1], security=json.loads(sys.argv[2])))
    print("in")
except ResourceError as error:
    print("refused:", error)
"""
STARTER = """
import json, sys, tempfile
from pathlib import Path
from nemorl.config.models import Placement
from nemorl.errors import NemorlError
from nemorl.resources.ray_launcher import RayLauncher
from nemorl.resources.worker import WorkerContext
from nemorl_sft.config import SFTConfig
from nemorl.resources.worker import TrainingFactory
cluster = {"launcher": "ray", "address": sys.argv[1], "cpus_per_worker": 0.5, "security": json.loads(sys.argv[2])}
config = SFTConfig(model="a", data="arithmetic", cluster=cluster)
with tempfile.TemporaryDirectory() as logs:
    launcher = RayLauncher(config, Placement(), WorkerContext(device="cpu"), Path(logs))
    try:
        launcher.training_group(TrainingFactory(config.policy), "trainer")
    except NemorlError as error:
        print("refused:", error)
    launcher.close()
"""
PLAIN = {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_USE_TLS"}


def environment() -> dict[str, str]:
    """This one without settings of an earlier session in this process, and a Ray that gives up soon."""
    kept = {key: value for key, value in os.environ.items() if key not in PLAIN and not key.startswith("RAY_TLS")}
    # A private cluster listens on the loopback only, where Ray looks for one in this mode alone.
    kept |= {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
    return kept | {"RAY_gcs_server_request_timeout_seconds": "5", "RAY_gcs_rpc_server_reconnect_timeout_s": "5"}


def knock(address: str, security: dict[str, str | bool], program: str = CLIENT) -> str:
    command = [sys.executable, "-c", program, address, json.dumps(security)]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=90, env=environment(), check=False)
    except subprocess.TimeoutExpired:
        return "refused: no answer"
    return found.stdout.strip() or f"refused: {found.stderr.strip()[-300:]}"


def make_certificates(folder: Path) -> dict[str, str]:
    """As `nemorl certs make` makes them, for this machine's addresses."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # sends nothing; tells which address this machine would use
        own = probe.getsockname()[0]
    make(folder / "certs", [f"node,{own}"], days=1)
    paths = {"tls_certificate": "node.pem", "tls_key": "node.key", "tls_ca": "ca.pem"}
    return {field: str(folder / "certs" / file) for field, file in paths.items()}


def knock_at_a_cluster(
    security: dict[str, str | bool], *visitors: dict[str, str | bool], program: str = CLIENT
) -> list[str]:
    """What each visitor hears at a private cluster with these settings."""
    command = [sys.executable, "-c", SERVER, json.dumps(security)]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment())
    assert server.stdin is not None
    assert server.stdout is not None
    try:
        address = server.stdout.readline().strip()
        assert address, "the cluster did not start"
        with ThreadPoolExecutor(len(visitors)) as threads:  # who is refused waits until Ray gives up
            heard = list(threads.map(lambda visitor: knock(address, visitor, program), visitors))
        server.stdin.write("enough\n")
        server.stdin.flush()
        assert server.wait(timeout=60) == 0
    finally:
        server.kill()
    return heard


def test_a_client_without_the_token_is_refused(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("a" * 64)
    (tmp_path / "other").write_text("b" * 64)
    visitors: list[dict[str, str | bool]] = [
        {"token_auth": True, "token_file": str(tmp_path / name)} for name in ("token", "other")
    ]
    right, wrong, none = knock_at_a_cluster({"token_file": str(tmp_path / "token")}, *visitors, {"token_auth": False})
    assert right == "in"
    assert wrong.startswith("refused: cannot connect to the Ray cluster")
    assert none.startswith("refused: cannot connect to the Ray cluster")


@pytest.mark.full
def test_a_client_without_a_certificate_is_refused(tmp_path: Path) -> None:
    certified = {**make_certificates(tmp_path), "token_auth": False}
    right, none = knock_at_a_cluster(certified, certified, {"token_auth": False})
    assert right == "in"
    assert none.startswith("refused")


@pytest.mark.full
def test_a_token_that_the_cluster_has_not_is_named_where_it_stops_workers(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("a" * 64)
    visitor: dict[str, str | bool] = {"token_auth": True, "token_file": str(tmp_path / "token")}
    (heard,) = knock_at_a_cluster({"token_auth": False}, visitor, program=STARTER)
    assert heard.startswith("refused: no worker starts: this process wants a token of who speaks to it")
    assert "cluster.security.token_auth: false" in heard

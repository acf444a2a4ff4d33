"""Two nodes of Ray with addresses of their own, as `nemorl launch` starts them: encrypted, by OpenSSL's judgement."""

from __future__ import annotations

import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from nemorl_ops.launch.ray_access import child_environment, make_access, own_access
from nemorl_ops.launch.ray_part import RayPart

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.full]

FIRST, SECOND = "127.0.0.2", "127.0.0.3"
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0"
"""How every HTTP/2 connection begins, with empty settings (RFC 9113, sections 3.4 and 6.5)."""
TLS_ALERT = b"\x15"
RUN = """
import sys
import ray
from nemorl.config import ClusterConfig
from nemorl.resources.ray_cluster import RayVirtualCluster
from nemorl.resources.ray_workers import RayWorkerGroup

class Echo:
    def __init__(self, context): pass
    def say(self, word): return f"{ray.util.get_node_ip_address()} {word}"
    def shutdown(self): pass

config = ClusterConfig(launcher="ray", address=sys.argv[1], num_nodes=2, workers_per_node=1)
cluster = RayVirtualCluster([1, 1], config)
print(*sorted(RayWorkerGroup(cluster, Echo).call(Echo.say, "x" * 200_000)), sep="\\n")  # more than Ray sends inline
print(*[f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}" for node in ray.nodes()], flush=True)
cluster.shutdown()
"""


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, list[RayPart], dict[str, str]]]:
    """The folder with token and certificates, the two nodes, and the environment of the first."""
    folder = tmp_path_factory.mktemp("attempt")
    make_access(folder, plaintext=False)
    parts: list[RayPart] = []
    environments = []
    try:
        for name, address in (("one", FIRST), ("two", SECOND)):
            access = own_access(folder, name, address, plaintext=False)
            environments.append(child_environment(access) | {"RAY_raylet_start_wait_time_s": "300"})
            parts.append(
                RayPart(
                    name=name, head=parts[0].address if parts else None, address=address, cpus=1, gpus=0, resources={},
                    object_store_gib=0.1, environment=environments[-1], log=folder / f"{name}.log",
                )
            )  # fmt: skip
            await_start(folder / f"{name}.log")
        yield folder, parts, environments[0]
    finally:
        for part in parts:
            part.close()


def await_start(log: Path) -> None:
    deadline = time.monotonic() + 400
    while "Ray runtime started" not in log.read_text():
        assert time.monotonic() < deadline, log.read_text()[-2000:]
        time.sleep(0.2)


def run(address: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", RUN, address]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)


def shaken(place: tuple[str, int], context: ssl.SSLContext) -> str:
    """For whom the certificate of a server is; raises if it wants one of the client, or has none of the authority."""
    with socket.create_connection(place, 20) as plain, context.wrap_socket(plain, server_hostname=place[0]) as stream:
        stream.settimeout(20)
        found = stream.getpeercert()
        stream.send(PREFACE)
        if not stream.recv(1):
            raise ConnectionResetError("closed")
    return str(found)


def test_nodes_and_workers_speak_tls_alone_and_only_with_who_has_a_certificate(
    nodes: tuple[Path, list[RayPart], dict[str, str]],
) -> None:
    folder, (head, _), environment = nodes
    done = run(head.address, environment)
    assert done.returncode == 0, done.stderr[-2000:]
    first, second, servers = done.stdout.splitlines()
    assert (first[:9], second[:9]) == (FIRST, SECOND)
    assert len(first) == len(second) == 200_010

    # A judge that is neither Ray's nor ours.
    known = folder / "ray-certificates"
    context = ssl.create_default_context(cafile=known / "ca.pem")
    context.set_alpn_protocols(["h2"])
    places = [(host, int(port)) for host, port in (each.split(":") for each in (head.address, *servers.split()))]
    assert [host for host, _ in places].count(FIRST) == 2, "the head's server of all nodes, and one on each node"
    assert len(places) == 3
    for place in places:
        with pytest.raises(OSError, match=r"(?i)certificate|closed|reset|eof"):  # it demands a certificate
            shaken(place, context)
    context.load_cert_chain(known / "two.pem", known / "two.key")
    assert all(place[0] in shaken(place, context) for place in places)

    assert all(answer_in_plain_text(place) in (b"", TLS_ALERT) for place in places)


def answer_in_plain_text(place: tuple[str, int]) -> bytes:
    """The first byte that a server sends to who speaks HTTP/2 as gRPC does without TLS; empty if it hangs up."""
    with socket.create_connection(place, 20) as plain:
        plain.sendall(PREFACE)
        try:
            return plain.recv(1)
        except ConnectionResetError:
            return b""

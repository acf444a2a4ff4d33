"""A private Ray: who can reach it, who can read its files, and what is left of it when its driver is killed."""

from __future__ import annotations

import ipaddress
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from nemorl.base.files.process_guard import processes

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc"),
]
DRIVER = """
import sys, tempfile
from nemorl.config import ClusterConfig
from nemorl.resources.ray_cluster import RayVirtualCluster
from nemorl.resources.ray_workers import RayWorkerGroup

class Busy:
    def __init__(self, context): pass
    def spin(self):
        while True: pass
    def shutdown(self): pass

cluster = RayVirtualCluster([1], ClusterConfig(launcher="ray", cpus_per_worker=0.5))
group = RayWorkerGroup(cluster, Busy)
print("up", flush=True)
group.call(Busy.spin)
"""
HALF_STARTED = """
import sys
from nemorl.config import ClusterConfig
from nemorl.resources.ray_session import RaySession
from ray._private.node import Node

def slow(self):
    global starts
    starts += 1
    start(self)
    if starts <= int(sys.argv[1]):
        raise Exception("The current node timed out during startup.")

starts, start, Node.start_ray_processes = 0, Node.start_ray_processes, slow
try:
    session = RaySession(ClusterConfig(launcher="ray"))
    session.close()
except Exception as error:
    print(error)
print(f"{starts} starts", flush=True)
input()
"""
LONGEST_WAIT_S = 60.0


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A driver whose worker is busy, and the folder of its cluster."""
    temporary = Path("/tmp") / f"nm{os.getpid()}"  # short: sockets are far below it, and their paths have a limit
    temporary.mkdir()
    command, environment = [sys.executable, "-c", DRIVER], {**os.environ, "TMPDIR": str(temporary)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        (folder,) = temporary.glob("nemorl-ray-*")
        yield process, folder
        process.kill()
    for left in processes(folder):
        os.kill(left, signal.SIGKILL)
    shutil.rmtree(temporary, ignore_errors=True)  # which the guard, if it had the time, has emptied


def test_it_listens_on_the_loopback_only(driver: tuple[subprocess.Popen[str], Path]) -> None:
    process, folder = driver
    members = [process.pid, *processes(folder)]
    listening = [
        ipaddress.ip_address(connection.laddr.ip)
        for pid in members
        for connection in psutil.Process(pid).net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert len(members) > 4  # driver, GCS, raylet, its agents, workers
    assert len(listening) > 4
    assert all((getattr(address, "ipv4_mapped", None) or address).is_loopback for address in listening)


def test_nobody_else_can_enter_its_folder(driver: tuple[subprocess.Popen[str], Path]) -> None:
    assert stat.S_IMODE(driver[1].stat().st_mode) == 0o700
    assert (driver[1] / "ray").is_dir()


def test_nothing_of_it_outlives_a_killed_driver(driver: tuple[subprocess.Popen[str], Path]) -> None:
    process, folder = driver
    assert processes(folder)
    process.kill()
    process.wait()
    deadline = time.monotonic() + LONGEST_WAIT_S
    while (processes(folder) or folder.exists()) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert processes(folder) == []
    assert not folder.exists()


@pytest.mark.parametrize(("slow", "is_refused"), [(1, False), (9, True)])
def test_a_slow_start_is_tried_once_more_and_leaves_nothing(slow: int, is_refused: bool) -> None:
    temporary = Path("/tmp") / f"nh{os.getpid()}"
    temporary.mkdir()
    command, environment = [sys.executable, "-c", HALF_STARTED, str(slow)], {**os.environ, "TMPDIR": str(temporary)}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        said = []
        while (line := process.stdout.readline()) and "starts" not in line:
            said.append(line)
        assert line == "2 starts\n"
        assert any("cannot connect" in line for line in said) == is_refused
        try:
            below = psutil.Process(process.pid).children(recursive=True)
            assert not [left for left in below if left.is_running() and left.status() != psutil.STATUS_ZOMBIE]
            assert [*temporary.glob("nemorl-ray-*")] == []
        finally:
            process.kill()
    shutil.rmtree(temporary, ignore_errors=True)

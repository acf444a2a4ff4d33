"""A Ray cluster whose nodes are network namespaces of this machine: they can be cut off, stopped, drained and lost.

Run everything under ``unshare --net``, the loopback interface up: the head and whoever uses it are in that namespace,
each further node in one of its own, behind a pair of virtual interfaces. Nothing outside sees any of it. Nodes that
have gone are started again, as an operator of a cluster does; the head too.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))
from forked_workers import python_that_forks

NETWORK = "10.77.0."
PORT = 6379
SETTINGS = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "4000",
    "RAY_health_check_failure_threshold": "4",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "15",
    "RAY_raylet_start_wait_time_s": "200",
}
"""A node that is silent for some 15 s counts as lost; Ray's own default is a minute."""
START = "import sys; sys.executable = sys.argv.pop(1); from ray.scripts.scripts import main; main()"
START_S = 240.0
LOOK_S = 1.0
HELPERS = ("sleep", "forked_workers.py")
"""What holds a namespace, and what its workers are forked from."""


def can_be_made() -> bool:
    """This machine lets us have namespaces."""
    tools = all(shutil.which(name) for name in ("unshare", "nsenter", "ip"))
    return tools and subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False).returncode == 0


class Nodes:
    """The cluster. Told by datagrams to ``control``: a verb, the number of a node and seconds."""

    def __init__(self, count: int) -> None:
        self._stack = ExitStack()
        self._temporary = Path(self._stack.enter_context(TemporaryDirectory(prefix="nmr-")))
        self._lock = threading.RLock()
        self._is_ending = False
        self._links: list[str] = []
        self._holders: list[int] = []
        self._pythons: list[str] = []
        self._told = self._stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        _run("ip", "link", "add", "nodes", "type", "bridge")
        _run("ip", "addr", "add", f"{NETWORK}1/24", "dev", "nodes")
        _run("ip", "link", "set", "nodes", "up")
        _run("ip", "route", "add", "default", "dev", "nodes")  # Ray finds its own address by a route
        self._told.bind(("127.0.0.1", 0))
        self.control = f"127.0.0.1:{self._told.getsockname()[1]}"
        self.address = f"{NETWORK}1:{PORT}"
        for number in range(count):
            self._add_namespace(number)
        self._start_head()
        for number in range(count):
            self._start_node(number)
        for loop in (self._listen, self._look_after):
            threading.Thread(target=loop, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._is_ending = True
            self.mend()
            self._end_head()
            for number in range(len(self._holders)):
                self._signal(number, signal.SIGKILL)
            self._stack.close()

    def mend(self) -> None:
        """All that was cut off or stopped goes on, and who has gone is started again."""
        for number in range(len(self._holders)):
            self._join(number)
            self._signal(number, signal.SIGCONT)
        end = time.monotonic() + START_S
        while self._alive() <= len(self._holders) and time.monotonic() < end:
            time.sleep(LOOK_S)

    def _alive(self) -> int:
        """Nodes that the cluster counts as there, its head included; 0 where it has no head."""
        from ray._raylet import GcsClient

        try:
            nodes = GcsClient(address=self.address).get_all_node_info(timeout=5)
        except Exception:  # Ray has many
            return 0
        return sum(node.state == 0 for node in nodes.values())

    # What befalls a node

    def _listen(self) -> None:
        with suppress(OSError):
            while words := self._told.recv(64).decode().split():
                verb, number, seconds = words[0], int(words[1]) % len(self._holders), float(words[2])
                with self._lock:
                    self._strike(verb, number, seconds)

    def _strike(self, verb: str, number: int, seconds: float) -> None:
        if verb == "cut":
            _run("ip", "link", "set", self._links[number], "down")
            self._later(seconds, self._join, number)
        elif verb == "freeze":
            self._signal(number, signal.SIGSTOP)
            self._later(seconds, self._signal, number, signal.SIGCONT)
        elif verb == "kill":
            self._signal(number, signal.SIGKILL, "raylet")
        elif verb == "drain":
            self._drain(number, seconds)
        elif verb == "headless":
            for process in _named("gcs_server", os.readlink("/proc/self/ns/net")):
                process.kill()

    def _later(self, seconds: float, action: Any, *arguments: Any) -> None:
        timer = threading.Timer(seconds, action, arguments)
        timer.daemon = True
        timer.start()

    def _join(self, number: int) -> None:
        _run("ip", "link", "set", self._links[number], "up")

    def _signal(self, number: int, what: signal.Signals, name: str | None = None) -> None:
        for process in _named(name, _namespace(self._holders[number])):
            with suppress(psutil.Error):
                if name is not None or not any(helper in " ".join(process.cmdline()) for helper in HELPERS):
                    process.send_signal(what)

    def _drain(self, number: int, seconds: float) -> None:
        """As a cloud does that takes a machine back."""
        from ray._raylet import GcsClient

        client = GcsClient(address=self.address)
        nodes = client.get_all_node_info(timeout=10)
        address = f"{NETWORK}{number + 2}"
        deadline_ms = int((time.time() + seconds) * 1000)
        for node_id, node in nodes.items():
            if node.node_manager_address == address and node.state == 0:
                with suppress(Exception):  # it is on its way out already
                    client.drain_node(node_id.hex(), 2, "taken back", deadline_ms)

    # Who is there

    def _look_after(self) -> None:
        """Start again who has gone."""
        while not self._is_ending:
            time.sleep(LOOK_S)
            with self._lock:
                if self._is_ending:
                    return
                if not _named("gcs_server", os.readlink("/proc/self/ns/net")):
                    self._end_head()
                    for number in range(len(self._holders)):
                        self._signal(number, signal.SIGKILL)
                    self._start_head()
                for number, holder in enumerate(self._holders):
                    if not _named("raylet", _namespace(holder)):
                        self._signal(number, signal.SIGKILL)  # workers that have not noticed
                        with suppress(subprocess.SubprocessError):  # cut off: tried again
                            self._start_node(number)

    def _add_namespace(self, number: int) -> None:
        holder = subprocess.Popen(["unshare", "--net", "sleep", "infinity"])
        self._stack.callback(holder.wait)
        self._stack.callback(holder.kill)
        while _namespace(holder.pid) == os.readlink("/proc/self/ns/net"):
            time.sleep(0.01)
        link, inside = f"node{number}", ("nsenter", "-t", str(holder.pid), "-n")
        _run("ip", "link", "add", link, "type", "veth", "peer", "name", "out", "netns", str(holder.pid))
        _run("ip", "link", "set", link, "master", "nodes", "up")
        _run(*inside, "ip", "addr", "add", f"{NETWORK}{number + 2}/24", "dev", "out")
        for name in ("lo", "out"):
            _run(*inside, "ip", "link", "set", name, "up")
        _run(*inside, "ip", "route", "add", "default", "via", f"{NETWORK}1")
        folder = self._temporary / str(number)
        folder.mkdir()
        self._pythons.append(str(self._stack.enter_context(python_that_forks(folder, inside))))
        self._links.append(link)
        self._holders.append(holder.pid)

    def _start_head(self) -> None:
        folder = self._temporary / "ray"
        shutil.rmtree(folder, ignore_errors=True)
        _ray(sys.executable, (), "--head", f"--port={PORT}", f"--node-ip-address={NETWORK}1", "--num-cpus=0",
             "--include-dashboard=false", f"--temp-dir={folder}")  # fmt: skip

    def _end_head(self) -> None:
        """With what it has started: its monitors do not end by themselves."""
        for process in _named(None, os.readlink("/proc/self/ns/net")):
            with suppress(psutil.Error):
                if any(mark in " ".join(process.cmdline()) for mark in (str(self._temporary / "ray"), self.address)):
                    process.kill()

    def _start_node(self, number: int) -> None:
        inside = ("nsenter", "-t", str(self._holders[number]), "-n")
        _ray(self._pythons[number], inside, f"--address={self.address}", f"--node-ip-address={NETWORK}{number + 2}",
             "--num-cpus=1")  # fmt: skip


def _ray(python: str, inside: Sequence[str], *options: str) -> None:
    command = [*inside, sys.executable, "-c", START, python, "start", *options, "--disable-usage-stats"]
    subprocess.run(
        command, env={**os.environ, **SETTINGS}, check=True, timeout=START_S, stdout=subprocess.DEVNULL, stderr=2
    )


def _run(*command: str) -> None:
    subprocess.run(command, check=True)


def _namespace(pid: int) -> str:
    return os.readlink(f"/proc/{pid}/ns/net")


def _named(name: str | None, namespace: str) -> list[psutil.Process]:
    """The processes of a network namespace, or those of one name."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            is_it = name in (None, process.name()) and process.status() != psutil.STATUS_ZOMBIE
            if is_it and _namespace(process.pid) == namespace:
                found.append(process)
    return found

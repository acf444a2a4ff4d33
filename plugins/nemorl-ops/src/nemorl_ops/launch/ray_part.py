"""One node's part of a job's Ray cluster: ``ray start`` on fixed ports, and a view of which nodes are alive."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from nemorl.base.files import process_guard
from nemorl.base.files.atomic import replace_text
from nemorl.base.files.owned_folders import owned_folder

from nemorl_ops.launch import detached
from nemorl_ops.launch.ports import PortBlock

CLOSE_POLL_S = 0.1
PLACE, PREFIX = Path("/tmp"), "nrl-"
"""Folders of Ray's parts: its sockets are far below, and may have names of 107 characters."""
LISTENS_S = 5.0
"""Longest time for a machine to take a connection."""
OWNER = "owner.json"
"""File in such a folder: the process that removes it."""


def own_address(towards: str | None = None, interface: str | None = None) -> str:
    """The address of this machine that others reach it by.

    Args:
        towards: A machine whose network it shall be in. Unset: that of the default route.
        interface: The network interface, by name; it decides alone.
    """
    if interface is not None:
        import fcntl
        import struct

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            found = fcntl.ioctl(probe.fileno(), 0x8915, struct.pack("256s", interface.encode()[:15]))  # SIOCGIFADDR
        return socket.inet_ntoa(found[20:24])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((towards or "192.0.2.1", 9))  # sends nothing: asks which address would be used
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


class RayPart:
    """Ray's processes on this node, which end with this object."""

    def __init__(
        self,
        *,
        name: str,
        head: str | None,
        address: str,
        cpus: int | None,
        gpus: int,
        resources: Mapping[str, float],
        object_store_gib: float | None,
        environment: Mapping[str, str],
        log: Path,
    ) -> None:
        """
        Args:
            name: Of this node, in Ray's messages.
            head: ``host:port`` to join; ``None``: this is the head.
            address: IP address of this node.
            cpus: Cores for Ray; ``None``: all of the machine.
            gpus: GPUs for Ray.
            resources: Further resources.
            object_store_gib: Size of its object store; ``None``: Ray's own choice.
            environment: Of its processes.
            log: File for their output.
        """
        remove_left_over()
        self._ports = PortBlock.claimed()
        self.address = head or f"{address}:{self._ports.head}"
        self._folder = owned_folder(PREFIX, PLACE)
        owner = {"pid": os.getpid(), "identity": detached.identity(os.getpid()), "namespace": _namespace()}
        replace_text(self._folder / OWNER, json.dumps(owner))
        command = [
            *(sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--log-style=record"),
            *(["--head", "--include-dashboard=false"] if head is None else [f"--address={head}"]),
            *(f"--node-ip-address={address}", f"--node-name={name}", "--disable-usage-stats"),
            *(f"--num-gpus={gpus}", f"--resources={json.dumps(dict(resources))}", f"--temp-dir={self._folder}"),
            *([f"--num-cpus={cpus}"] if cpus is not None else []),
            *([f"--object-store-memory={int(object_store_gib * 2**30)}"] if object_store_gib is not None else []),
            *self._ports.options(head=head is None),
        ]
        guard = [sys.executable, "-I", "-S", process_guard.__file__, str(os.getpid()), str(self._folder)]
        self._guard = subprocess.Popen(
            guard, start_new_session=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
        )
        marked = {**environment, process_guard.MARK: str(self._folder)}
        with log.open("ab") as output:
            self._process = subprocess.Popen(command, stdout=output, stderr=output, env=marked, start_new_session=True)

    @property
    def exit_code(self) -> int | None:
        """Of Ray's processes; ``None`` while they live."""
        return self._process.poll()

    def close(self) -> None:
        """End Ray's processes at once, and remove what they left in /tmp: after the run there is nothing to drain."""
        while _killed(self._folder):
            self._process.poll()
            time.sleep(CLOSE_POLL_S)
        self._guard.kill()  # it ignores SIGTERM where this node does: ranks that stay while rank 0 saves
        self._guard.wait()
        self._ports.release()
        shutil.rmtree(self._folder, ignore_errors=True)


def remove_left_over() -> None:
    """Remove what parts of Ray left on this machine whose owner was killed, with all that it had to clean up."""
    for folder in PLACE.glob(f"{PREFIX}*"):
        try:
            owner = json.loads((folder / OWNER).read_text())
        except (OSError, ValueError):  # it is another user's, or being made
            continue
        # Numbers of processes in another container mean nothing in this one.
        if owner["namespace"] == _namespace() and not detached.is_alive(owner):
            while _killed(folder):
                time.sleep(CLOSE_POLL_S)
            shutil.rmtree(folder, ignore_errors=True)


def _namespace() -> str:
    return os.readlink("/proc/self/ns/pid")


def _killed(folder: Path) -> list[int]:
    """The processes that belong to a folder, which have now been told to end."""
    left = process_guard.processes(folder)
    for process in left:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    return left


def _require_listening(address: str) -> None:
    host, _, port = address.rpartition(":")
    if not host or "//" in host:  # Ray finds this cluster by itself, or asks through a server of its own
        return
    try:
        socket.create_connection((host, int(port)), LISTENS_S).close()
    except OSError as error:
        raise ConnectionError(f"nobody listens at {address}: {error}") from error


class ClusterView:
    """Which nodes a Ray cluster has, asked from this process."""

    def __init__(self, address: str, environment: Mapping[str, str]) -> None:
        """
        Args:
            address: ``host:port``, or ``auto`` for the one of this machine.
            environment: Variables for this process, which tell Ray the cluster's token.

        Raises:
            ConnectionError: Nobody listens there yet. A client of Ray that asks before may wait for good.
        """
        _require_listening(os.environ.get("RAY_ADDRESS", "") if address == "auto" else address)
        os.environ.update(environment)
        import ray  # which reads them, once

        ray.init(address=address, namespace="nemorl-launch", configure_logging=False, log_to_driver=False)

    def nodes(self) -> dict[str, bool]:
        """Names of all nodes that ever were, and whether each is alive."""
        import ray

        found: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
        return {str(node["NodeName"]): bool(node["Alive"]) for node in found}

    def close(self) -> None:
        import ray

        ray.shutdown()

"""Two runs on one machine, as far as that needs no Ray: what each takes of the machine is its own, also when one dies.

With Ray and training, all of this is tests/integration/ray/test_two_runs.py.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from nemorl_insight.doctor.left_folders import left_folders

RUN = """
import json, os, subprocess, sys
from types import SimpleNamespace
from nemorl.base.files import process_guard
from nemorl.base.files.owned_folders import owned_folder
from nemorl.resources.ports import listening_socket
from nemorl_trust.ray_security import ray_variables
from nemorl_ops.launch.ports import PortBlock

folder = owned_folder("nemorl-", sys.argv[1])
marked = {**os.environ, process_guard.MARK: str(folder)}
worker = subprocess.Popen(["sleep", "600"], env=marked, start_new_session=True, stdout=subprocess.DEVNULL)
server = listening_socket("it", "127.0.0.1", 0, waiting=1)
memory = os.memfd_create("nemorl-weights")  # as the transport shared_memory: it has no name in the file system
block = PortBlock.claimed()
security = dict.fromkeys(("token_auth", "token_file", "tls_certificate", "tls_key", "tls_ca"), None)
token = ray_variables(SimpleNamespace(**security, plaintext=False), None)["RAY_AUTH_TOKEN"]
ports = [*range(block.first, block.first + 200), server.getsockname()[1]]
print(json.dumps({"folder": str(folder), "worker": worker.pid, "token": token, "ports": ports,
                  "memory": os.fstat(memory).st_ino}), flush=True)
sys.stdin.readline()
"""


class Neighbour:
    """One of them, and what it took."""

    def __init__(self, place: Path) -> None:
        command = [sys.executable, "-c", RUN, str(place)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.took: dict[str, Any] = {}

    def ready(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        self.took = json.loads(self.process.stdout.readline())
        return self.took


@pytest.fixture
def neighbours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Neighbour]]:
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    found = [Neighbour(tmp_path), Neighbour(tmp_path)]
    for each in found:
        each.ready()
    yield found
    for each in found:
        each.process.kill()
        each.process.communicate()
    for left in left_folders([tmp_path]):
        left.remove()


def test_neighbours_share_nothing_and_the_end_of_one_is_nothing_to_the_other(
    neighbours: list[Neighbour], tmp_path: Path
) -> None:
    one, two = neighbours
    assert not set(one.took["ports"]) & set(two.took["ports"])
    for what in ("folder", "worker", "token", "memory"):
        assert one.took[what] != two.took[what]
    assert left_folders([tmp_path]) == [], "both live"
    one.process.kill()
    one.process.wait()
    (left,) = left_folders([tmp_path])
    assert (str(left.folder), left.processes) == (one.took["folder"], (one.took["worker"],))
    assert left.remove()
    assert not _lives(one.took["worker"])
    assert Path(two.took["folder"]).is_dir()
    assert _lives(two.took["worker"])


def _lives(process: int) -> bool:
    return Path(f"/proc/{process}/cwd").exists()  # of one that has ended there is none

"""The run in a pod waits for a Ray that somebody else has started."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from nemorl_ops.launch.ray_access import child_environment, make_access, own_access
from nemorl_ops.launch.ray_part import RayPart, own_address

pytestmark = [pytest.mark.full, pytest.mark.ray, pytest.mark.slow]


@contextmanager
def started(folder: Path, name: str, head: str | None, environment: Mapping[str, str]) -> Iterator[RayPart]:
    """A node of Ray that is up. It gives itself 30 s, too few on a busy machine: KubeRay starts such a pod again."""
    log = folder / f"{name}.log"
    part = None
    try:
        while part is None or "Ray runtime started" not in log.read_text():
            if part is None or part.exit_code is not None:
                if part is not None:
                    part.close()
                log.write_text("")
                size: Any = {"cpus": 1, "gpus": 0, "resources": {}, "object_store_gib": 0.1}
                part = RayPart(name=name, head=head, address=own_address(), environment=environment, log=log, **size)
            time.sleep(0.5)
        yield part
    finally:
        if part is not None:
            part.close()


def test_a_run_begins_when_all_nodes_have_joined(tmp_path: Path) -> None:
    make_access(tmp_path, plaintext=False)
    environment = child_environment(own_access(tmp_path, "node", own_address(), plaintext=False))
    program = "import ray; ray.init('auto'); print(sum(node['Alive'] for node in ray.nodes()))"
    entry = [sys.executable, "-m", "nemorl_ops.launch.entry", "--nodes=2", "--", sys.executable, "-c", program]
    with started(tmp_path, "head", None, environment) as head:
        waiting = {**os.environ, **environment, "RAY_ADDRESS": head.address}
        run = subprocess.Popen(entry, env=waiting, stdout=subprocess.PIPE, text=True)
        try:
            with started(tmp_path, "worker", head.address, environment):
                said, _ = run.communicate(timeout=300)
            assert (run.returncode, said.strip()) == (0, "2")
        finally:
            run.kill()

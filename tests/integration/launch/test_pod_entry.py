"""The run in a pod waits for a Ray that somebody else has started."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from nemorl_ops.launch.ray_access import child_environment, make_access, own_access
from nemorl_ops.launch.ray_part import RayPart, own_address

pytestmark = [pytest.mark.ray, pytest.mark.slow]


def test_a_run_begins_when_all_nodes_have_joined(tmp_path: Path) -> None:
    make_access(tmp_path, plaintext=False)
    environment = child_environment(own_access(tmp_path, "node", own_address(), plaintext=False))
    common = {"address": own_address(), "cpus": 1, "gpus": 0, "resources": {}, "object_store_gib": 0.1}
    head = RayPart(name="head", head=None, environment=environment, log=tmp_path / "head.log", **common)
    waiting = {**os.environ, **environment, "RAY_ADDRESS": head.address}
    program = "import ray; ray.init('auto'); print(sum(node['Alive'] for node in ray.nodes()))"
    entry = [sys.executable, "-m", "nemorl_ops.launch.entry", "--nodes=2", "--", sys.executable, "-c", program]
    run = subprocess.Popen(entry, env=waiting, stdout=subprocess.PIPE, text=True)
    log, worker = tmp_path / "worker.log", None
    try:
        while run.poll() is None:
            if worker is None or worker.exit_code is not None:  # Ray gives a node 30 s; KubeRay starts its pod again
                worker = RayPart(name="worker", head=head.address, environment=environment, log=log, **common)
            time.sleep(0.5)
        assert (run.returncode, run.communicate()[0].strip()) == (0, "2")
    finally:
        run.kill()
        for part in (worker, head):
            if part is not None:
                part.close()

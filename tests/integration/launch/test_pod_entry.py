"""The run in a pod waits for a Ray that somebody else has started."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from nemorl_launch.ray_part import RayPart, child_environment, own_address, write_token

pytestmark = [pytest.mark.ray, pytest.mark.slow]


def test_a_run_begins_when_all_nodes_have_joined(tmp_path: Path) -> None:
    environment = child_environment(write_token(tmp_path))
    common = {"address": own_address(), "cpus": 1, "gpus": 0, "resources": {}, "object_store_gib": 0.1}
    head = RayPart(name="head", head=None, environment=environment, log=tmp_path / "head.log", **common)
    parts = [head]
    try:
        entry = [sys.executable, "-m", "nemorl_launch.entry", "--nodes=2"]
        command = [*entry, "--", sys.executable, "-c", f"open({str(tmp_path / 'began')!r}, 'w')"]
        waiting = {**os.environ, **environment, "RAY_ADDRESS": head.address}
        late = subprocess.run(
            [*entry, "--join-s=20", "--", "true"], env=waiting, capture_output=True, text=True, check=False
        )
        assert late.returncode != 0
        assert "waited 20 s for 2 nodes of Ray, of which 1 are there" in late.stderr
        run = subprocess.Popen(command, env=waiting)
        log = tmp_path / "worker.log"
        parts.append(RayPart(name="worker", head=head.address, environment=environment, log=log, **common))
        assert run.wait(180) == 0
        assert (tmp_path / "began").exists()
    finally:
        for part in parts:
            part.close()

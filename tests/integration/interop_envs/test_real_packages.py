"""Tests that need another project's package, run where it is: in environments of their own, from the package index."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from peer_venvs import peer_python

ROOT = Path(__file__).parents[3]

pytestmark = pytest.mark.full


@pytest.mark.parametrize(
    ("requirement", "tests"),
    [
        ("openenv==0.10.0", "test_openenv_client.py"),
        ("openenv-core==0.3.0", "test_openenv_client.py"),
        ("verifiers==0.4.0", "test_verifiers_tasksets.py"),
    ],
)
def test_the_tests_of_a_package_pass_beside_it(requirement: str, tests: str, tmp_path: Path) -> None:
    python = peer_python(tmp_path, requirement, with_ours=True)
    command = [python, "-m", "pytest", f"tests/unit/interop_envs/{tests}", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert "skipped" not in done.stdout.splitlines()[-1], done.stdout[-1000:]

"""The example files for dstack and SkyPilot are what their own parsers take."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from nemorl.config.load import load_config
from nemorl_trust.ray_security import ray_variables

EXAMPLES = Path(__file__).parents[3] / "examples" / "launch"


def read(name: str) -> Any:
    return yaml.safe_load((EXAMPLES / name).read_text())


def script_of(name: str) -> str:
    """What a node runs."""
    found = read(name)
    return str(found["run"]) if "run" in found else "\n".join(found["commands"])


def test_dstack_takes_its_example() -> None:
    models = pytest.importorskip(
        "dstack._internal.core.models.configurations", reason="needs dstack: pip install dstack"
    )
    found = models.parse_run_configuration(read("nemorl.dstack.yml"))
    assert (found.type, found.nodes, found.stop_criteria.value) == ("task", 2, "master-done")
    assert found.resources.gpu.count.min == 8


def test_skypilot_takes_its_example() -> None:
    sky = pytest.importorskip("sky", reason="needs SkyPilot: pip install skypilot")
    task = sky.Task.from_yaml_config({**read("skypilot.yml"), "workdir": None, "volumes": None, "secrets": {}})
    (resources,) = task.resources
    assert (task.num_nodes, resources.accelerators, resources.use_spot) == (2, {"H100": 8}, True)


def test_examples_name_secrets_and_hold_none() -> None:
    assert read("nemorl.dstack.yml")["env"] == ["HF_TOKEN", "RAY_AUTH_TOKEN", "RAY_AUTH_MODE=token"]
    assert read("skypilot.yml")["secrets"] == {"HF_TOKEN": None, "RAY_AUTH_TOKEN": None}
    assert read("skypilot.yml")["envs"] == {"RAY_AUTH_MODE": "token"}


@pytest.mark.parametrize("name", ["nemorl.dstack.yml", "skypilot.yml"])
def test_the_runs_of_examples_are_not_refused_beyond_one_machine(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "00" * 32)
    # Counts that the shell would fill in are 2 nodes of 8.
    words = re.findall(r"cluster\.[a-z_.]+=\S+", script_of(name))
    given = [re.sub(r"=\$\w*NODES\w*$", "=2", re.sub(r"=\$\w*GPUS\w*$", "=8", word)) for word in words]
    given = [word for word in given if "$" not in word] + ["cluster.address=192.0.2.1:6379"]
    run = {"algorithm": "grpo", "model": "org/model", "data": "arithmetic", "environment": "math"}
    cluster = load_config(run, given, for_launch=True, for_cluster=True).cluster
    assert (cluster.num_nodes, cluster.gpus_per_node) == (2, 8)
    assert ray_variables(cluster.security, cluster.address) == {}  # the environment's, which Ray reads itself


@pytest.mark.parametrize("name", ["nemorl.dstack.yml", "skypilot.yml"])
def test_commands_of_examples_are_commands_of_a_shell(name: str) -> None:
    script = script_of(name)
    done = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")

"""The example files for dstack and SkyPilot are what their own parsers take."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

EXAMPLES = Path(__file__).parents[3] / "examples" / "launch"


def read(name: str) -> Any:
    return yaml.safe_load((EXAMPLES / name).read_text())


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


@pytest.mark.parametrize("name", ["nemorl.dstack.yml", "skypilot.yml"])
def test_examples_name_secrets_and_hold_none(name: str) -> None:
    found = read(name)
    assert found.get("env", []) == (["HF_TOKEN"] if name == "nemorl.dstack.yml" else [])
    assert found.get("secrets", {}) == ({} if name == "nemorl.dstack.yml" else {"HF_TOKEN": None})


@pytest.mark.parametrize("name", ["nemorl.dstack.yml", "skypilot.yml"])
def test_commands_of_examples_are_commands_of_a_shell(name: str) -> None:
    found = read(name)
    script = found["run"] if "run" in found else "\n".join(found["commands"])
    done = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")

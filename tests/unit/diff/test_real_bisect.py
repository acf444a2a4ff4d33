"""``compare bisect`` over short runs: causes that were planted in a config, a plugin's version and a checkpoint."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import Command
from installed_plugins import write_distribution
from nemorl.base.files.jsonl import read_jsonl
from nemorl.base.files.sealed_folders import read_manifest, seal, stage
from real_runs import config_of, real_run
from safetensors.torch import load_file, save_file

pytestmark = pytest.mark.full
SHORT: dict[str, Any] = {"max_steps": 15, "records": {"groups": 1}, "checkpoint": {"every": 5}}
SLOW: dict[str, Any] = {"optimizer": {"lr": 1e-6}, "max_grad_norm": 0.5}
"""The planted cause, and something else."""
CAUSE = "policy.optimizer.lr: 0.005 -> 1e-06"
Ends = tuple[Path, Path]


@pytest.fixture(scope="module")
def ends(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Ends:
    """A run that learns, and one that does not for one of four reasons."""
    folder = tmp_path_factory.mktemp("ends")
    good = real_run(tiny_model, folder / "good", **SHORT)
    return good, real_run(tiny_model, folder / "bad", policy=SLOW, clip_low=0.1, std_epsilon=1e-5, **SHORT)


def test_probes_from_a_step_are_the_good_run_from_there(ends: Ends, nemorl: Command, tmp_path: Path) -> None:
    found = tmp_path / "found"
    asked = [
        "compare",
        "bisect",
        *ends,
        "--metric",
        "train/reward",
        "--from-step",
        "5",
        "--steps",
        "10",
        "--output",
        found,
    ]
    done = nemorl(*asked, "--json")
    assert done.code == 0, done.err + done.out
    assert done.json["found"] == [CAUSE]
    probes = [_rewards(found / probe["name"] / "seed_0") for probe in done.json["probes"]]
    assert all(list(steps) == list(range(6, 16)) for steps in probes)
    own = _rewards(ends[0])
    assert probes[0] == {step: own[step] for step in range(6, 16)}  # bit by bit
    assert probes[0] != probes[1]
    missing = nemorl(*asked[:-4], "--from-step", "7", "--output", tmp_path / "other")
    assert missing.code == 2
    assert "there are: 5, 10, 15" in missing.err


def test_a_search_that_is_killed_in_a_probe_goes_on_there_and_finds_the_cause(
    ends: Ends, nemorl: Command, tmp_path: Path
) -> None:
    folder = tmp_path / "found"
    asked = [
        "compare",
        "bisect",
        *map(str, ends),
        "--metric",
        "train/reward",
        "--steps",
        "15",
        "--output",
        str(folder),
        "--json",
    ]
    killed = subprocess.Popen(
        [sys.executable, "-m", "nemorl", *asked],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    while not _rewards(folder / "probe_002/seed_0"):
        assert killed.poll() is None
        time.sleep(0.2)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    journal = json.loads((folder / "bisection.json").read_text())
    assert [probe["name"] for probe in journal["probes"]] == ["probe_001"]
    done = nemorl(*asked)
    assert done.code == 0, done.err + done.out
    assert done.json["found"] == [CAUSE]
    assert len(done.json["probes"]) <= 2 + 2 * math.log2(4)
    assert done.json["probes"][0]["text"] == journal["probes"][0]["text"]
    assert nemorl(*asked).json["probes"] == done.json["probes"]
    assert [probe["name"] for probe in done.json["probes"]] == [
        f"probe_{n:03}" for n in range(1, len(done.json["probes"]) + 1)
    ]


ENVIRONMENT = """
    from nemorl.contracts.environment import Environment
    from nemorl.plugins.kinds import EnvironmentConfig

    class Digits(Environment):
        def score(self, prompt, response):
            return float(sum(character.isdigit() for character in response) >= 2) * {factor}

    class DigitsConfig(EnvironmentConfig):
        "Rewards two digits."
        summary = "two digits"

        def build(self):
            return Digits()
"""


def test_a_planted_version_of_a_plugin_is_found(tiny_model: Path, tmp_path: Path) -> None:
    """The newer version of an environment gives a quarter of the reward. It is the bad run's, and is in a folder."""
    for version, factor in {"0.1.0": 1.0, "0.2.0": 0.25}.items():
        (tmp_path / version).mkdir()
        code, entries = ENVIRONMENT.format(factor=factor), {"two_digits": "acme_digits:DigitsConfig"}
        write_distribution(tmp_path / version, "acme-digits", entries, code=code, version=version)

    def nemorl(version: str, *arguments: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "nemorl", *map(str, arguments), "--json"]
        environment = {**os.environ, "PYTHONPATH": str(tmp_path / version)}
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    options = {**SHORT, "max_steps": 6}
    for version, name, changes in (("0.1.0", "good", {}), ("0.2.0", "bad", {"std_epsilon": 1e-5})):
        config = {**config_of(tiny_model, **options, **changes), "environment": {"name": "two_digits"}}
        recipe = tmp_path / f"{name}.json"
        recipe.write_text(json.dumps(config))
        trained = nemorl(version, "train", recipe, "--run-dir", tmp_path / name)
        assert trained.returncode == 0, trained.stderr
    asked = ["compare", "bisect", tmp_path / "good", tmp_path / "bad", "--metric", "train/reward", "--steps", "6"]
    done = nemorl("0.1.0", *asked, "--plugin-folder", tmp_path / "0.2.0")
    assert done.returncode == 0, done.stderr + done.stdout
    assert json.loads(done.stdout)["found"] == ["plugin acme-digits: 0.1.0 -> 0.2.0"]


def test_a_planted_checkpoint_is_found(tiny_model: Path, nemorl: Command, tmp_path: Path) -> None:
    """Copies of the last checkpoint stand for six; from the fourth on the weights of the last norm are zero.

    With it all logits are: tokens are drawn evenly, and two digits are as rare as before training.
    """
    options = {**SHORT, "checkpoint": {"every": 0}, "validation": {"every": 15}, "data": {"num_validation": 40}}
    run = real_run(tiny_model, tmp_path / "run", **options)
    for step in range(16, 22):
        _plant(run / "checkpoints/step_000015", step, is_broken=step >= 19)
    done = nemorl("compare", "bisect", f"{run}@16", f"{run}@21", "--metric", "validation/reward", "--json")
    assert done.code == 0, done.err + done.out
    assert done.json["found"] == [18, 19]
    assert len(done.json["probes"]) <= 2 + math.ceil(math.log2(5))


def _plant(last: Path, step: int, *, is_broken: bool) -> None:
    final = last.with_name(f"step_{step:06}")
    staging = stage(final)
    shutil.copytree(last, staging, dirs_exist_ok=True)
    manifest = read_manifest(staging)
    (staging / "manifest.json").unlink()
    if is_broken:
        (file,) = (staging / "policy/model").glob("*.safetensors")
        tensors = load_file(file)
        tensors["model.norm.weight"] = torch.zeros_like(tensors["model.norm.weight"])
        save_file(tensors, file, metadata=_metadata(file))
    facts = {key: value for key, value in manifest.items() if key not in ("files", "sha256")}
    seal(staging, final, {**facts, "step": step}, {})


def _metadata(file: Path) -> dict[str, str]:
    header = json.loads(file.read_bytes()[8 : 8 + int.from_bytes(file.read_bytes()[:8], "little")])
    found: dict[str, str] = header.get("__metadata__", {})
    return found


def _rewards(run: Path) -> dict[int, float]:
    file = run / "metrics.jsonl"
    lines = read_jsonl(file) if file.is_file() else ()
    return {line["step"]: line["train/reward"] for line in lines if "train/reward" in line}

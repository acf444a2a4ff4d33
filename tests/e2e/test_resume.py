"""A killed run that is continued ends with the weights of the uninterrupted one, byte for byte (invariant 9)."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml
from launched import Launched
from nemorl.base.files.jsonl import read_jsonl
from tiers import only

pytestmark = pytest.mark.slow

STEPS = 8
COMMON = {
    "data": {"name": "arithmetic", "min_value": 10, "max_value": 49, "num_train": 60, "num_validation": 10},
    "max_steps": STEPS,
    "policy": {"optimizer": {"lr": 1e-3}, "init": "random", "schedule": {"kind": "cosine", "warmup_steps": 2}},
    "checkpoint": {"every": 1, "keep_last": 2},
    "validation": {"every": 3},
}
CONFIGS = {
    "grpo": {
        **COMMON,
        "algorithm": "grpo",
        "environment": "math",
        "num_prompts_per_step": 4,
        "num_generations_per_prompt": 4,
        "num_minibatches": 2,
        "generation": {"max_new_tokens": 6},
    },
    "sft": {**COMMON, "algorithm": "sft", "batch_size": 8},
}


def command(config: Path, run_dir: Path, *changes: str) -> list[str]:
    return ["train", str(config), *changes, "--run-dir", str(run_dir), "--json"]


def run_alone(arguments: list[str]) -> dict[str, object]:
    """A command in an interpreter of its own: what it says, and how its hashes fall, owes nothing to other tests."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "nemorl", *arguments],
        capture_output=True, text=True, check=False, timeout=300, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return last_line(done.stdout)


def finish(process: Launched) -> dict[str, object]:
    code, out, err = process.wait()
    assert code == 0, err
    return last_line(out)


def last_line(out: str) -> dict[str, object]:
    found: dict[str, object] = json.loads(out.splitlines()[-1])
    return found


def wait_for_step(run_dir: Path, step: int, process: Launched) -> None:
    while process.poll() is None:
        steps = [record["step"] for record in read_jsonl(run_dir / "metrics.jsonl") if "train/loss" in record]
        if steps and steps[-1] >= step:
            return
        time.sleep(0.005)


def write_config(folder: Path, model: Path, algorithm: str) -> Path:
    path = folder / f"{algorithm}.yaml"
    path.write_text(yaml.safe_dump({**CONFIGS[algorithm], "model": str(model)}))
    return path


def digest(run_dir: Path) -> str:
    return hashlib.sha256((run_dir / "model" / "model.safetensors").read_bytes()).hexdigest()


@pytest.mark.parametrize("algorithm", only("grpo", of=("grpo", "sft")))
def test_a_run_killed_twice_ends_with_the_same_weights(tmp_path: Path, tiny_model: Path, algorithm: str) -> None:
    config = write_config(tmp_path, tiny_model, algorithm)
    whole = run_alone(command(config, tmp_path / "whole"))
    assert whole["steps"] == STEPS
    again = command(config, tmp_path / "killed")

    dice = random.Random(algorithm)
    for number, (low, high) in enumerate(((1, STEPS // 2), (STEPS // 2 + 1, STEPS - 1))):
        process = Launched(again, tmp_path / f"said {number}")
        wait_for_step(tmp_path / "killed", dice.randint(low, high), process)
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert finish(Launched(again, tmp_path / "said at last"))["steps"] == STEPS

    assert digest(tmp_path / "killed") == digest(tmp_path / "whole")
    steps = [r["step"] for r in read_jsonl(tmp_path / "killed" / "metrics.jsonl") if "train/loss" in r]
    assert steps == list(range(1, STEPS + 1))
    losses = {
        name: [r["train/loss"] for r in read_jsonl(tmp_path / name / "metrics.jsonl") if "train/loss" in r]
        for name in ("whole", "killed")
    }
    assert losses["whole"] == losses["killed"]


def test_sigterm_saves_exits_0_and_the_same_command_continues(tmp_path: Path, tiny_model: Path) -> None:
    config = write_config(tmp_path, tiny_model, "grpo")
    again = command(config, tmp_path / "run")
    process = Launched(again, tmp_path / "said first")
    wait_for_step(tmp_path / "run", 2, process)
    process.send_signal(signal.SIGTERM)
    stopped = finish(process)

    assert stopped["stopped"] == "received SIGTERM"
    assert 2 <= stopped["steps"] < STEPS
    assert finish(Launched(again, tmp_path / "said then"))["steps"] == STEPS


def test_a_terminal_that_goes_away_saves_and_is_an_error(tmp_path: Path, tiny_model: Path) -> None:
    config = write_config(tmp_path, tiny_model, "sft")
    endless = command(config, tmp_path / "run", "max_steps=10000")  # it is at work when the signal comes
    process = Launched(endless, tmp_path / "said first")
    wait_for_step(tmp_path / "run", 2, process)
    process.send_signal(signal.SIGHUP)
    code, out, err = process.wait()
    assert code == 2
    stopped = last_line(out)
    assert stopped["stopped"] == "received SIGHUP"
    assert [line for line in err.splitlines() if line.startswith("error: ")] != []
    end = int(str(stopped["steps"])) + 1
    again = command(config, tmp_path / "run", f"max_steps={end}")
    assert finish(Launched(again, tmp_path / "said then"))["steps"] == end


def test_of_two_equal_commands_at_once_one_trains_and_the_other_says_who_does(tmp_path: Path, tiny_model: Path) -> None:
    config = write_config(tmp_path, tiny_model, "sft")
    both = [Launched(command(config, tmp_path / "run"), tmp_path / f"said {number}") for number in range(2)]
    processes = {process.pid: process for process in both}
    lock = tmp_path / "run" / "run.lock"
    while not (lock.is_file() and lock.read_text()):
        time.sleep(0.005)
    owner = psutil.Process(json.loads(lock.read_text())["pid"])
    winner = processes.pop(owner.pid if owner.pid in processes else owner.ppid())  # a supervised one is a child
    owner.suspend()  # however slow the machine is, the other comes while the first is there
    (loser,) = processes.values()
    code, _, error = loser.wait()
    assert code == 2, error
    owner.resume()
    assert finish(winner)["steps"] == STEPS
    told = " ".join(error.split())
    assert f"is in use by process {owner.pid} on " in told
    assert f"train {config} --run-dir" in told
    assert "Traceback" not in told
    steps = [r["step"] for r in read_jsonl(tmp_path / "run" / "metrics.jsonl") if "train/loss" in r]
    assert steps == list(range(1, STEPS + 1))
    events = [record["event"] for record in read_jsonl(tmp_path / "run" / "events.jsonl")]
    assert events.count("started") == events.count("finished") == 1

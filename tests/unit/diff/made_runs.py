"""A made-up run of three steps that kept everything: config, plugins, metrics, records, checkpoints."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import yaml
from record_files import write_records
from safetensors.numpy import load_file, save_file

STEPS = (1, 2, 3)
CONFIG: dict[str, Any] = {
    "algorithm": "grpo",
    "model": "org/model",
    "data": "arithmetic",
    "environment": "math",
    "max_steps": 3,
    "seed": 42,
    "kl_penalty": 0.01,
    "normalize_std": True,
    "generation": {"max_new_tokens": 4},
    "policy": {"optimizer": {"lr": 1e-5}, "max_grad_norm": 1.0},
}
LOCK = {"distribution": "nemorl-grpo", "version": "0.1.0", "files_sha256": "aa", "parts": ["algorithms:grpo"]}
WEIGHTS = "policy/model/shard-00001-model-00001-of-00001.safetensors"


def metrics_of(step: int) -> dict[str, float]:
    return {
        "train/mean_prompt_length": 2.0,
        "train/total_num_tokens": 20.0,
        "train/reward": 0.5,
        "train/advantages/max": 1.0,
        "train/kl_penalty": 0.001 * step,
        "train/loss": -0.1 * step,
        "train/grad_norm": 2.0 + step,
        "train/lr": 1e-5,
        "timing/train/generation": 0.25 * step,
    }


def record(step: int, group: int, place: int) -> dict[str, Any]:
    """Two prompt tokens, three of the policy; the first of a pair is right."""
    right = float(place == 0)
    return {
        "split": "train",
        "step": step,
        "group": group,
        "group_id": f"train-{step}-{group}",
        "sample_id": f"train-{step}-{group}-{place}",
        "prompt": f"{step}+{group}=",
        "response": "abc",
        "answer": str(step + group),
        "reward": right,
        "components": [{"name": "correct", "value": right}],
        "metrics": [],
        "correct": bool(right),
        "valid": True,
        "advantage": 2 * right - 1,
        "finish_reason": "stop",
        "prompt_tokens": 2,
        "tokens": 3,
        "num_turns": 1,
        "sequences": [
            {
                "token_ids": [step, group, 7, 8 + place, 9],
                "mask": [False, False, True, True, True],
                "generation_logprobs": [0.0, 0.0, -0.5, -1.0, -0.25],
                "reference_logprobs": [0.0, 0.0, -0.5, -1.0, -0.25],
                "loss_weights": [0.0, 0.0, 0.1, 0.1, 0.1],
            }
        ],
    }


def make_run(folder: Path) -> Path:
    """The run."""
    folder.mkdir(parents=True)
    write_config(folder)
    (folder / "plugins.lock.json").write_text(json.dumps({"plugins": [LOCK]}))
    (folder / "environment.json").write_text(json.dumps({"python": "3.11.2", "libraries": {"torch": "2.13.0"}}))
    lines = [{"step": step, "time": 1.0, **metrics_of(step)} for step in STEPS]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_records(folder, [record(step, group, place) for step in STEPS for group in (0, 1) for place in (0, 1)])
    for step in STEPS:
        checkpoint = folder / f"checkpoints/step_{step:06}"
        for name in ("policy/model", "policy/optimizer"):
            (checkpoint / name).mkdir(parents=True)
            tensors = {"embed": np.full((4, 2), step, np.float32), "head": np.full((2, 4), -step, np.float32)}
            save_file(tensors, checkpoint / WEIGHTS.replace("policy/model", name))
        (checkpoint / "manifest.json").write_text("{}")
    return folder


def write_config(folder: Path, **changes: Any) -> None:
    (folder / "config.yaml").write_text(yaml.safe_dump({**CONFIG, **changes}))


def changed(original: Path, folder: Path, *plants: Callable[[Path], None]) -> Path:
    """A copy of a run in which something differs."""
    shutil.copytree(original, folder)
    for plant in plants:
        plant(folder)
    return folder


def with_config(**changes: Any) -> Callable[[Path], None]:
    return lambda folder: write_config(folder, **changes)


def with_metric(name: str, value: float | None, step: int) -> Callable[[Path], None]:
    def plant(folder: Path) -> None:
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        for line in lines:
            if line["step"] == step:
                line[name] = value
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    return plant


def with_record(sample: str, change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """Another value in the record of ``sample``, ``STEP-GROUP-PLACE``."""

    def plant(folder: Path) -> None:
        step = int(sample.partition("-")[0])
        path = folder / f"records/train/step_{step:06}.parquet"
        rows = pq.read_table(path).to_pylist()
        for row in rows:
            if row["sample_id"] == f"train-{sample}":
                change(row)
        path.unlink()
        write_records(folder, rows)

    return plant


def with_weight(step: int, name: str, value: float, file: str = WEIGHTS) -> Callable[[Path], None]:
    def plant(folder: Path) -> None:
        path = folder / f"checkpoints/step_{step:06}" / file
        tensors = load_file(path)
        tensors[name].flat[3] = value
        save_file(tensors, path)

    return plant


def with_version(version: str) -> Callable[[Path], None]:
    def plant(folder: Path) -> None:
        (folder / "plugins.lock.json").write_text(json.dumps({"plugins": [{**LOCK, "version": version}]}))

    return plant

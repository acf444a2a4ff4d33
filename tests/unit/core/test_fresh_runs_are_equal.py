"""Two fresh runs of one config and seed leave the same bytes: but for times, and readings of the machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

OF_TIMES = {
    "environment.json",  # the command, and this machine
    "events.jsonl",
    "plugins.lock.json",  # of an editable checkout, which others may be editing
    "report.html",
    "run.lock",
}
"""Files of a run that hold times, or what is not the run's."""
PROGRAM = """
import json, sys
import nemorl
from nemorl.contracts.display import Silence

rows = [{"prompt": f"{i}+1=", "answer": str(i + 1), "response": str(i + 1)} for i in range(6)]
def reward(prompt, response): return float(sum(map(ord, response)) % 7)
config = nemorl.load_config(json.loads(sys.argv[1]))
given = {"reward_fn": reward} if config.sampler is not None else {}
config.build().fit(rows, **given, val_dataset=rows, console=Silence())
"""
GRPO = {"num_prompts_per_step": 2, "num_generations_per_prompt": 2, "generation": {"max_new_tokens": 3}}
CASES: dict[str, dict[str, Any]] = {
    "grpo": {"algorithm": "grpo", **GRPO},
    "sft, bfloat16": {"algorithm": "sft", "batch_size": 2, "policy": {"precision": "bfloat16"}},
}


def leave(folder: Path, model: Path, case: dict[str, Any], hash_seed: int) -> Path:
    folder.mkdir()
    policy = {"init": "random", "max_sequence_tokens": 32, "optimizer": {"lr": 1e-3}, **case.get("policy", {})}
    shared = {"model": str(model), "run_dir": "run", "max_steps": 2, "checkpoint": {"every": 1}}
    config = json.dumps({**shared, "validation": {"every": 1, "max_samples": 3}, **case, "policy": policy})
    environment = {**os.environ, "PYTHONHASHSEED": str(hash_seed), "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", PROGRAM, config], cwd=folder, env=environment, check=True)
    return folder / "run"


def without_times(file: Path) -> Any:
    """What is in a file; of numbers that clocks and the machine made, nothing."""
    if file.suffix == ".parquet":
        from pyarrow import parquet

        times = ("time", "step_time", "began_s", "ended_s")
        return [_cut(row, times) for row in parquet.read_table(file).to_pylist()]
    if file.name in ("trainer.json", "manifest.json", "metrics.jsonl"):
        lines = file.read_text().splitlines() if file.suffix == ".jsonl" else [file.read_text()]
        return [_cut(json.loads(line), ("time",)) for line in lines]
    return file.read_bytes()


def _cut(value: Any, names: tuple[str, ...]) -> Any:
    if isinstance(value, dict):
        clocks = ("timing/", "performance/", "system/", "trainer.json", "sha256")  # system/: what this machine has free
        return {k: _cut(v, names) for k, v in value.items() if k not in names and not k.startswith(clocks)}
    return [_cut(item, names) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize("case", CASES.values(), ids=[*CASES])
def test_two_fresh_runs_leave_the_same_bytes(case: dict[str, Any], tiny_model: Path, tmp_path: Path) -> None:
    one, other = (leave(tmp_path / str(seed), tiny_model, case, seed) for seed in (1, 2))
    names = sorted(str(file.relative_to(one)) for file in one.rglob("*") if file.is_file())
    assert names == sorted(str(file.relative_to(other)) for file in other.rglob("*") if file.is_file())
    compared = [name for name in names if Path(name).name not in OF_TIMES]
    assert {Path(name).suffix for name in compared} >= {".safetensors", ".json", ".jsonl", ".yaml"}
    assert [name for name in compared if without_times(one / name) != without_times(other / name)] == []

"""A config that is checked for other machines: only what this machine lacks is passed over."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest
from nemorl.config.cluster import count_gpus
from nemorl.config.load import load_config
from nemorl.errors import ConfigError

EIGHT_NODES: dict[str, Any] = {
    "algorithm": "grpo",
    "model": "org/model",
    "data": {"name": "file", "path": "/not/here/train.jsonl"},
    "environment": "math",
    "policy": {"backend": {"name": "megatron", "pipeline_parallel_size": 2}, "tensor_parallel_size": 4},
    "generation": {"backend": {"name": "vllm", "tensor_parallel_size": 2}},
    "cluster": {
        "num_nodes": 8,
        "gpus_per_node": 8,
        "address": "auto",
        "colocated": False,
        "generation_workers": 4,
        "security": {"token_file": "/not/here/token"},
    },
    "loggers": ["wandb", "mlflow"],
}


def problems(config: dict[str, Any], **options: bool) -> set[str]:
    try:
        load_config(config, **options)
    except ConfigError as error:
        return {problem.path for problem in error.problems}
    return set()


def test_what_this_machine_lacks_is_no_problem_of_another() -> None:
    assert problems(EIGHT_NODES, for_launch=True, for_cluster=True) == set()


def test_for_this_machine_a_missing_file_still_is_one() -> None:
    assert "data.path" in problems(EIGHT_NODES, for_launch=True)


def test_gpus_of_this_machine_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    config = {**EIGHT_NODES, "cluster": {"gpus_per_node": 8}, "generation": {"backend": "vllm"}}
    assert "cluster.gpus_per_node" in problems(config)
    assert problems(config, for_cluster=True) == set()


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"polcy": {}}, "polcy"),
        ({"cluster": {**EIGHT_NODES["cluster"], "generation_workers": 32}}, "cluster.generation_workers"),
        ({"policy": {"tensor_parallel_size": 5}}, "policy.tensor_parallel_size"),
        ({"loggers": ["nosuch"]}, "loggers.0"),
    ],
)
def test_what_is_wrong_everywhere_is_told(change: dict[str, Any], path: str) -> None:
    assert path in problems({**EIGHT_NODES, **change}, for_launch=True, for_cluster=True)


@pytest.mark.parametrize(("visible", "count"), [("0,1", 2), ("", 0), ("-1", 0), ("NoDevFiles", 0)])
def test_gpus_are_those_that_the_process_may_see(visible: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert count_gpus() == count


def test_a_tool_that_hangs_finds_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    def hangs(*_: Any, **__: Any) -> None:
        raise subprocess.TimeoutExpired("nvidia-smi", 20)

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("shutil.which", lambda name: "/hanging/nvidia-smi")
    monkeypatch.setattr("subprocess.run", hangs)
    assert count_gpus() == 0

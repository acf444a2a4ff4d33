"""Published weights that lie on a device which engines share are released once these have copied them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nemorl
import pytest
import torch
from nemorl_cli.console import Console
from nemorl_rl.transports.config import SharedMemoryConfig
from nemorl_rl.transports.cuda_ipc import CudaIpc

ROWS = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(4)]


def reward(prompt: str, response: str) -> float:
    return float(sum(map(ord, response)) % 7)


def config(model: Path, run_dir: Path) -> Any:
    return nemorl.load_config(
        {
            "algorithm": "grpo",
            "model": str(model),
            "run_dir": str(run_dir),
            "policy": {"init": "random", "max_sequence_tokens": 32},
            "num_prompts_per_step": 2,
            "num_generations_per_prompt": 2,
            "generation": {"max_new_tokens": 3},
            "cluster": {"weight_transport": "shared_memory"},
            "validation": {"every": 0, "at_end": False},
            "checkpoint": {"every": 0, "export": False},
            "max_steps": 2,
        }
    )


def senders(model: Path, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[list[int], list[float]]:
    """How many senders hold weights while responses are sampled, and the losses."""
    held: list[int] = []
    collect = nemorl.RolloutTrainer.collect

    def counted(self: Any, rows: Any) -> Any:
        held.append(len(self.resources.training._host._senders))
        return collect(self, rows)

    with monkeypatch.context() as patched:
        patched.setattr(nemorl.RolloutTrainer, "collect", counted)
        result = config(model, run_dir).build().fit(ROWS, reward, console=Console(quiet=True))
    return held, [record["train/loss"] for record in result.history if "train/loss" in record]


@pytest.mark.slow
def test_weights_on_a_shared_device_are_there_only_while_engines_copy_them(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, losses = senders(tiny_model, tmp_path / "kept", monkeypatch)
    # In host memory in truth: what is looked at is when they are let go.
    monkeypatch.setattr(SharedMemoryConfig, "takes_device_memory", True)
    lent, same = senders(tiny_model, tmp_path / "lent", monkeypatch)
    assert (kept, lent) == ([1, 1], [0, 0])
    assert same == losses


def test_an_engine_that_is_built_anew_gets_weights_that_were_released(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SharedMemoryConfig, "takes_device_memory", True)
    versions: list[int] = []
    collect = nemorl.RolloutTrainer.collect

    def asked(self: Any, rows: Any) -> Any:
        newest = self.resources._newest()
        versions.append(newest.version)
        assert {*next(iter(newest.buckets()))} & {"model.embed_tokens.weight"}
        return collect(self, rows)

    monkeypatch.setattr(nemorl.RolloutTrainer, "collect", asked)
    config(tiny_model, tmp_path / "run").build().fit(ROWS, reward, console=Console(quiet=True))
    assert versions == [0, 1]


def test_cuda_ipc_gives_its_copies_back(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(torch.cuda, "ipc_collect", lambda: said.append("ipc_collect"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: said.append("empty_cache"))
    sender = CudaIpc()
    sender._kept.append([torch.ones(3)])
    sender.close()
    sender.close()  # nothing is left
    assert not sender._kept
    assert said == ["ipc_collect", "empty_cache"], "first what no receiver maps any more, then the allocator's blocks"

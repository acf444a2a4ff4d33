"""Runs whose weights travel as changes: their records are those of runs whose weights travel whole, bit for bit."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import nemorl
import pytest
from nemorl.errors import ConfigError
from nemorl_cli.console import Console
from recorded_messages import Raises
from tiers import only

ROWS = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(8)]
OF_TIME_OR_TRANSPORT = ("timing/", "performance/", "system/", "train/weight_sync")
"""Beginnings of metrics that two runs of the same weights need not share."""


def reward(prompt: str, response: str) -> float:
    return float(sum(map(ord, response)) % 7)


def config(model: Path, run_dir: Path, transport: str, *, steps: int, rate: float = 1e-5, **policy: Any) -> Any:
    return nemorl.load_config(
        {
            "algorithm": "grpo",
            "model": str(model),
            "run_dir": str(run_dir),
            "policy": {
                "init": "random",
                "max_sequence_tokens": 32,
                "precision": "bfloat16",
                "optimizer": {"lr": rate},
                **policy,
            },
            "num_prompts_per_step": 2,
            "num_generations_per_prompt": 4,
            "generation": {"max_new_tokens": 6},
            "cluster": {"weight_transport": transport},
            "validation": {"every": 0, "at_end": False},
            "checkpoint": {"every": 0, "export": False},
            "max_steps": steps,
        }
    )


def run(model: Path, run_dir: Path, transport: str, **options: Any) -> tuple[list[dict[str, Any]], list[float]]:
    """What two runs of the same weights share, by step; and bytes of each sync."""
    result = config(model, run_dir, transport, **options).build().fit(ROWS, reward, console=Console(quiet=True))
    records = [record for record in result.history if "train/loss" in record]
    same = [{k: v for k, v in record.items() if not k.startswith(OF_TIME_OR_TRANSPORT)} for record in records]
    assert all(record.get("train/weight_sync_fallbacks", 0.0) == 0.0 for record in records)
    assert all(record["train/weights_proven"] == 1.0 for record in records)  # by receipts, which know of no transport
    return same, [record["train/weight_sync_bytes"] for record in records]


@pytest.mark.slow
@pytest.mark.parametrize("rate", only(1e-6, of=(1e-6, 1e-5)))
def test_a_run_with_changes_is_the_run_with_whole_weights(
    tiny_model: Path, tmp_path: Path, weights_folder: Path, rate: float
) -> None:
    whole, size = run(tiny_model, tmp_path / "whole", "shared_memory", steps=20, rate=rate)
    over_socket, changes = run(tiny_model, tmp_path / "socket", "delta_socket", steps=20, rate=rate)
    in_folder, files = run(tiny_model, tmp_path / "folder", "delta_folder", steps=20, rate=rate)
    assert over_socket == whole
    assert in_folder == whole
    assert changes == files  # the same messages
    assert max(changes) < 0.25 * min(size)
    assert whole[0]["train/loss"] != whole[-1]["train/loss"], "a run that learns nothing proves nothing"


def test_merged_adapters_in_float32_travel_as_changes_too(tiny_model: Path, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    model = tmp_path / "model"
    shutil.copytree(tiny_model, model)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model)).save_pretrained(model)
    options: dict[str, Any] = {"steps": 2, "init": "pretrained", "lora": {"rank": 2}, "precision": "float32"}
    whole, _ = run(model, tmp_path / "whole", "shared_memory", **options)
    changed, _ = run(model, tmp_path / "socket", "delta_socket", **options)
    assert changed == whole


def test_a_folder_that_nobody_has_named_is_asked_for_before_anything_starts(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raises: Raises
) -> None:
    monkeypatch.delenv("NEMORL_WEIGHTS_FOLDER", raising=False)
    with raises(ConfigError, "delta_folder", "NEMORL_WEIGHTS_FOLDER", path="cluster.weight_transport"):
        config(tiny_model, tmp_path / "run", "delta_folder", steps=1)


def test_the_first_fallback_is_told_once(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine whose bits change in its memory twice: the run learns on, and its events name the tensor once."""
    from nemorl_rl.transports.delta.bases import Base

    bring, times = Base.bring, []

    def harmed(self: Base, number: int, ask: Any) -> int:
        if number in (4, 6) and "model.norm.weight" in self.tensors:
            self.tensors["model.norm.weight"].zero_()
            times.append(number)
        return bring(self, number, ask)

    monkeypatch.setattr(Base, "bring", harmed)
    built = config(tiny_model, tmp_path / "run", "delta_socket", steps=6).build()
    result = built.fit(ROWS, reward, console=Console(quiet=True))
    counts = [record["train/weight_sync_fallbacks"] for record in result.history if "train/loss" in record]
    assert times == [4, 6]
    assert (counts[0], counts[-1]) == (0.0, 2.0)
    told = [line for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines() if "instead of what" in line]
    assert len(told) == 1
    assert "model.norm.weight" in told[0]

"""What may change when a run is continued changes no result of a step beyond rounding."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import nemorl
import pytest
from nemorl.base.files.jsonl import read_jsonl
from nemorl.trainer import BaseTrainer
from nemorl_cli.console import Console
from nemorl_cli.report.records.reading import read_records
from nemorl_rl.callbacks import Callback
from safetensors.torch import load_file
from tiers import only

ROWS = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(6)]


class StopAfterOne(Callback):
    def on_step_end(self, trainer: BaseTrainer[Any], step: int) -> None:
        trainer.stop("for the test")


def reward(prompt: str, response: str) -> float:
    return float(sum(map(ord, response)) % 7)


def run(model: Path, run_dir: Path, change: str | None = None, **options: Any) -> None:
    data = {
        "algorithm": "grpo",
        "model": str(model),
        "run_dir": str(run_dir),
        "num_prompts_per_step": 3,
        "num_generations_per_prompt": 4,
        "num_minibatches": 2,
        "max_steps": 3,
        "validation": {"every": 0},
        "generation": {"max_new_tokens": 6},
        "policy": {"init": "random", "max_sequence_tokens": 32, "optimizer": {"lr": 1e-3}},
    }
    config = nemorl.load_config(data, [change] if change else [])
    config.build().fit(ROWS, reward, console=Console(quiet=True), resume=True, **options)


@pytest.fixture(scope="module")
def runs(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The whole run, and one that stopped after its first step."""
    folder = tmp_path_factory.mktemp("runs")
    run(tiny_model, folder / "whole")
    run(tiny_model, folder / "stopped", callbacks=[StopAfterOne()])
    return folder / "whole", folder / "stopped"


def measured(run_dir: Path) -> list[dict[str, float]]:
    apart = ("time", "timing", "performance", "system", "train/tree_ratio")  # of the clock, or of the layout itself
    records = read_jsonl(run_dir / "metrics.jsonl")
    return [{name: value for name, value in record.items() if not name.startswith(apart)} for record in records]


def responses(run_dir: Path) -> list[tuple[int, str]]:
    return [(record["step"], record["response"]) for record in read_records(run_dir, split="train")]


CHANGES = [
    "policy.microbatch_tokens=16",
    "policy.activation_checkpointing=true",
    "policy.backend.layout=packed",
    "policy.backend.attn_implementation=eager",
    "policy.backend.sequence_parallel=false",
    "policy.backend.logprob_chunk_tokens=5",
    "generation.backend.max_batch_rows=2",
    "generation.backend.kv_cache_tokens=40",
    "rollouts.environment_concurrency=1",
    "rollouts.max_batches_per_step=2",
    "rollouts.mismatch_warning=1.2",
    "rollouts.mismatch_limit=null",
    "records.max_gib=1.5",
]


@pytest.mark.parametrize("change", only(*CHANGES[::3], of=CHANGES))
@pytest.mark.slow
def test_a_run_goes_on_with_another_layout_as_with_its_own(
    change: str, runs: tuple[Path, Path], tiny_model: Path, tmp_path: Path
) -> None:
    whole, stopped = runs
    shutil.copytree(stopped, tmp_path / "run")
    run(tiny_model, tmp_path / "run", change)
    assert responses(tmp_path / "run") == responses(whole)
    # Sums in another order, in float32; the two steps move weights by up to 4 updates * lr = 4e-3.
    for one, other in zip(measured(whole), measured(tmp_path / "run"), strict=True):
        assert other == pytest.approx(one, rel=1e-3, abs=1e-5)
    one, other = (load_file(folder / "model/model.safetensors") for folder in (whole, tmp_path / "run"))
    assert all(other[name].allclose(one[name], rtol=0, atol=5e-4) for name in one)

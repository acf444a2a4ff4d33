"""DPO runs on a tiny model: where the reference comes from changes nothing, and it is computed once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from nemorl.errors import DataError
from nemorl.run import TrainResult
from nemorl_cli.console import Console
from nemorl_preference.dpo import DPOConfig
from nemorl_preference.dpo.trainer import DPOTrainer
from nemorl_rl.data.tokenizer import Tokenizer
from recorded_messages import Raises

ROWS = [{"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": str(a * b + 7)} for a in range(4) for b in range(3)]


def train(model: Path, run_dir: Path, *, resume: bool = False, **knobs: Any) -> TrainResult:
    config = DPOConfig(**{
        "model": str(model),
        "policy": {"init": "random", "optimizer": {"lr": 1e-2}},
        "batch_size": 4,
        "max_steps": 3,
        "checkpoint": {"export": False},
        "cluster": {"gpus_per_node": 0},
        "run_dir": run_dir,
        **knobs,
    })  # fmt: skip
    data = {"train": ROWS[:8], "validation": ROWS[8:]}
    return config.build().fit(dataset=data, resume=resume, console=Console(quiet=True))


def computed(run_dir: Path) -> list[tuple[int, int]]:
    """(computed, read) of each start of the run."""
    events = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    return [(e["computed"], e["read"]) for e in events if e["event"] == "reference_logprobs"]


def numbers(result: TrainResult) -> list[float]:
    names = ("train/loss", "train/rewards_margin_mean", "validation/loss", "validation/rewards_chosen_mean")
    return [record[name] for record in result.history for name in names if name in record]


def test_precomputed_reference_and_reference_model_give_the_same_run(tiny_model: Path, tmp_path: Path) -> None:
    ahead = train(tiny_model, tmp_path / "ahead")
    model = train(tiny_model, tmp_path / "model", reference="model")
    assert numbers(ahead) == pytest.approx(numbers(model), abs=1e-5)
    assert ahead.history[0]["train/loss"] == pytest.approx(0.693147, abs=1e-5)  # log 2: the policy is the reference
    assert computed(tmp_path / "ahead") == [(24, 0)]  # both responses of all 12 rows, over more than one epoch
    assert not (tmp_path / "model" / "reference.safetensors").exists()


@pytest.mark.slow
def test_a_continued_run_reads_the_reference(tiny_model: Path, tmp_path: Path) -> None:
    whole = train(tiny_model, tmp_path / "whole", max_steps=4)
    train(tiny_model, tmp_path / "run", max_steps=1)
    continued = train(tiny_model, tmp_path / "run", max_steps=4, resume=True)
    # One step and 4 held-out rows at first; the rest of the rows when the run is made longer, by the initial policy.
    assert computed(tmp_path / "run") == [(16, 0), (8, 16)]
    assert continued.history[-1]["validation/loss"] == whole.history[-1]["validation/loss"]


@pytest.fixture
def trainer(tiny_model: Path) -> DPOTrainer:
    made = DPOTrainer(DPOConfig(model="some/model", policy={"max_sequence_tokens": 5}))
    made.tokenizer = Tokenizer.load(str(tiny_model))
    return made


def test_pairs_are_cut_at_the_limit(trainer: DPOTrainer) -> None:
    batch = trainer.to_batch([{"prompt": "12=", "chosen": "1", "rejected": "123"}])
    assert batch.lengths.tolist() == [5, 5]  # "1 2 = 1 <eos>", and "1 2 = 1 2" of six
    assert batch.mask.tolist() == [False, False, False, True, True] * 2


def test_a_batch_without_responses_is_refused(trainer: DPOTrainer, raises: Raises) -> None:
    with raises(DataError, "policy.max_sequence_tokens"):
        trainer.train_step([{"prompt": "12345=", "chosen": "1", "rejected": "2"}])

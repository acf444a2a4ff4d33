"""What a reward model is trained on, and what is left when it is done."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from nemorl.config.load import validate
from nemorl.errors import ConfigError, DataError
from nemorl_cli.console import Console
from nemorl_preference.rm import RMConfig
from nemorl_preference.rm.environment import load_classifier
from nemorl_preference.rm.trainer import RMTrainer
from nemorl_rl.data.tokenizer import Tokenizer
from recorded_messages import Raises

ROWS = [
    {"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": str(a * b + 7), "gap": a}
    for a in range(3)
    for b in range(3)
]


def trainer(tiny_model: Path, **knobs: Any) -> RMTrainer:
    made = RMTrainer(RMConfig(model="some/model", **knobs))
    made.tokenizer = Tokenizer.load(str(tiny_model))
    return made


def test_a_text_is_scored_one_past_its_end(tiny_model: Path) -> None:
    batch = trainer(tiny_model).to_batch([{"prompt": "1=", "chosen": "1", "rejected": "23"}])
    assert batch.lengths.tolist() == [5, 6]  # "1 = 1 <eos>" and "1 = 2 3 <eos>", each with one token more
    assert torch.nonzero(batch.mask).flatten().tolist() == [4, 10]
    assert batch["margins"].tolist() == [0, 0]


def test_a_pair_whose_prompt_fills_the_limit_trains_nothing(tiny_model: Path, raises: Raises) -> None:
    made = trainer(tiny_model, policy={"max_sequence_tokens": 3})
    batch = made.to_batch(
        [
            {"prompt": "1=", "chosen": "1", "rejected": "2"},
            {"prompt": "12=", "chosen": "1", "rejected": "2"},
        ]
    )
    assert batch.lengths.tolist() == [4] * 4
    assert torch.nonzero(batch.mask).flatten().tolist() == [3, 7]
    with raises(DataError):
        made.train_step([{"prompt": "12=", "chosen": "1", "rejected": "2"}])


def test_margins_come_from_their_column(tiny_model: Path, raises: Raises) -> None:
    made = trainer(tiny_model, margin_column="gap")
    assert made.to_batch([ROWS[4], {**ROWS[0], "gap": None}])["margins"].tolist() == [1, 1, 0, 0]
    with raises(DataError, "gap", "much"):
        made.to_batch([{**ROWS[0], "gap": "much"}])


def test_adapters_are_refused(raises: Raises) -> None:
    with raises(ConfigError, path="policy.lora"):
        validate(RMConfig, {"model": "m", "policy": {"lora": {"rank": 4}}})


@pytest.mark.slow
def test_the_export_is_a_classifier_that_ranks_as_the_run_did(tiny_model: Path, tmp_path: Path) -> None:
    config = RMConfig(
        model=str(tiny_model),
        policy={"init": "random", "optimizer": {"lr": 1e-3}},
        batch_size=4,
        max_steps=20,
        validation={"every": 0},
        margin_column="gap",
        center_loss_weight=0.01,
        cluster={"gpus_per_node": 0},
        run_dir=tmp_path / "run",
    )
    result = config.build().fit(dataset={"train": ROWS, "validation": ROWS}, console=Console(quiet=True))
    model = load_classifier(str(tmp_path / "run" / "model"), "cpu", torch.float32)
    tokenizer = Tokenizer.load(str(tmp_path / "run" / "model"))

    def value(row: dict[str, Any], name: str) -> float:
        ids = tokenizer.encode(row["prompt"] + row[name]) + sorted(tokenizer.stop_token_ids)
        with torch.no_grad():
            return float(model(input_ids=torch.tensor([ids])).logits)

    chosen = sum(value(row, "chosen") for row in ROWS) / len(ROWS)
    assert result.metrics["validation/rewards_chosen_mean"] == pytest.approx(chosen, abs=1e-4)
    assert result.metrics["validation/loss"] < result.history[0]["train/loss"]

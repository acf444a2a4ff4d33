"""KTO, ORPO and SimPO learn a preference that holds for texts they have not seen. CPU, seconds."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from nemorl.config import load_config
from nemorl_cli.console import Console
from nemorl_rl.models.tiny import write_tiny_model

pytestmark = pytest.mark.slow

LETTERS = "abcdefgh"


def text(rng: random.Random, step: int) -> str:
    """Through the alphabet forwards (1), which is good, or backwards (-1)."""
    start, length = rng.randrange(8), rng.randint(4, 8)
    return "".join(LETTERS[(start + step * i) % 8] for i in range(length))


def pairs(count: int, seed: int) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    return [{"prompt": rng.choice(LETTERS), "chosen": text(rng, 1), "rejected": text(rng, -1)} for _ in range(count)]


def labelled(count: int, seed: int) -> list[dict[str, Any]]:
    """One response per row; a third of them are good."""
    rng = random.Random(seed)
    labels = [rng.random() < 1 / 3 for _ in range(count)]
    return [{"prompt": rng.choice(LETTERS), "response": text(rng, 1 if good else -1), "label": good} for good in labels]


def train(folder: Path, rows: Any, **knobs: Any) -> Any:
    sizes: Any = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    config = load_config({
        "model": str(write_tiny_model(folder / "tiny", alphabet=LETTERS, **sizes)),
        "policy": {"init": "random", "optimizer": {"lr": 1e-3}},
        "batch_size": 16,
        "max_steps": 30,
        "validation": {"every": 0, "at_start": True},
        "cluster": {"gpus_per_node": 0},
        "run_dir": str(folder / "run"),
        **knobs,
    })  # fmt: skip
    data = {"train": rows(256, 0), "validation": rows(64, 1)}
    return config.build().fit(dataset=data, console=Console(quiet=True))


def test_kto_learns_from_single_responses(tmp_path: Path) -> None:
    result = train(tmp_path, labelled, algorithm="kto", batch_size=32, desirable_weight=2.0)
    before, after = result.history[0], result.metrics
    assert after["validation/accuracy"] > 0.95
    gap = after["validation/rewards_desirable_mean"] - after["validation/rewards_undesirable_mean"]
    assert gap > 0.3
    assert after["validation/loss"] < before["validation/loss"] - 0.05


@pytest.mark.parametrize("algorithm", ["orpo", "simpo"])
def test_a_preference_is_learnt_without_a_reference(algorithm: str, tmp_path: Path) -> None:
    result = train(tmp_path, pairs, algorithm=algorithm)
    before, after = result.history[0], result.metrics
    assert after["validation/accuracy"] > 0.95
    assert after["validation/rewards_margin_mean"] > before["validation/rewards_margin_mean"] + 0.05
    assert after["validation/preference_loss"] < before["validation/preference_loss"]
    if algorithm == "orpo":  # which imitates, too
        assert after["validation/sft_loss"] < before["validation/sft_loss"] - 0.3

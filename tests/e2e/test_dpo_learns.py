"""Direct preference optimisation learns a preference that holds for texts it has not seen. CPU, seconds."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from nemorl_cli.console import Console
from nemorl_preference.dpo import DPOConfig
from nemorl_rl.models.tiny import write_tiny_model

pytestmark = pytest.mark.slow

LETTERS = "abcdefgh"


def pairs(count: int, seed: int) -> list[dict[str, str]]:
    """The chosen response goes through the alphabet forwards, the rejected one backwards."""
    rng = random.Random(seed)

    def run(step: int) -> str:
        start, length = rng.randrange(8), rng.randint(4, 8)
        return "".join(LETTERS[(start + step * i) % 8] for i in range(length))

    return [{"prompt": rng.choice(LETTERS), "chosen": run(1), "rejected": run(-1)} for _ in range(count)]


@pytest.mark.parametrize("loss", ["sigmoid", "hinge", "ipo"])
def test_a_preference_is_learnt(loss: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    config = DPOConfig(
        model=str(write_tiny_model(tmp_path / "tiny", alphabet=LETTERS, **sizes)),
        policy={"init": "random", "optimizer": {"lr": 1e-3}},
        loss=loss,  # type: ignore[arg-type]
        batch_size=16,
        max_steps=30,
        validation={"every": 0, "at_start": True},
        cluster={"gpus_per_node": 0},
        run_dir=tmp_path / "run",
    )
    data = {"train": pairs(256, 0), "validation": pairs(64, 1)}
    result = config.build().fit(dataset=data, console=Console(quiet=True))
    before, after = result.history[0], result.metrics
    assert after["validation/accuracy"] > 0.95
    assert after["validation/rewards_margin_mean"] > before["validation/rewards_margin_mean"] + 0.05
    assert after["validation/loss"] < before["validation/loss"]

"""Trainers as the architecture guide writes them, on a tiny model: they learn, and say what is wrong."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nemorl
import pytest
from nemorl.errors import ConfigError, ForeignError, UsageError
from nemorl.plugins import Index, Registry
from nemorl_compat.trainers import ALGORITHM_REGISTRY, BaseTrainer, GuideLoss
from nemorl_testing.plugin import use_registry
from recorded_messages import Raises

ROWS = [{"prompt": f"{n}+1=", "response": str(n + 1)} for n in range(8)]
KNOBS = {
    "max_steps": 30,
    "batch_size": 8,
    "policy": {"init": "random", "optimizer": {"lr": 3e-3}},
    "checkpoint": {"every": 0, "export": False},
}


class Imitation(BaseTrainer):
    """The guide's example, complete: weighted likelihood of the responses."""

    @classmethod
    def _build_config_from_pretrained(cls, model: str, **kwargs: Any) -> dict[str, Any]:
        config = super()._build_config_from_pretrained(model, **kwargs)
        config["imitation"] = {"scale": kwargs.pop("scale", 1.0)}
        return config

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._settings = config.get("imitation", {})

    def _train_step(self, batch: Any) -> dict[str, float]:
        return self.update(self.encode(batch))

    def _compute_loss(self, batch: Any, outputs: Any) -> Any:
        return -self._settings["scale"] * (outputs * batch.loss_weights).sum()


@pytest.fixture
def scoped() -> Iterator[Registry]:
    """Registrations end with the test."""
    with use_registry(Registry(Index.installed())) as found:
        yield found


def losses(trainer: BaseTrainer) -> list[float]:
    return [record["train/loss"] for record in trainer.fit(ROWS).history if "train/loss" in record]


@pytest.mark.slow
def test_a_trainer_in_the_guides_style_learns(tiny_model: Path, tmp_path: Path) -> None:
    found = losses(Imitation.from_pretrained(str(tiny_model), run_dir=tmp_path / "run", **KNOBS))
    # 8 rows of two tokens: 4.5 nats at random (log of the vocabulary), under 1.5 once the rows are known.
    assert found[0] > 4
    assert found[-1] < 1.5


@pytest.mark.slow
def test_its_own_section_reaches_the_loss(tiny_model: Path, tmp_path: Path) -> None:
    first = [
        losses(Imitation.from_pretrained(str(tiny_model), run_dir=tmp_path / str(scale), scale=scale, **KNOBS))[0]
        for scale in (1.0, 2.0)
    ]
    assert first[1] == pytest.approx(2 * first[0], rel=1e-5)


def test_the_config_is_built_as_the_guide_shows(tiny_model: Path) -> None:
    trainer = Imitation.from_pretrained(str(tiny_model), scale=3.0, max_steps=5)
    assert trainer._settings == {"scale": 3.0}
    assert trainer.config.max_steps == 5
    assert trainer.config.custom == {"imitation": {"scale": 3.0}}
    assert trainer.config.get("batch_size") == 32
    assert trainer.config.get("absent", "default") == "default"


def test_a_knob_that_nothing_takes_is_refused(tiny_model: Path, raises: Raises) -> None:
    with raises(ConfigError, "scale", path="scal"):
        Imitation.from_pretrained(str(tiny_model), scal=3.0)


def test_the_loss_travels_without_the_trainer(tiny_model: Path) -> None:
    trainer = Imitation.from_pretrained(str(tiny_model), scale=3.0)
    loss = GuideLoss(Imitation, trainer.config)
    assert pickle.loads(pickle.dumps(loss)) == loss


def test_a_trainer_without_a_loss_says_so(tiny_model: Path, tmp_path: Path, raises: Raises) -> None:
    class Lossless(BaseTrainer):
        pass

    with raises(ForeignError, "Lossless", "_compute_loss"):
        Lossless.from_pretrained(str(tiny_model), run_dir=tmp_path / "run", **KNOBS).fit(ROWS)


def test_a_step_that_returns_no_dict_is_named(tiny_model: Path, tmp_path: Path, raises: Raises) -> None:
    class Wordless(BaseTrainer):
        def _train_step(self, batch: Any) -> Any:
            return 1.0

    with raises(UsageError, "Wordless._train_step", "1.0"):
        Wordless.from_pretrained(str(tiny_model), run_dir=tmp_path / "run", **KNOBS).fit(ROWS)


@pytest.mark.usefixtures("scoped")
def test_the_algorithm_registry_is_a_view_of_nemorls(tiny_model: Path, tmp_path: Path) -> None:
    ALGORITHM_REGISTRY["imitation"] = Imitation
    assert ALGORITHM_REGISTRY["imitation"] is Imitation
    assert {"grpo", "sft", "imitation"} <= set(ALGORITHM_REGISTRY)
    assert "absent" not in ALGORITHM_REGISTRY
    assert len(ALGORITHM_REGISTRY) == len(set(ALGORITHM_REGISTRY))
    own = {"custom": {"imitation": {"scale": 1.0}}}
    knobs = {**KNOBS, "max_steps": 2, "run_dir": tmp_path / "run", **own}
    assert nemorl.train(str(tiny_model), ROWS, algorithm="imitation", **knobs).steps == 2

"""GRPO with teachers: what they add to the advantage, by hand, and runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import nemorl
import pytest
import torch
from nemorl.config.load import validate
from nemorl.errors import ConfigError
from nemorl.metrics import values
from nemorl.types import Prompt, Sample, Samples, Score
from nemorl_cli.console import Console
from nemorl_distillation import MOPDConfig
from nemorl_distillation.mopd import AddTeachers, MOPDTrainer
from nemorl_distillation.teachers import SameTokens, Teacher, turns
from nemorl_tensors import TokenBatch
from nemorl_testing.models import tiny_model
from recorded_messages import Raises

NAN = float("nan")


class Says:
    """Gives every token the same log-prob."""

    def __init__(self, logprob: float) -> None:
        self.logprob = logprob

    def get_logprobs(self, batch: TokenBatch) -> torch.Tensor:
        return torch.where(batch.mask, self.logprob, NAN)


def response(index: int, reward: float, domain: str) -> Sample:
    prompt = Prompt(index, "1+1=", (5,), row={"domain": domain})
    return Sample(prompt, (5, 6, 7), (False, True, True), (0.0, -1.0, -1.0), Score(reward), "2", "stop")


SAMPLES = Samples(
    [response(0, 1.0, "math"), response(0, 0.0, "math"), response(1, 1.0, "code"), response(1, 1.0, "code")]
)
MODELS: dict[str, Any] = {"math": Says(-0.5), "code": Says(-200.0)}
CONFIG = MOPDConfig(model="m", teacher={"model": "t"})  # type: ignore[arg-type]
TEACHERS = [Teacher(name, weight, name, SameTokens(9)) for name, weight in (("math", 2.0), ("code", 0.5))]


def added(column: str | None) -> tuple[list[float], dict[str, float]]:
    """The advantages of the four responses' tokens, and metrics."""
    batch = TokenBatch.from_samples(SAMPLES, CONFIG.advantages(SAMPLES), drop=[False] * 3 + [True])
    batch = batch.with_tokens(old_logprobs=torch.tensor([NAN, -1.0, -2.0] * 4))

    def read(samples: Samples, batch: TokenBatch) -> Any:
        return ((turn, MODELS[turn.teacher.role]) for turn in turns(TEACHERS, samples, batch, column))

    batch, metrics = AddTeachers(read)(batch, SAMPLES)
    return batch["advantages"][batch.mask].tolist(), values(metrics)


def test_each_token_is_credited_with_the_gap_to_its_domains_teacher() -> None:
    # Rewards 1 and 0 against each other: outcome advantages 1 and -1. Math, weight 2: 2 * (-0.5 + 1), 2 * (-0.5 + 2).
    # Code, weight 0.5, no less than -100: 0.5 * (-100 + 1), 0.5 * (-100 + 2); its group earned the same twice.
    found, metrics = added("domain")
    assert found == [1 + 1.0, 1 + 3.0, -1 + 1.0, -1 + 3.0, -49.5, -49.0]
    # -(0.5 + 1.5 + 0.5 + 1.5 - 99 - 98) / 6, (1 + 3 + 1 + 3 + 49.5 + 49) / 6, (1 + 1 + 1 + 1 + 0 + 0) / 6
    assert metrics["teacher_reverse_kl"] == pytest.approx(193 / 6)
    assert metrics["teacher_advantage_size"] == pytest.approx(106.5 / 6)
    assert metrics["outcome_advantage_size"] == pytest.approx(4 / 6)


def test_without_a_column_all_teachers_are_added_up() -> None:
    found, _ = added(None)
    # 2 * (-0.5 + 1) + 0.5 * (-100 + 1) = -48.5 and 2 * (-0.5 + 2) + 0.5 * (-100 + 2) = -46
    assert found == pytest.approx([1 - 48.5, 1 - 46.0, -1 - 48.5, -1 - 46.0, -48.5, -46.0])


def test_the_outcome_has_a_weight() -> None:
    config = CONFIG.model_copy(update={"outcome_weight": 0.25})
    assert config.advantages(SAMPLES) == [0.25, -0.25, 0.0, 0.0]


def settings(run_dir: Path, **changes: Any) -> Any:
    teacher = {"precision": "float32"}
    teachers = {name: {"model": str(tiny_model(seed=seed)), **teacher} for name, seed in (("math", 11), ("code", 12))}
    return nemorl.load_config(
        {
            "algorithm": "mopd",
            "model": str(tiny_model(num_hidden_layers=1)),
            "teachers": teachers,
            "teacher_column": "domain",
            "num_prompts_per_step": 4,
            "num_generations_per_prompt": 2,
            "max_steps": 1,
            "policy": {"optimizer": {"lr": 1e-3}, "max_sequence_tokens": 32},
            "generation": {"max_new_tokens": 4},
            "validation": {"every": 0, "at_end": False},
            "checkpoint": {"export": False},
            "cluster": {"gpus_per_node": 0},
            "run_dir": str(run_dir),
            **changes,
        }
    )


ROWS = [{"prompt": f"{a}+1=", "domain": "code" if a % 2 else "math"} for a in range(8)]


def reward(prompt: str, said: str) -> float:
    return float(ord(said[:1] or "a") % 2)


def test_two_teachers_and_a_reward_train_together(tmp_path: Path) -> None:
    read: dict[str, set[str]] = {}

    class Watching(MOPDTrainer):
        def turns(self, samples: Samples, batch: TokenBatch) -> Any:
            for turn, model in super().turns(samples, batch):
                read.setdefault(turn.teacher.name, set()).update(one.prompt.row["domain"] for one in turn.samples)
                yield turn, model

    result = Watching(settings(tmp_path)).fit(ROWS, reward, console=Console(quiet=True))
    assert read == {"math": {"math"}, "code": {"code"}}
    assert result.metrics["train/teacher_reverse_kl"] > 0.1
    assert result.metrics["train/outcome_advantage_size"] > 0
    assert result.metrics["train/grad_norm"] > 0


def test_without_outcomes_its_gradient_is_that_of_opd(tmp_path: Path) -> None:
    loose = {"advantage_clip_low": None, "outcome_weight": 0.0}
    ours = settings(tmp_path / "mopd", **loose).build().fit(ROWS, reward, console=Console(quiet=True)).metrics
    opd = {**settings(tmp_path / "opd").model_dump(mode="json", exclude_unset=True), "algorithm": "opd"}
    theirs = nemorl.load_config(opd).build().fit(ROWS, console=Console(quiet=True)).metrics
    assert ours["train/grad_norm"] == pytest.approx(theirs["train/grad_norm"], rel=1e-4)
    assert ours["train/teacher_reverse_kl"] == pytest.approx(theirs["train/reverse_kl"], rel=1e-4)


def test_mistakes_are_reported_before_a_launch(tmp_path: Path, raises: Raises) -> None:
    with pytest.raises(ConfigError) as caught:
        validate(
            MOPDConfig, {"model": "some/model", "teacher": {"model": "some/other", "align": "text"}}, source="test"
        )
    assert [problem.path for problem in caught.value.problems] == ["teacher.align"]
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "1+1=", "domain": "law"}))
    teachers = {"math": {"model": "some/teacher"}, "code": {"model": "some/other"}}
    config = {"algorithm": "mopd", "model": "some/model", "teachers": teachers, "teacher_column": "domain"}
    scored = {"data": {"name": "file", "path": str(rows)}, "environment": "math"}
    with raises(ConfigError, "math", "code", path="teacher_column"):
        nemorl.load_config({**config, **scored}, for_launch=True)

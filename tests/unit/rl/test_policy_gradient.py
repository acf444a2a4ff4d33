"""What the author of a policy-gradient algorithm finds: few classes, examples that run, room for a variant."""

from __future__ import annotations

import doctest
import importlib
import inspect
import pkgutil
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from nemorl.config import Config
from nemorl.config.load import load_config, validate
from nemorl.metrics import average
from nemorl.plugins import registry
from nemorl.trainer import BaseTrainer
from nemorl_cli.console import Console
from nemorl_rl import policy_gradient
from nemorl_rl.callbacks import Callback
from nemorl_rl.config import RolloutRunConfig

PAGE = Path(__file__).parents[3] / "docs/plugin-kinds/algorithm.md"
ENTRIES = registry().index.of_kind("algorithms")
OURS = sorted(entry.name for entry in ENTRIES if entry.distribution.startswith("nemorl-"))
MODULES = [
    importlib.import_module(f"{policy_gradient.__name__}.{module.name}")
    for module in pkgutil.iter_modules(policy_gradient.__path__)
]


def trainer_of(algorithm: str) -> type[BaseTrainer[Any]]:
    module, _, name = registry().load("algorithms", algorithm).trainer.partition(":")
    trainer: type[BaseTrainer[Any]] = getattr(importlib.import_module(module), name)
    return trainer


def above_the_base(trainer: type[BaseTrainer[Any]]) -> list[str]:
    return [cls.__name__ for cls in trainer.__mro__ if issubclass(cls, BaseTrainer) and cls is not BaseTrainer]


DEEPER = {"distillation": 4, "opd": 4, "sdpo": 4, "opsd": 5, "sdft": 5}
"""Whoever teaches is a class of its own there. This table only gets shorter."""


@pytest.mark.parametrize("algorithm", OURS)
def test_an_algorithm_is_at_most_three_classes_above_the_loop(algorithm: str) -> None:
    assert len(above_the_base(trainer_of(algorithm))) <= DEEPER.get(algorithm, 3)


@pytest.mark.parametrize("algorithm", ["grpo", "dapo", "gspo", "cispo"])
def test_grpo_and_its_kin_are_the_step_and_a_config(algorithm: str) -> None:
    assert above_the_base(trainer_of(algorithm))[1:] == ["PolicyGradientTrainer", "RolloutTrainer"]
    assert [name for name in vars(trainer_of(algorithm)) if not name.startswith("_")] == ["config_class"]


@pytest.mark.parametrize("algorithm", OURS)
def test_a_config_has_at_most_seven_bases_above_what_every_sampling_run_has(algorithm: str) -> None:
    bases = registry().load("algorithms", algorithm).__mro__[1:]
    above = [cls for cls in bases if issubclass(cls, Config) and cls not in RolloutRunConfig.__mro__]
    assert len(above) <= 7, above


def test_a_transform_of_ones_own_is_given_the_log_probs_that_it_reads() -> None:
    class Own:
        requires = frozenset({"old_logprobs"})

        def __call__(self, batch: Any, samples: Any) -> tuple[Any, dict[str, Any]]:
            return batch, {}

    class Trainer(trainer_of("grpo")):  # type: ignore[misc]
        def build_transforms(self) -> list[Any]:
            return [*super().build_transforms(), Own()]

    config = load_config({"algorithm": "grpo", "model": "some/model"})
    for trainer, is_read in ((trainer_of("grpo")(config), False), (Trainer(config), True)):
        trainer.setup()
        assert ("old_logprobs" in trainer.loss.requires) == is_read  # one update per step


def public(module: ModuleType) -> Iterator[Any]:
    """Functions and classes that a module defines; configs, whose fields have docstrings of their own, are none."""
    for name, thing in vars(module).items():
        is_ours = getattr(thing, "__module__", None) == module.__name__ and not name.startswith("_")
        if is_ours and (inspect.isfunction(thing) or (inspect.isclass(thing) and not issubclass(thing, Config))):
            yield thing


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__.rpartition(".")[2])
def test_everything_public_has_an_example_that_runs(module: ModuleType) -> None:
    without = [thing.__name__ for thing in public(module) if ">>> " not in (inspect.getdoc(thing) or "")]
    assert without == [], f"{module.__name__} has no example of {without}"
    assert doctest.testmod(module, verbose=False).failed == 0


def test_the_merging_of_metrics_has_an_example_too() -> None:
    (example,) = doctest.DocTestFinder().find(average, "average")
    assert example.examples
    assert doctest.DocTestRunner(verbose=False).run(example).failed == 0


def small(**changes: Any) -> dict[str, Any]:
    return {
        "policy": {"init": "random", "max_sequence_tokens": 32, "optimizer": {"lr": 1e-2}},
        "generation": {"max_new_tokens": 3},
        "validation": {"every": 0, "at_end": False},
        "checkpoint": {"every": 0, "export": False},
        "rollouts": {"mismatch_limit": None},
        "max_steps": 2,
        "num_prompts_per_step": 2,
        "num_generations_per_prompt": 4,
        "num_minibatches": 2,
        "num_epochs_per_rollout": 3,
        "kl_penalty": 0.0,  # the variant's estimator is k3, RLOO's k2
        "advantage_clip_high": 0.125,
        **changes,
    }


class Updates(Callback):
    """Notes how many responses each optimizer step learns from."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def on_fit_begin(self, trainer: Any) -> None:
        trainer.run.policy.train_step = partial(self._train_step, trainer.run.policy.train_step)

    def _train_step(self, train_step: Callable[..., Any], minibatch: Any, loss: Any) -> Any:
        self.sizes.append(len(minibatch))
        return train_step(minibatch, loss)


def history(config: Any, updates: Updates) -> list[dict[str, float]]:
    rows = [{"prompt": f"{a}+{b}="} for a in range(2) for b in range(2)]
    given: dict[str, Any] = {"callbacks": [updates], "console": Console(quiet=True)}
    found = config.build().fit(rows, lambda prompt, response: len(set(response)) / 3, **given)
    timed = ("timing/", "performance/", "system/")
    return [{name: value for name, value in record.items() if not name.startswith(timed)} for record in found.history]


@pytest.mark.slow
def test_a_variant_from_outside_is_a_config_and_its_advantages(site: Path, tiny_model: Path, tmp_path: Path) -> None:
    (section,) = re.findall(r"## From rewards to advantages\n.*?\n## ", PAGE.read_text(), re.DOTALL)
    (code,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    written = [line for line in code.splitlines() if line and not line.startswith("from ")]
    assert len(written) <= 12
    (site / "acme_mean_baseline.py").write_text(code)
    variant = importlib.import_module("acme_mean_baseline").MeanBaselineConfig
    given = small(model=str(tiny_model))

    # Rewards less the mean of the other rewards of the group are RLOO's advantages.
    ours = load_config({"algorithm": "rloo", "run_dir": str(tmp_path / "rloo"), **given})
    theirs = validate(variant, {"run_dir": str(tmp_path / "variant"), **given})
    updates = Updates()
    expected, found = history(ours, Updates()), history(theirs, updates)
    assert found == expected
    assert updates.sizes == [4] * 2 * 3 * 2  # 8 responses in 2 minibatches, 3 epochs, 2 steps
    assert max(record.get("train/advantages/max", 0.0) for record in found) == 0.125
    assert any(record.get("train/grad_norm", 0.0) > 0 for record in found)

"""``cluster.take_turns``: runs whose models leave the devices' memory while others work learn what others learn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import nemorl
import pytest
from nemorl.contracts import OffloadingBackend
from nemorl.errors import ConfigError
from nemorl.plugins.index import Index
from nemorl.plugins.registry import Registry
from nemorl_cli.console import Console
from nemorl_dtensor import DTensorConfig
from nemorl_dtensor.generation import HFGeneration
from nemorl_testing.models import tiny_model as saved_model
from nemorl_testing.plugin import use_registry
from recorded_messages import Raises

ROWS = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(6)]
STEP = {"num_prompts_per_step": 2, "num_generations_per_prompt": 2, "generation": {"max_new_tokens": 3}}
RUNS: dict[str, dict[str, Any]] = {
    "grpo": {"algorithm": "grpo", "kl_penalty": 0.1, **STEP},
    "grpo of adapters": {"algorithm": "grpo", "kl_penalty": 0.1, "policy": {"lora": {"rank": 4}}, **STEP},
    "ppo": {"algorithm": "ppo", "num_prompts_per_step": 4, "generation": {"max_new_tokens": 3}},
}


def reward(prompt: str, response: str) -> float:
    return float(sum(map(ord, response)) % 7)


def settings(model: Path, run_dir: Path, run: dict[str, Any], **cluster: Any) -> Any:
    policy = {"max_sequence_tokens": 32, "optimizer": {"lr": 1e-3}, **run.get("policy", {})}
    if "lora" in policy:  # adapters need weights to adapt
        model = Path(saved_model())
    else:
        policy["init"] = "random"
    common = {
        "model": str(model),
        "run_dir": str(run_dir),
        "max_steps": 3,
        "validation": {"every": 2, "max_samples": 2},
    }
    return nemorl.load_config({**run, **common, "policy": policy, "cluster": cluster, "checkpoint": {"every": 2}})


def measured(config: Any) -> list[dict[str, Any]]:
    """The metrics of a run, without what depends on the clock."""
    trainer = config.build()
    trainer.fit(ROWS, reward, val_dataset=ROWS, console=Console(quiet=True))
    records = [json.loads(line) for line in (config.run_dir / "metrics.jsonl").read_text().splitlines()]
    clock = ("time", "timing", "performance", "system")
    return [{name: value for name, value in r.items() if not name.startswith(clock)} for r in records]


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.slow
def test_taking_turns_changes_no_number(name: str, tiny_model: Path, tmp_path: Path) -> None:
    staying = measured(settings(tiny_model, tmp_path / "staying", RUNS[name]))
    moving = measured(settings(tiny_model, tmp_path / "moving", RUNS[name], take_turns=True))
    assert moving == staying
    assert len(staying) >= 5


@pytest.mark.slow
def test_models_do_leave(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[int] = []
    generate = nemorl.RolloutTrainer.collect

    def collect(self: Any, rows: Any) -> Any:
        found = generate(self, rows)
        held.append(self.run.policy.workers.call(OffloadingBackend.held_bytes)[0]["optimizer"])
        return found

    monkeypatch.setattr(nemorl.RolloutTrainer, "collect", collect)
    measured(settings(tiny_model, tmp_path / "r", RUNS["grpo"], take_turns=True))
    assert held == [0, 0, 0], "the optimizer waits outside while responses are sampled"


@pytest.mark.parametrize(("snapshots", "levels"), [(1, {1, 2}), (2, {1})])
@pytest.mark.slow
def test_an_engine_forgets_its_weights_only_if_an_update_brings_all_that_it_has(
    snapshots: int, levels: set[int], tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[int] = []
    sleep = HFGeneration.sleep

    def asked(self: HFGeneration, level: Any) -> None:
        told.append(level)
        sleep(self, level)

    monkeypatch.setattr(HFGeneration, "sleep", asked)
    run = {**RUNS["grpo"], "generation": {"max_new_tokens": 3, "backend": {"name": "hf", "snapshots": snapshots}}}
    measured(settings(tiny_model, tmp_path / "run", run, take_turns=True))
    assert set(told) == levels
    assert told.count(2) == (3 if 2 in levels else 0), "once a step, while the policy learns"


def test_what_cannot_take_turns_is_refused(tiny_model: Path, tmp_path: Path, raises: Raises) -> None:
    apart = {"take_turns": True, "colocated": False, "workers_per_node": 2}
    with raises(ConfigError, path="cluster.take_turns"):
        settings(tiny_model, tmp_path, RUNS["grpo"], **apart)


def test_by_default_nobody_moves_on_a_cpu(tiny_model: Path, tmp_path: Path) -> None:
    assert not settings(tiny_model, tmp_path, RUNS["grpo"]).place().takes_turns
    assert settings(tiny_model, tmp_path, RUNS["grpo"], take_turns=True).place().takes_turns


def test_a_model_beside_the_policy_must_be_able_to_leave_as_well(
    tiny_model: Path, tmp_path: Path, raises: Raises
) -> None:
    class Staying(DTensorConfig):
        supports = DTensorConfig.supports - {"offload"}

    with use_registry(Registry(Index.installed())) as registry, raises(ConfigError, path="critic.backend"):
        registry.register("training_backends", "staying", Staying)
        settings(tiny_model, tmp_path, {**RUNS["ppo"], "critic": {"backend": "staying"}}, take_turns=True)

"""The trainer's devices sample while it waits for rollouts: more engines, the same numbers, no memory kept from it."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from elastic_runs import apart, learnt, train
from nemorl.contracts import SleepingBackend
from nemorl_rl.callbacks import Callback
from small_runs import weights

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.usefixtures("private_ray")]


def lending(**more: Any) -> dict[str, Any]:
    """One trainer, an engine apart and one on its device, with weights of their own."""
    return apart(1, lend_training_devices=True, weight_transport="delta_socket", **more)


@pytest.fixture(scope="module")
def undisturbed(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """In one process."""
    result = train(tiny_model, tmp_path_factory.mktemp("one") / "run", {"gpus_per_node": 0})
    return learnt(result.history), weights(result)


class Look(Callback):
    """What lent engines hold when they get weights and while the policy learns, and what each has served."""

    def __init__(self) -> None:
        self.held: list[tuple[str, Any]] = []
        self.engines: list[dict[str, Any]] = []

    def on_weights_synced(self, trainer: Any, step: int, version: int) -> None:
        self.held.append(("sync", trainer.generation.workers.call_lent(SleepingBackend.held_bytes)))

    def on_rollout_end(self, trainer: Any, step: int) -> None:
        fleet = trainer.generation.workers
        with trainer.run.resources.turn_of("policy")("train"):
            self.held.append(("train", fleet.call_lent(SleepingBackend.held_bytes)))
        self.engines = fleet.as_json()


class KillLent(Callback):
    """SIGKILL to the lent engine, once, as a step begins."""

    def __init__(self, step: int) -> None:
        self.step, self.ready = step, list[int]()

    def on_step_begin(self, trainer: Any, step: int) -> None:
        fleet = trainer.generation.workers
        self.ready.append(len(fleet.ranks))
        if step == self.step:
            (lent,) = [number for number, one in enumerate(fleet.as_json()) if one["lent"]]
            os.kill(fleet.facts[lent].pid, signal.SIGKILL)

    def on_step_end(self, trainer: Any, step: int) -> None:
        if step == self.step:  # it starts between two phases, and the next one waits for it
            trainer.generation.workers.tend()


def test_an_engine_on_the_trainers_device_samples_and_leaves_its_memory_to_the_trainer(
    undisturbed: Any, tiny_model: Path, tmp_path: Path
) -> None:
    look = Look()
    cluster = lending(take_turns=True)
    result = train(tiny_model, tmp_path / "run", cluster, look)
    assert (learnt(result.history), weights(result)) == undisturbed
    own, lent = look.engines
    assert (own["lent"], lent["lent"]) == (False, True)
    assert own["served"] == lent["served"] > 0  # of equal speed, each has half of the rows
    assert all(held["weights"] > 0 for phase, (held,) in look.held if phase == "sync")
    assert all(sum(held.values()) == 0 for phase, (held,) in look.held if phase == "train")


def test_a_lent_engine_that_dies_is_done_without_and_comes_back(
    undisturbed: Any, tiny_model: Path, tmp_path: Path
) -> None:
    killer = KillLent(2)
    cluster = lending(take_turns=True)
    result = train(tiny_model, tmp_path / "run", cluster, killer)
    assert (learnt(result.history), weights(result)) == undisturbed
    assert "engine-1 is lost" in (tmp_path / "run" / "events.jsonl").read_text()
    assert killer.ready[:2] == [2, 2]
    assert killer.ready[-1] == 2


@pytest.mark.full
def test_where_both_fit_nobody_moves(undisturbed: Any, tiny_model: Path, tmp_path: Path) -> None:
    look = Look()
    result = train(tiny_model, tmp_path / "run", lending(), look)
    assert (learnt(result.history), weights(result)) == undisturbed
    assert look.engines[1]["served"] > 0
    assert all(held["weights"] > 0 for _, (held,) in look.held)


@pytest.mark.full
def test_the_engine_goes_with_a_trainer_that_dies_and_comes_back_with_it(
    undisturbed: Any, tiny_model: Path, tmp_path: Path
) -> None:
    class KillTrainer(Callback):
        def on_rollout_end(self, trainer: Any, step: int) -> None:
            if step == 2 and not trainer.run.resources.restarts:
                os.kill(trainer.policy.workers.facts[0].pid, signal.SIGKILL)

    cluster = lending(take_turns=True)
    result = train(tiny_model, tmp_path / "run", cluster, KillTrainer(), checkpoint={"every": 1, "export": True})
    assert (learnt(result.history), weights(result)) == undisturbed

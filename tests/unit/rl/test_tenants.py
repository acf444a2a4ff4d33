"""Models that share devices: who is in their memory in each phase, in which order they go and come."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from nemorl.contracts.memory import DeviceMemoryError, MemoryPart
from nemorl.errors import BackendError, DeadlineError
from nemorl_rl.placement.tenants import (
    ROLLOUT,
    SYNC,
    TRAIN,
    EngineTenant,
    Parts,
    Phase,
    Tenancy,
    TrainingTenant,
    phases,
)
from recorded_messages import Raises

GIB = 2**30
MEASURE, REFERENCE, SAVE = Phase("policy", "measure"), Phase("policy", "reference"), Phase("policy", "save")
ALL: Parts = ("weights", "optimizer", "gradients", "reference")


class Recording:
    """Workers of one backend that write down what they are told."""

    def __init__(self, name: str, said: list[str], fails: str = "") -> None:
        self.name, self.said, self.fails = name, said, fails

    def call(self, verb: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        method = verb.__name__
        if method == "held_bytes":
            return [{"weights": GIB}, {"weights": 2 * GIB, "cache": GIB // 2}]
        (given,) = args
        self.said.append(f"{self.name} {method} {' '.join(given) if isinstance(given, list) else given}")
        if method == self.fails:
            raise BackendError("out of memory", fix="less")
        return [None]


class Unwatched:
    """Nothing was planned."""

    def entered(self, phase: Phase, holdings: Any) -> None:
        pass

    def explained(self, phase: Phase, error: DeviceMemoryError, holdings: Any) -> DeviceMemoryError:
        return error


def tenancy(said: list[str], *, shares_weights: bool = False, fails: str = "", limit_s: float = 5.0) -> Tenancy:
    found = Tenancy(phases(["policy"], shares_weights=shares_weights), Unwatched(), limit_s=limit_s)
    found.admit("policy", TrainingTenant(Recording("policy", said, fails)), ALL)  # type: ignore[arg-type]
    found.admit("engine", EngineTenant(Recording("engine", said)), ("weights", "cache"))  # type: ignore[arg-type]
    return found


def steps(found: Tenancy, said: list[str], *names: Phase) -> list[str]:
    del said[:]
    for name in names:
        with found.during(name):
            pass
    return list(said)


def test_one_step_in_the_order_of_the_issue() -> None:
    """rollout -> sleep engine -> onload trainer -> train -> publish weights -> offload -> wake, weights first."""
    said: list[str] = []
    found = tenancy(said)
    steps(found, said, ROLLOUT)
    assert steps(found, said, TRAIN, SYNC, ROLLOUT) == [
        "engine sleep 1",
        "policy onload weights optimizer gradients",
        # sync: the engine's weights come once the optimizer is gone, its cache once the trainer is
        "policy offload gradients optimizer reference",
        "engine wake weights",
        "policy offload gradients optimizer reference weights",
        "engine wake cache",
    ]


def test_an_engine_whose_weights_come_anew_forgets_them_while_the_policy_learns() -> None:
    said: list[str] = []
    found = tenancy(said)
    engine = EngineTenant(Recording("engine", said))  # type: ignore[arg-type]
    found.admit("engine", engine, ("weights", "cache"), forgets={TRAIN: engine.forget})
    assert steps(found, said, ROLLOUT, TRAIN, TRAIN, SYNC, ROLLOUT) == [
        "policy offload gradients optimizer reference weights",
        "engine sleep 2",
        "policy onload weights optimizer gradients",
        "policy offload gradients optimizer reference",
        "engine wake weights",
        "policy offload gradients optimizer reference weights",
        "engine wake cache",
    ]
    # A copy that was kept for another phase is let go of; what comes next may be a rollout after a checkpoint.
    step = steps(found, said, REFERENCE, TRAIN, SYNC, ROLLOUT)
    assert [told for told in step if "sleep" in told] == ["engine sleep 1", "engine sleep 2"]
    assert [told for told in steps(found, said, SAVE, ROLLOUT) if "sleep" in told] == ["engine sleep 1"]


def test_work_of_the_same_phase_moves_nothing() -> None:
    said: list[str] = []
    found = tenancy(said)
    steps(found, said, ROLLOUT)
    assert steps(found, said, ROLLOUT, ROLLOUT) == []
    assert steps(found, said, MEASURE, MEASURE, TRAIN) == [
        "engine sleep 1",
        "policy onload weights",
        "policy onload optimizer gradients",
    ]


def test_an_engine_over_the_policys_weights_leaves_with_what_is_its_own() -> None:
    said: list[str] = []
    found = tenancy(said, shares_weights=True)
    assert steps(found, said, ROLLOUT, TRAIN) == [
        "policy offload gradients optimizer reference",
        "engine sleep 1",
        "policy onload optimizer gradients",
    ]


def test_the_reference_is_in_memory_while_it_is_asked_and_no_longer() -> None:
    said: list[str] = []
    found = tenancy(said)
    steps(found, said, MEASURE)
    assert steps(found, said, REFERENCE, MEASURE) == [
        "policy offload gradients optimizer reference weights",
        "policy onload reference",
        "policy offload gradients optimizer reference weights",
        "policy onload weights",
    ]


def test_the_reference_of_adapters_is_the_model_without_them() -> None:
    table = phases(["policy", "critic"], shares_weights=False, adapted=["policy"])
    assert table[REFERENCE] == {"policy": ("weights",)}
    assert table[Phase("critic", "reference")] == {"critic": ("reference",)}


def test_models_beside_the_policy_take_turns_as_well() -> None:
    said: list[str] = []
    found = Tenancy(phases(["policy", "critic"], shares_weights=False), Unwatched(), limit_s=5.0)
    for role in ("policy", "critic"):
        found.admit(role, TrainingTenant(Recording(role, said)), ALL)  # type: ignore[arg-type]
    assert steps(found, said, Phase("critic", "measure"), TRAIN) == [
        "policy offload gradients optimizer reference weights",
        "critic offload gradients optimizer reference",
        "critic offload gradients optimizer reference weights",
        "policy onload weights optimizer gradients",
    ]


def test_what_was_built_anew_is_there_with_all_it_has() -> None:
    said: list[str] = []
    found = tenancy(said)
    steps(found, said, ROLLOUT)
    del said[:]
    found.send_away("engine")
    found.admit("policy", TrainingTenant(Recording("policy", said)), ALL)  # type: ignore[arg-type]
    assert said == ["engine sleep 1"]
    assert steps(found, said, SAVE) == ["policy offload gradients reference"]


def test_a_part_that_does_not_fit_says_who_holds_what(raises: Raises) -> None:
    said: list[str] = []
    found = tenancy(said, fails="onload")
    steps(found, said, ROLLOUT)
    with raises(BackendError, "train", "weights", "2.00", "cache", "0.50"):
        steps(found, said, TRAIN)
    # What failed half way is tried again, not taken for done.
    assert "policy onload weights optimizer gradients" in said
    with pytest.raises(BackendError):
        steps(found, said, TRAIN)


def test_work_of_another_phase_waits_for_the_end_of_this_one(raises: Raises) -> None:
    said: list[str] = []
    found = tenancy(said, limit_s=0.05)
    entered, leave = threading.Event(), threading.Event()

    def generate() -> None:
        with found.during(ROLLOUT):
            entered.set()
            leave.wait(10)

    thread = threading.Thread(target=generate)
    thread.start()
    entered.wait(10)
    with raises(DeadlineError, "train", "rollout"):
        steps(found, said, TRAIN)
    with found.during(ROLLOUT):
        pass  # a second one of the same phase does not wait
    leave.set()
    thread.join()
    assert steps(found, said, TRAIN)[0] == "engine sleep 1"


@pytest.mark.parametrize("shares_weights", [False, True])
def test_no_phase_needs_two_models_whole(shares_weights: bool) -> None:
    """Two models are never in memory with what makes them large: the trainer's optimizer and the engine's cache."""
    trained: set[MemoryPart] = {"optimizer", "gradients"}
    large: Mapping[str, set[MemoryPart]] = {"policy": trained, "critic": trained, "engine": {"cache"}}
    for residents in phases(["policy", "critic"], shares_weights=shares_weights).values():
        holders = [name for name, parts in residents.items() if large[name] & set(parts)]
        assert len(holders) <= 1

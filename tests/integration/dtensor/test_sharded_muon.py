"""Muon on sharded matrices: each rank holds a part, and the step is that of the whole."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from nemorl.resources.worker import WorkerContext
from sharded_runs import OPTIMIZER, Case, Found, train
from spawned import run_calls
from test_sharded_training import MODELS, TP, write_model
from tiers import in_full
from torch import Tensor

pytestmark = [pytest.mark.full, pytest.mark.slow]

MUON: dict[str, Any] = {"optimizer": {**OPTIMIZER, "name": "muon"}}
LAYOUTS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "dp2": (2, {}, {}),
    "tp2": (2, TP, {}),
    "dp2 bfloat16": (2, {"precision": "bfloat16"}, {}),
    **in_full({"fsdp2 x tp2": (4, TP, {}), "replicas2 x shards2": (4, {}, {"data_parallel_replicas": 2})}),
}
TOLERANCE = 0.03
"""Of the distance that the weights went: the iteration runs in bfloat16, and sums of parts round otherwise."""


@dataclass(frozen=True)
class Alone:
    """What one process finds, in one precision."""

    initial: dict[str, Tensor]
    own: Found
    further: Found
    """From its own checkpoint."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_model(tmp_path_factory.mktemp("model") / "qwen2", MODELS["qwen2"]))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of checkpoints, by layout or precision."""
    folder = tmp_path_factory.mktemp("saved")
    for name in (*LAYOUTS, "float32", "bfloat16"):
        (folder / name).mkdir()
    return folder


@pytest.fixture(scope="module")
def ranks(model: str, saved: Path) -> dict[str, list[Found]]:
    """What every rank finds, by layout."""
    found: dict[str, list[Found]] = {}
    for size in sorted({size for size, _, _ in LAYOUTS.values()}):
        cases = [
            Case(layout, model, size, {**MUON, **policy}, options, saves=str(saved / layout))
            for layout, (ranks, policy, options) in LAYOUTS.items()
            if ranks == size
        ]
        results = run_calls([(train, (case,)) for case in cases], size)
        found |= {case.name: result for case, result in zip(cases, results, strict=True)}
    return found


@pytest.fixture(scope="module")
def alone(model: str, saved: Path) -> dict[str, Alone]:
    found = {}
    for precision in ("float32", "bfloat16"):
        policy = {**MUON, "precision": precision}
        still = train(WorkerContext(), Case("still", model, 1, {**policy, "optimizer": {"lr": 1e-12}}))
        uninterrupted = train(WorkerContext(), Case("one", model, 1, policy))
        own = train(WorkerContext(), Case("own", model, 1, policy, saves=str(saved / precision)))
        further = train(WorkerContext(), Case("more", model, 1, policy, resumes=str(saved / precision)))
        assert own.losses == uninterrupted.losses
        found[precision] = Alone(still.weights, own, further)
    return found


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    return float(torch.stack([(one[name].float() - other[name].float()).norm() for name in one]).norm())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sharded_matrices_take_the_step_of_the_whole_and_are_resumed_by_one_process(
    layout: str, model: str, saved: Path, ranks: dict[str, list[Found]], alone: dict[str, Alone]
) -> None:
    _, policy, _ = LAYOUTS[layout]
    precision = policy.get("precision", "float32")
    initial, own, further = alone[precision].initial, alone[precision].own, alone[precision].further
    went = distance(own.weights, initial)
    assert went > 0
    tolerance = TOLERANCE if precision == "float32" else 2 * TOLERANCE
    assert distance(own.weights, ranks[layout][0].weights) < tolerance * went

    # One process continues from the ranks' checkpoint as it would have from its own.
    case = Case("more", model, 1, {**MUON, "precision": precision}, resumes=str(saved / layout))
    resumed = train(WorkerContext(), case)
    went = distance(further.weights, own.weights)
    assert distance(resumed.weights, further.weights) < 2 * tolerance * (went + distance(own.weights, initial))

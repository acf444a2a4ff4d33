"""However a model is spread over ranks, it leaves their devices and comes back unchanged, and so does its engine."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("megatron.core", reason="megatron-core is not installed: pip install nemorl-megatron")

from layouts import EP, LOW, MIXTURE, PLAIN, PP, TP, VPP
from megatron_tenants import Case, check_offload, sleep_over_a_trainer
from nemorl_testing.models import tiny_model
from spawned import run_calls

pytestmark = [pytest.mark.slow, pytest.mark.megatron]

LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dp2": ({}, {}),
    "dp2, plain optimizer": ({}, PLAIN),
    "dp2 bfloat16": (LOW, {}),
    "dp2 bfloat16, plain optimizer": (LOW, PLAIN),
    "tp2": (TP, {}),
    "pp2": ({}, PP),
    "pp2 vpp2": ({}, VPP),
    "ep2": ({}, EP),
}


@pytest.fixture(scope="module")
def cases() -> dict[str, Case]:
    dense, mixture = str(tiny_model(num_hidden_layers=4)), str(tiny_model(**MIXTURE))
    return {
        name: Case(mixture if name == "ep2" else dense, policy, options) for name, (policy, options) in LAYOUTS.items()
    }


@pytest.fixture(scope="module")
def checked(cases: dict[str, Case]) -> dict[str, list[list[str]]]:
    return dict(zip(cases, run_calls([(check_offload, (case,)) for case in cases.values()], 2), strict=True))


@pytest.fixture(scope="module")
def slept(cases: dict[str, Case]) -> dict[str, list[dict[str, bool]]]:
    calls = [(sleep_over_a_trainer, (case,)) for case in cases.values()]
    return dict(zip(cases, run_calls(calls, 2), strict=True))


@pytest.mark.parametrize("name", LAYOUTS)
def test_what_leaves_the_devices_comes_back_unchanged(name: str, checked: dict[str, list[list[str]]]) -> None:
    assert checked[name] == [[], []]


@pytest.mark.parametrize("name", LAYOUTS)
def test_an_engine_and_the_trainer_it_lives_with_sleep_together(
    name: str, slept: dict[str, list[dict[str, bool]]]
) -> None:
    assert slept[name] == [{"same": True, "empty": True, "reference is away": True}] * 2

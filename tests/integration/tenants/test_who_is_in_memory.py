"""With `cluster.take_turns`, each phase of each algorithm has those models in memory that it needs and no others.

Runs with real backends and engines, of which each phase's order and what every tenant holds then are written down.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any

import nemorl
import pytest
from nemorl_cli.console import Console
from nemorl_rl.placement.tenants import Phase, Tenancy
from nemorl_testing.models import tiny_model

pytestmark = [pytest.mark.slow]

ROWS = [{"prompt": f"{i}+1=", "answer": str(i + 1), "chosen": "7", "rejected": "8"} for i in range(4)]
SAMPLING = {"num_prompts_per_step": 2, "generation": {"max_new_tokens": 3}}
MEGATRON = pytest.mark.megatron


def reward(prompt: str, response: str) -> float:
    return float(sum(map(ord, response)) % 7)


RUNS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "grpo": (
        {"algorithm": "grpo", "kl_penalty": 0.1, "num_generations_per_prompt": 2, **SAMPLING},
        ["rollout", "policy reference", "policy train", "sync"],
    ),
    "ppo": (
        {"algorithm": "ppo", "kl_penalty": 0.1, **SAMPLING},
        ["rollout", "critic measure", "policy measure", "policy reference", "critic train", "policy train", "sync"],
    ),
    "opd": ({"algorithm": "opd", **SAMPLING}, ["rollout", "teacher measure", "policy train", "sync"]),
    "distillation": (
        {"algorithm": "distillation", "topk": 4, **SAMPLING},
        ["rollout", "teacher measure", "policy train", "sync"],
    ),
    "dpo": ({"algorithm": "dpo", "reference": "model", "batch_size": 2}, ["policy reference", "policy train"]),
}
"""A run, and the phases of one of its steps."""


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Mapping[str, Any], Mapping[str, Any]]]:
    """Phase by phase: what the table says, and what tenants really hold."""
    found: list[tuple[str, Mapping[str, Any], Mapping[str, Any]]] = []
    during = Tenancy.during

    @contextmanager
    def recorded(self: Tenancy, phase: Phase) -> Iterator[None]:
        with during(self, phase):
            held = {name: {p for p, size in parts.items() if size} for name, parts in self.holdings().items()}
            found.append((str(phase), self._table[phase], {name: parts for name, parts in held.items() if parts}))
            yield

    monkeypatch.setattr(Tenancy, "during", recorded)
    return found


def config(name: str, run_dir: Path, backend: str = "dtensor") -> Any:
    model = str(tiny_model())
    common: dict[str, Any] = {
        "model": model,
        "run_dir": str(run_dir),
        "max_steps": 2,
        "policy": {"backend": backend, "max_sequence_tokens": 32, "optimizer": {"lr": 1e-3}},
        "cluster": {"take_turns": True},
        "validation": {"every": 0, "at_end": False},
        "checkpoint": {"every": 0, "export": False},
    }
    if name in ("opd", "distillation"):
        common["teacher"] = {"model": str(tiny_model(seed=8))}
    if backend == "megatron" and name != "dpo":
        common["generation"] = {**RUNS[name][0]["generation"], "backend": "megatron"}
    return nemorl.load_config({**RUNS[name][0], **common})


CASES = [(name, "dtensor") for name in RUNS] + [pytest.param(name, "megatron", marks=MEGATRON) for name in RUNS]


@pytest.mark.parametrize(("name", "backend"), CASES)
def test_each_phase_finds_whom_it_needs_and_nobody_else(
    name: str, backend: str, seen: list[tuple[str, Mapping[str, Any], Mapping[str, Any]]], tmp_path: Path
) -> None:
    if backend == "megatron":
        pytest.importorskip("megatron.core", reason="megatron-core is not installed: pip install nemorl-megatron")
    trainer = config(name, tmp_path / "run", backend).build()
    inputs = {} if name == "dpo" else {"reward_fn": reward}
    trainer.fit(ROWS, console=Console(quiet=True), **inputs)
    assert seen, "nobody takes turns"
    for phase, table, held in seen:
        for tenant, parts in held.items():
            assert parts <= set(table.get(tenant, ())), f"{tenant} holds {parts} in {phase}"
    phases = [phase for phase, _ in groupby(phase for phase, _, _ in seen if not phase.endswith("save"))]
    step = RUNS[name][1]
    assert phases[-len(step) :] == step


def test_a_model_is_built_while_the_others_are_away(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A critic, a teacher or an engine that is being built does not find the policy in its way."""
    from nemorl_rl.placement.tenant_resources import TenantResources

    held: list[Mapping[str, Any]] = []
    auxiliary = nemorl.resources.manager.ResourceManager.auxiliary_policy

    def build(self: TenantResources, *args: Any) -> Any:
        assert self._tenancy is not None
        held.append({name: sum(parts.values()) for name, parts in self._tenancy.holdings().items()})
        return auxiliary(self, *args)

    monkeypatch.setattr(nemorl.resources.manager.ResourceManager, "auxiliary_policy", build)
    config("ppo", tmp_path / "run").build().fit(ROWS, reward_fn=reward, console=Console(quiet=True))
    assert held == [{"policy": 0}]

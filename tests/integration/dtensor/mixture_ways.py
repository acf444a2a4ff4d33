"""Mixtures on ranks, in many ways: what they learn, and what one process learns in their place."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import reduce
from pathlib import Path

import pytest
import torch
from context_runs import Learnt, Way, batch_of, learn
from mixture_runs import write_mixture
from nemorl.metrics import Mean
from spawned import Call, run_calls
from spread_cases import gap, together

QWEN = "qwen3_moe"
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


def alone(way: Way) -> Way:
    """The same in one process, padded, resumed from the checkpoint of one process."""
    options = {key: value for key, value in way.options.items() if key == "router"}
    policy = {key: value for key, value in way.policy.items() if key == "lora"}
    resumes = way.resumes and "one"
    name = f"one {way.model} {way.batch} {policy} {options} {resumes}"
    return Way(name, model=way.model, batch=way.batch, policy=policy, options=options, resumes=resumes)


PLAIN = alone(Way("", model=QWEN))


def moves_bias(way: Way) -> bool:
    return "bias_update_rate" in way.options.get("router", {})


def _mesh(way: Way) -> tuple[int, ...]:
    """Ways of one mesh share processes: torch takes meshes of equal shape for the same, also of dead groups."""
    replicas, experts = (way.options.get(name, 1) for name in ("data_parallel_replicas", "expert_parallel_size"))
    return way.world_size, way.together, replicas, experts


class Runs:
    """What the ranks of all ways found, and what one process does in their place."""

    def __init__(self, folder: Path, ways: Sequence[Way], *, models: Iterable[str], saved: str) -> None:
        """
        Args:
            folder: For models and checkpoints.
            ways: In an order in which a checkpoint exists before it is resumed from.
            models: All that are needed.
            saved: The way that saves a checkpoint, besides one process.
        """
        self.folders = {name: write_mixture(folder / name, name) for name in models}
        for name in ("one", saved):
            (folder / f"saved {name}").mkdir()
            self.folders[name] = str(folder / f"saved {name}")
        self._found: dict[str, list[Learnt]] = {}
        self._run([replace(PLAIN, saves="one")])
        self._run([way for way in map(alone, ways) if way.name != PLAIN.name])
        for mesh in dict.fromkeys(map(_mesh, ways)):
            self._run([way for way in ways if _mesh(way) == mesh])

    def _run(self, ways: list[Way]) -> None:
        named = {way.name: way for way in ways}
        calls: list[Call] = [(learn, (way, self.folders)) for way in named.values()]
        found = run_calls(calls, ways[0].world_size)
        self._found |= dict(zip(named, found, strict=True))

    def __getitem__(self, way: Way) -> list[Learnt]:
        return self._found[way.name]


def expect_learnt_as_one(way: Way, runs: Runs) -> None:
    """Log-probs, losses, norms of gradients, weights."""
    found, (one,) = runs[way], runs[alone(way)]
    heads, lengths = found[:: way.together], batch_of(way).lengths
    for name in ("before", "reference", "given", "after"):
        assert gap(together(heads, name, lengths), together([one], name, lengths)) < 1e-5, name
    assert gap(one.after, one.before) > 1e-2, "the steps changed nothing: this proves nothing"
    for step, expected in enumerate(one.metrics):
        losses = sum(rank.metrics[step]["loss"] for rank in heads)
        assert losses == pytest.approx(expected["loss"], rel=1e-6, abs=1e-6)
        for rank in found:
            assert rank.metrics[step]["grad_norm"] == pytest.approx(expected["grad_norm"], rel=5e-6)
    assert found[0].weights.keys() == one.weights.keys()
    worst = max((gap(found[0].weights[key], wanted), key) for key, wanted in one.weights.items())
    assert worst[0] < 1e-5, worst


def expect_gradients_of_one(way: Way, runs: Runs) -> None:
    """Of each tensor, on every rank."""
    (one,) = runs[alone(way)]
    largest = max(float(wanted.norm()) for wanted in one.gradients.values())
    for rank in runs[way]:
        assert rank.gradients.keys() == one.gradients.keys()
        for key, wanted in one.gradients.items():
            distance = float((rank.gradients[key] - wanted).norm())
            assert distance <= 5e-6 * max(float(wanted.norm()), 1e-3 * largest), key


def expect_counted_once(way: Way, runs: Runs) -> None:
    """Loads of experts, and balance losses."""
    found, (one,) = runs[way], runs[alone(way)]
    for step, expected in enumerate(one.metrics):
        assert expected["expert_load_max"] > 1
        for rank in found:
            counted = {name: rank.metrics[step].get(name) for name in ("expert_load_max", "dead_experts")}
            assert counted == {name: expected[name] for name in counted}
            assert ("balance_loss" in rank.metrics[step]) == ("balance_loss" in expected)
            if "balance_loss" in expected:
                assert rank.metrics[step]["balance_loss"] == pytest.approx(expected["balance_loss"], rel=1e-5)


def expect_bias_of_one(way: Way, runs: Runs) -> None:
    """Moved, and to the last bit."""
    wanted = runs[alone(way)][0].weights[BIAS]
    assert float(wanted.abs().max()) > 0.015, "two updates of 0.01 and more"
    assert torch.equal(runs[way][0].weights[BIAS], wanted)


def expect_flips_counted_once(way: Way, runs: Runs) -> None:
    """Choices that routers would have made otherwise."""
    heads, (one,) = runs[way][:: way.together], runs[alone(way)]
    found = reduce(Mean.merge, [rank.flipped for rank in heads])
    assert found.count == one.flipped.count
    assert abs(found.total - one.flipped.total) <= 2, "but for scores that rounding makes equal"
    assert found.value > 0.3

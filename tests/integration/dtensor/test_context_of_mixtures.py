"""Ranks that share sequences of a mixture learn what one process learns: its routers, its experts, replayed routes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import torch
from context_runs import Learnt, Way, batch_of, learn
from mixture_runs import write_mixture
from nemorl.metrics import Mean
from spawned import run_calls
from spread_cases import gap, together
from tiers import in_full
from torch import Tensor

pytestmark = pytest.mark.slow

RECOMPUTED: dict[str, Any] = {"activation_checkpointing": True}
LORA: dict[str, Any] = {"lora": {"rank": 3}}
EP2: dict[str, Any] = {"expert_parallel_size": 2}
HOST: dict[str, Any] = {"offload": {"parameters": True}}
BALANCED: dict[str, Any] = {"router": {"balance_loss": 0.5}}
BIASED: dict[str, Any] = {"router": {"bias_update_rate": 0.01}}
IN_DOUBLE: dict[str, Any] = {"router": {"dtype": "float64"}}
REPLAYED: dict[str, Any] = {"router": {"replay": True}}
REPLAYED_BALANCED: dict[str, Any] = {"router": {"replay": True, "balance_loss": 0.5}}
REPLAYED_BIASED: dict[str, Any] = {"router": {"replay": True, "bias_update_rate": 0.01}}
RING: dict[str, Any] = {"context_parallel_method": "ring"}
QWEN, MIXTRAL, DEEPSEEK = "qwen3_moe", "mixtral", "deepseek_v3"
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"

OWN = Way("cp2 own routes", 2, 2, "padded", QWEN, "own routes", options=REPLAYED)
WAYS = (
    Way("cp2 balanced, recomputed", 2, 2, "padded", QWEN, "ragged", RECOMPUTED, BALANCED),
    Way("cp2 biased, packed", 2, 2, "packed", DEEPSEEK, options=BIASED),
    Way("cp2 replayed, balanced, shared", 2, 2, "shared", QWEN, "routed branching", options=REPLAYED_BALANCED),
    Way("cp2 replayed, biased, recomputed", 2, 2, "padded", DEEPSEEK, "routed", RECOMPUTED, REPLAYED_BIASED),
    OWN,
    Way("cp2 short", 2, 2, model=QWEN, batch="short", options=BALANCED),
    Way("cp2 x ep2", 2, 2, model=QWEN, options=EP2, saves="cp2 x ep2"),
    Way("cp2 x ep2 host", 2, 2, model=QWEN, options={**EP2, **HOST}),
    Way("cp2 x ep2 mixtral in float64", 2, 2, model=MIXTRAL, options={**EP2, **IN_DOUBLE}),
    Way("cp2 x ep2 replayed, biased", 2, 2, "packed", DEEPSEEK, "routed", options={**EP2, **REPLAYED_BIASED}),
    Way("ring2 balanced, recomputed", 2, 2, "padded", QWEN, "ragged", RECOMPUTED, {**RING, **BALANCED}),
    Way("ring2 x ep2 replayed, biased", 2, 2, "packed", DEEPSEEK, "routed", options={**RING, **EP2, **REPLAYED_BIASED}),
    Way("dp2 x cp2 x ep2 balanced", 4, 2, model=QWEN, options={**EP2, **BALANCED}),
    Way("one -> dp2 x cp2 x ep2", 4, 2, "shared", QWEN, options=EP2, resumes="one"),
    *in_full(
        [
            Way("ep2 replayed, balanced", 2, 1, "padded", QWEN, "routed", RECOMPUTED, {**EP2, **REPLAYED_BALANCED}),
            Way("ep2", 2, model=QWEN, options=EP2),
            Way("ep2 host", 2, model=QWEN, options={**EP2, **HOST}),
            Way("cp2", 2, 2, model=QWEN),
            Way("cp2 host", 2, 2, model=QWEN, options=HOST),
            Way("cp2 biased", 2, 2, model=DEEPSEEK, options=BIASED),
            Way("ring2 biased", 2, 2, model=DEEPSEEK, options={**RING, **BIASED}),
            Way("ring2 biased host", 2, 2, model=DEEPSEEK, options={**RING, **BIASED, **HOST}),
            Way("ring2 replayed, shared", 2, 2, "shared", QWEN, "routed branching", options={**RING, **REPLAYED}),
            Way("dp2 x ring2 x ep2 balanced", 4, 2, model=QWEN, options={**RING, **EP2, **BALANCED}),
            Way("cp2 biased host", 2, 2, model=DEEPSEEK, options={**BIASED, **HOST}),
            Way("cp2 x ep2 recomputed", 2, 2, "shared", DEEPSEEK, "branching", RECOMPUTED, EP2),
            Way("cp2 x ep2 lora", 2, 2, model=QWEN, policy=LORA, options={**EP2, **BALANCED}),
            Way("cp4 x ep2 biased", 4, 4, model=DEEPSEEK, options={**EP2, **BIASED}),
            Way("dp2 x cp2 x ep4", 4, 2, model=QWEN, options={"expert_parallel_size": 4}),
            Way("dp2 x cp2 x ep2 replayed", 4, 2, "packed", QWEN, "routed", options={**EP2, **REPLAYED_BALANCED}),
            Way("replicas2 x cp2 x ep2", 4, 2, model=QWEN, options={**EP2, "data_parallel_replicas": 2}),
        ]
    ),
    Way("cp2 x ep2 -> one", model=QWEN, resumes="cp2 x ep2"),
)
"""In an order in which a checkpoint exists before it is resumed from."""


def alone(way: Way) -> Way:
    """The same in one process, padded, resumed from the checkpoint of one process."""
    options = {key: value for key, value in way.options.items() if key == "router"}
    policy = {key: value for key, value in way.policy.items() if key == "lora"}
    resumes = way.resumes and "one"
    name = f"one {way.model} {way.batch} {policy} {options} {resumes}"
    return Way(name, model=way.model, batch=way.batch, policy=policy, options=options, resumes=resumes)


PLAIN = alone(Way("", model=QWEN))


def _mesh(way: Way) -> tuple[int, int, int]:
    """Ways of one mesh share processes: torch takes meshes of equal shape for the same, also of dead groups."""
    replicas, experts = (way.options.get(name, 1) for name in ("data_parallel_replicas", "expert_parallel_size"))
    return way.world_size, replicas, experts


class Runs:
    """What the ranks of all ways found, and what one process does in their place."""

    def __init__(self, folder: Path) -> None:
        self.folders = {name: write_mixture(folder / name, name) for name in (QWEN, MIXTRAL, DEEPSEEK)}
        for name in ("one", "cp2 x ep2"):
            (folder / f"saved {name}").mkdir()
            self.folders[name] = str(folder / f"saved {name}")
        self._found: dict[str, list[Learnt]] = {}
        self._run([replace(PLAIN, saves="one")])
        self._run([way for way in map(alone, WAYS) if way.name != PLAIN.name])
        for mesh in dict.fromkeys(map(_mesh, WAYS)):
            self._run([way for way in WAYS if _mesh(way) == mesh])

    def _run(self, ways: list[Way]) -> None:
        named = {way.name: way for way in ways}
        calls = [(learn, (way, self.folders)) for way in named.values()]
        found = run_calls(calls, ways[0].world_size)
        self._found |= dict(zip(named, found, strict=True))

    def __getitem__(self, way: Way) -> list[Learnt]:
        return self._found[way.name]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    torch.set_num_threads(1)
    return Runs(tmp_path_factory.mktemp("mixtures"))


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_log_probs_losses_and_weights_are_those_of_one_process(way: Way, runs: Runs) -> None:
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
    worst = max((gap(found[0].weights[key], wanted), key) for key, wanted in one.weights.items())
    assert worst[0] < 1e-5, worst


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_each_gradient_is_that_of_one_process_on_every_rank(way: Way, runs: Runs) -> None:
    (one,) = runs[alone(way)]
    largest = max(float(wanted.norm()) for wanted in one.gradients.values())
    for rank in runs[way]:
        assert rank.gradients.keys() == one.gradients.keys()
        for key, wanted in one.gradients.items():
            distance = float((rank.gradients[key] - wanted).norm())
            assert distance <= 5e-6 * max(float(wanted.norm()), 1e-3 * largest), key


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_experts_are_counted_once_for_each_token(way: Way, runs: Runs) -> None:
    found, (one,) = runs[way], runs[alone(way)]
    for step, expected in enumerate(one.metrics):
        assert expected["expert_load_max"] > 1
        for rank in found:
            counted = {name: rank.metrics[step].get(name) for name in ("expert_load_max", "dead_experts")}
            assert counted == {name: expected[name] for name in counted}
            balance = rank.metrics[step].get("balance_loss")
            assert (
                balance == pytest.approx(expected["balance_loss"], rel=1e-5)
                if balance
                else ("balance_loss" not in expected)
            )


def moved(options: Mapping[str, Any]) -> bool:
    return "bias_update_rate" in options.get("router", {})


@pytest.mark.parametrize("way", [way for way in WAYS if moved(way.options)], ids=lambda way: way.name)
def test_the_bias_that_chooses_experts_is_that_of_one_process(way: Way, runs: Runs) -> None:
    wanted: Tensor = runs[alone(way)][0].weights[BIAS]
    assert float(wanted.abs().max()) > 0.015, "two updates of 0.01 and more"
    assert torch.equal(runs[way][0].weights[BIAS], wanted)


@pytest.mark.parametrize("way", [way for way in WAYS if way.batch == "routed"], ids=lambda way: way.name)
def test_flipped_routes_are_counted_once_for_each_token(way: Way, runs: Runs) -> None:
    heads, (one,) = runs[way][:: way.together], runs[alone(way)]
    found = reduce(Mean.merge, [rank.flipped for rank in heads])
    assert found.count == one.flipped.count
    assert abs(found.total - one.flipped.total) <= 2, "but for scores that rounding makes equal"
    assert found.value > 0.3


def test_own_routes_change_nothing(runs: Runs) -> None:
    (one,) = runs[PLAIN]
    for rank in runs[OWN]:
        assert rank.flipped.total == 0
        assert rank.flipped.count == 352  # 88 tokens are fed, each to two experts of two layers
        assert gap(rank.before, together([one], "before", batch_of(OWN).lengths)) < 1e-5
        for key, wanted in one.gradients.items():
            torch.testing.assert_close(rank.gradients[key], wanted, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("way", [way for way in WAYS if "host" in way.name], ids=lambda way: way.name)
def test_parameters_on_the_host_change_no_number(way: Way, runs: Runs) -> None:
    plain = next(other for other in WAYS if other.name == way.name.removesuffix(" host"))
    for one, other in zip(runs[way], runs[plain], strict=True):
        assert torch.equal(one.after, other.after)
        assert one.metrics[-1]["grad_norm"] == other.metrics[-1]["grad_norm"]
        assert all(torch.equal(tensor, other.weights[key]) for key, tensor in one.weights.items())

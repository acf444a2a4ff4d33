"""Ranks that share sequences of a mixture learn what one process learns: its routers, its experts, replayed routes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from context_runs import Way, batch_of
from mixture_ways import (
    PLAIN,
    QWEN,
    Runs,
    expect_bias_of_one,
    expect_counted_once,
    expect_flips_counted_once,
    expect_gradients_of_one,
    expect_learnt_as_one,
    moves_bias,
)
from spread_cases import gap, together
from tiers import in_full

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
MIXTRAL, DEEPSEEK = "mixtral", "deepseek_v3"

OWN = Way("cp2 own routes", 2, 2, "padded", QWEN, "own routes", options=REPLAYED)
WAYS = (
    Way("cp2 balanced, recomputed", 2, 2, "padded", QWEN, "ragged", RECOMPUTED, BALANCED),
    Way("cp2 replayed, balanced, shared", 2, 2, "shared", QWEN, "routed branching", options=REPLAYED_BALANCED),
    OWN,
    Way("cp2 x ep2", 2, 2, model=QWEN, options=EP2, saves="cp2 x ep2"),
    Way("cp2 x ep2 host", 2, 2, model=QWEN, options={**EP2, **HOST}),
    Way("cp2 x ep2 replayed, biased", 2, 2, "packed", DEEPSEEK, "routed", options={**EP2, **REPLAYED_BIASED}),
    Way("ring2 x ep2 replayed, biased", 2, 2, "packed", DEEPSEEK, "routed", options={**RING, **EP2, **REPLAYED_BIASED}),
    Way("dp2 x cp2 x ep2 balanced", 4, 2, model=QWEN, options={**EP2, **BALANCED}),
    Way("one -> dp2 x cp2 x ep2", 4, 2, "shared", QWEN, options=EP2, resumes="one"),
    *in_full(
        [
            Way("cp2 biased, packed", 2, 2, "packed", DEEPSEEK, options=BIASED),
            Way("cp2 short", 2, 2, model=QWEN, batch="short", options=BALANCED),
            Way("cp2 x ep2 mixtral in float64", 2, 2, model=MIXTRAL, options={**EP2, **IN_DOUBLE}),
            Way("cp2 replayed, biased, recomputed", 2, 2, "padded", DEEPSEEK, "routed", RECOMPUTED, REPLAYED_BIASED),
            Way("ring2 balanced, recomputed", 2, 2, "padded", QWEN, "ragged", RECOMPUTED, {**RING, **BALANCED}),
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


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    torch.set_num_threads(1)
    return Runs(tmp_path_factory.mktemp("mixtures"), WAYS, models=(QWEN, MIXTRAL, DEEPSEEK), saved="cp2 x ep2")


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_log_probs_losses_and_weights_are_those_of_one_process(way: Way, runs: Runs) -> None:
    expect_learnt_as_one(way, runs)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_each_gradient_is_that_of_one_process_on_every_rank(way: Way, runs: Runs) -> None:
    expect_gradients_of_one(way, runs)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_experts_are_counted_once_for_each_token(way: Way, runs: Runs) -> None:
    expect_counted_once(way, runs)


@pytest.mark.parametrize("way", filter(moves_bias, WAYS), ids=lambda way: way.name)
def test_the_bias_that_chooses_experts_is_that_of_one_process(way: Way, runs: Runs) -> None:
    expect_bias_of_one(way, runs)


@pytest.mark.parametrize("way", [way for way in WAYS if way.batch == "routed"], ids=lambda way: way.name)
def test_flipped_routes_are_counted_once_for_each_token(way: Way, runs: Runs) -> None:
    expect_flips_counted_once(way, runs)


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

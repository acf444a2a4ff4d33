"""Ranks that split the attention of a mixture and divide its experts learn what one process learns; each token is
dispatched, and counted, once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from context_runs import Way, refused
from mixture_ways import (
    QWEN,
    Runs,
    expect_bias_of_one,
    expect_counted_once,
    expect_flips_counted_once,
    expect_gradients_of_one,
    expect_learnt_as_one,
    moves_bias,
)
from spawned import run_calls
from tiers import in_full

pytestmark = pytest.mark.slow

TP2: dict[str, Any] = {"tensor_parallel_size": 2}
RECOMPUTED: dict[str, Any] = {**TP2, "activation_checkpointing": True}
ADAPTERS: dict[str, Any] = {
    "lora": {"rank": 3, "target_modules": ("q_proj", "o_proj", "experts.gate_up_proj", "experts.down_proj")}
}
LORA: dict[str, Any] = {**TP2, **ADAPTERS}
LATENT_LORA: dict[str, Any] = {
    **TP2,
    "lora": {"rank": 3, "target_modules": ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "experts.down_proj")},
}
EP2: dict[str, Any] = {"expert_parallel_size": 2}
EP4: dict[str, Any] = {"expert_parallel_size": 4}
BALANCED: dict[str, Any] = {"router": {"balance_loss": 0.5}}
BIASED: dict[str, Any] = {"router": {"bias_update_rate": 0.01}}
REPLAYED: dict[str, Any] = {"router": {"replay": True, "balance_loss": 0.5}}
MIXTRAL, GLM, GPT_OSS, DEEPSEEK = "mixtral", "glm4_moe", "gpt_oss", "deepseek_v3"

WAYS = (
    # Two ranks: those that split the attention are those that divide the experts.
    Way("tp2, ep2", 2, model=QWEN, policy=TP2, options=EP2, saves="tp2, ep2"),
    Way("tp2, ep2 biased, packed", 2, 1, "packed", GLM, policy=RECOMPUTED, options={**EP2, **BIASED}),
    Way("tp2, ep2 replayed, shared", 2, 1, "shared", QWEN, "routed branching", TP2, {**EP2, **REPLAYED}),
    Way("tp2, ep2 adapters", 2, model=GPT_OSS, policy=LORA, options={**EP2, **BALANCED}),
    # Four ranks: experts over two of the same tokens, over all, or twice over all.
    Way("dp2 x tp2, ep2 replayed", 4, 1, "padded", GLM, "routed", RECOMPUTED, {**EP2, **REPLAYED}),
    Way("one -> dp2 x tp2, ep4", 4, 1, "shared", QWEN, policy=TP2, options=EP4, resumes="one"),
    *in_full(
        [
            Way("tp2, ep2 balanced, recomputed", 2, model=GPT_OSS, policy=RECOMPUTED, options={**EP2, **BALANCED}),
            Way("tp2, ep2 latent, balanced", 2, model=DEEPSEEK, policy=RECOMPUTED, options={**EP2, **BALANCED}),
            Way("tp2, ep2 latent keys", 2, 1, "packed", "latent keys", policy=TP2, options=EP2),
            Way("dp2 x tp2, ep2 balanced", 4, model=MIXTRAL, policy=TP2, options={**EP2, **BALANCED}),
            Way("dp2 x tp2, ep4 biased", 4, model=GLM, policy=TP2, options={**EP4, **BIASED}),
            Way("dp2 x tp2, ep4 short", 4, model=QWEN, batch="short", policy=TP2, options=EP4),
            Way("tp4, ep2", 4, model="four heads", policy={"tensor_parallel_size": 4}, options=EP2),
            Way("dp2 x tp2, ep4 latent, adapters", 4, model=DEEPSEEK, policy=LATENT_LORA, options={**EP4, **BALANCED}),
            Way("tp2, ep2 on the host", 2, model=QWEN, policy=TP2, options={**EP2, "offload": {"parameters": True}}),
            Way("dp2 x tp2, ep4 adapters", 4, model=MIXTRAL, policy=LORA, options=EP4),
            Way(
                "replicas2 x tp2, ep2",
                4,
                model=QWEN,
                policy=TP2,
                options={**EP2, **BALANCED, "data_parallel_replicas": 2},
            ),
        ]
    ),
    Way("tp2, ep2 -> one", model=QWEN, resumes="tp2, ep2"),
)
"""In an order in which a checkpoint exists before it is resumed from."""
REFUSED = (
    (Way("", 2, model=QWEN, policy=TP2, options={**EP2, "sequence_parallel": False}), "sequence_parallel"),
    (Way("", 2, model=QWEN, policy=TP2), "expert_parallel_size"),
    (Way("", 2, model="qwen3_5_moe", policy=TP2, options=EP2), "tensor_parallel_size"),
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    torch.set_num_threads(1)
    return Runs(
        tmp_path_factory.mktemp("mixtures"),
        WAYS,
        models={way.model for way in (*WAYS, *(way for way, _ in REFUSED))},
        saved="tp2, ep2",
    )


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_log_probs_losses_and_weights_are_those_of_one_process(way: Way, runs: Runs) -> None:
    expect_learnt_as_one(way, runs)


# Those of two or three tokens are near nothing, and their rounding is not.
@pytest.mark.parametrize("way", [way for way in WAYS if way.batch != "short"], ids=lambda way: way.name)
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


def test_what_is_not_served_is_refused(runs: Runs) -> None:
    outcomes = run_calls([(refused, (way, runs.folders)) for way, _ in REFUSED], 2)
    for (_, names), ranks in zip(REFUSED, outcomes, strict=True):
        assert all(names in message for message in ranks)

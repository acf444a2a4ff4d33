"""Weights in pieces: what all ranks publish, read in any process, is what `export_weights` puts together on rank 0.

Sharded in every way that a backend knows. Nobody sends more than its part, and nothing is sent twice.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from nemorl_testing.models import tiny_model
from published_pieces import Layout, Read, read_pieces
from spawned import run_calls
from tiers import only

pytestmark = pytest.mark.slow

TP = {"tensor_parallel_size": 2}
MIXTURE = {
    "architecture": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "head_dim": 32,
}
DTENSOR = (
    Layout("one", 1),
    Layout("fsdp2", 2),
    Layout("tp2", 2, TP),
    Layout("fsdp2 adapters", 2, {"lora": {"rank": 4, "target_modules": "all-linear"}}),
    Layout("fsdp2 mixture", 2, model="mixture"),
    Layout("ep2", 2, options={"expert_parallel_size": 2}, model="mixture"),
    Layout("fsdp3", 3),  # uneven
    Layout("fsdp2 x tp2", 4, TP),
    Layout("2 replicas of fsdp2", 4, options={"data_parallel_replicas": 2}),
    Layout("fsdp2 x ep2", 4, options={"expert_parallel_size": 2}, model="mixture"),
)
MEGATRON = (
    Layout("one", 1),
    Layout("dp2", 2),
    Layout("tp2", 2, TP),
    Layout("pp2", 2, options={"pipeline_parallel_size": 2}),
    Layout("ep2", 2, options={"expert_parallel_size": 2}, model="mixture"),
    Layout("tp2 x pp2", 4, TP, {"pipeline_parallel_size": 2}),
    Layout("tp4, fewer key-value heads", 4, {"tensor_parallel_size": 4}),
)


@pytest.fixture(scope="module")
def models() -> dict[str, Path]:
    return {
        "dense": tiny_model(num_attention_heads=4, num_key_value_heads=2, hidden_size=128),
        "mixture": tiny_model(num_key_value_heads=2, **MIXTURE),
    }


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_pieces_of_dtensor_make_the_model(size: int, models: dict[str, Path]) -> None:
    check("dtensor", [layout for layout in DTENSOR if layout.world_size == size], models)


@pytest.mark.megatron
@pytest.mark.parametrize("size", only(1, 2, of=[1, 2, 4]))
def test_pieces_of_megatron_make_the_model(size: int, models: dict[str, Path]) -> None:
    pytest.importorskip("megatron.core", reason="megatron-core is not installed: pip install nemorl-megatron")
    check("megatron", [layout for layout in MEGATRON if layout.world_size == size], models)


def check(backend: str, layouts: list[Layout], models: dict[str, Path]) -> None:
    calls = [(read_pieces, (backend, str(models[layout.model]), layout)) for layout in layouts]
    for layout, ranks in zip(layouts, run_calls(calls, layouts[0].world_size), strict=True):
        check_ranks(layout, ranks)


def check_ranks(layout: Layout, ranks: list[Read]) -> None:
    whole = ranks[0].whole
    for rank in ranks:
        for joined in (rank.joined, rank.second):
            assert joined.keys() == whole.keys(), layout.name
            assert all(torch.equal(joined[name], tensor) for name, tensor in whole.items()), layout.name
    total = sum(tensor.nbytes for tensor in whole.values())
    sent = [rank.published_bytes for rank in ranks]
    assert sum(sent) == total, layout.name
    # A layer may be one rank's turn, and the embedding is a large part of so small a model.
    assert max(sent) <= 1.5 * total / layout.world_size, (layout.name, sent)

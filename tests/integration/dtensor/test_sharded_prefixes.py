"""Ranks that compute shared tokens once learn what one process learns from every sequence by itself."""

from __future__ import annotations

import pytest
import torch
from nemorl_testing.batches import branching_batch
from nemorl_testing.models import tiny_model
from sharded_prefixes import Learnt, Way, learn
from spawned import run_calls
from torch import Tensor

pytestmark = pytest.mark.slow

TP = {"tensor_parallel_size": 2}
WAYS = (
    Way("dp2", 2),
    Way("dp2, activation checkpointing", 2, policy={"activation_checkpointing": True}),
    Way("tp2", 2, policy=TP),
    Way("tp2, whole sequences", 2, policy=TP, options={"sequence_parallel": False}),
)
LORA = (Way("lora dp2", 2, policy={"lora": {"rank": 2}}),)
ALONE = (Way("one", 1, "padded"), Way("lora one", 1, "padded", {"lora": {"rank": 2}}))


@pytest.fixture(scope="module")
def learnt() -> dict[str, list[Learnt]]:
    model = str(tiny_model(num_key_value_heads=2))
    found = {}
    for size in (1, 2):
        ways = [way for way in (*ALONE, *WAYS, *LORA) if way.world_size == size]
        found |= dict(zip([w.name for w in ways], run_calls([(learn, (model, w)) for w in ways], size), strict=True))
    return found


@pytest.mark.parametrize("way", [*WAYS, *LORA], ids=lambda way: way.name)
def test_ranks_learn_what_sequences_alone_teach(way: Way, learnt: dict[str, list[Learnt]]) -> None:
    (one,) = learnt["lora one" if "lora" in way.policy else "one"]
    ranks = learnt[way.name][:: way.policy.get("tensor_parallel_size", 1)]
    for name in ("logprobs", "reference", "topk_ids"):
        torch.testing.assert_close(joined(ranks, name), joined([one], name), atol=5e-6, rtol=0)
    assert sum(rank.loss for rank in ranks) == pytest.approx(one.loss, rel=1e-5)
    assert ranks[0].grad_norm == pytest.approx(one.grad_norm, rel=5e-6)
    weights = ranks[0].weights
    assert all(rank.tree_ratio > 1.2 for rank in ranks)
    assert one.tree_ratio == 1.0
    worst = max(float((weights[name] - wanted).abs().max()) for name, wanted in one.weights.items())
    assert worst <= 5e-6


def test_groups_are_on_one_rank(learnt: dict[str, list[Learnt]]) -> None:
    # Fed are 9 + 4 + 2 + 2 + 5 + 5 tokens of a group with a prompt of 9, so 27, 48 and 28, and 6 of the stranger.
    batch = branching_batch()
    firsts = [ids[0].item() for ids in batch.token_ids.split(batch.lengths.tolist())]
    groups = [{firsts[index] for index in rank.sequences} for rank in learnt["dp2"]]
    assert not groups[0] & groups[1]


def joined(ranks: list[Learnt], name: str) -> Tensor:
    """The ranks' tensors in the batch's order."""
    lengths = branching_batch().lengths.tolist()
    pieces: dict[int, Tensor] = {}
    for rank in ranks:
        parts = getattr(rank, name).split([lengths[index] for index in rank.sequences])
        pieces |= dict(zip(rank.sequences, parts, strict=True))
    return torch.cat([pieces[index] for index in sorted(pieces)])

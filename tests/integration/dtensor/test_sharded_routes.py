"""Ranks that replay routes learn what one process learns from them."""

from __future__ import annotations

import pytest
import torch
from nemorl_testing.models import tiny_mixture
from sharded_routes import Learnt, Way, learn, sent_batch
from spawned import run_calls

pytestmark = pytest.mark.slow

WAYS = (
    Way("two", 2),
    Way("two, packed", 2, "packed"),
    Way("two, activation checkpointing", 2, policy={"activation_checkpointing": True}),
)


@pytest.fixture(scope="module")
def learnt() -> dict[str, list[Learnt]]:
    model = str(tiny_mixture())
    found = {"one": run_calls([(learn, (model, Way("one", 1)))], 1)[0]}
    for way in WAYS:
        found |= {way.name: run_calls([(learn, (model, way))], 2)[0]}
    return found


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_two_ranks_learn_what_one_process_learns_from_the_recorded_experts(
    way: Way, learnt: dict[str, list[Learnt]]
) -> None:
    (one,), ranks = learnt["one"], learnt[way.name]
    lengths = sent_batch().lengths.tolist()
    whole = dict(zip(one.sequences, one.logprobs.split([lengths[each] for each in one.sequences]), strict=True))
    for rank in ranks:
        expected = torch.cat([whole[each] for each in rank.sequences])
        torch.testing.assert_close(rank.logprobs, expected, atol=5e-6, rtol=0)
    assert sum(rank.loss for rank in ranks) == pytest.approx(one.loss, rel=1e-5)
    assert ranks[0].grad_norm == pytest.approx(one.grad_norm, rel=5e-6)
    worst = {name: float((ranks[0].weights[name] - wanted).abs().max()) for name, wanted in one.weights.items()}
    assert max(worst.values()) <= 5e-6, worst
    together = ranks[0].flipped.merge(ranks[1].flipped)
    assert together.count == one.flipped.count, "each choice is counted on the rank that makes it"
    assert abs(together.total - one.flipped.total) <= 2, "but for scores that rounding makes equal"
    assert together.value > 0.5

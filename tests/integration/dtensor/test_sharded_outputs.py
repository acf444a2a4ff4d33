"""Values, candidates and pairs: a model that is spread over ranks says and learns what one process does."""

from __future__ import annotations

import pytest
import torch
from nemorl_testing.models import tiny_model
from sharded_outputs import Outputs, Way, outputs
from spawned import run_calls
from tiers import in_full
from torch import Tensor

pytestmark = pytest.mark.slow

TP = {"tensor_parallel_size": 2}
WAYS = (
    Way("dp2", 2),
    Way("dp2 packed", 2, options={"layout": "packed"}),
    Way("dp2 random", 2, {"init": "random"}),
    Way("tp2", 2, TP),
    Way("tp2 whole sequences", 2, TP, {"sequence_parallel": False}),
    *in_full((Way("fsdp2 x tp2", 4, TP),)),
)


@pytest.fixture(scope="module")
def found() -> dict[str, list[Outputs]]:
    model = str(tiny_model(num_key_value_heads=2))
    alone = [Way("one", 1), Way("one random", 1, {"init": "random"})]
    results = {}
    for size in sorted({way.world_size for way in (*alone, *WAYS)}):
        ways = [way for way in (*alone, *WAYS) if way.world_size == size]
        every = run_calls([(outputs, (model, way)) for way in ways], size)
        results |= {way.name: ranks for way, ranks in zip(ways, every, strict=True)}
    return results


@pytest.mark.parametrize("way", WAYS, ids=[way.name for way in WAYS])
def test_values_candidates_and_pairs_equal_those_of_one_process(way: Way, found: dict[str, list[Outputs]]) -> None:
    (one,) = found["one random" if "init" in way.policy else "one"]
    ranks = found[way.name][:: way.policy.get("tensor_parallel_size", 1)]
    for name in ("values", "topk_logprobs", "moments"):
        assert torch.allclose(joined(ranks, name), joined([one], name), atol=1e-5), name
    assert torch.equal(joined(ranks, "topk_ids"), joined([one], "topk_ids"))
    totals = [sum(losses) for losses in zip(*(rank.losses for rank in ranks), strict=True)]
    assert totals == pytest.approx(one.losses, abs=1e-5)


def joined(ranks: list[Outputs], name: str) -> Tensor:
    """The ranks' tensors in the batch's order."""
    from nemorl_testing.batches import ragged_batch

    lengths = ragged_batch().select([0, 5, 2, 3, 4, 1, 7, 6]).lengths.tolist()
    pieces = {}
    for rank in ranks:
        parts = getattr(rank, name).split([lengths[index] for index in rank.sequences])
        pieces |= dict(zip(rank.sequences, parts, strict=True))
    return torch.cat([pieces[index] for index in sorted(pieces)])

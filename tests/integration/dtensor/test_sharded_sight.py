"""Models that see or hear over two ranks: what each is shown may be of another kind, or nothing."""

from __future__ import annotations

import pytest
from nemorl_testing.seeing import tiny_sight
from seen_families import conversations, seer
from sharded_sight import learnt
from spawned import run_ranks
from torch import Tensor

pytestmark = pytest.mark.slow

SHARDS = {
    "nothing on one rank": ((0, 1, 2, 4), (3,)),
    "two kinds on two ranks": ((2, 3), (0, 1, 4)),
}


@pytest.mark.parametrize("case", SHARDS)
@pytest.mark.parametrize("kind", ["qwen3_vl", "llava", "qwen2_5_omni_thinker"])
def test_two_ranks_learn_what_one_process_does(kind: str, case: str) -> None:
    ids, masks, media = conversations(seer(kind))
    model, shards = str(tiny_sight(kind)), SHARDS[case]
    (alone,) = run_ranks(learnt, 1, model, ids, masks, media, [range(len(ids))])
    untrained: Tensor = run_ranks(learnt, 1, model, ids, masks, media, [[3]])[0]
    together = run_ranks(learnt, 2, model, ids, masks, media, shards)
    for found in together:
        assert float((found - alone).abs().max()) <= 2e-5
    assert float((untrained - alone).abs().max()) > 1e-2

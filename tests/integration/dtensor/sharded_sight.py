"""What the ranks of ``test_sharded_sight`` do: train on what they see, and say what they make of all."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from nemorl.config import PolicyConfig
from nemorl.media import Media
from nemorl.resources.worker import WorkerContext
from nemorl_dtensor.config import DTensorConfig
from nemorl_tensors.batch import TokenBatch
from nemorl_testing.batches import WeightedNLL
from torch import Tensor


def learnt(
    context: WorkerContext,
    model: str,
    sequences: Sequence[Sequence[int]],
    masks: Sequence[Sequence[bool]],
    media: Sequence[Media],
    shards: Sequence[Sequence[int]],
) -> Tensor:
    """[N] log-probs of all sequences after two steps in which each rank trains on its shard of them.

    Args:
        context: Of the rank.
        model: Its folder.
        sequences: Token ids.
        masks: Of what is trained.
        media: Items in them.
        shards: Sequences of each rank, by index.
    """
    batch = TokenBatch.from_sequences(sequences, masks, media=media)
    batch = batch.with_tokens(advantages=torch.linspace(-1, 1, batch.num_tokens))
    policy = PolicyConfig(
        model_name=model, optimizer={"lr": 1e-3, "eps": 1e-3}, media={"train": ["tower", "connector"]}
    )
    backend = DTensorConfig().build(policy, context, reference=False)
    mine = batch.select(shards[context.rank])
    for _ in range(2):
        backend.train_step(mine, WeightedNLL())
    found: Tensor = backend.get_logprobs(batch)
    backend.shutdown()
    return torch.where(batch.mask, found, 0.0)

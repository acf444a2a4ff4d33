"""What the ranks of ``test_sharded_routes`` do: train on a batch whose routes are replayed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from nemorl.config import PolicyConfig
from nemorl.metrics import Mean
from nemorl.resources.worker import WorkerContext
from nemorl_dtensor.config import DTensorConfig
from nemorl_tensors import TokenBatch
from nemorl_testing.batches import WeightedNLL, ragged_batch
from sharded_prefixes import LINEAR
from torch import Tensor

LAYERS, EXPERTS, CHOSEN = 2, 8, 2


@dataclass(frozen=True)
class Way:
    """One way to spread a mixture."""

    name: str
    world_size: int
    layout: str = "padded"
    policy: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Learnt:
    """Of one rank; tensors are of its shard of the batch, in the order of ``sequences``."""

    sequences: list[int]
    logprobs: Tensor
    loss: float
    grad_norm: float
    flipped: Mean
    weights: dict[str, Tensor]
    """After a step; empty on ranks other than 0"""


def sent_batch() -> TokenBatch:
    """Sequences whose tokens went to experts at random."""
    batch = ragged_batch()
    scores = torch.rand(batch.num_tokens, LAYERS, EXPERTS, generator=torch.Generator().manual_seed(3))
    return batch.with_tokens(routes=scores.topk(CHOSEN, -1).indices.to(torch.int16))


def learn(context: WorkerContext, model: str, way: Way) -> Learnt:
    """One rank: it scores its shard, and takes a step. Ranks have different numbers of microbatches."""
    batch = sent_batch()
    sequences = batch.shards(context.world_size)[context.rank]
    mine = batch.select(sequences)
    fields = {"optimizer": LINEAR, "microbatch_tokens": 20, "max_grad_norm": None, **way.policy}
    config = DTensorConfig.model_validate({"layout": way.layout, "router": {"replay": True}})
    backend = config.build(PolicyConfig.model_validate({"model_name": model, **fields}), context, reference=False)
    logprobs = backend.get_logprobs(mine)
    metrics: dict[str, Any] = dict(backend.train_step(mine, WeightedNLL()))
    exported = [dict(bucket) for bucket in backend.export_weights()]
    weights = {name: tensor.detach().clone() for bucket in exported for name, tensor in bucket.items()}
    backend.shutdown()
    loss, norm = metrics["loss"].value, metrics["grad_norm"].value
    return Learnt(sequences, logprobs, loss, norm, metrics["routes_flipped"], weights)

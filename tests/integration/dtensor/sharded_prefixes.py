"""What the ranks of ``test_sharded_prefixes`` do: train on a batch whose sequences share tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from nemorl.config import PolicyConfig
from nemorl.resources.worker import WorkerContext
from nemorl_dtensor.config import DTensorConfig
from nemorl_testing.batches import WeightedNLL, branching_batch
from torch import Tensor

LINEAR = {"lr": 1.0, "eps": 1.0, "weight_decay": 0.0}
"""AdamW whose first update is g / (|g| + 1): it shows the gradient."""


@dataclass(frozen=True)
class Way:
    """One way to spread a model, and the layout of its rows."""

    name: str
    world_size: int
    layout: str = "shared"
    policy: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Learnt:
    """Of one rank; tensors are of its shard of the batch, in the order of ``sequences``."""

    sequences: list[int]
    logprobs: Tensor
    topk_ids: Tensor
    reference: Tensor
    loss: float
    grad_norm: float
    tree_ratio: float
    weights: dict[str, Tensor]
    """After a step; empty on ranks other than 0"""


def learn(context: WorkerContext, model: str, way: Way) -> Learnt:
    """One rank: it scores its shard, and takes a step."""
    width = way.policy.get("tensor_parallel_size", 1) * way.options.get("context_parallel_size", 1)
    batch = branching_batch(temperature=0.9)
    sequences = batch.shards(context.world_size // width, by_trees=True)[context.rank // width]
    mine = batch.select(sequences)
    fields = {"optimizer": LINEAR, "microbatch_tokens": 40, "max_grad_norm": None, **way.policy}
    policy = PolicyConfig(model_name=model, **fields)
    backend = DTensorConfig(layout=way.layout, **way.options).build(policy, context, reference=True)
    logprobs, reference = backend.get_logprobs(mine), backend.get_logprobs(mine, "reference")
    ids, _ = backend.get_topk_logprobs(mine, 2)
    metrics = {name: metric.value for name, metric in backend.train_step(mine, WeightedNLL()).items()}
    exported = [dict(bucket) for bucket in backend.export_weights()]
    weights = {name: tensor.detach().clone() for bucket in exported for name, tensor in bucket.items()}
    backend.shutdown()
    ratio = metrics["tree_ratio"]
    return Learnt(sequences, logprobs, ids, reference, metrics["loss"], metrics["grad_norm"], ratio, weights)

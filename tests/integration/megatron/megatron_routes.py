"""What the ranks of ``test_megatron_sharded_routes`` do: score a batch whose routes are replayed, and train on it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from megatron_runs import Spread
from nemorl.config import PolicyConfig
from nemorl.metrics import Mean
from nemorl.resources.worker import WorkerContext
from nemorl_megatron.training import MegatronBackend
from nemorl_tensors import TokenBatch
from nemorl_testing.batches import WeightedNLL, branching_batch, ragged_batch
from torch import Tensor

LAYERS, EXPERTS, CHOSEN = 3, 4, 2
"""Of the mixture: layers with experts, among four."""
BATCHES = {"ragged": ragged_batch, "branching": branching_batch}


@dataclass(frozen=True)
class Case(Spread):
    """One way to spread a mixture."""

    batch: str = "ragged"
    own: bool = False
    """Nothing is replayed."""


@dataclass(frozen=True)
class Found:
    """Of one rank; tensors are of its shard of the batch, in the order of ``sequences``."""

    sequences: list[int]
    logprobs: Tensor
    loss: float
    grad_norm: float
    flipped: Mean
    weights: dict[str, Tensor]
    """After a step; empty on ranks other than 0"""


def sent_batch(name: str) -> TokenBatch:
    """Sequences whose tokens went to experts at random, by their id: what sequences have in common went to the same."""
    batch = BATCHES[name](temperature=0.9)
    table = torch.rand(int(batch.token_ids.max()) + 1, LAYERS, EXPERTS, generator=torch.Generator().manual_seed(3))
    return batch.with_tokens(routes=table.topk(CHOSEN, -1).indices.to(torch.int16)[batch.token_ids])


def learn(context: WorkerContext, case: Case) -> Found:
    """One rank: it scores its shard, and takes a step."""
    batch = sent_batch(case.batch)
    sequences = batch.shards(max(case.shards) + 1)[case.shards[context.rank]]
    mine = batch.select(sequences)
    router = {"replay": not case.own, **case.options.get("router", {})}
    options = {"name": "megatron", **case.options, "router": router}
    optimizer = {"lr": 1.0, "eps": 1.0, "weight_decay": 0.0}  # an update shows the gradient: g / (|g| + 1)
    fields = {"optimizer": optimizer, "microbatch_tokens": 48, "max_grad_norm": None, **case.policy}
    config = PolicyConfig.model_validate({"model_name": case.model, "backend": options, **fields})
    backend = config.backend.build(config, context, reference=False)
    assert isinstance(backend, MegatronBackend)
    logprobs = backend.get_logprobs(mine)
    metrics = backend.train_step(mine, WeightedNLL())
    exported = [dict(bucket) for bucket in backend.export_weights()]
    weights = {name: tensor.detach().clone() for bucket in exported for name, tensor in bucket.items()}
    backend.shutdown()
    flipped = metrics.get("routes_flipped", Mean(0.0))
    assert isinstance(flipped, Mean)
    return Found(sequences, logprobs, metrics["loss"].value, metrics["grad_norm"].value, flipped, weights)

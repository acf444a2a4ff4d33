"""What the ranks of ``test_sharded_context`` do: learn from sequences that several of them share.

# N = tokens of a rank's shard
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from nemorl.config import PolicyConfig
from nemorl.errors import BackendError
from nemorl.metrics import Mean
from nemorl.resources.worker import WorkerContext
from nemorl_dtensor.config import DTensorConfig
from nemorl_dtensor.ranks import like, whole
from nemorl_dtensor.training import DTensorBackend
from nemorl_dtensor.ulysses import by_heads, by_slices
from nemorl_tensors import TokenBatch
from nemorl_testing.batches import Counted, branching_batch, ragged_batch
from nemorl_testing.models import chosen_experts, load_reference
from nemorl_testing.training_outputs import SquaredError
from torch import Tensor

OPTIMIZER = {"lr": 1e-2, "eps": 1e-3, "weight_decay": 0.1}
STEPS = 2
"""After the first, whose gradient is read"""
SHORT = (2, 3, 2)
"""Tokens of sequences of which fewer are fed than four ranks share rows"""
ROUTES_OF = {"qwen3_moe": (2, 4), "deepseek_v3": (1, 4), "glm4_moe": (2, 4)}
"""Layers with experts, and experts of each, of mixtures that routes are replayed in"""
CHOSEN = 2
VOCABULARY = 80


@dataclass(frozen=True)
class Way:
    """One way to spread a model, its rows and the batch."""

    name: str
    world_size: int = 1
    context: int = 1
    layout: str = "padded"
    model: str = "qwen2"
    batch: str = "ragged"
    policy: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    head: str = "language_model"
    saves: str = ""
    resumes: str = ""

    @property
    def together(self) -> int:
        """Ranks that are given the same shard."""
        return self.context * int(self.policy.get("tensor_parallel_size", 1))


@dataclass(frozen=True)
class Learnt:
    """Of one rank; tensors are of its shard of the batch, in the order of ``sequences``."""

    sequences: list[int]
    before: Tensor
    """[N] log-probs or values"""
    reference: Tensor
    likeliest: Tensor
    """[N, 2] token ids; of values nothing"""
    given: Tensor
    """[N] what the loss was given in the first step"""
    gradients: dict[str, Tensor]
    """Of the first step, whole"""
    metrics: list[dict[str, float]]
    """By step"""
    flipped: Mean
    """Of the first step: replayed routes that are not the routers' own"""
    after: Tensor
    weights: dict[str, Tensor]
    """Exported; empty on ranks other than 0"""


def batch_of(way: Way) -> TokenBatch:
    """The batch of all ranks."""
    if way.batch == "short":
        ids = [[20 + index, 30 + index, 40 + index][:length] for index, length in enumerate(SHORT)]
        batch = TokenBatch.from_sequences(ids, [[True] * length for length in SHORT])
        batch = batch.with_tokens(advantages=torch.linspace(-1, 1, batch.num_tokens))
    else:
        batch = (branching_batch if "branching" in way.batch else ragged_batch)(temperature=0.9)
    if "routed" in way.batch:  # by token id: what sequences share goes to the same experts
        scores = torch.rand(VOCABULARY, *ROUTES_OF[way.model], generator=torch.Generator().manual_seed(3))
        batch = batch.with_tokens(routes=scores.topk(CHOSEN, -1).indices.to(torch.int16)[batch.token_ids])
    return batch.with_tokens(targets=torch.linspace(-1, 1, batch.num_tokens))


def own_routes(batch: TokenBatch, folder: str) -> Tensor:
    """[N, L, K] int16 experts that a plain forward pass over each sequence chooses."""
    model, sequences = load_reference(folder), batch.token_ids.split(batch.lengths.tolist())  # type: ignore[no-untyped-call]
    return torch.cat([chosen_experts(model, sequence.tolist()) for sequence in sequences]).to(torch.int16)


def build(context: WorkerContext, way: Way, folders: Mapping[str, str]) -> DTensorBackend:
    fields = {"optimizer": OPTIMIZER, "microbatch_tokens": 64, "max_grad_norm": 0.05, **way.policy}
    policy = PolicyConfig(model_name=folders[way.model], **fields)
    config = DTensorConfig(layout=way.layout, context_parallel_size=way.context, **way.options)
    backend = config.build(policy, context, reference=way.head != "value", head=way.head)
    assert isinstance(backend, DTensorBackend)
    return backend


def learn(context: WorkerContext, way: Way, folders: Mapping[str, str]) -> Learnt:
    """One rank: it scores its shard, and takes a few steps, the first one by halves."""
    backend, batch = build(context, way, folders), batch_of(way)
    if way.batch == "own routes":
        batch = batch.with_tokens(routes=own_routes(batch, folders[way.model]))
    shards = batch.shards(context.world_size // way.together, by_trees=way.layout == "shared")
    sequences = shards[context.rank // way.together]
    mine = batch.select(sequences)
    if way.resumes:
        backend.load_checkpoint(Path(folders[way.resumes]))
    is_critic = way.head == "value"
    read, loss = (backend.get_values, SquaredError()) if is_critic else (backend.get_logprobs, Counted())
    before = read(mine)
    reference = before if is_critic else backend.get_logprobs(mine, "reference")
    likeliest = torch.zeros(0) if is_critic else backend.get_topk_logprobs(mine, 2)[0]
    first, given = backend.forward_backward(mine, loss)
    gradients = {
        name: whole(like(backend._trainable[name], part)).clone()
        for name, part in backend._optimizer.gathered().items()
    }
    steps = [first | dict(backend.optimizer_step()), *(backend.train_step(mine, loss) for _ in range(STEPS))]
    if way.saves:
        backend.save_checkpoint(Path(folders[way.saves]))
    exported = [dict(bucket) for bucket in backend.export_weights()]
    weights = {name: tensor.detach().clone() for bucket in exported for name, tensor in bucket.items()}
    metrics = [{name: metric.value for name, metric in step.items()} for step in steps]
    flipped: Any = first.get("routes_flipped", Mean(0, 0))
    found = Learnt(sequences, before, reference, likeliest, given, gradients, metrics, flipped, read(mine), weights)
    backend.shutdown()
    return found


def refused(context: WorkerContext, way: Way, folders: Mapping[str, str]) -> str:
    """The error that building gives."""
    try:
        build(context, way, folders)
    except BackendError as error:
        dist.destroy_process_group()
        return f"{error.message} {error.fix}"
    raise AssertionError(f"{way.name} was built")


def exchange(context: WorkerContext) -> dict[str, Any]:
    """Two tokens a rank, four query heads of one number and one of keys: what attention gets, and what comes back."""
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{context.master_port}", rank=context.rank, world_size=context.world_size
    )
    assert dist.group.WORLD is not None
    # Head h of token t is 10 h + t.
    tokens = torch.arange(2.0) + 2 * context.rank
    query = (10 * torch.arange(4.0)[:, None] + tokens)[None, :, :, None].requires_grad_()
    key = (100 + tokens)[None, None, :, None].requires_grad_()
    queries, keys, values = by_heads(query, key, key, dist.group.WORLD)
    back = by_slices(queries.transpose(1, 2), dist.group.WORLD)
    (queries.sum() * (1 + context.rank) + keys.sum() + values.sum() * 0).backward()
    assert query.grad is not None
    assert key.grad is not None
    found = {
        "queries": queries[0, :, :, 0].tolist(),
        "keys": keys[0, :, :, 0].tolist(),
        "returns": torch.equal(back, query.transpose(1, 2)),
        "query gradient": query.grad[0, :, :, 0].tolist(),
        "key gradient": key.grad.flatten().tolist(),
    }
    dist.destroy_process_group()
    return found

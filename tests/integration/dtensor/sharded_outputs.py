"""What the ranks of ``test_sharded_outputs`` do: the verbs beside log-probs, and what of them can be compared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from nemorl.config import PolicyConfig
from nemorl.resources.worker import WorkerContext
from nemorl_dtensor.config import DTensorConfig
from nemorl_tensors.filtering import TokenFilter
from nemorl_testing.batches import ragged_batch
from nemorl_testing.moments import Unsure
from nemorl_testing.training_outputs import CandidateNLL, PairLoss, SquaredError
from torch import Tensor

K = 3


@dataclass(frozen=True)
class Way:
    """One way to spread a model."""

    name: str
    world_size: int
    policy: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Outputs:
    """Of one rank's shard, in the order of ``sequences``."""

    sequences: list[int]
    values: Tensor
    """[N] after two steps"""
    topk_ids: Tensor
    topk_logprobs: Tensor
    """[N, K] both, after two steps"""
    moments: Tensor
    """[N, 3] after three steps, the last of which rewards entropy"""
    losses: list[float]
    """Squared errors of the critic, pair losses, candidate losses, entropy"""


def outputs(context: WorkerContext, model: str, way: Way) -> Outputs:
    """One rank: a critic learns two steps, and a policy one step of pairs, of candidates and of entropy."""
    batch = replace(ragged_batch().select([0, 5, 2, 3, 4, 1, 7, 6]), sequences_per_group=2)
    batch = batch.with_sequences(pair=torch.arange(8) // 2)
    candidates = torch.stack([batch.token_ids, batch.token_ids.roll(1), batch.token_ids.roll(2)], 1)
    batch = batch.with_tokens(targets=torch.linspace(-1, 1, batch.num_tokens), candidate_ids=candidates)
    width = way.policy.get("tensor_parallel_size", 1)
    sequences = batch.shards(context.world_size // width)[context.rank // width]
    mine = batch.select(sequences)

    fields = {"optimizer": {"lr": 1e-2, "eps": 1e-3}, "microbatch_tokens": 64, **way.policy}
    policy = PolicyConfig(model_name=model, **fields)
    # Each joins the ranks anew, on a port of its own.
    critic = DTensorConfig(**way.options).build(policy, context, reference=False, head="value")
    losses = [critic.train_step(mine, SquaredError())["loss"].value for _ in range(2)]
    values = critic.get_values(mine)
    critic.shutdown()

    after = replace(context, master_port=context.master_port + 1)
    backend = DTensorConfig(**way.options).build(policy, after, reference=False)
    losses.append(backend.train_step(mine, PairLoss())["loss"].value)
    losses.append(backend.train_step(mine, CandidateNLL())["loss"].value)
    ids, logprobs = backend.get_topk_logprobs(mine, K)
    unsure = replace(mine, keep=TokenFilter(beside_moments=True))
    losses.append(backend.train_step(unsure, Unsure())["loss"].value)
    moments = backend.get_moments(mine)
    backend.shutdown()
    return Outputs(sequences, values, ids, logprobs, moments, losses)

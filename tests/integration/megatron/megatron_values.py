"""What ranks of ``test_megatron_values`` do: train a critic or a reward model a few steps, and report what it says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from nemorl.config import PolicyConfig
from nemorl.contracts import Loss
from nemorl.plugins.kinds import TrainingBackendConfig
from nemorl.resources.worker import WorkerContext
from nemorl_megatron import MegatronConfig
from nemorl_ppo.value_loss import ValueLoss
from nemorl_preference.rm.loss import BradleyTerryLoss
from nemorl_tensors import TokenBatch, loss_weights
from nemorl_testing.batches import ragged_batch
from torch import Tensor

STEPS, SAVED_AFTER = 4, 2
OPTIMIZER = {"lr": 1e-2, "eps": 1e-3, "weight_decay": 0.1}
LossName = Literal["critic", "pairs"]
LOSSES: Mapping[LossName, Loss] = {"critic": ValueLoss(clip=0.2), "pairs": BradleyTerryLoss(0.01)}


@dataclass(frozen=True)
class Case:
    """One way to train values."""

    model: str
    world_size: int = 1
    policy: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    loss: LossName = "critic"
    saves: str = ""
    resumes: str = ""


@dataclass(frozen=True)
class Found:
    """What one rank reports; values are of its own shard of the batch, in the order of ``sequences``."""

    sequences: list[int]
    before: Tensor
    after: Tensor
    losses: list[float]
    grad_norms: list[float]
    weights: dict[str, Tensor]
    """The export; empty on ranks other than 0"""


def batch_of(case: Case) -> TokenBatch:
    """Ragged sequences with returns; in pairs of whole texts, one value at the end of each, where the loss compares."""
    batch = ragged_batch()
    draw = torch.Generator().manual_seed(4)
    if case.loss == "critic":
        returns = torch.randn(batch.num_tokens, generator=draw)
        return batch.with_tokens(returns=returns, old_values=torch.zeros(batch.num_tokens))
    pairs = batch.select([0, 1, 2, 3, 4, 5, 6, 8])
    mask = torch.zeros_like(pairs.mask)
    mask[pairs.lengths.cumsum(0) - 1] = True  # a token past the text, whose place the value stands at
    weights = loss_weights(mask, pairs.lengths, "token")
    margins = torch.zeros(len(pairs))
    return replace(pairs, mask=mask, loss_weights=weights, sequences_per_group=2).with_sequences(margins=margins)


def train(context: WorkerContext, case: Case) -> Found:
    """One rank of a run with megatron."""
    config = MegatronConfig(**case.options)
    policy = policy_of(case, config)
    shards = config.data_shards(policy, case.world_size)
    batch = batch_of(case)
    sequences = batch.shards(max(shards) + 1)[shards[context.rank]]
    return run(config, policy, context, batch.select(sequences), sequences, case)


def policy_of(case: Case, backend: TrainingBackendConfig) -> PolicyConfig:
    fields = {"optimizer": OPTIMIZER, "microbatch_tokens": 64, "max_grad_norm": 0.5, **case.policy}
    return PolicyConfig(
        model_name=case.model,
        backend=backend,
        schedule={"kind": "linear", "warmup_steps": 2, "decay_steps": 6},
        **fields,
    )


def run(
    config: TrainingBackendConfig,
    policy: PolicyConfig,
    context: WorkerContext,
    batch: TokenBatch,
    sequences: list[int],
    case: Case,
) -> Found:
    backend: Any = config.build(policy, context, reference=False, head="value")
    if case.resumes:
        backend.load_checkpoint(Path(case.resumes))
    before = backend.get_values(batch)
    metrics = []
    for step in range(SAVED_AFTER if case.resumes else 0, STEPS):
        if case.saves and step == SAVED_AFTER:
            backend.save_checkpoint(Path(case.saves))
        metrics.append(backend.train_step(batch, LOSSES[case.loss]))
    if case.saves:
        backend.save_pretrained(Path(case.saves) / "exported")
    exported = [dict(bucket) for bucket in backend.export_weights()]
    found = Found(
        sequences,
        before,
        backend.get_values(batch),
        [m["loss"].value for m in metrics],
        [m["grad_norm"].value for m in metrics],
        {name: tensor.detach().clone() for bucket in exported for name, tensor in bucket.items()},
    )
    backend.shutdown()
    return found

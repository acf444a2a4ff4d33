"""What the ranks of ``test_megatron_training`` do: train a few steps some way, and report what can be compared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from nemorl.config import PolicyConfig
from nemorl.contracts import Loss, SnapshottingBackend, TrainingBackend
from nemorl.plugins.kinds import TrainingBackendConfig
from nemorl.resources.worker import WorkerContext
from nemorl_dtensor import DTensorConfig
from nemorl_megatron import MegatronConfig
from nemorl_preference.dpo.sigmoid import SigmoidLoss
from nemorl_rl.policy_gradient.loss import ClippedPolicyGradientLoss
from nemorl_sft.loss import NLLLoss
from nemorl_tensors import TokenBatch, segment_sum
from nemorl_testing.batches import ragged_batch
from spread_cases import halved_step
from torch import Tensor

STEPS, SAVED_AFTER = 4, 2
K = 3
OPTIMIZER = {"lr": 1e-2, "eps": 1e-3, "weight_decay": 0.1}
"""Adam divides by |gradient| + eps: a small eps would make a step of gradients that are nothing but rounding (those of
key biases), and of their differences."""
LossName = Literal["grpo", "some zero", "sft", "dpo"]
LOSSES: Mapping[LossName, Loss] = {
    "grpo": ClippedPolicyGradientLoss(kl_penalty=0.1),
    "some zero": ClippedPolicyGradientLoss(),
    "sft": NLLLoss(),
    "dpo": SigmoidLoss(beta=0.5),
}


@dataclass(frozen=True)
class Spread:
    """A model and how it is spread over ranks."""

    name: str
    model: str
    world_size: int = 1
    policy: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def shards(self) -> tuple[int, ...]:
        """Of the data, by rank."""
        return MegatronConfig(**self.options).data_shards(PolicyConfig(**self.policy), self.world_size)


@dataclass(frozen=True)
class Case(Spread):
    """One way to train."""

    loss: LossName = "grpo"
    all_on_first: bool = False
    """The first shard has the whole batch, the others have nothing."""
    halved: bool = False
    """Each step is a pass over either half of a rank's shard, and an update."""
    saves: str = ""
    """Folder for a checkpoint after ``SAVED_AFTER`` steps, and for an export after all."""
    resumes: str = ""
    """Folder of a checkpoint to take the remaining steps from."""


@dataclass(frozen=True)
class Found:
    """What one rank reports; tensors are of its own shard of the batch, in the order of ``sequences``."""

    sequences: list[int]
    before: Tensor
    """[N] log-probs at the start"""
    after: Tensor
    reference: Tensor
    topk_ids: Tensor
    topk_logprobs: Tensor
    """[N, K] after training"""
    losses: list[float]
    grad_norms: list[float]
    weights: dict[str, Tensor]
    """The export; empty on ranks other than 0"""


def train(context: WorkerContext, case: Case) -> Found:
    """One rank of a run with megatron."""
    return _train(context, case, MegatronConfig(**case.options))


def train_with_dtensor(case: Case) -> Found:
    """The same in one process with the other backend."""
    policy = {name: value for name, value in case.policy.items() if name != "tensor_parallel_size"}
    alone = replace(
        case, world_size=1, policy=policy, options={}, saves="", resumes="", all_on_first=False, halved=False
    )
    return _train(WorkerContext(), alone, DTensorConfig())


def _train(context: WorkerContext, case: Case, config: TrainingBackendConfig) -> Found:
    fields = {"optimizer": OPTIMIZER, "microbatch_tokens": 64, "max_grad_norm": 0.05, **case.policy}
    fields["schedule"] = {"kind": "linear", "warmup_steps": 2, "decay_steps": 6}
    backend = config.build(PolicyConfig(model_name=case.model, **fields), context, reference=True)
    batch = _batch(case.loss)
    sequences = _shard(batch, case, context.rank)
    mine = batch.select(sequences)
    reference = backend.get_logprobs(mine, "reference")
    mine = mine.with_tokens(reference_logprobs=reference, old_logprobs=reference, generation_logprobs=reference)
    mine = mine.with_sequences(reference_response_logprobs=segment_sum(reference, mine.mask, mine.lengths))
    if case.resumes:
        backend.load_checkpoint(Path(case.resumes))
    before = backend.get_logprobs(mine)
    metrics = [_step(backend, mine, case, step) for step in range(SAVED_AFTER if case.resumes else 0, STEPS)]
    if case.saves:
        backend.save_pretrained(Path(case.saves) / "exported")
    exported = [dict(bucket) for bucket in backend.export_weights()]
    ids, logprobs = backend.get_topk_logprobs(mine, K)
    found = Found(
        sequences,
        before,
        backend.get_logprobs(mine),
        reference,
        ids,
        logprobs,
        [m["loss"].value for m in metrics],
        [m["grad_norm"].value for m in metrics],
        {name: tensor.detach().clone() for bucket in exported for name, tensor in bucket.items()},
    )
    backend.shutdown()
    return found


def _step(backend: TrainingBackend, batch: TokenBatch, case: Case, step: int) -> Any:
    if case.halved:
        return halved_step(backend, batch, LOSSES[case.loss])
    if not (case.saves and step == SAVED_AFTER):
        return backend.train_step(batch, LOSSES[case.loss])
    assert isinstance(backend, SnapshottingBackend)
    backend.snapshot_checkpoint(Path(case.saves))  # and trains while that is being written
    metrics = backend.train_step(batch, LOSSES[case.loss])
    assert backend.snapshot_files(wait=True)
    return metrics


def _batch(loss: LossName) -> TokenBatch:
    """Ragged sequences; in pairs where the loss compares, or two of three without advantage."""
    batch = ragged_batch(temperature=0.9)
    if loss == "some zero":
        return batch.with_tokens(advantages=torch.where(batch.sequence_ids % 3 == 0, batch["advantages"], 0.0))
    if loss != "dpo":
        return batch
    pairs = batch.select([0, 1, 2, 3, 4, 5, 6, 8])  # the last pair has nothing to score on one side
    return replace(pairs, sequences_per_group=2)


def _shard(batch: TokenBatch, case: Case, rank: int) -> list[int]:
    shards = case.shards
    if case.all_on_first:
        return list(range(len(batch))) if shards[rank] == 0 else []
    return batch.shards(max(shards) + 1)[shards[rank]]

"""What the ranks of ``test_megatron_packed`` do: the same batch in one layout of rows or another."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from megatron_runs import LOSSES, LossName, Spread
from nemorl.config import PolicyConfig
from nemorl.contracts import Loss
from nemorl.metrics import Metrics
from nemorl.resources.worker import WorkerContext
from nemorl_megatron import MegatronConfig
from nemorl_megatron.bridge.exchange import Exchange, global_names
from nemorl_megatron.bridge.own import OwnBridge
from nemorl_megatron.config import LayoutName
from nemorl_megatron.layout import choose
from nemorl_megatron.training import MegatronBackend
from nemorl_tensors import TokenBatch, segment_sum
from nemorl_testing.batches import branching_batch, ragged_batch
from torch import Tensor

K = 3
MICROBATCH_TOKENS = 64
"""Two to four microbatches of the ragged batch."""


@dataclass(frozen=True)
class Case(Spread):
    """A model, spread in one way."""

    loss: LossName = "grpo"
    all_on_first: bool = False
    """The first shard has the whole batch, the others have nothing."""
    branches: bool = False
    """Sequences share tokens."""


@dataclass(frozen=True)
class Found:
    """What one rank finds in one layout."""

    sequences: list[int]
    """Of the batch, in this rank's shard."""
    logprobs: Tensor
    """[N] of the shard, as are the next two"""
    topk_ids: Tensor
    topk_logprobs: Tensor
    """[N, K]"""
    loss: float
    gradients: dict[str, Tensor]
    """Whole, under Hugging Face names, on rank 0."""
    tree_ratio: float
    """Tokens of the sequences per computed one."""
    packs_by_itself: bool
    """What ``auto`` says of this model."""


def batch_of(case: Case) -> TokenBatch:
    """Ragged sequences, of groups that begin alike in every other case; pairs where the loss compares."""
    batch = branching_batch(temperature=0.9) if case.branches else ragged_batch(temperature=0.9)
    if case.loss != "dpo":
        return batch
    return replace(batch.select([*range(7), 8]), sequences_per_group=2)


def compute(context: WorkerContext, case: Case, layout: LayoutName) -> Found:
    """One rank in one layout."""
    # The plain optimizer: with the distributed one a rank has a range of each gradient.
    config = MegatronConfig(layout=layout, distributed_optimizer=False, **case.options)
    policy = PolicyConfig(
        model_name=case.model,
        microbatch_tokens=MICROBATCH_TOKENS,
        max_grad_norm=None,
        optimizer={"lr": 1e-6},
        **case.policy,
    )
    backend = config.build(policy, context, reference=True)
    assert isinstance(backend, MegatronBackend)
    batch = batch_of(case)
    sequences = _shard(batch, config.data_shards(policy, case.world_size), case, context.rank)
    mine = batch.select(sequences)
    reference = backend.get_logprobs(mine, "reference")
    mine = mine.with_tokens(
        reference_logprobs=reference - 0.1, old_logprobs=reference + 0.05, generation_logprobs=reference
    )
    mine = mine.with_sequences(reference_response_logprobs=segment_sum(reference - 0.1, mine.mask, mine.lengths))
    ids, topk = backend.get_topk_logprobs(mine, K)
    logprobs = backend.get_logprobs(mine)
    auto = choose("auto", backend._pieces, backend._parallel, backend._bridge.vocabulary)
    metrics, gradients = _train_step(backend, mine, LOSSES[case.loss])
    backend.shutdown()
    ratio = metrics["tree_ratio"].value if "tree_ratio" in metrics else 1.0
    return Found(sequences, logprobs, ids, topk, metrics["loss"].value, gradients, ratio, auto.is_packed)


def _shard(batch: TokenBatch, shards: tuple[int, ...], case: Case, rank: int) -> list[int]:
    if case.all_on_first:
        return list(range(len(batch))) if shards[rank] == 0 else []
    return batch.shards(max(shards) + 1)[shards[rank]]


def _train_step(backend: MegatronBackend, batch: TokenBatch, loss: Loss) -> tuple[Metrics, dict[str, Tensor]]:
    """Its metrics, and the gradients that an update would be made from."""
    backend.clear_gradients()
    metrics, _ = backend.forward_backward(batch, loss)
    backend._optimizer.add_up()
    return metrics, _gradients(backend)


def _gradients(backend: MegatronBackend) -> dict[str, Tensor]:
    """Sums over microbatches and data-parallel ranks."""
    bridge, parallel = backend._bridge, backend._parallel
    assert isinstance(bridge, OwnBridge)
    parameters = global_names(backend._pieces, bridge.settings, parallel)
    sums = {name: parameter.main_grad for name, parameter in parameters.items()}
    buckets = Exchange(bridge.settings, parallel).whole(sums, torch.float32)
    return {name: tensor.clone() for bucket in buckets for name, tensor in bucket.items()}

"""What ``test_megatron_mtp`` compares: a step with MTP layers by hand, on transformers' layers, and on ranks.

# L = layers of the model, D = depths, T = tokens of a sequence that the model is fed, H = hidden size
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_routers import gradients_of
from megatron_runs import Spread
from mtp_models import ByHand, StepByHand
from nemorl.config import PolicyConfig
from nemorl.metrics import Metrics
from nemorl.resources.worker import WorkerContext
from nemorl_megatron.training import MegatronBackend
from nemorl_sft.loss import NLLLoss
from nemorl_testing.batches import ragged_batch
from torch import Tensor

FACTOR, TEMPERATURE = 0.3, 0.9


@dataclass(frozen=True)
class Case(Spread):
    """One step in one layout."""

    mtp: Mapping[str, Any] | None = None
    saves: str = ""
    """Folder for a checkpoint after the update, and for an export of it."""
    resumes: str = ""
    """Folder of a checkpoint that the weights are exported from."""


@dataclass(frozen=True)
class Found:
    """Of one step on one rank."""

    metrics: dict[str, tuple[float, float]]
    """Total and weight of this rank's shard"""
    gradients: dict[str, Tensor]
    """By stored name; empty on ranks other than 0"""
    weights: dict[str, Tensor]
    """After the update; likewise"""


def by_hand(folder: Path, depths: int, *, detach: bool) -> StepByHand:
    return ByHand(folder).step(ragged_batch(temperature=TEMPERATURE), depths, detach=detach, factor=FACTOR)


def step(context: WorkerContext, case: Case) -> Found:
    """One rank's part of a step: gradients before the update, weights after it."""
    mtp = {} if case.mtp is None else {"mtp": case.mtp}
    options = {"name": "megatron", "distributed_optimizer": False, **case.options, **mtp}
    fields = {"model_name": case.model, "microbatch_tokens": 64, "max_grad_norm": 0.05, **case.policy}
    fields["optimizer"] = {"lr": 1e-2, "eps": 1e-3, "weight_decay": 0.1}
    config = PolicyConfig.model_validate({**fields, "backend": options})
    backend = config.backend.build(config, context, reference=False)
    assert isinstance(backend, MegatronBackend)
    if case.resumes:
        backend.load_checkpoint(Path(case.resumes))
        found = Found({}, {}, _weights(backend))
        backend.shutdown()
        return found
    batch = ragged_batch(temperature=TEMPERATURE)
    mine = batch.select(batch.shards(max(case.shards) + 1)[case.shards[context.rank]])
    passes, _ = backend.forward_backward(mine, NLLLoss())
    learner = backend._optimizer
    learner.add_up()
    gradients = gradients_of(backend)
    learner.add_up = lambda: None  # type: ignore[method-assign]
    update = backend.optimizer_step()
    if case.saves:
        backend.save_checkpoint(Path(case.saves))
        backend.save_pretrained(Path(case.saves) / "exported")
    found = Found(_numbers({**passes, **update}), gradients, _weights(backend))
    backend.shutdown()
    return found


def _numbers(metrics: Metrics) -> dict[str, tuple[float, float]]:
    """Of means their two parts; of others the value."""
    return {
        name: (metric.total, metric.count) if name.startswith("mtp_") else (metric.value, 1.0)
        for name, metric in metrics.items()
        if name.startswith("mtp_") or name in ("loss", "grad_norm")
    }


def _weights(backend: MegatronBackend) -> dict[str, Tensor]:
    return {name: tensor.clone() for bucket in backend.export_weights() for name, tensor in bucket.items()}

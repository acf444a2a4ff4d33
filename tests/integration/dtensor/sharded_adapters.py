"""What the ranks of these tests do: train adapters on one base, alone or by turns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from nemorl.contracts import AdamStep, AdapterShape
from nemorl.resources.worker import WorkerContext
from nemorl_dtensor.ranks import local
from nemorl_dtensor.training import DTensorBackend
from nemorl_testing.batches import WeightedNLL, ragged_batch
from sharded_runs import Case, build, shard_of
from torch import Tensor

SHAPES = {
    "narrow": AdapterShape(rank=2, alpha=8.0, seed=1, modules=frozenset({"attention"})),
    "wide": AdapterShape(rank=4, seed=2),
}
ADAM = AdamStep(lr=1e-2, weight_decay=0.1, max_grad_norm=0.05)


@dataclass(frozen=True)
class Adapted:
    """One way to spread the base."""

    model: str
    world_size: int
    names: tuple[str, ...]
    """Of its adapters"""
    policy: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Learned:
    """One adapter on this rank: weights, then moments."""

    first: list[Tensor]
    last: list[Tensor]


def learned(context: WorkerContext, case: Adapted) -> dict[str, Learned]:
    """What this rank has of each of the case's adapters, at first and after two updates whose passes interleave."""
    backend = _backend(context, case)
    first = {name: _tensors(backend, name) for name in case.names}
    for step in range(2):
        for name in case.names:
            _pass(backend, context, case, name, step)
        for name in reversed(case.names):
            backend.use_adapter(name)
            backend.optimizer_step(ADAM)
    found = {name: Learned(first[name], _tensors(backend, name)) for name in case.names}
    backend.shutdown()
    return found


def _backend(context: WorkerContext, case: Adapted) -> DTensorBackend:
    backend = build(context, Case("", case.model, policy={"lora": {"rank": 4}, **case.policy}))
    for name in case.names:
        backend.add_adapter(name, SHAPES[name])
    return backend


def _pass(backend: DTensorBackend, context: WorkerContext, case: Adapted, name: str, step: int) -> None:
    backend.use_adapter(name)
    width = case.policy.get("tensor_parallel_size", 1)
    batch = ragged_batch(seed=step + len(name))
    mine = shard_of(batch, context.rank // width, context.world_size // width, all_on_first=False)
    backend.forward_backward(batch.select(mine), WeightedNLL())


def _tensors(backend: DTensorBackend, name: str) -> list[Tensor]:
    backend.use_adapter(name)
    moments = backend._optimizer.tensors()
    return [local(tensor.detach()).clone() for tensor in (*backend._trainable.values(), *moments.values())]

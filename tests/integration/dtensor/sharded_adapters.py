"""What the ranks of these tests do: train two adapters on one base, alone and by turns, and compare."""

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
    policy: Mapping[str, Any] = field(default_factory=dict)


def largest_difference(context: WorkerContext, case: Adapted) -> dict[str, float]:
    """Of each adapter's weights and moments on this rank, between training alone and by turns; and how far it moved."""
    alone = {}
    for name in SHAPES:
        backend = _backend(context, case, [name])
        start = _tensors(backend, name)
        for step in range(2):
            _pass(backend, context, case, name, step)
            backend.optimizer_step(ADAM)
        alone[name] = (start, _tensors(backend, name))
        backend.shutdown()
    backend = _backend(context, case, [*SHAPES])
    for step in range(2):
        for name in SHAPES:
            _pass(backend, context, case, name, step)
        for name in reversed(SHAPES):
            backend.use_adapter(name)
            backend.optimizer_step(ADAM)
    found = {name: _tensors(backend, name) for name in SHAPES}
    backend.shutdown()
    return {
        **{name: _apart(found[name], alone[name][1]) for name in SHAPES},
        **{f"{name} moved": _apart(*alone[name]) for name in SHAPES},
    }


def _backend(context: WorkerContext, case: Adapted, names: list[str]) -> DTensorBackend:
    backend = build(context, Case("", case.model, policy={"lora": {"rank": 4}, **case.policy}))
    for name in names:
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


def _apart(one: list[Tensor], other: list[Tensor]) -> float:
    """Infinite where one has a moment that the other lacks, but for those of before the first update."""
    pairs = [(a.float(), b.float()) for a, b in zip(one, other, strict=False) if a.numel()]
    return max(float((a - b).abs().max()) for a, b in pairs) if pairs else 0.0

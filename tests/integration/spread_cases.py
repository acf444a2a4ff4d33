"""Ways to spread a model: run each over its ranks, and compare what the ranks report."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from nemorl.contracts import Loss
from nemorl.metrics import Metrics, merge
from nemorl_tensors import TokenBatch
from spawned import run_calls
from torch import Tensor


class SpreadCase(Protocol):
    """One way to spread a model."""

    @property
    def world_size(self) -> int: ...


class Shard(Protocol):
    """What a rank reports of its part of a batch, in the order of ``sequences``."""

    @property
    def sequences(self) -> list[int]: ...


def run_spread(function: Callable[..., Any], cases: Mapping[str, SpreadCase]) -> dict[str, list[Any]]:
    """``function(context, case)`` on every rank of each case, of those with the fewest ranks first.

    Returns:
        By name, the results in rank order. Cases of as many ranks share their processes.
    """
    found: dict[str, list[Any]] = {}
    for size in sorted({case.world_size for case in cases.values()}):
        chosen = {name: case for name, case in cases.items() if case.world_size == size}
        results = run_calls([(function, (case,)) for case in chosen.values()], size)
        found |= dict(zip(chosen, results, strict=True))
    return found


def together(parts: Sequence[Shard], name: str, lengths: Tensor) -> Tensor:
    """[N] or [N, K] per-token values of the whole batch, from those of its shards.

    Args:
        parts: One rank of each shard, or several that agree.
        name: Field of the parts.
        lengths: [B] tokens of each sequence of the batch; shards may leave some out.
    """
    pieces: dict[int, Tensor] = {}
    for part in parts:
        pieces.update(zip(part.sequences, getattr(part, name).split(lengths[part.sequences].tolist()), strict=True))
    return torch.cat([pieces[index] for index in sorted(pieces)])


def gap(one: Tensor, other: Tensor) -> float:
    """Largest difference; of values above 1, in parts of them. 0 of nothing.

    Kernels of other CPUs round otherwise, and float32 rounds a log-prob of -10 ten times as coarsely as one of -1.
    """
    difference, size = (one.float() - other.float()).abs(), other.float().abs().clamp(min=1.0)
    return float((difference / size).max()) if one.numel() else 0.0


def halved_step(backend: Any, batch: TokenBatch, loss: Loss) -> Metrics:
    """One step over this rank's shard in three calls: a pass over each half of it, whose log-probs are those of before,
    and an update."""
    expected = backend.get_logprobs(batch)
    half = len(batch) // 2
    passed = []
    for part, its_expected in zip(
        (batch.select(range(half)), batch.select(range(half, len(batch)))),
        expected.split([int(batch.lengths[:half].sum()), int(batch.lengths[half:].sum())]),  # type: ignore[no-untyped-call]
        strict=True,
    ):
        metrics, outputs = backend.forward_backward(part, loss)
        torch.testing.assert_close(outputs, its_expected, atol=1e-5, rtol=0)
        passed.append(metrics)
    return {**merge(passed), **backend.optimizer_step()}

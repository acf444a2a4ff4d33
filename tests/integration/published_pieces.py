"""What a rank of ``test_published_pieces`` does: publish its pieces, and read everybody's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from nemorl.config import PolicyConfig
from nemorl.plugins import registry
from nemorl.resources.worker import WorkerContext
from nemorl.weights import transport
from nemorl_tensors.engines.pieces import RankPieces, SpreadHandle
from torch import Tensor

TRANSPORT = "nemorl-rl:shared_memory"


@dataclass(frozen=True)
class Layout:
    """One way to spread a model."""

    name: str
    world_size: int
    policy: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    model: str = "dense"


@dataclass(frozen=True)
class Read:
    """What a rank found."""

    whole: dict[str, Tensor]
    """``export_weights``; of rank 0"""
    joined: dict[str, Tensor]
    """From the pieces of all ranks"""
    second: dict[str, Tensor]
    """The same for a second version, published before the first was read again"""
    published_bytes: int
    """Of this rank's own pieces"""


def read_pieces(context: WorkerContext, backend: str, model: str, layout: Layout) -> Read:
    """Spread a model; compare its pieces, read in another process, with whole tensors."""
    policy = PolicyConfig(
        model_name=model, **{"backend": {"name": backend, **layout.options}, "optimizer": {"lr": 1e-2}, **layout.policy}
    )
    trainer = registry().load("training_backends", backend)(**layout.options)
    trainer = trainer.build(policy, context, reference=False)
    whole = {name: tensor.clone() for bucket in trainer.export_weights() for name, tensor in bucket.items()}
    mine = trainer.publish_pieces(TRANSPORT)
    joined = _joined(_of_all(mine), 1)
    second = _joined(_of_all(trainer.publish_pieces(TRANSPORT)), 2)
    found = Read(whole, joined, second, _bytes(mine))
    if dist.is_initialized():
        dist.barrier()  # nobody leaves while others read
    trainer.shutdown()
    return found


def _of_all(mine: RankPieces) -> list[RankPieces]:
    if not dist.is_initialized():
        return [mine]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


def _joined(ranks: list[RankPieces], version: int) -> dict[str, Tensor]:
    (bucket,) = SpreadHandle(TRANSPORT, version, ranks).buckets()
    return {name: tensor.clone() for name, tensor in bucket.items()}


def _bytes(pieces: RankPieces) -> int:
    buckets = transport(TRANSPORT).fetch(pieces.payload)
    return sum(tensor.nbytes for bucket in buckets for tensor in bucket.values())

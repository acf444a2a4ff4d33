"""Checks of a training backend whose ranks send their own parts of the weights (capability ``weight_pieces``)."""

from __future__ import annotations

import torch
from nemorl.contracts import PublishesPieces, TrainingBackend
from nemorl.weights import IN_PROCESS
from nemorl_tensors.engines.pieces import SpreadHandle
from torch import Tensor

from nemorl_testing.backends import build_trainer, weights_of
from nemorl_testing.batches import WeightedNLL, ragged_batch
from nemorl_testing.kit import NotApplicable, Subject, expect


def check_pieces_make_the_weights(subject: Subject) -> None:
    """What the ranks publish in pieces is what `export_weights` yields, before and after a step. (DESIGN 5)"""
    if "weight_pieces" not in subject.config.supports:
        raise NotApplicable("the backend does not declare supports={'weight_pieces'}")
    backend = build_trainer(subject)
    expect(isinstance(backend, PublishesPieces), "the backend has no publish_pieces")
    for step in range(2):
        found, wanted = _joined(backend), weights_of(backend)
        expect(found.keys() == wanted.keys(), f"names differ: {sorted(found.keys() ^ wanted.keys())[:3]}")
        wrong = [name for name, tensor in wanted.items() if not torch.equal(found[name].float(), tensor)]
        expect(not wrong, f"after {step} steps the pieces of {', '.join(wrong[:3])} make another tensor")
        backend.train_step(ragged_batch(), WeightedNLL())


def _joined(backend: TrainingBackend) -> dict[str, Tensor]:
    assert isinstance(backend, PublishesPieces)
    (bucket,) = SpreadHandle(IN_PROCESS, 1, [backend.publish_pieces(IN_PROCESS)]).buckets()
    return {name: tensor.cpu().clone() for name, tensor in bucket.items()}

"""Pieces are described once for as long as the parameters stay where they are, and are always the weights of now."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch
from nemorl_tensors import TokenBatch
from nemorl_tensors.engines.pieces import Piece
from torch import Tensor

from .conftest import Build

LORA = {"rank": 4, "target_modules": ["q_proj", "down_proj"]}


def pieces_of(trainer: Any) -> list[Piece]:
    with torch.no_grad():
        return list(trainer._exported.pieces())


def require_equal(trainer: Any) -> None:
    found = {piece.name: piece.values for piece in pieces_of(trainer)}
    wanted: dict[str, Tensor] = {name: tensor for bucket in trainer.export_weights() for name, tensor in bucket.items()}
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


def test_pieces_are_those_of_the_version_before_and_hold_the_newest_weights(
    build: Build, batch: TokenBatch, weighted_nll: Any
) -> None:
    trainer = build()
    first = pieces_of(trainer)
    before = first[0].values.clone()
    trainer.train_step(batch, weighted_nll)
    again = pieces_of(trainer)
    assert all(one is other for one, other in zip(first, again, strict=True))
    assert not torch.equal(again[0].values, before)
    require_equal(trainer)


def test_pieces_follow_weights_that_left_the_memory_and_came_back(build: Build) -> None:
    trainer = build()
    pieces_of(trainer)
    trainer.offload(["weights"])
    assert trainer.held_bytes()["weights"] == 0  # what is kept keeps no memory
    trainer.onload(["weights"])
    require_equal(trainer)


def test_pieces_follow_a_parameter_that_got_other_memory(build: Build) -> None:
    trainer = build()
    pieces_of(trainer)
    parameter = next(trainer._model.parameters())
    parameter.data = parameter.data + 1
    require_equal(trainer)


def test_what_adapters_were_merged_into_is_not_kept(build: Build) -> None:
    trainer = build(lora=LORA)
    [merged] = [piece for piece in pieces_of(trainer) if piece.name.endswith("layers.0.self_attn.q_proj.weight")]
    kept = weakref.ref(merged.values)
    del merged
    gc.collect()
    assert kept() is None
    require_equal(trainer)

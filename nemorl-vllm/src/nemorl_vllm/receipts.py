"""Digests of the weights in vLLM's own layout, mapped back to the tensors that the trainer sent.

vLLM fuses projections, stacks experts, pads vocabularies and cuts all of it over its processes, each architecture in
its own way. Nobody here repeats that: the tensors of an update are handed to vLLM's loaders as lazy ones, which tell
of every copy out of them (``nemorl_tensors.engines.pieces``). What a loader has written into a parameter is digested
there, as the box of the sent tensor that it was copied from. A layer is packed for its kernels after that, which this
does not see: the log-probs of a probe do.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from nemorl.weights import Digest
from nemorl_tensors.engines.boxes import ViewBox
from nemorl_tensors.engines.digests import PartDigest, box_sum, dtype_name, joined, numbers
from nemorl_tensors.engines.pieces import LazyWeight, Piece, lazy_weight
from torch import Tensor

ROUNDED = "not comparable: quantised"
KEPT = ("embed", "norm", "lm_head")
"""Parts of the names of tensors that keep the policy's precision where others are rounded."""
REARRANGED = "vLLM holds it in an order of its own"


@dataclass
class Receipt:
    """What one process has loaded in an update."""

    parts: list[tuple[PartDigest, Tensor]] = field(default_factory=list)
    """With the sum as it is on the device; the value within is 0 until it is read."""
    reasons: dict[str, str] = field(default_factory=dict)
    """Why there is no digest, by name."""

    def copied(self, piece: Piece, place: ViewBox | None, target: Tensor) -> None:
        """A loader has copied a place of a sent tensor into a parameter."""
        sent, held = dtype_name(piece.values), dtype_name(target)
        if sent != held:
            self.reasons[piece.name] = f"vLLM holds it as {held}, it was sent as {sent}"
            return
        box = None if place is None else _as_box(place, target)
        if place is None or box is None:
            self.reasons[piece.name] = REARRANGED
            return
        try:
            value = box_sum(box, piece.shape, place.box.starts)
        except ValueError:
            self.reasons[piece.name] = REARRANGED
            return
        part = PartDigest(piece.name, sent, piece.shape, place.box.starts, place.box.sizes, 0)
        self.parts.append((part, value))

    def answer(self) -> tuple[list[PartDigest], dict[str, str]]:
        """Parts with their values, and reasons."""
        values = numbers([value for _, value in self.parts])
        found = [
            PartDigest(part.name, part.dtype, part.shape, part.offsets, part.sizes, value)
            for (part, _), value in zip(self.parts, values, strict=True)
        ]
        return found, self.reasons


def lazily(buckets: Iterable[Mapping[str, Tensor]]) -> Iterator[Mapping[str, Tensor]]:
    """The same tensors, which tell of every copy out of them."""
    for bucket in buckets:
        yield {
            name: tensor if isinstance(tensor, LazyWeight) else lazy_weight([Piece.whole(name, tensor.detach())])
            for name, tensor in bucket.items()
        }


def answer_of(
    answers: Sequence[tuple[Sequence[PartDigest], Mapping[str, str]]], names: Collection[str], *, rounds: bool
) -> dict[str, Digest | str]:
    """The answers of all processes of an engine as one.

    Args:
        answers: Parts and reasons of each.
        names: Of the tensors that were sent.
        rounds: Linear layers and experts are rounded after they are loaded.
    """
    reasons = {name: why for _, found in answers for name, why in found.items()}
    if rounds:
        reasons |= {name: ROUNDED for name in names if not any(part in name for part in KEPT)}
    held = joined(part for parts, _ in answers for part in parts)
    return {name: found for name in names if (found := reasons.get(name) or held.get(name))}


def _as_box(place: ViewBox, target: Tensor) -> Tensor | None:
    """Memory that a place was copied to, with the dimensions of the tensor that the place is in."""
    sizes = place.box.sizes
    kept = [dimension for dimension in place.dimensions if dimension is not None]
    if target.numel() != torch.Size(sizes).numel():
        return None
    axes = [axis for axis, dimension in enumerate(place.dimensions) if dimension is not None]
    if target.ndim != len(place.dimensions):
        return None
    packed = target.permute(*axes, *(axis for axis in range(target.ndim) if axis not in axes))
    packed = packed.reshape([sizes[dimension] for dimension in kept])
    order = sorted(range(len(kept)), key=kept.__getitem__)
    return packed.permute(*order).reshape(sizes)

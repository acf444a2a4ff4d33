"""Experts of a mixture as a checkpoint holds them: stacked, as transformers computes them, or each by itself.

# E = experts of a layer, F = hidden size of one, H = hidden size of the model

NeMo RL's DTensor workers of version 2 train mixtures with Automodel's layers, over expert-parallel ranks, and save each
expert under its published name. Its workers of version 1 save what transformers holds: one tensor of all experts of a
layer since its version 5, and before that each expert by itself, too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

GATE_UP, DOWN = ".experts.gate_up_proj", ".experts.down_proj"
"""Ends of transformers' names: [E, 2F, H], gates above the rest, and [E, H, F]."""


@dataclass(frozen=True)
class Projections:
    """Published names of an expert's three matrices."""

    gate: str
    up: str
    down: str


PUBLISHED = {
    ".mlp.": Projections("gate_proj", "up_proj", "down_proj"),
    ".block_sparse_moe.": Projections("w1", "w3", "w2"),
}
"""By the name of a layer's mixture; the second is Mixtral's."""


@dataclass(frozen=True)
class Part:
    """A stored tensor, and which tensor of the model it is, or is a part of."""

    name: str
    """Of the tensor of the model."""
    shape: tuple[int, ...]
    """Of the stored tensor."""
    expert: int | None = None
    """The one that it is of; ``None``: it is the whole tensor."""
    first_row: int = 0
    """In that expert's matrix of the model."""

    def within(self, tensor: Tensor) -> Tensor:
        """The memory of the part in the model's tensor."""
        return tensor if self.expert is None else tensor[self.expert].narrow(0, self.first_row, self.shape[0])


def stored_parts(expected: Mapping[str, tuple[int, ...]], found: Collection[str]) -> dict[str, Part]:
    """The tensors that a checkpoint of a model should have, by the names that this one uses.

    Args:
        expected: Shapes of the model's tensors, by transformers' names.
        found: Names in the checkpoint.

    >>> stacked = {"model.layers.0.mlp.experts.down_proj": (2, 8, 4), "lm_head.weight": (9, 8)}
    >>> list(stored_parts(stacked, {"model.layers.0.mlp.experts.1.down_proj.weight"}))
    ['model.layers.0.mlp.experts.0.down_proj.weight', 'model.layers.0.mlp.experts.1.down_proj.weight', 'lm_head.weight']
    """
    block = next((block for block in PUBLISHED if any(_is_single(block, name) for name in found)), None)
    parts: dict[str, Part] = {}
    for name, shape in expected.items():
        if name in found or block is None:
            parts[name] = Part(name, tuple(shape))
        elif name.endswith((GATE_UP, DOWN)):
            parts.update(_experts(name, shape, block))
        else:  # a router, whose block has another published name
            parts[name.replace(".mlp.", block)] = Part(name, tuple(shape))
    return parts


def _is_single(block: str, name: str) -> bool:
    _, inside, expert = name.partition(f"{block}experts.")
    return bool(inside) and expert.split(".")[0].isdigit()


def _experts(name: str, shape: tuple[int, ...], block: str) -> Iterator[tuple[str, Part]]:
    count, rows, columns = shape
    published = PUBLISHED[block]
    stem = name.rpartition(".experts.")[0].removesuffix(".mlp") + block
    matrices = [published.down] if name.endswith(DOWN) else [published.gate, published.up]
    size = rows // len(matrices)
    for expert in range(count):
        for number, matrix in enumerate(matrices):
            yield f"{stem}experts.{expert}.{matrix}.weight", Part(name, (size, columns), expert, number * size)

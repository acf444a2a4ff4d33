"""What a rank holds of each parameter, as a checkpoint names it, and how to get that from parts cut otherwise."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from nemorl_megatron.bridge.exchange import Exchange, global_names
from nemorl_megatron.bridge.rules import Index, Part, Rule, Whole
from nemorl_megatron.bridge.tables import HEAD, Weight, tied_head, weights

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel

    from nemorl_megatron.model import PolicyModel
    from nemorl_megatron.parallel import Parallel
    from nemorl_megatron.settings import Settings


@dataclass(frozen=True)
class Held:
    """One parameter of this rank."""

    name: str
    """Equal names and parts are copies of one another."""
    parameter: nn.Parameter
    part: Part
    _weight: Weight
    _rule: Rule

    def shape(self, ways: int) -> torch.Size:
        """Of one of ``ways`` parts."""
        return torch.Size(self._rule.shape(self._weight, ways))

    def from_parts(self, ways: int, read: Callable[[int], Tensor]) -> Tensor:
        """This rank's part, of what was cut into ``ways`` parts.

        Args:
            ways: How many there are.
            read: Gives the part of a number. No more than needed are asked for.
        """
        if ways == self.part.ways:
            return read(self.part.number)
        stored = self._weight.stored
        whole = self._rule.join(self._weight, [read(number) for number in range(ways)])

        def read_slice(name: str, index: Index) -> Tensor:
            return whole[stored.index(name)][index]

        return self._rule.read(self._weight, self.part, read_slice)


def held(model: Sequence[PolicyModel], settings: Settings, parallel: Parallel) -> Iterator[Held]:
    """The parameters of a model that the tables describe, under names that are the same in every layout."""
    exchange = Exchange(settings, parallel)
    table = {weight.parameter: weight for weight in (*weights(settings), tied_head(settings))}
    for name, parameter in global_names(model, settings, parallel).items():
        weight = table[name]
        # A head that is the embedding is a copy of it, on another stage.
        key = "embedding.word_embeddings.weight" if name == HEAD and settings.tied else name
        yield Held(key, parameter, exchange.part(weight), weight, exchange.rules[weight.rule])


def held_as_it_is(model: Sequence[GPTModel], parallel: Parallel) -> Iterator[Held]:
    """The parameters of any model, whole, under names that another layout does not have."""
    place = parallel.place
    for number, piece in enumerate(model):
        for name, parameter in piece.named_parameters():
            ranks = f"tensor{place.tensor}.expert{place.expert}.{place.expert_tensor}.stage{place.pipeline}.{number}"
            weight = Weight(name, "whole", (name,), (tuple(parameter.shape),))
            yield Held(f"{ranks}.{name}", parameter, Part(0, 1), weight, Whole())

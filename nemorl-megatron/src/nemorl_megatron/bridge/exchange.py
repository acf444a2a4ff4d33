"""Between stored tensors and the parts that ranks hold of them: fill parameters, and put whole tensors together.

Both work on any tensors that are divided as the parameters are (weights, gradients, optimizer state): a mapping from
:func:`global_names` to this rank's part. So what one layout saved under Hugging Face names another can load.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from nemorl.errors import BackendError
from nemorl_tensors.engines.buckets import BUCKET_BYTES, in_buckets
from nemorl_tensors.engines.pieces import Piece
from torch import Tensor

from nemorl_megatron.bridge.rules import Part, Rule, rules
from nemorl_megatron.bridge.tables import HEAD, RuleName, Weight, tied_head, weights

if TYPE_CHECKING:
    from nemorl_megatron.bridge.sources import Source
    from nemorl_megatron.model import PolicyModel
    from nemorl_megatron.parallel import Parallel
    from nemorl_megatron.settings import Settings

_EXPERT = re.compile(r"local_experts\.(\d+)\.")
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")


def global_names(model: Sequence[PolicyModel], settings: Settings, parallel: Parallel) -> dict[str, Tensor]:
    """This rank's parameters, and routers' biases, by the names in ``bridge.tables``, where layers and experts are
    counted over all ranks."""
    named: dict[str, Tensor] = {}
    experts = settings.mixture.experts if settings.mixture else 0
    first_expert = parallel.place.expert * experts // parallel.sizes.expert
    for piece in model:
        first_layer = get_transformer_layer_offset(piece.config, piece.vp_stage, parallel.place.pipeline)
        biases = ((name, found) for name, found in piece.named_buffers() if name.endswith("router.expert_bias"))
        for name, parameter in chain(piece.named_parameters(), biases):
            counted = _counted_from(_LAYER, first_layer, name)
            named[_counted_from(_EXPERT, first_expert, counted)] = parameter
    return named


def _counted_from(number: re.Pattern[str], first: int, name: str) -> str:
    """``name`` with ``first`` added to the number that the pattern's group finds in it."""
    match = number.search(name)
    return f"{name[: match.start(1)]}{int(match[1]) + first}{name[match.end(1) :]}" if match else name


@dataclass(frozen=True)
class Exchange:
    """The tensors of one model in one layout."""

    settings: Settings
    parallel: Parallel
    others: tuple[Weight, ...] | None = None
    """Parameters other than the model's own, in place of these"""

    @cached_property
    def _table(self) -> tuple[Weight, ...]:
        return (*weights(self.settings),) if self.others is None else self.others

    @cached_property
    def rules(self) -> Mapping[RuleName, Rule]:
        """How tensors of this model lie in parameters."""
        return rules(self.settings.head)

    @torch.no_grad()
    def fill(self, parts: Mapping[str, Tensor], source: Source) -> None:
        """Copy into ``parts`` what this rank holds of the stored tensors, and read no more than that.

        Raises:
            BackendError: a stored tensor is missing or of another shape.
        """
        for name, values in self.read(parts, source):
            parts[name].copy_(values)

    def read(self, parts: Collection[str], source: Source) -> Iterator[tuple[str, Tensor]]:
        """This rank's parts of the stored tensors, as they are stored, one parameter after the other.

        Raises:
            BackendError: a stored tensor is missing or of another shape.
        """
        missing = {*parts}
        for weight in chain(self._table, [tied_head(self.settings)]):
            if weight.parameter not in missing:
                continue
            missing.remove(weight.parameter)
            self._require_stored(weight, source)
            yield weight.parameter, self.rules[weight.rule].read(weight, self.part(weight), source.read)
        assert not missing, f"the tables say nothing of {sorted(missing)}"

    def whole(
        self, parts: Mapping[str, Tensor], dtype: torch.dtype, bucket_bytes: int = BUCKET_BYTES
    ) -> Iterator[dict[str, Tensor]]:
        """Stored tensors in buckets, on rank 0; empty buckets on the others. Collective: all ranks iterate together.

        Rank 0 holds one bucket and what it received for the next tensor; every other rank only its own parts.

        Args:
            parts: This rank's, by global name.
            dtype: Of all of them, on all ranks, but those that are always float32.
            bucket_bytes: A bucket ends with the tensor that makes it this large.
        """
        yield from in_buckets(self._joined(parts, dtype), bucket_bytes)

    def pieces(self, parts: Mapping[str, Tensor]) -> Iterator[Piece]:
        """Pieces of the stored tensors that this rank has and is the one to send, sharing the memory of ``parts``."""
        for turn, weight in enumerate(self._table):
            if weight.parameter in parts and self._sends(weight, turn):
                values = parts[weight.parameter].detach()
                yield from self.rules[weight.rule].pieces(weight, self.part(weight), values)

    def _joined(self, parts: Mapping[str, Tensor], given: torch.dtype) -> Iterator[tuple[dict[str, Tensor], int]]:
        """The stored tensors of each parameter, on rank 0, and their bytes, on all ranks."""
        for weight in self._table:
            dtype = torch.float32 if weight.rule == "float32" else given
            received = self._on_rank_0(weight, parts, dtype)
            joined = self.rules[weight.rule].join(weight, received) if received else ()
            size = sum(torch.Size(shape).numel() for shape in weight.shapes) * dtype.itemsize
            yield dict(zip(weight.stored if received else (), joined, strict=True)), size

    def _on_rank_0(self, weight: Weight, parts: Mapping[str, Tensor], dtype: torch.dtype) -> list[Tensor]:
        """All parts of a parameter on rank 0, in order; nothing on the others. Each part is sent by one rank."""
        rule = self.rules[weight.rule]
        holders = [copies[0] for copies in self._holders(weight)]
        rank = self.parallel.rank
        if rank > 0:
            if rank in holders:
                dist.send(parts[weight.parameter].detach().contiguous(), 0)
            return []
        received: list[Tensor] = []
        for holder in holders:
            if holder == 0:
                received.append(parts[weight.parameter].detach())
                continue
            shape = rule.shape(weight, len(holders))
            received.append(torch.empty(shape, dtype=dtype, device=self.parallel.device))
            dist.recv(received[-1], holder)
        return received

    def _sends(self, weight: Weight, turn: int) -> bool:
        """Whether this rank is the one that sends its part: those that hold copies of a part take turns."""
        holders = self._holders(weight)[self.part(weight).number]
        return holders[turn % len(holders)] == self.parallel.rank

    def _holders(self, weight: Weight) -> list[list[int]]:
        """Ranks that hold a parameter: those with a copy of each part, in the order of its parts."""
        expert: int | None = None
        if weight.expert is not None:
            assert self.settings.mixture is not None
            expert = weight.expert * self.parallel.sizes.expert // self.settings.mixture.experts
        part = self.part(weight)
        if not self.rules[weight.rule].divided:
            return [[r for number in self._numbers(expert) for r in self._ranks[self._stage(weight), expert, number]]]
        return [self._ranks[self._stage(weight), expert, number] for number in range(part.ways)]

    def _numbers(self, expert: int | None) -> range:
        """Of all parts that a parameter could be divided into."""
        return range(self.parallel.sizes.tensor if expert is None else self.parallel.sizes.expert_tensor)

    @cached_property
    def _ranks(self) -> dict[tuple[int, int | None, int], list[int]]:
        """Ranks that hold copies of a part, lowest first, by pipeline rank, expert-parallel rank (``None``: parameters
        that are no expert's) and number of the part."""
        found: dict[tuple[int, int | None, int], list[int]] = defaultdict(list)
        for place in self.parallel.places:
            found[place.pipeline, None, place.tensor].append(place.rank)
            found[place.pipeline, place.expert, place.expert_tensor].append(place.rank)
        return found

    def _stage(self, weight: Weight) -> int:
        """Pipeline rank of a parameter."""
        if weight.layer is not None:
            return self._stages[weight.layer]
        return 0 if weight.parameter.startswith("embedding") else self.parallel.sizes.pipeline - 1

    @cached_property
    def _stages(self) -> list[int]:
        """Pipeline rank of each layer."""
        counts = self.parallel.sizes.layers_by_stage(self.settings.layers)
        return [stage for part in counts for stage, number in enumerate(part) for _ in range(number)]

    def part(self, weight: Weight) -> Part:
        """Which part of a parameter this rank holds, where it holds one."""
        sizes, place = self.parallel.sizes, self.parallel.place
        if not self.rules[weight.rule].divided:
            return Part(0, 1)
        if weight.expert is not None:
            return Part(place.expert_tensor, sizes.expert_tensor)
        return Part(place.tensor, sizes.tensor)

    def _require_stored(self, weight: Weight, source: Source) -> None:
        for name, shape in zip(weight.stored, weight.shapes, strict=True):
            found = source.shape(name)
            if found is None:
                hint = "an output head that is not the embedding" if weight.parameter == HEAD else "this parameter"
                raise BackendError(
                    f"the weights have no tensor {name!r}, which a {self.settings.architecture} model has for {hint}",
                    fix="use a causal language model's folder as transformers saves it, or its right config.json",
                )
            if found != shape:
                raise BackendError(
                    f"{name!r} has shape {list(found)} in the weights, where config.json says {list(shape)}",
                    fix="give the weights the config.json that they were saved with",
                )

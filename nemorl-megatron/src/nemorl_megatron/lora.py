"""Low-rank adapters (arXiv:2106.09685) on the parallel linear layers of a policy.

# S = tokens of a row, B = rows, I = inputs, O = outputs of a stored linear layer, R = rank of the adapters

Each linear layer of the Hugging Face model has adapters of its own, as peft gives them, although megatron-core holds
queries, keys and values (gate and up) in one parameter: both training backends train the same numbers. Base weights
stay frozen and in place, so the frozen reference policy is the same model with adapters off, and what is exported is
base + adapter.

Over tensor-parallel ranks the factor beside the divided dimension of the weight is divided like it, the other one is on
every rank. What crosses ranks is [S, B, R]: of a column-parallel layer before it is multiplied by B, of a row-parallel
one after it was multiplied by A.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from nemorl.base.text.suggest import did_you_mean
from nemorl.errors import BackendError
from torch import Tensor, nn
from torch.nn.functional import linear

from nemorl_megatron.bridge.exchange import Exchange, global_names
from nemorl_megatron.bridge.tables import Weight, weights

if TYPE_CHECKING:
    from nemorl.config.models import LoraConfig

    from nemorl_megatron.bridge.rules import Index
    from nemorl_megatron.layers import AdaptedColumn, AdaptedRow
    from nemorl_megatron.model import PolicyModel
    from nemorl_megatron.parallel import Parallel
    from nemorl_megatron.settings import Settings

PEFT_PREFIX = "base_model.model."
"""Of every name in a file of adapters."""
A, B = "lora_A", "lora_B"


@dataclass(frozen=True)
class Target:
    """A parameter of linear layers, some of which get adapters."""

    weight: Weight
    chosen: tuple[bool, ...]
    """Of its stored tensors, in their order."""

    @property
    def module(self) -> str:
        """Global name of the module that holds the parameter."""
        return self.weight.parameter.removesuffix(".weight")

    @property
    def is_row(self) -> bool:
        """Inputs are divided over tensor-parallel ranks, not outputs."""
        return self.weight.rule == "row"

    def factors(self, rank: int) -> Iterator[Weight]:
        """A and B of each adapted layer, as parameters that are stored under peft's names."""
        for stored, (outputs, inputs), chosen in zip(self.weight.stored, self.weight.shapes, self.chosen, strict=True):
            if not chosen:
                continue
            layer = stored.removesuffix(".weight")
            name = f"{self.module}.adapter.{layer.rpartition('.')[2]}"
            for factor, shape in ((A, (rank, inputs)), (B, (outputs, rank))):
                is_divided = (factor == A) == self.is_row
                # A vocabulary is divided by rows; these divide evenly.
                rule = ("row" if self.is_row else "vocabulary") if is_divided else "whole"
                names = (f"{PEFT_PREFIX}{layer}.{factor}.weight",)
                yield Weight(f"{name}.{factor}", rule, names, (shape,), self.weight.layer)  # type: ignore[arg-type]


class Factors(nn.Module):
    """A and B of one stored linear layer: this rank's parts, float32 whatever the precision of the base."""

    def __init__(self, inputs: int, outputs: int, rank: int, device: str, *, is_row: bool, divided: bool) -> None:
        """
        Args:
            inputs: Of this rank.
            outputs: Of this rank.
            rank: Of the adapters.
            device: torch device string.
            is_row: Inputs are divided over ranks, not outputs.
            divided: The sequence is divided over ranks too.
        """
        super().__init__()
        self.lora_A = nn.Parameter(torch.empty(rank, inputs, dtype=torch.float32, device=device))
        self.lora_B = nn.Parameter(torch.empty(outputs, rank, dtype=torch.float32, device=device))
        part, whole = (self.lora_A, self.lora_B) if is_row else (self.lora_B, self.lora_A)
        set_tensor_model_parallel_attributes(part, True, int(is_row), 1)
        # Tells megatron-core to add up the gradients of all parts of the sequence.
        whole.sequence_parallel = divided  # type: ignore[attr-defined]


class Adapter(nn.Module):
    """The adapters of one parallel linear layer."""

    def __init__(self, target: Target, lora: LoraConfig, exchange: Exchange) -> None:
        super().__init__()
        parallel, part = exchange.parallel, exchange.part(target.weight)
        self.group: Any = None
        """The ranks that share the layer."""
        self.enabled = True
        self.sequence_parallel = parallel.sizes.sequence_parallel
        self._scale = lora.alpha / lora.rank
        self._dropout = nn.Dropout(lora.dropout)
        self._is_row = target.is_row
        self._widths: list[int] = []
        """Outputs of this rank, by stored layer."""
        self._factors: list[Factors | None] = []
        for stored, (outputs, inputs), chosen in zip(
            target.weight.stored, target.weight.shapes, target.chosen, strict=True
        ):
            own_inputs = inputs // part.ways if target.is_row else inputs
            own_outputs = outputs if target.is_row else outputs // part.ways
            self._widths.append(own_outputs)
            self._factors.append(None)
            if chosen:
                factors = Factors(
                    own_inputs,
                    own_outputs,
                    lora.rank,
                    parallel.device,
                    is_row=target.is_row,
                    divided=self.sequence_parallel,
                )
                self.add_module(stored.removesuffix(".weight").rpartition(".")[2], factors)
                self._factors[-1] = factors
        self._order = None if len(self._widths) == 1 else _order(target.weight, exchange).to(parallel.device)

    @property
    def axes(self) -> dict[str, int]:
        """The divided dimension of each divided parameter, by name."""
        return {
            f"{name}.{A if self._is_row else B}": int(self._is_row)
            for name, module in self.named_children()
            if isinstance(module, Factors)
        }

    def forward(self, states: Tensor, output: Tensor) -> Tensor:
        """``output`` of the base layer for ``states``, and what the adapters add to it."""
        if not self.enabled:
            return output
        chosen = [factors for factors in self._factors if factors is not None]
        inner = linear(self._dropout(states.float()), torch.cat([factors.lora_A for factors in chosen]))
        parts = iter(self._met(inner).chunk(len(chosen), -1))
        found = [
            output.new_zeros((*output.shape[:-1], width), dtype=torch.float32)
            if factors is None
            else linear(next(parts), factors.lora_B)
            for width, factors in zip(self._widths, self._factors, strict=True)
        ]
        delta = found[0] if self._order is None else torch.cat(found, -1)[..., self._order]
        return (output.float() + delta * self._scale).to(output.dtype)

    def _met(self, inner: Tensor) -> Tensor:
        """[S, B, R] of all tokens and inputs that this rank's B is for."""
        if self._is_row and self.sequence_parallel:
            return reduce_scatter_to_sequence_parallel_region(inner, group=self.group)  # type: ignore[no-any-return]
        if self._is_row:
            return reduce_from_tensor_model_parallel_region(inner, group=self.group)  # type: ignore[no-any-return]
        if self.sequence_parallel:
            return gather_from_sequence_parallel_region(inner, group=self.group)  # type: ignore[no-any-return]
        return copy_to_tensor_model_parallel_region(inner, group=self.group)  # type: ignore[no-any-return]

    @torch.no_grad()
    def delta(self) -> Tensor:
        """Delta of the adapters to this rank's part of the weight, float32."""
        inputs = next(factors.lora_A.shape[1] for factors in self._factors if factors is not None)
        device = next(self.parameters()).device
        found = [
            torch.zeros(width, inputs, device=device) if factors is None else factors.lora_B @ factors.lora_A
            for width, factors in zip(self._widths, self._factors, strict=True)
        ]
        delta = found[0] if self._order is None else torch.cat(found)[self._order]
        return delta * self._scale


class Adapters:
    """The adapters of this rank's pieces."""

    def __init__(
        self, pieces: Sequence[PolicyModel], settings: Settings, parallel: Parallel, lora: LoraConfig, seed: int
    ) -> None:
        """Insert them. B starts at zero, so the policy starts at the base model, which is frozen.

        Raises:
            BackendError: a target is no layer that can be adapted, or the layout does not allow it.
        """
        if settings.value_head:
            raise BackendError(
                "a value head is trained whole: training backend megatron has none over adapters",
                fix="remove policy.lora for this critic or reward model",
            )
        targets = _targets(settings, lora)
        _require_whole_heads(settings, parallel, targets)
        exchange = Exchange(settings, parallel)
        self._by_parameter: dict[str, Adapter] = {}
        modules = _linear_layers(pieces, settings, parallel)
        for piece in pieces:
            piece.requires_grad_(False)
            if piece.pre_process and piece.config.recompute_granularity is not None:
                # A layer is computed again in the backward pass only where its input has a gradient.
                piece.embedding.register_forward_hook(_with_gradient)
        for target in targets:
            if target.module in modules:
                layer = modules[target.module]
                layer.adapter = Adapter(target, lora, exchange)
                layer.adapter.group = layer.tp_group
                self._by_parameter[target.weight.parameter] = layer.adapter
        table = tuple(factor for target in targets for factor in target.factors(lora.rank))
        self._exchange = Exchange(settings, parallel, table)
        named = global_names(pieces, settings, parallel)
        self._parts = {factor.parameter: named[factor.parameter] for factor in table if factor.parameter in named}
        self._exchange.fill(self._parts, RandomAdapters(table, seed))

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Within it the model is the reference policy."""
        for adapter in self._by_parameter.values():
            adapter.enabled = False
        try:
            yield
        finally:
            for adapter in self._by_parameter.values():
                adapter.enabled = True

    def merged(self, parts: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """This rank's parts of the plain model, base + adapter, each computed when it is asked for."""
        return _Merged(parts, self._by_parameter)

    def published(self) -> Iterator[Mapping[str, Tensor]]:
        """Buckets of whole factors under the names of peft's files, on rank 0; empty ones elsewhere. Collective."""
        yield from self._exchange.whole(self._parts, torch.float32)


class _Merged(Mapping[str, Tensor]):
    def __init__(self, parts: Mapping[str, Tensor], adapters: Mapping[str, Adapter]) -> None:
        self._parts, self._adapters = parts, adapters

    def __getitem__(self, name: str) -> Tensor:
        base = self._parts[name].detach()
        if name not in self._adapters:
            return base
        return (base.float() + self._adapters[name].delta()).to(base.dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)


class RandomAdapters:
    """Freshly drawn adapters: B zero, A uniform within 1 / sqrt(I), as peft draws it. A factor depends on its name and
    the seed alone, so every layout gets the same ones. (``bridge.sources.Source``)"""

    def __init__(self, table: Sequence[Weight], seed: int) -> None:
        self._shapes = {factor.stored[0]: factor.shapes[0] for factor in table}
        self._seed = seed

    def shape(self, name: str) -> tuple[int, ...] | None:
        return self._shapes.get(name)

    def read(self, name: str, index: Index) -> Tensor:
        shape = self._shapes[name]
        if name.endswith(f".{B}.weight"):
            return torch.zeros(shape)[index]
        bound = 1 / math.sqrt(shape[1])
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self._seed} {name}".encode()))
        return torch.empty(shape).uniform_(-bound, bound, generator=generator)[index]


def _with_gradient(_module: Any, _args: Any, embeddings: Tensor) -> Tensor:
    return embeddings.requires_grad_() if torch.is_grad_enabled() else embeddings


def _order(weight: Weight, exchange: Exchange) -> Tensor:
    """Where each row of this rank's part of a parameter stands among its rows of the stored tensors, one after the
    other."""
    starts = [sum(shape[0] for shape in weight.shapes[:number]) for number in range(len(weight.shapes))]
    rows = {
        name: torch.arange(start, start + shape[0])[:, None]
        for name, start, shape in zip(weight.stored, starts, weight.shapes, strict=True)
    }
    numbered = Weight(weight.parameter, weight.rule, weight.stored, tuple((shape[0], 1) for shape in weight.shapes))
    found = exchange.rules[weight.rule].read(numbered, exchange.part(weight), lambda name, index: rows[name][index])
    ranks = torch.empty(len(found), dtype=torch.int64)
    ranks[found.squeeze(1).argsort()] = torch.arange(len(found))
    return ranks


def _targets(settings: Settings, lora: LoraConfig) -> list[Target]:
    """The parameters that get adapters.

    Raises:
        BackendError: a name in the config is that of no layer which can be adapted.
    """
    linears = [w for w in weights(settings) if w.expert is None and w.rule in ("qkv", "gate_up", "row")]
    candidates = [w for w in linears if w.parameter.endswith(".weight")]
    if lora.target_modules == "all-linear":
        # Of a mixture those that dtensor adapts too: peft takes its dense layers, which are called alike, for experts.
        chosen = [w for w in candidates if settings.mixture is None or ".self_attention." in w.parameter]
        return [Target(weight, (True,) * len(weight.stored)) for weight in chosen]
    found: list[Target] = []
    used: set[str] = set()
    for weight in candidates:
        names = [stored.removesuffix(".weight") for stored in weight.stored]
        matches = [{end for end in lora.target_modules if f".{name}".endswith(f".{end}")} for name in names]
        used.update(*matches)
        if any(matches):
            found.append(Target(weight, tuple(map(bool, matches))))
    unused = [end for end in lora.target_modules if end not in used]
    if unused:
        leaves = dict.fromkeys(s.split(".")[-2] for weight in candidates for s in weight.stored)
        raise BackendError(
            f"no linear layer that training backend megatron adapts is called {unused[0]!r} (it adapts attention and "
            f"dense feed-forward layers: {', '.join(leaves)}; not the output head, routers or experts)",
            fix=did_you_mean(unused[0], leaves) or "name such layers in policy.lora.target_modules, or use all-linear",
        )
    return found


def _require_whole_heads(settings: Settings, parallel: Parallel, targets: Sequence[Target]) -> None:
    ranks = parallel.sizes.tensor
    if settings.groups < ranks and any(target.weight.rule == "qkv" for target in targets):
        raise BackendError(
            f"LoRA on queries, keys and values takes a key-value head for each tensor-parallel rank: the model has "
            f"{settings.groups}, and policy.tensor_parallel_size is {ranks}",
            fix=f"set policy.tensor_parallel_size: {settings.groups} or less, or adapt other layers "
            "(policy.lora.target_modules)",
        )


def _linear_layers(
    pieces: Sequence[PolicyModel], settings: Settings, parallel: Parallel
) -> dict[str, AdaptedColumn | AdaptedRow]:
    """This rank's layers that can have adapters, by global name."""
    from nemorl_megatron.layers import AdaptedColumn, AdaptedRow

    names = {id(parameter): name for name, parameter in global_names(pieces, settings, parallel).items()}
    return {
        names[id(module.weight)].removesuffix(".weight"): module
        for piece in pieces
        for module in piece.modules()
        if isinstance(module, AdaptedColumn | AdaptedRow)
    }

"""Low-rank adapters of experts: each expert of a stack has an A and a B of its own.

# E = experts of a stack, I = inputs, O = outputs, R = rank, S = choices of tokens, in the order of their experts,
# T = tokens, K = experts of a token, D = hidden size

transformers 5 keeps the weights of all experts of a layer in stacks, ``experts.gate_up_proj`` and
``experts.down_proj``. An adapter of a stack has A [E, R, I] and B [E, O, R], and adds ``scaling * (x A^T) B^T`` to what
an expert makes of x, by grouped products: no expert's ``B A`` is ever made while training. Ranks that divide the
experts (``experts``) divide their adapters alike.

peft's files hold the same numbers as two matrices of a stack (``peft.tuners.lora.layer.ParamWrapper``): A as
[E * R, I], expert by expert, and B as [O, R * E], where neighbours are of the same entry of the rank.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from nemorl.errors import BackendError
from torch import Tensor, nn

from nemorl_dtensor.mixtures import ADAPTED_EXPERTS
from nemorl_dtensor.ranks import local

CHILD = "adapters"
"""Name of the module within the experts that holds their adapters, by the name of the stack."""
BYTES = 16
"""Grouped products on CUDA take rows that begin at multiples of so many."""


class StackAdapter(nn.Module):
    """The factors of one stack."""

    def __init__(self, experts: int, inputs: int, outputs: int, rank: int) -> None:
        super().__init__()
        self.lora_A = nn.Parameter(torch.zeros(experts, rank, inputs))
        self.lora_B = nn.Parameter(torch.zeros(experts, outputs, rank))
        self.scaling = 1.0
        self.is_on = True


@dataclass(frozen=True)
class LowRankStack:
    """Factors that grouped products take."""

    a: Tensor
    """[E, R, I]"""
    b: Tensor
    """[E, O, R]"""
    scaling: float


def add_adapters(model: Any, names: Collection[str], rank: int) -> dict[str, StackAdapter]:
    """Give stacks of experts adapters of zeros.

    Args:
        model: A transformers mixture.
        names: Ends of names of stacks, e.g. ``experts.down_proj``.
        rank: R.

    Returns:
        By their module's name.

    Raises:
        BackendError: The model has no such stacks, or is of a family that is not known here.
    """
    kind = model.config.get_text_config().model_type
    found: dict[str, StackAdapter] = {}
    used: set[str] = set()
    for path, experts in [*model.named_modules()]:
        stacks = [name for name, parameter in experts.named_parameters(recurse=False) if parameter.ndim == 3]
        ends = {stack: {end for end in names if f".{path}.{stack}".endswith(f".{end}")} for stack in stacks}
        adapters = {stack: _adapter_of(experts, stack, rank) for stack in stacks if ends[stack]}
        used |= set().union(*ends.values())
        if adapters:
            setattr(experts, CHILD, nn.ModuleDict(adapters))
            setattr(experts, "forward", partial(_forward, experts, experts.forward))  # noqa: B010  a method of its class
            found |= {f"{path}.{CHILD}.{stack}": adapter for stack, adapter in adapters.items()}
    if used != set(names) or kind not in ADAPTED_EXPERTS:
        unknown = ", ".join(sorted(set(names) - used))
        raise BackendError(
            f"{type(model).__name__} has no stacks of experts called {unknown}"
            if unknown
            else f"dtensor does not know how models of type {kind} apply their experts",
            fix="leave experts out of policy.lora.target_modules; of models of type "
            f"{', '.join(sorted(ADAPTED_EXPERTS))} experts.gate_up_proj and experts.down_proj can be named",
        )
    return found


def _adapter_of(experts: Any, stack: str, rank: int) -> StackAdapter:
    number, outputs, inputs = experts.get_parameter(stack).shape
    if vars(experts).get("is_transposed", False):
        inputs, outputs = outputs, inputs
    return StackAdapter(number, inputs, outputs, rank)


@torch.no_grad()
def draw(factor_ERI: Tensor, rank: int, generator: torch.Generator | None = None) -> None:
    """Fill the first entries of A's rank with what peft draws for them, the same way for each expert."""
    experts, _, inputs = factor_ERI.shape
    drawn = torch.empty(experts * rank, inputs)
    nn.init.kaiming_uniform_(drawn, a=math.sqrt(5), generator=generator)
    factor_ERI[:, :rank] = drawn.view(experts, rank, inputs)


def adapters_of(experts: nn.Module) -> dict[str, StackAdapter]:
    """By the name of the stack; empty where it has none."""
    children = dict(experts.named_children()).get(CHILD)
    found: dict[str, Any] = {} if children is None else dict(children.named_children())
    return found


def low_rank(experts: nn.Module) -> dict[str, LowRankStack]:
    """What this rank's experts add, by stack; empty where adapters are turned off, or there are none."""
    return {
        stack: LowRankStack(local(adapter.lora_A), local(adapter.lora_B), adapter.scaling)
        for stack, adapter in adapters_of(experts).items()
        if adapter.is_on
    }


def _forward(experts: Any, plain: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Any:
    """transformers' signature of experts, of which this rank has all."""
    low = low_rank(experts)
    if not low:
        return plain(hidden_states, top_k_index, top_k_weights)
    return adapted_experts(experts, low, hidden_states, top_k_index, top_k_weights)


def adapted_experts(
    experts: Any, low: Mapping[str, LowRankStack], states_TD: Tensor, experts_TK: Tensor, weights_TK: Tensor
) -> Tensor:
    """[T, D] weighted sum of what each token's experts make of it, adapters included.

    Args:
        experts: transformers' module, whose stacks are whole tensors.
        low: Factors, by the name of the stack.
        states_TD: Tokens.
        experts_TK: Of each token.
        weights_TK: Of these.
    """
    from transformers.integrations.moe import _grouped_linear

    # 1. Choices in the order of experts.
    tokens, choices = experts_TK.shape
    chosen_S, order_S = torch.sort(experts_TK.reshape(-1), stable=True)
    ends_E = torch.bincount(chosen_S, minlength=experts.num_experts).cumsum(0).to(torch.int32)

    def product(stack: str, states_SI: Tensor) -> Tensor:
        bias_SO = getattr(experts, f"{stack}_bias")[chosen_S] if experts.has_bias else None
        base_EOI = getattr(experts, stack)
        made_SO: Tensor = _grouped_linear(states_SI, base_EOI, ends_E, bias_SO, experts.is_transposed)
        if stack not in low:
            return made_SO
        a_ERI, b_EOR = (_aligned(factor.to(states_SI.dtype), axis) for factor, axis in _factors(low[stack]))
        narrow_SR = _grouped_linear(states_SI, a_ERI, ends_E) * low[stack].scaling
        return made_SO + _grouped_linear(narrow_SR, b_EOR, ends_E)

    # 2. What each expert makes of its tokens: up, through the activation, down.
    first_SI = states_TD[order_S // choices]
    if experts.has_gate:
        middle_SI = experts._apply_gate(product("gate_up_proj", first_SI))
    else:
        middle_SI = experts.act_fn(product("up_proj", first_SI))
    last_SD = product("down_proj", middle_SI) * weights_TK.reshape(-1)[order_S].unsqueeze(-1)

    # 3. In the order of tokens again. A sum over choices is the same each time, unlike additions to the same row.
    place_S = torch.empty_like(order_S)
    place_S[order_S] = torch.arange(len(order_S), device=order_S.device)
    return last_SD[place_S].view(tokens, choices, last_SD.shape[1]).sum(1).to(states_TD.dtype)


def _factors(low: LowRankStack) -> Iterator[tuple[Tensor, int]]:
    """Each factor with the axis of its rank."""
    yield low.a, 1
    yield low.b, 2


def _aligned(factor: Tensor, axis: int) -> Tensor:
    """With zeros beyond the rank, up to the next size that grouped products take."""
    missing = -factor.shape[axis] % (BYTES // factor.element_size())
    padding = (0, missing) if axis == 2 else (0, 0, 0, missing)
    return nn.functional.pad(factor, padding) if missing else factor


def delta(a_ERI: Tensor, b_EOR: Tensor, scaling: float, *, transposed: bool) -> Tensor:
    """What adapters add to a stack, in its form: [E, O, I], or [E, I, O] where it is transposed."""
    found_EOI = torch.bmm(b_EOR, a_ERI) * scaling
    return found_EOI.transpose(1, 2) if transposed else found_EOI


def file_modules(model: nn.Module) -> dict[str, str]:
    """The module in peft's files of each adapter, by its module's name here.

    peft wraps the experts once for each stack, in the order of their parameters: the last one is the outermost.
    """
    found: dict[str, str] = {}
    for path, experts in model.named_modules():
        adapted = adapters_of(experts)
        order = [name for name, _ in experts.named_parameters(recurse=False) if name in adapted]
        for depth, stack in enumerate(reversed(order)):
            found[f"{path}.{CHILD}.{stack}"] = ".".join([path, *["base_layer"] * depth])
    return found


def to_file(factor: Tensor, *, is_first: bool) -> Tensor:
    """A [E, R, I] as [E * R, I], or B [E, O, R] as [O, R * E].

    >>> to_file(torch.tensor([[[1, 2]], [[3, 4]]]), is_first=False)  # two experts, one output, rank 2
    tensor([[1, 3, 2, 4]])
    """
    return factor.flatten(0, 1) if is_first else factor.permute(1, 2, 0).flatten(1)


def from_file(matrix: Tensor, experts: int, *, is_first: bool) -> Tensor:
    """The other way round.

    >>> from_file(torch.tensor([[1, 3, 2, 4]]), 2, is_first=False)
    tensor([[[1, 2]],
    <BLANKLINE>
            [[3, 4]]])
    """
    if is_first:
        return matrix.reshape(experts, -1, matrix.shape[1])
    return matrix.reshape(matrix.shape[0], -1, experts).permute(2, 0, 1)

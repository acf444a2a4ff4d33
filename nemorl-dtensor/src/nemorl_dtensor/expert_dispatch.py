"""Tokens go to the ranks that have their experts, and come back.

# T = tokens of this rank, K = experts a token is sent to, S = T * K, R = tokens that arrive, D = hidden size,
# E = experts, G = ranks that divide them, each with E / G neighbours

One exchange of counts, one of states there, one back; the backward pass makes the two of states in reverse. Every rank
takes part in each, also one that has or gets no token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

Compute = Callable[[Tensor, Tensor], Tensor]
"""([R, D] states, [R] local expert of each) -> [R, D], not weighted yet"""


def dispatched(
    states_TD: Tensor, experts_TK: Tensor, weights_TK: Tensor, experts: int, group: ProcessGroup, compute: Compute
) -> Tensor:
    """[T, D] weighted sum of what each token's experts make of it. Collective.

    Args:
        states_TD: This rank's tokens.
        experts_TK: int64 expert of each choice, of all E.
        weights_TK: Of each choice; differentiable.
        experts: E.
        group: The G ranks, in the order of their experts.
        compute: Applies this rank's experts.
    """
    tokens, choices = experts_TK.shape
    ranks = group.size()

    # 1. Choices in the order of experts, hence of the ranks that have them.
    chosen_S = experts_TK.reshape(-1)
    order_S = torch.argsort(chosen_S, stable=True)
    sent_GE = torch.bincount(chosen_S, minlength=experts).view(ranks, -1)
    received_GE = torch.empty_like(sent_GE)
    dist.all_to_all_single(received_GE, sent_GE, group=group)
    sent, received = torch.stack([sent_GE.sum(1), received_GE.sum(1)]).tolist()  # the one wait for the device

    # 2. There, through the experts, and back.
    arrived_RD = exchanged(states_TD[order_S // choices], sent, received, group)
    local_E = torch.arange(experts // ranks, device=states_TD.device)
    made_RD = compute(arrived_RD, local_E.repeat(ranks).repeat_interleave(received_GE.reshape(-1)))
    returned_SD = exchanged(made_RD, received, sent, group)

    # 3. In the order of tokens again. A sum over choices is the same each time, unlike additions to the same row.
    place_S = torch.empty_like(order_S)
    place_S[order_S] = torch.arange(len(order_S), device=order_S.device)
    weighted_TKD = returned_SD[place_S].view(tokens, choices, -1) * weights_TK.unsqueeze(-1)
    return weighted_TKD.sum(1).to(states_TD.dtype)


def exchanged(rows: Tensor, sent: Sequence[int], received: Sequence[int], group: ProcessGroup) -> Tensor:
    """[sum(received), …]: the first ``sent[0]`` rows go to the first rank, and so on. Differentiable, collective.

    Args:
        rows: [sum(sent), …].
        sent: Rows for each rank of the group.
        received: Rows from each.
        group: The ranks.
    """
    found: Tensor = _Exchange.apply(rows, list(sent), list(received), group)  # type: ignore[no-untyped-call]
    return found


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: ProcessGroup) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _all_to_all(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _all_to_all(grads[0], ctx.received, ctx.sent, ctx.group), None, None, None


def _all_to_all(rows: Tensor, sent: list[int], received: list[int], group: ProcessGroup) -> Tensor:
    found = rows.new_empty((sum(received), *rows.shape[1:]))
    dist.all_to_all_single(found, rows.contiguous(), received, sent, group=group)
    return found

"""Rows whose tokens are shared out over context-parallel ranks, for a model that spreads them over its attention heads.

# R = rows, W = row width, k = ranks that share them, S = W / k = tokens of a slice, M = scored tokens

Every rank of a group is given the same rows and computes slice r of each. Only attention looks at other tokens: there
slices are traded for heads (``ulysses``), so that each mask is that of whole rows. What is scored is put together
again, so that every rank computes the same loss; its gradient goes to the slice that has the predicting state.
Parameters get the sum over ranks, as they do over ranks with other data.

It reaches unmodified models through transformers' registry of attention functions.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from nemorl.errors import BackendError
from nemorl_tensors.engines.context_rows import added_up, own_columns
from nemorl_tensors.engines.rows import Rows, Tree
from nemorl_tensors.engines.tree_attention import TreePlan, torch_attention, tree_attention
from torch import Tensor, nn

from nemorl_dtensor.attention_common import attention_with_common
from nemorl_dtensor.tree_attention import FULL_ATTENTION, beyond_full_attention, registered, tree_plan
from nemorl_dtensor.ulysses import by_heads, by_slices

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NAME = "nemorl_context_parallel"
KEYWORD = "shared_rows"
"""Of the argument of a decoder's forward pass that carries a :class:`SharedRows` to each layer's attention."""
PLAIN = "sdpa"
"""The attention function that calls without shared rows go to."""
MEASURED_ROPE = frozenset({"dynamic", "longrope"})
"""Rotary embeddings whose frequencies follow from the longest position in sight: that of a slice is another."""
FIX = "set policy.backend.context_parallel_size: 1; backend: megatron divides sequences of more architectures"


@dataclass(frozen=True)
class SharedRows:
    """What attention must know of the rows that a rank sees a slice of."""

    group: dist.ProcessGroup
    plan: TreePlan | None
    """Which token attends to which, in one row of several sequences; ``None``: each row is one sequence"""


@dataclass(frozen=True)
class OwnPart:
    """A rank's slice of some rows, and how what is found of it becomes part of what is found of all."""

    rows: Rows
    """The slice, with the positions that its tokens have in whole rows"""
    shared: SharedRows
    places: Tensor
    """Which of the M scored tokens the slice predicts"""
    scored: int
    """M"""

    @classmethod
    def of(cls, rows: Rows, group: dist.ProcessGroup, dtype: torch.dtype) -> OwnPart:
        """That of this rank.

        Args:
            rows: The same on all ranks of the group; their width is a multiple of the group's size.
            group: The ranks that share them, in the order of their slices.
            dtype: Precision of the model.
        """
        part, places = own_slice(rows, group)
        return cls(part, SharedRows(group, _plan(rows, dtype)), places, rows.targets.numel())

    def states(self, decoder: nn.Module) -> Tensor:
        """[R, S, D] last hidden states of the slice."""
        # A mask of four axes is taken as it is: the model makes none of its own, of a slice.
        unread = torch.ones((1, 1, 1, 1), dtype=torch.bool, device=self.rows.input_ids.device)
        states: Tensor = decoder(
            input_ids=self.rows.input_ids,
            position_ids=self.rows.position_ids,
            attention_mask=unread,
            use_cache=False,
            **{KEYWORD: self.shared},
        ).last_hidden_state
        return states

    def together(self, found: Any) -> Any:
        """[M, ...] what the ranks found of all scored tokens, from what this one found of its own. Collective."""
        if isinstance(found, tuple):
            return tuple(self.together(each) for each in found)
        whole = found.new_zeros((self.scored, *found.shape[1:])).index_copy(0, self.places, found)
        return added_up(whole, self.shared.group)


def own_slice(rows: Rows, group: dist.ProcessGroup) -> tuple[Rows, Tensor]:
    """This rank's tokens of rows, and which of the scored tokens they predict."""
    size = rows.input_ids.shape[1] // group.size()
    first = group.rank() * size
    return own_columns(rows, torch.arange(first, first + size, device=rows.input_ids.device))


def _plan(rows: Rows, dtype: torch.dtype) -> TreePlan | None:
    """Of one row of several sequences, which may share tokens."""
    tree = rows.tree
    if tree is None and rows.position_ids is not None:  # packed: they share none
        starts = torch.nonzero(rows.position_ids[0] == 0).squeeze(1)
        lengths = tuple(starts.diff(append=starts.new_tensor([rows.position_ids.shape[1]])).tolist())
        slots = starts[:, None] + torch.arange(max(lengths), device=starts.device)
        tree = Tree(slots.clamp(max=rows.position_ids.shape[1] - 1), lengths, lengths)
    return None if tree is None else tree_plan(tree, dtype, rows.input_ids.device)


def share_rows(model: PreTrainedModel, ranks: int, *, tensor_parallel: int) -> None:
    """Have a model, whose parameters may be on the meta device, compute attention over rows that ranks share.

    Args:
        model: As transformers makes it. Its attention function changes, to one that is the same for other rows.
        ranks: That share each row.
        tensor_parallel: Ranks that divide its layers.

    Raises:
        BackendError: Its layers look at other tokens in ways that this does not serve.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    obstacle = _obstacle(model, ranks, tensor_parallel)
    if not obstacle:
        AttentionInterface.register(NAME, attend)
        AttentionMaskInterface.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS[PLAIN])
        model.set_attn_implementation(NAME)
        if model.config._attn_implementation != NAME:
            obstacle = "it does not take its attention from transformers' registry"
    if obstacle:
        raise BackendError(
            f"{type(model).__name__} cannot share its rows over {ranks} context-parallel ranks: {obstacle}", fix=FIX
        )


def _obstacle(model: PreTrainedModel, ranks: int, tensor_parallel: int) -> str:
    """Why the tokens of a model's rows cannot be shared out; empty if nothing is known against it."""
    config = model.config.get_text_config()
    kinds = {kind for kind in getattr(config, "layer_types", None) or () if kind != FULL_ATTENTION}
    if kinds:
        return f"it has layers of {', '.join(sorted(kinds))}"
    heads, ways = config.num_attention_heads, ranks * tensor_parallel
    if heads % ways:
        return f"{heads} attention heads do not divide over {ways} ranks"
    if model.config._attn_implementation != PLAIN:
        return f"its attention is {model.config._attn_implementation}, and only {PLAIN} is extended"
    parameters = inspect.signature(model.get_decoder().forward).parameters  # type: ignore[no-untyped-call]
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return "its decoder passes no further arguments on to its attention"
    rotary = {getattr(module, "rope_type", None) for module in model.modules()} & MEASURED_ROPE
    return f"its {rotary.pop()} rotary embedding goes by the longest position of a pass" if rotary else ""


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    shared_rows: SharedRows | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """An attention function of transformers: [R, H, S, d] queries, [R, G, S, d] keys and values -> [R, S, H, d].

    Calls without shared rows go to the function that this one extends.

    Raises:
        BackendError: the model asks for more than full causal attention.
    """
    if shared_rows is None:
        return registered(PLAIN)(module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **options)
    if unknown := beyond_full_attention(options):
        raise BackendError(f"context parallelism knows no attention with {', '.join(unknown)}", fix=FIX)
    queries, keys, values = by_heads(query, key, value, shared_rows.group)
    if shared_rows.plan is None:
        answers = torch_attention(queries, keys, values, None, scaling)
    else:
        found_by_token = tree_attention(
            shared_rows.plan, queries, keys, values, scaling, torch_attention, attention_with_common
        )
        answers = found_by_token[None]
    return by_slices(answers, shared_rows.group), None

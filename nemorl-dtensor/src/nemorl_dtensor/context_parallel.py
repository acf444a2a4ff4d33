"""Rows whose tokens are shared out over context-parallel ranks, for a model whose attention brings them together.

# R = rows, W = row width, k = ranks that share them, S = W / k = tokens of a rank's part, M = scored tokens

Every rank of a group is given the same rows and computes its columns of each. Only attention looks at other tokens:
columns are traded for heads there (``ulysses``), or keys and values go round (``ring``); either way what a token sees
is what it sees in whole rows. What is scored is put together again, so that every rank computes the same loss; its
gradient goes to the part that has the predicting state. Parameters get the sum over ranks, as they do over ranks with
other data.

It reaches unmodified models through transformers' registry of attention functions.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from nemorl.errors import BackendError
from nemorl_tensors.engines.context_rows import added_up, own_columns
from nemorl_tensors.engines.rows import Rows, Tree
from torch import Tensor, nn

from nemorl_dtensor.config import ContextMethod, Method, method_of
from nemorl_dtensor.ring import Ring
from nemorl_dtensor.tree_attention import FULL_ATTENTION, beyond_full_attention, registered
from nemorl_dtensor.ulysses import Ulysses

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


class SharedRows(Protocol):
    """What attention must know of the rows that a rank sees a part of."""

    def attention(self, query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
        """[R, S, H, d'] of [R, H, S, d] queries and [R, G, S, d], [R, G, S, d'] keys and values. Collective, as is the
        gradient."""


class Sharing(Protocol):
    """A way in which ranks share rows."""

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks."""

    @property
    def width_multiple(self) -> int:
        """Rows that they share have a multiple of so many columns."""

    def columns(self, width: int) -> list[int]:
        """This rank's S places in a row."""

    def shared(self, tree: Tree | None, width: int, dtype: torch.dtype, device: torch.device) -> SharedRows:
        """Rows of that width, of which a single one has the sequences of ``tree``; ``None``: each is one sequence."""


METHODS: Mapping[Method, Callable[[dist.ProcessGroup], Sharing]] = {"ulysses": Ulysses, "ring": Ring}


@dataclass(frozen=True)
class OwnPart:
    """A rank's part of some rows, and how what is found of it becomes part of what is found of all."""

    rows: Rows
    """The part, with the positions that its tokens have in whole rows"""
    shared: SharedRows
    group: dist.ProcessGroup
    """The ranks that have the other parts"""
    places: Tensor
    """Which of the M scored tokens the part predicts"""
    scored: int
    """M"""

    @classmethod
    def of(cls, rows: Rows, sharing: Sharing, dtype: torch.dtype) -> OwnPart:
        """That of this rank.

        Args:
            rows: The same on all ranks; their width is a multiple of what the way of sharing asks for.
            sharing: How they are shared.
            dtype: Precision of the model.
        """
        part, places = own_part(rows, sharing)
        shared = sharing.shared(_tree(rows), rows.input_ids.shape[1], dtype, rows.input_ids.device)
        return cls(part, shared, sharing.group, places, rows.targets.numel())

    def states(self, decoder: nn.Module) -> Tensor:
        """[R, S, D] last hidden states of the part."""
        # A mask of four axes is taken as it is: the model makes none of its own, of a part.
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
        return added_up(whole, self.group)


def own_part(rows: Rows, sharing: Sharing) -> tuple[Rows, Tensor]:
    """This rank's tokens of rows, and which of the scored tokens they predict."""
    columns = sharing.columns(rows.input_ids.shape[1])
    return own_columns(rows, torch.tensor(columns, dtype=torch.int64, device=rows.input_ids.device))


def _tree(rows: Rows) -> Tree | None:
    """Of one row of several sequences, which may share tokens; ``None``: each row is one sequence."""
    tree = rows.tree
    if tree is None and rows.position_ids is not None:  # packed: they share none
        starts = torch.nonzero(rows.position_ids[0] == 0).squeeze(1)
        lengths = tuple(starts.diff(append=starts.new_tensor([rows.position_ids.shape[1]])).tolist())
        slots = starts[:, None] + torch.arange(max(lengths), device=starts.device)
        tree = Tree(slots.clamp(max=rows.position_ids.shape[1] - 1), lengths, lengths)
    return tree


def share_rows(
    model: PreTrainedModel, group: dist.ProcessGroup, *, tensor_parallel: int, method: ContextMethod = "auto"
) -> Sharing:
    """Have a model, whose parameters may be on the meta device, compute attention over rows that ranks share.

    Args:
        model: As transformers makes it. Its attention function changes, to one that is the same for other rows.
        group: The ranks that share each row, in order.
        tensor_parallel: Ranks that divide its layers.
        method: How they share them.

    Returns:
        How they share them.

    Raises:
        BackendError: Its layers look at other tokens in ways that this does not serve.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    ranks, heads = group.size(), model.config.get_text_config().num_attention_heads
    chosen = method_of(method, heads, ranks * tensor_parallel)
    obstacle = _obstacle(model)
    if chosen == "ulysses" and heads % (ranks * tensor_parallel):
        obstacle = (
            f"{heads} attention heads do not divide over {ranks * tensor_parallel} ranks, and it is not to be a ring"
        )
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
    return METHODS[chosen](group)


def _obstacle(model: PreTrainedModel) -> str:
    """Why the tokens of a model's rows cannot be shared out; empty if nothing is known against it."""
    config = model.config.get_text_config()
    kinds = {kind for kind in getattr(config, "layer_types", None) or () if kind != FULL_ATTENTION}
    if kinds:
        return f"it has layers of {', '.join(sorted(kinds))}"
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
    return shared_rows.attention(query, key, value, scaling), None

"""How attention over rows of a prefix forest (``engines.tree_attention``) gets into transformers' models.

# W = row width, H and G = heads of queries and of keys, E = head size

It reaches unmodified models through transformers' registry of attention functions, under ``NAME`` and that of
the function it extends, which rows without a tree go to, as if it had been chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from nemorl.errors import BackendError
from nemorl_tensors.engines.rows import Tree
from nemorl_tensors.engines.tree_attention import TreePlan, torch_attention, tree_attention
from torch import Tensor

from nemorl_dtensor import attention_cpu
from nemorl_dtensor.attention_common import attention_with_common

NAME = "nemorl_shared_prefix"
KEYWORD = "prefix_tree"
"""Of the argument of a decoder's forward pass that carries a :class:`TreePlan` to each layer's attention."""
FULL_ATTENTION = "full_attention"
"""transformers' name for layers that attend to all tokens before."""
EXTENDED = ("sdpa", attention_cpu.NAME)
"""Attention functions that rows without a tree may go to."""
MIN_COMMON_SCORES = 1 << 16
"""Of a head. Of four heads of 32 numbers a training step of 15 responses of 64 tokens to 512 (490,000 scores) takes
0.81 times as long, one of 7 responses to 128 (57,000), whose calls cost what they save, 1.0 to 1.04 times."""
UNDERSTOOD = frozenset({"position_ids", "output_attentions", "output_hidden_states", "use_cache", "cache_position"})
"""Further arguments of attention functions that change nothing here."""


def tree_arguments(tree: Tree, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """Arguments of a decoder's forward pass over a row with a tree, in precision ``dtype``."""
    # A mask of four axes is taken as it is: none of row width by row width is made.
    unread = torch.ones((1, 1, 1, 1), dtype=torch.bool, device=device)
    return {KEYWORD: tree_plan(tree, dtype, device), "attention_mask": unread}


def tree_plan(tree: Tree, dtype: torch.dtype, device: torch.device) -> TreePlan:
    """The plan of a tree for attention in precision ``dtype`` on a device."""
    least = MIN_COMMON_SCORES if device.type == "cpu" else None
    return TreePlan.of(tree, dtype, min_common_scores=least).to(device)


def register(plain: str) -> str:
    """Make this attention known to transformers.

    Args:
        plain: Name of the attention function of rows without a tree, one of ``EXTENDED``.

    Returns:
        The name it got.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    name = f"{NAME}_over_{plain}"
    AttentionInterface.register(name, partial(attend, plain))
    AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[plain])
    return name


def attend(
    plain: str,
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    prefix_tree: TreePlan | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """An attention function of transformers: [1, H, W, E] queries, [1, G, W, E] keys and values -> [1, W, H, E].

    Rows without a tree go to the function ``plain``.

    Raises:
        BackendError: the model asks for more than full causal attention, in a row with a tree.
    """
    if prefix_tree is None:
        return registered(plain)(module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **options)
    if unknown := beyond_full_attention(options):
        raise BackendError(f"its attention has {', '.join(unknown)}")
    own = attention_cpu.attention if plain == attention_cpu.NAME else torch_attention
    return tree_attention(prefix_tree, query, key, value, scaling, own, attention_with_common)[None], None


def registered(name: str) -> Callable[..., tuple[Tensor, None]]:
    """An attention function of transformers."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    found: Callable[..., tuple[Tensor, None]] = ALL_ATTENTION_FUNCTIONS[name]
    return found


def beyond_full_attention(options: Mapping[str, Any]) -> list[str]:
    """What a model asks of its attention that is more than full causal attention, by name."""
    return sorted(name for name, given in options.items() if given is not None and name not in UNDERSTOOD)

"""Whether a model can compute the shared layout, and which layout its batches get.

The shared layout is exact where attention is full and causal and positions come from ``position_ids``. Models say so in
no common way, so it is tried when a model is built: states of a small tree against those of its sequences alone. What
a model's attention asks for beside (a sliding window, sinks, a cap on scores) is refused by name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from nemorl.errors import BackendError, NemorlError
from nemorl_tensors.engines.layouts import EACH_FOR_ITSELF, Layout, probe_batch
from nemorl_tensors.engines.prefix_forest import MIN_RATIO
from nemorl_tensors.engines.rows import Rows, to_rows
from nemorl_tensors.engines.tree_rows import to_tree_rows
from torch import Tensor, nn

from nemorl_dtensor import tree_attention

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FULL_ATTENTION = "full_attention"
"""transformers' name for layers that attend to all tokens before."""
STATES_TOLERANCE = {torch.float32: 1e-3}
"""Largest error of the states, relative to their norm; other precisions: ``ROUNDED``."""
ROUNDED = 0.1


def share_prefixes(
    model: PreTrainedModel, decoder: nn.Module, states: Callable[[Rows], Tensor], *, width_multiple: int = 1
) -> str:
    """Make ``model`` able to compute rows with a tree, if it can. Collective where the model is sharded.

    Args:
        model: As transformers runs it. Its attention function changes, to one that is the same for other rows.
        decoder: Its part below the head.
        states: [M, D] states that predict the scored tokens of rows, by that decoder.
        width_multiple: Of the rows' width.

    Returns:
        Why it cannot; empty if it can.
    """
    config = model.config.get_text_config()
    kinds = {kind for kind in getattr(config, "layer_types", None) or () if kind != FULL_ATTENTION}
    if kinds:
        return f"{type(model).__name__} has layers of {', '.join(sorted(kinds))}"
    plain = model.config._attn_implementation
    if plain not in tree_attention.EXTENDED:
        return f"its attention is {plain}, and only {' and '.join(tree_attention.EXTENDED)} are extended"
    parameters = inspect.signature(decoder.forward).parameters.values()
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return f"{type(decoder).__name__} passes no further arguments on to its attention"
    name = tree_attention.register(plain)
    model.set_attn_implementation(name)
    try:
        obstacle = _obstacle(model, states, width_multiple)
        if model.config._attn_implementation != name:
            obstacle = f"{type(model).__name__} does not take its attention from transformers' registry"
    except (NemorlError, TypeError, ValueError, KeyError, AttributeError, RuntimeError) as error:
        obstacle = f"{type(model).__name__}: {error}"
    if obstacle:
        model.set_attn_implementation(plain)
    return obstacle


@torch.no_grad()
def _obstacle(model: PreTrainedModel, states: Callable[[Rows], Tensor], width_multiple: int) -> str:
    """How the states of a tree differ from those of its sequences alone; empty if they do not."""
    batch = probe_batch(model.config.get_text_config().vocab_size).to(model.device)
    together = states(to_tree_rows(batch, width_multiple=width_multiple)).float()
    alone = states(to_rows(batch, packed=False, width_multiple=width_multiple)).float()
    error = float((together - alone).norm() / alone.norm())
    if error <= STATES_TOLERANCE.get(next(model.parameters()).dtype, ROUNDED):
        return ""
    return f"states of {type(model).__name__} differ by {error:.3g} of their norm when sequences share tokens"


def choose_layout(requested: str, *, packed: bool, obstacle: str) -> Layout:
    """The layout for a model.

    Args:
        requested: ``DTensorConfig.layout``.
        packed: Sequences share rows where they do not share tokens.
        obstacle: Why the model cannot compute the shared layout; empty if it can.

    Raises:
        BackendError: the shared layout is asked for, and the model cannot.
    """
    if requested == "shared" and obstacle:
        raise BackendError(
            f"layout shared does not work with this model: {obstacle}", fix="set policy.backend.layout: auto"
        )
    if requested == "shared":
        return Layout(packed=packed, min_ratio=1.0)
    if requested == "auto" and not packed:
        remarks = [f"{EACH_FOR_ITSELF}: {obstacle}"] if obstacle else []
        return Layout(packed=packed, min_ratio=None if obstacle else MIN_RATIO, remarks=remarks)
    return Layout(packed=packed, min_ratio=None)

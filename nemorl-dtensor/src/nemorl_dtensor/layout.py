"""Which of the layouts of ``nemorl_tensors.engines`` a batch gets, and whether a model can compute the shared one.

The shared layout is exact where attention is full and causal and positions come from ``position_ids``. Models say so in
no common way, so it is tried when a model is built: states of a small tree against those of its sequences alone. What
a model's attention asks for beside (a sliding window, sinks, a cap on scores) is refused by name.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from nemorl.errors import BackendError, NemorlError
from nemorl.metrics import Mean, Metrics
from nemorl_tensors import TokenBatch
from nemorl_tensors.engines.prefix_forest import MIN_RATIO, PrefixForest, plan_trees
from nemorl_tensors.engines.rows import Rows, fed_lengths, plan_microbatches, to_rows
from nemorl_tensors.engines.tree_rows import to_tree_rows
from torch import Tensor, nn

from nemorl_dtensor import tree_attention

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)

FULL_ATTENTION = "full_attention"
"""What transformers calls layers that attend to all tokens before."""
MAX_PADDING = 2.0
"""Padded tokens per token from which rows of their own are given up for a row without padding."""
PROBE_TREE = ((0, 1, 2, 3, 4, 5), (0, 1, 2, 3, 6), (0, 1, 7, 8, 9, 10, 11), (0, 1, 2), (12, 13))
"""Sequences of the check, as indices of distinct tokens: branches at two depths, a prefix of another, a stranger."""
STATES_TOLERANCE = {torch.float32: 1e-3}
"""Largest error of the states, relative to their norm; other precisions: ``ROUNDED``."""
ROUNDED = 0.1


class Layout:
    """How batches become rows."""

    def __init__(self, *, packed: bool, min_ratio: float | None, obstacle: str = "") -> None:
        """
        Args:
            packed: Sequences share rows where they do not share tokens.
            min_ratio: Tokens of the sequences per computed one above which they share tokens; ``None``: never.
            obstacle: Why they do not, where the config would let them.
        """
        self.is_packed, self._min_ratio, self._obstacle = packed, min_ratio, obstacle

    def plan(self, batch: TokenBatch, budget: int) -> list[list[int]]:
        """Sequence indices per microbatch, up to ``budget`` computed tokens."""
        forest = PrefixForest.of_batch(batch) if self._min_ratio is not None or self._obstacle else None
        if forest is not None and forest.ratio > (self._min_ratio or MIN_RATIO):
            if self._min_ratio is not None:
                return plan_trees(batch, forest, budget)
            log.warning("sequences share %.1fx of their tokens, computed for each: %s", forest.ratio, self._obstacle)
            self._obstacle = ""  # once is enough
        return plan_microbatches(batch, budget, padded=not self.is_packed)

    def rows(self, microbatch: TokenBatch, *, width_multiple: int, candidates: bool = False) -> Rows:
        """A microbatch of the plan, laid out for the model."""
        if self._shares(microbatch):
            return to_tree_rows(microbatch, width_multiple=width_multiple, candidates=candidates)
        return to_rows(microbatch, packed=self.is_packed, width_multiple=width_multiple, candidates=candidates)

    def metrics(self, batch: TokenBatch, plan: list[list[int]]) -> Metrics:
        """``tree_ratio``: tokens of the sequences per computed one, padding not counted."""
        parts = [batch.select(sequences) for sequences in plan]
        forests = [(PrefixForest.of_batch(part), self._shares(part)) for part in parts]
        fed = sum(forest.sequence_tokens for forest, _ in forests)
        computed = sum(forest.tokens if shares else forest.sequence_tokens for forest, shares in forests)
        return {"tree_ratio": Mean(float(fed), float(computed))} if fed else {}

    def _shares(self, microbatch: TokenBatch) -> bool:
        if self._min_ratio is None:
            return False
        forest, fed = PrefixForest.of_batch(microbatch), fed_lengths(microbatch)
        padded = int(fed.max()) * int((fed > 0).sum()) if len(fed) else 0
        # A plan by trees may leave sequences together that share nothing and are of all lengths.
        return forest.ratio > self._min_ratio or padded > MAX_PADDING * forest.tokens


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
    vocabulary = model.config.get_text_config().vocab_size
    sequences = [[1 + index * 7 % max(1, vocabulary - 1) for index in members] for members in PROBE_TREE]
    batch = TokenBatch.from_sequences(sequences, [[True] * len(members) for members in sequences]).to(model.device)
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
        return Layout(packed=packed, min_ratio=None if obstacle else MIN_RATIO, obstacle=obstacle)
    return Layout(packed=packed, min_ratio=None)

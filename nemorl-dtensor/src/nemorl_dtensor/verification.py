"""What a built model proves before it is used, and the layout of batches that follows from it.

# R = rows, W = row width, M = scored tokens, D = hidden size, V = vocabulary

1. Its scores are those of the model's own forward pass in transformers: wrong numbers are an error, never a result.
2. Its states are the same where sequences share tokens. The shared layout is exact where attention is full and causal
   and positions come from ``position_ids``. Models say so in no common way, so it is tried on a small tree. What a
   model's attention asks for beside (a sliding window, sinks, a cap on scores) is refused by name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from nemorl.errors import BackendError, NemorlError
from nemorl.media import FIRST_ID
from nemorl_tensors.engines.layouts import EACH_FOR_ITSELF, Layout, probe_batch
from nemorl_tensors.engines.prefix_forest import MIN_RATIO
from nemorl_tensors.engines.rows import Rows, to_rows
from nemorl_tensors.engines.tree_rows import to_tree_rows
from torch import Tensor, nn

from nemorl_dtensor import context_parallel, tree_attention
from nemorl_dtensor.model_head import Scorer, unsupported
from nemorl_dtensor.ranks import computing_device
from nemorl_dtensor.sharded_head import ShardedScorer
from nemorl_dtensor.sharding import reshard
from nemorl_dtensor.value_head import ValueScorer, no_value_head

if TYPE_CHECKING:
    from nemorl_media.sight import Sight
    from transformers import PreTrainedModel

    from nemorl_dtensor.config import DTensorConfig

PROBE_TOKENS = 8
PROBE_LOGIT_STD = 20.0
"""Spread of the logits in the check: large enough that a cap or scale that is missed changes them by far."""
TOLERANCE = {torch.float32: 2e-3, torch.bfloat16: 1.0}
"""Nats, at logits of ``PROBE_LOGIT_STD``. bfloat16 rounds a logit of 60 by 0.25."""

Score = Callable[[Rows, float, float], Tensor]
"""(rows, temperature, factor) -> [M] log-probs, the decoder's states multiplied by the factor first"""

STATES_TOLERANCE = {torch.float32: 1e-3}
"""Largest error of the states, relative to their norm; other precisions: ``ROUNDED``."""
ROUNDED = 0.1


def verified_layout(
    config: DTensorConfig, model: PreTrainedModel, scorer: Scorer | ValueScorer | ShardedScorer, *, packed: bool
) -> Layout:
    """Refuse a model whose scores are not its own; the layout of batches for one whose are. Collective where sharded.

    Args:
        config: Which layout is wanted.
        model: As transformers runs it, with its weights. It is made to share tokens where that is wanted and it can.
        scorer: What is to score it.
        packed: Sequences share rows where they do not share tokens.

    Raises:
        BackendError: Its scores differ, its packed sequences see each other, or it cannot have the layout.
    """
    parts, multiple = (scorer.scorer, scorer.width_multiple) if isinstance(scorer, ShardedScorer) else (scorer, 1)
    # 1. Scores.
    if isinstance(parts, ValueScorer):
        verify_values(model, scorer.score, width_multiple=multiple)
    else:
        verify(model, parts, scorer.score, width_multiple=multiple, packed=packed)
    # 2. Layout.
    may_share = config.layout == "shared" or (config.layout == "auto" and not packed)
    obstacle = ""
    if may_share and isinstance(parts, Scorer) and parts.sight is not None and not parts.sight.family.is_causal:
        obstacle = f"{type(model).__name__} attends to the tokens of an item in both directions"
    elif may_share:
        obstacle = share_prefixes(model, scorer.decoder, scorer.states, width_multiple=multiple)
    if isinstance(scorer, ShardedScorer):
        reshard(model)
    if config.layout == "shared" and obstacle:
        raise BackendError(
            f"layout shared does not work with this model: {obstacle}", fix="set policy.backend.layout: auto"
        )
    min_ratio = 1.0 if config.layout == "shared" else MIN_RATIO
    remarks = [f"{EACH_FOR_ITSELF}: {obstacle}"] if obstacle else []
    return Layout(packed=packed, min_ratio=min_ratio if may_share and not obstacle else None, remarks=remarks)


@torch.no_grad()
def verify(
    model: PreTrainedModel, scorer: Scorer, score: Score, *, width_multiple: int = 1, packed: bool = False
) -> None:
    """Compare ``score`` with the model's own logits, also on states blown up so that caps and scales show.

    Collective where the model is sharded.

    Args:
        model: As transformers runs it.
        scorer: Its parts.
        score: What is checked.
        width_multiple: Of the rows' width.
        packed: Also check that two sequences in one row do not see each other.

    Raises:
        BackendError: They differ.
    """
    half = -(-PROBE_TOKENS // 2 // width_multiple) * width_multiple
    ids = probe_ids(model, 2 * half)
    rows = _all_scored(ids, None)
    tolerance = TOLERANCE.get(next(model.parameters()).dtype, 1.0)
    factor = PROBE_LOGIT_STD / max(float(_own_logits(model, scorer.decoder, ids, 1.0).std()), 1e-6)
    logprobs = torch.log_softmax(_own_logits(model, scorer.decoder, ids, factor), -1)
    expected = logprobs[:-1].gather(1, rows.target_ids[:, None]).squeeze(1)
    error = float((score(rows, 1.0, factor) - expected).abs().max())
    if not error <= tolerance:
        raise unsupported(model, f"decoder and output head give log-probs that are off by {error:.3g}")
    if isinstance(scorer, Scorer) and scorer.sight is not None:
        _verify_sight(model, scorer, scorer.sight, score, tolerance)
    if packed:
        positions = torch.arange(half, device=ids.device).repeat(2)[None]
        together = score(_all_scored(ids, positions), 1.0, factor)[half:]
        alone = score(_all_scored(ids[:, half:], None), 1.0, factor)
        if not torch.allclose(together, alone, atol=tolerance):
            raise BackendError(
                f"{type(model).__name__} with {model.config._attn_implementation} attention lets packed sequences see "
                "each other",
                fix="set policy.backend.layout: padded",
            )


def _verify_sight(model: PreTrainedModel, scorer: Scorer, sight: Sight, score: Score, tolerance: float) -> None:
    """The same with an item among the tokens, which the model takes by its own forward pass.

    Raises:
        BackendError: They differ.
    """
    family = sight.family
    item = family.blank()
    text = probe_ids(model, PROBE_TOKENS)[0]
    text = text[~torch.isin(text, torch.tensor([*family.stand_ins.values()], device=text.device))]
    shown = torch.tensor(item.media.token_ids(item.tokens), device=text.device)
    ids = torch.cat((text[:2], shown, text[2:]))[None]
    rows = replace(_all_scored(ids, None), media={item.media.name: item.media})
    scored = rows.target_ids < FIRST_ID
    rows = replace(
        rows, predictors=rows.predictors[scored], targets=rows.targets[scored], target_ids=rows.target_ids[scored]
    )
    plain = torch.where(ids >= FIRST_ID, family.stand_ins[item.media.kind], ids)
    given = family.own_arguments([*sight.items(rows.media).values()], ids >= FIRST_ID)
    logits = model(input_ids=plain, use_cache=False, **given).logits[0].float()
    own = torch.log_softmax(logits, -1)[rows.predictors].gather(1, rows.target_ids[:, None]).squeeze(1)
    error = float((score(rows, 1.0, 1.0) - own).abs().max())
    if not error <= tolerance:
        raise unsupported(model, f"what it sees gives log-probs that are off by {error:.3g}")


def _own_logits(model: PreTrainedModel, decoder: nn.Module, ids: Tensor, factor: float) -> Tensor:
    """[W, V] of the model's own forward pass, the decoder's states multiplied by ``factor``."""
    calls = 0

    def blow_up(_module: nn.Module, _inputs: Any, output: Any) -> Any:
        nonlocal calls
        calls += 1
        output.last_hidden_state = output.last_hidden_state * factor
        return output

    hook = decoder.register_forward_hook(blow_up)
    try:
        logits: Tensor = model(input_ids=ids, use_cache=False).logits[0].float()
    finally:
        hook.remove()
    if calls != 1:
        raise unsupported(model, "its forward pass does not call its decoder once")
    return logits


def _all_scored(ids: Tensor, positions: Tensor | None) -> Rows:
    """One row of which every token but the first is scored."""
    places = torch.arange(ids.shape[1], device=ids.device)
    return Rows(ids, positions, places[:-1], places[1:], ids[0, 1:])


def probe_ids(model: PreTrainedModel, count: int) -> Tensor:
    """[1, count] distinct token ids."""
    vocabulary = model.config.get_text_config().vocab_size
    step = max(1, vocabulary // count)
    device = computing_device(next(model.parameters()))
    return torch.tensor([[index * step % vocabulary for index in range(count)]], device=device)


@torch.no_grad()
def verify_values(model: PreTrainedModel, score: Score, *, width_multiple: int = 1) -> None:
    """Compare ``score`` with the model's own output for a short text. Collective where the model is sharded.

    Raises:
        BackendError: They differ.
    """
    width = -(-PROBE_TOKENS // width_multiple) * width_multiple
    ids = probe_ids(model, width)
    last = torch.tensor([width - 1], device=ids.device)
    found = score(Rows(ids, None, last, last, ids[0, -1:]), 1.0, 1.0)
    expected = model(input_ids=ids, use_cache=False).logits.reshape(-1)[-1:].float()
    error = float((found - expected).abs().max())
    if not error <= TOLERANCE.get(next(model.parameters()).dtype, 1.0):
        raise no_value_head(model, f"decoder and value head give values that are off by {error:.3g}")


@torch.no_grad()
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
    kinds = {kind for kind in getattr(config, "layer_types", None) or () if kind != tree_attention.FULL_ATTENTION}
    if kinds:
        return f"{type(model).__name__} has layers of {', '.join(sorted(kinds))}"
    plain = model.config._attn_implementation
    shares_rows = plain == context_parallel.NAME  # which takes trees as it is
    if plain not in tree_attention.EXTENDED and not shares_rows:
        return f"its attention is {plain}, and only {' and '.join(tree_attention.EXTENDED)} are extended"
    parameters = inspect.signature(decoder.forward).parameters.values()
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return f"{type(decoder).__name__} passes no further arguments on to its attention"
    batch, device = probe_batch(config.vocab_size), computing_device(next(model.parameters()))
    alone = to_rows(batch, packed=False, width_multiple=width_multiple).to(device)
    together = to_tree_rows(batch, width_multiple=width_multiple).to(device)
    name = plain if shares_rows else tree_attention.register(plain)
    model.set_attn_implementation(name)
    try:
        found, wanted = states(together).float(), states(alone).float()
        error = float((found - wanted).norm() / wanted.norm())
        is_exact = error <= STATES_TOLERANCE.get(next(model.parameters()).dtype, ROUNDED)
        difference = f"states of {type(model).__name__} differ by {error:.3g} of their norm when sequences share tokens"
        obstacle = "" if is_exact else difference
        if model.config._attn_implementation != name:
            obstacle = f"{type(model).__name__} does not take its attention from transformers' registry"
    except (NemorlError, TypeError, ValueError, KeyError, AttributeError, RuntimeError) as refusal:
        obstacle = f"{type(model).__name__}: {refusal}"
    if obstacle:
        model.set_attn_implementation(plain)
    return obstacle

"""Families: what nemorl scores of sequences with items is what transformers itself makes of each alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
import torch
from nemorl.errors import BackendError
from nemorl_dtensor.verification import share_prefixes, verify
from nemorl_tensors.batch import TokenBatch
from nemorl_tensors.engines.rows import PAD_ID, Rows, to_rows
from nemorl_tensors.engines.tree_rows import to_tree_rows
from recorded_messages import Raises
from seen_families import KINDS, TOLERANCE, Seer, batch_of, conversations, seer
from torch import Tensor

PADDING = 5


def left_padded(batch: TokenBatch) -> Rows:
    """Padded rows with ``PADDING`` more tokens at the left, a sequence of their own."""
    rows = to_rows(batch, packed=False)
    height, width = rows.input_ids.shape
    ids = torch.cat((torch.full((height, PADDING), PAD_ID), rows.input_ids), 1)
    positions = torch.cat((torch.arange(PADDING), torch.arange(width))).expand(height, -1)
    row, column = rows.predictors // width, rows.predictors % width
    predictors = row * (width + PADDING) + column + PADDING
    return replace(rows, input_ids=ids, position_ids=positions, predictors=predictors)


LAYOUTS: Mapping[str, Callable[[TokenBatch], Rows]] = {
    "padded": lambda batch: to_rows(batch, packed=False),
    "packed": lambda batch: to_rows(batch, packed=True),
    "left-padded": left_padded,
    "shared": to_tree_rows,
}
CANNOT: Mapping[str, set[str]] = {
    "gemma3": {"shared"},
    "qwen3_5": {"packed", "left-padded", "shared"},
    "qwen3_5_moe": {"packed", "left-padded", "shared"},
}
"""Layouts that a family's decoder does not have: sliding windows, recurrent layers"""


def own(of: Seer, batch: TokenBatch) -> Tensor:
    """[M] of the scored tokens, by transformers."""
    ids, _, media = conversations(of)
    return torch.cat([of.own_logprobs(sequence, media) for sequence in ids])[to_rows(batch, packed=False).targets]


def gradient(of: Seer, loss: Tensor) -> dict[str, Tensor]:
    of.model.zero_grad()
    loss.backward()
    return {
        name: torch.zeros_like(weight) if weight.grad is None else weight.grad.clone()
        for name, weight in of.model.named_parameters()
    }


def difference(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> float:
    """Of gradients, relative to the norm of all."""
    error = sum(float((found[name] - wanted[name]).norm()) ** 2 for name in wanted)
    return float((error / sum(float(part.norm()) ** 2 for part in wanted.values())) ** 0.5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_scores_and_gradient_are_those_of_each_sequence_alone(kind: str, layout: str) -> None:
    of = seer(kind)
    batch, scorer = batch_of(of), of.scorer()
    if layout == "shared":
        of.model.set_attn_implementation("sdpa")
        obstacle = share_prefixes(of.model, scorer.decoder, scorer.states)
        assert bool(obstacle) == (layout in CANNOT.get(kind, set()))
    if layout in CANNOT.get(kind, set()):
        pytest.skip(f"no {layout} layout")
    rows = LAYOUTS[layout](batch)
    found, wanted = scorer.score(rows, 1.0), own(of, batch)
    assert rows.targets.equal(to_rows(batch, packed=False).targets)
    assert float((found - wanted).detach().abs().max()) <= TOLERANCE
    assert difference(gradient(of, found.mean()), gradient(of, wanted.mean())) <= TOLERANCE


@pytest.mark.parametrize("kind", KINDS)
def test_the_model_proves_itself_on_text(kind: str, raises: Raises) -> None:
    of = seer(kind)
    scorer = of.scorer()
    if "packed" in CANNOT.get(kind, set()):
        verify(of.model, scorer, scorer.score)
        with raises(BackendError):
            verify(of.model, scorer, scorer.score, packed=True)
    else:
        verify(of.model, scorer, scorer.score, packed=True)


@pytest.mark.parametrize("kind", KINDS)
def test_other_items_and_another_order_change_scores_and_gradient(kind: str) -> None:
    of = seer(kind)
    answer = of.encode(" yes")
    one, two, other = of.media(1), of.media(3), of.media(5)  # of one kind

    def scores(*media: object) -> Tensor:
        ids = of.prompt(list(media), "which?") + answer  # type: ignore[arg-type]
        mask = [False] * (len(ids) - len(answer)) + [True] * len(answer)
        batch = TokenBatch.from_sequences([ids], [mask], media=list(media))  # type: ignore[arg-type]
        return of.scorer().score(to_rows(batch, packed=False), 1.0)

    usual = scores(one, two)
    usual_gradient = gradient(of, usual.mean())
    for changed in (scores(two, one), scores(one, other), scores(one, one)):
        assert float((changed - usual).detach().abs().max()) > 1e-3
        assert difference(gradient(of, changed.mean()), usual_gradient) > 1e-2


@pytest.mark.parametrize("kind", KINDS)
def test_gradient_reaches_towers_and_connectors(kind: str) -> None:
    of = seer(kind)
    parts = (of.family.tower_names(of.model), of.family.connector_names(of.model))
    found = gradient(of, of.scorer().score(to_rows(batch_of(of), packed=False), 1.0).mean())
    for names in parts:
        assert names
        assert all(any(float(part.norm()) for at, part in found.items() if at.startswith(name)) for name in names)


@pytest.mark.parametrize("kind", KINDS)
def test_a_pass_that_nobody_looks_at_leads_to_all_parameters_of_kinds_that_are_not_shown(kind: str) -> None:
    of = seer(kind)
    sight = of.scorer().sight
    assert sight is not None
    encoders = (*of.family.tower_names(of.model), *of.family.connector_names(of.model))

    def reached(value: Tensor) -> set[str]:
        of.model.zero_grad()
        value.backward()
        parameters = ((name, weight) for name, weight in of.model.named_parameters() if name.startswith(encoders))
        return {name for name, weight in parameters if weight.grad is not None}

    batch = batch_of(of)  # shows items of all kinds
    everything = reached(of.scorer().score(to_rows(batch, packed=False), 1.0).sum())
    assert sight.idle(batch.media) == 0.0
    for shown in ({}, {item.name: item for item in (of.media(1),)}):
        nothing = sight.idle(shown)
        assert isinstance(nothing, Tensor) == (not shown or len(of.kinds) > 1)
        seen = [of.family.encode(of.model, [of.family.item(item)]) for item in shown.values()]
        parts = [part.sum() for one in seen for part in (one.embeds, *one.deeper)]
        total = torch.stack([*parts, torch.as_tensor(nothing)]).sum()
        assert torch.as_tensor(nothing).detach() == 0.0
        assert reached(total) == everything


@pytest.mark.parametrize("kind", KINDS)
def test_a_placeholder_that_the_policy_samples_is_a_word(kind: str) -> None:
    """transformers' own forward pass would look for features of it."""
    of = seer(kind)
    item = of.media(1)
    prompt = of.prompt([item], "what?")
    said = [of.family.stand_ins[item.kind], *of.encode(" yes"), of.family.placeholders[item.kind]]
    batch = TokenBatch.from_sequences(
        [prompt + said, prompt + said[1:]],
        [[False] * len(prompt) + [True] * len(rest) for rest in (said, said[1:])],
        media=[item],
    )
    with torch.no_grad():
        padded = of.scorer().score(to_rows(batch, packed=False), 1.0)
        alone = [of.scorer().score(to_rows(batch.select([index]), packed=False), 1.0) for index in range(2)]
    assert bool(padded.isfinite().all())
    assert float((padded - torch.cat(alone)).abs().max()) <= TOLERANCE
    assert float((padded[1 : len(said)] - padded[len(said) :]).abs().max()) > 1e-3  # it is read as what it is

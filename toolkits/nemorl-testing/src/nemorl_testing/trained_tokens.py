"""Checks of algorithms by what their models learn from: what a batch marks as trained is what was sampled or given, and
has a gradient; losses hold their certificate.

# N = tokens of all sequences concatenated, K = candidates per token
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from nemorl_testing.algorithms import ROWS, first_step
from nemorl_testing.kit import NotApplicable, Subject, expect
from nemorl_testing.updates import VALUE, Update

if TYPE_CHECKING:
    from torch import Tensor


def check_what_is_trained_is_what_was_chosen(subject: Subject) -> None:
    """A batch's mask is True on all that the policy sampled in a sequence, or a row gives as its response, end token
    included, and on nothing else; a sequence that is left out has none. (DESIGN 7.6)"""
    updates = first_step(subject)
    sampled: dict[tuple[int, ...], set[tuple[bool, ...]]] = {}
    for sample in updates.samples:
        for one in sample.sequences:
            sampled.setdefault(tuple(one.token_ids), set()).add(tuple(one.response_mask))
    looked_at = 0
    for update in updates.first.values():
        for ids, mask in _sequences(update.batch):
            if ids in sampled:
                looked_at += 1
                expect(
                    not any(mask) or mask in sampled[ids],
                    f"the batch of {update.role} trains on tokens {_places(mask)} of a sequence whose sampled tokens "
                    f"are {_places(next(iter(sampled[ids])))}",
                )
            elif update.head != VALUE and not subject.settings.rows:
                looked_at += 1
                _expect_given(subject, ids, mask)
    if not looked_at:
        raise NotApplicable("it trains on sequences that this check did not see being made")


def check_every_trained_token_has_a_gradient(subject: Subject) -> None:
    """In the loss of each model that learns, every trained token whose advantage is not 0 has a gradient, and no token
    has that is masked out. (DESIGN 7.6)"""
    for update in first_step(subject).first.values():
        batch = update.batch
        outside = (_gradient(update) & ~batch.mask).nonzero().flatten().tolist()
        expect(not outside, f"in the loss of {update.role}, masked tokens {outside[:8]} of the batch have a gradient")
        missing_N = tokens_without_gradient(update)
        missing = missing_N.nonzero().flatten().tolist()
        rows = batch.sequence_ids[missing_N].unique().tolist()
        where = f"trained tokens {missing[:8]} of the batch, in its sequences {rows[:8]},"
        expect(not missing, f"in the loss of {update.role}, {where} have no gradient")


def tokens_without_gradient(update: Update) -> Tensor:
    """[N] bool: trained tokens that the loss of an update should teach, and does not.

    A loss may be at its minimum there: half right, said of a response that earned a half. A step aside it is not.
    """
    batch = update.batch
    found: Tensor = batch.mask & (batch.loss_weights != 0)
    if "advantages" in batch:
        found = found & (batch["advantages"] != 0)
    found = found & ~_gradient(update)
    return found & ~_gradient(update, aside=True) if bool(found.any()) else found


def check_metrics_are_those_of_the_whole_batch(subject: Subject) -> None:
    """What a loss reports does not depend on how a batch is cut: totals and counts are added up, never averages
    averaged. (DESIGN 7.5)"""
    from nemorl.metrics import merge, values

    for update in first_step(subject).first.values():
        batch, outputs = update.batch, _outputs(update)
        cut = batch.sequences_per_group
        if len(batch) < 2 * cut:
            raise NotApplicable("its batch has a single part")
        tokens = int(batch.lengths[:cut].sum())
        parts = [  # of different sizes: the mean of two means is another number
            update.loss(outputs[:tokens], batch.select(range(cut))),
            update.loss(outputs[tokens:], batch.select(range(cut, len(batch)))),
        ]
        whole, merged = values(update.loss(outputs, batch)[1]), values(merge([metrics for _, metrics in parts]))
        for name in sorted(whole):
            seen = f"{whole[name]} of the whole batch, {merged.get(name)} of two unequal parts of it"
            same = name in merged and math.isclose(whole[name], merged[name], rel_tol=1e-4, abs_tol=1e-5)
            expect(same, f"the {name} of {update.role} is {seen}: give a Mean its total and its count")


def check_losses_are_certified(subject: Subject) -> None:
    """Every loss that learns in a run holds its certificate: cuts, packing, order, padding, shards and shared prefixes
    change nothing, its gradient is that of its value, and a step on a bandit goes the right way. (DESIGN 7.5)"""
    from nemorl_testing.losses.certificate import certify_loss

    updates = first_step(subject).first.values()
    certified = [update for update in updates if update.batch.keep is None]
    if not certified:
        raise NotApplicable("it updates nothing, or on log-probs of a part of the vocabulary alone")
    for update in certified:
        found = certify_loss(update.loss, is_value=update.head == VALUE, example=update.batch)
        expect(found.is_sound, f"the loss of {update.role} is {found}")


def _expect_given(subject: Subject, ids: tuple[int, ...], mask: tuple[bool, ...]) -> None:
    """The trained tokens are a response of the kit's own rows, up to the end of the sequence."""
    from nemorl_rl.data.tokenizer import Tokenizer

    inner = Tokenizer.of(subject.config.policy).inner
    given = {str(row[column]) for row in ROWS for column in ("response", "chosen", "rejected")}
    trained = [token for token, is_trained in zip(ids, mask, strict=True) if is_trained]
    text = inner.decode(trained, skip_special_tokens=True).strip()
    expect(text in given, f"it trains on {text!r} of {inner.decode(ids)!r}, which is no response of a row")
    expect(mask[-1], f"it does not train on the end of {inner.decode(ids)!r}")


def _outputs(update: Update) -> Tensor:
    """Outputs of the model, [N], or made-up ones for candidates, [N, K], or with moments, [N, 3]. Masked slots hold
    NaN."""
    import torch

    batch, said = update.batch, update.before
    if "candidate_ids" in update.loss.requires:
        tokens, candidates = batch["candidate_ids"].shape
        draws = torch.randn(tokens, candidates + 1, generator=torch.Generator().manual_seed(0))
        said = torch.log_softmax(draws, 1)[:, :-1]
    elif batch.keep is not None and batch.keep.beside_moments:
        said = torch.stack((said, -said, said.exp()), 1)  # some entropies
    return torch.where(batch.mask.reshape(-1, *[1] * (said.ndim - 1)), said, torch.nan)


def _gradient(update: Update, *, aside: bool = False) -> Tensor:
    """[N] bool, True where the derivative of the loss by what the model says is not 0.

    ``aside``: by what it would say if each number were up to 0.1 lower.
    """
    import torch

    outputs = _outputs(update)
    if aside:
        outputs = outputs - 0.1 * torch.rand(outputs.shape, generator=torch.Generator().manual_seed(0))
    outputs = outputs.requires_grad_()
    update.loss(outputs, update.batch)[0].backward()
    assert outputs.grad is not None
    return (outputs.grad != 0).reshape(len(outputs), -1).any(1)  # NaN is not 0


def _sequences(batch: Any) -> list[tuple[tuple[int, ...], tuple[bool, ...]]]:
    lengths = batch.lengths.tolist()
    pairs = zip(batch.token_ids.split(lengths), batch.mask.split(lengths), strict=True)
    return [(tuple(ids.tolist()), tuple(mask.tolist())) for ids, mask in pairs]


def _places(mask: tuple[bool, ...]) -> list[int]:
    return [index for index, is_true in enumerate(mask) if is_true]

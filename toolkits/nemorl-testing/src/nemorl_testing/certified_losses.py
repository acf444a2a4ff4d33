"""The check of algorithms that their losses hold the certificate of losses, each with the options of a real run."""

from __future__ import annotations

from nemorl_testing.algorithms import first_step
from nemorl_testing.kit import NotApplicable, Subject, expect
from nemorl_testing.updates import VALUE


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

"""Parts of a model that rest in the host's memory: they take the device's only while something needs them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from nemorl.contracts.memory import MemoryPart

from nemorl_rl.planning.memory.parts import Moments, total

UPDATE = "update"
"""The moment of a training step that needs the optimizer's state."""


def rested(moments: Moments, resting: Collection[MemoryPart]) -> Moments:
    """The same model whose ``resting`` parts come in for their work: the optimizer's state for updates, the reference
    for scoring.

    Args:
        moments: Of a model on a device that is not the host's processor.
        resting: Of ``optimizer`` and ``reference``.
    """
    if not resting:
        return moments
    leaving = tuple(part for part in moments.lasting if part.held in resting)
    state, reference = (
        tuple(replace(part, held=None) for part in leaving if part.held == name) for name in ("optimizer", "reference")
    )
    training = dict(moments.training)
    if state:
        training[UPDATE] = (*training.get(UPDATE, ()), *state)
    moved = replace(
        moments.moved,
        per_update=moments.moved.per_update + 2 * total(state),
        per_scoring=moments.moved.per_scoring + 2 * total(reference),
        on_host=moments.moved.on_host + total(leaving),
    )
    lasting = tuple(part for part in moments.lasting if part not in leaving)
    return replace(moments, lasting=lasting, training=training, scoring=(*moments.scoring, *reference), moved=moved)

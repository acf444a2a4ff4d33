"""Inputs that do not reach the model: found by putting another in their place.

A model that is trained without seeing its images learns something all the same, and its loss falls. So before the first
update each kind of input of the batch is replaced in one sequence: an image or a sound by another of as many tokens,
what an environment said between two answers by the same tokens in another order. The shapes are the same, so where the
input does not count the log-probs of what follows are equal to the last bit, and so is the gradient.

Algorithms whose models read more than the batch makes swaps of their own, and ``nemorl doctor RUN`` swaps what a run
recorded: :func:`reached` is the check of all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from nemorl.errors import BackendError, DataError
from nemorl.media import FIRST_ID, PLACE_BITS, Media

if TYPE_CHECKING:
    from nemorl.contracts import Head
    from nemorl.resources.policies import TrainingPolicy
    from nemorl_tensors import TokenBatch
    from torch import Tensor

WORDS: Mapping[str, str] = {
    "image": "images do",
    "audio": "sounds do",
    "observation": "what the environment says between two answers does",
}
"""Kinds of input that a batch may have."""
TRIED = 4
"""Sequences that are tried before a kind counts as dead: of one the log-probs may be saturated."""
SATURATED = -1e-6
"""Nats. Above it a log-prob is that of a certainty, which no input changes."""
FIX = (
    "see that the model's own classes are used and its files are whole; nothing was trained. `nemorl doctor RUN` tries "
    "again"
)


@dataclass(frozen=True)
class Swap:
    """A sequence, and the same with another input of a kind."""

    kind: str
    """A key of ``WORDS``, or the name of an input in words."""
    one: TokenBatch
    other: TokenBatch


def require_live_inputs(policy: TrainingPolicy, batch: TokenBatch, head: Head = "language_model") -> None:
    """Refuse to train a model that does not see what it is shown.

    Args:
        policy: The model.
        batch: That it is to be trained on.
        head: Of the model.

    Raises:
        BackendError: A kind of input does not change what follows it.
    """
    require_reached(reached_inputs(policy, batch, head))


def reached_inputs(policy: TrainingPolicy, batch: TokenBatch, head: Head = "language_model") -> dict[str, bool | None]:
    """Whether each kind of input that a batch has reaches a model; ``None`` where that cannot be told."""
    if head == "value":
        return reached(swaps(batch), policy.get_values, saturates_at=None)
    return reached(swaps(batch), policy.get_logprobs)


def reached(
    pairs: Iterable[Swap], read: Callable[[TokenBatch], Tensor], saturates_at: float | None = SATURATED
) -> dict[str, bool | None]:
    """Whether each kind of input changes what a model says of the tokens after it.

    Args:
        pairs: Sequences with another input in one's place.
        read: [N] what the model says of each token of a batch, float32.
        saturates_at: Numbers that are all above it cannot tell. Unset: any can.

    Returns:
        Of each kind: True where one of its swaps changed anything, ``None`` where none of them could tell.
    """
    found: dict[str, bool | None] = {}
    for swap in pairs:
        if not found.get(swap.kind):
            changes = _changes(swap, read, saturates_at)
            found[swap.kind] = found.get(swap.kind) if changes is None else changes
    return found


def require_reached(found: Mapping[str, bool | None], fix: str = FIX) -> None:
    """
    Args:
        found: Of :func:`reached`.
        fix: Advice where an input is dead.

    Raises:
        BackendError: One is.
    """
    dead = [WORDS.get(kind, f"{kind} does") for kind, is_alive in found.items() if is_alive is False]
    if dead:
        raise BackendError(
            f"{' and '.join(dead)} not reach the model: with another in their place every log-prob after them is the "
            "same",
            fix=fix,
        )


def swaps(batch: TokenBatch) -> Iterator[Swap]:
    """Of each kind of input that the batch has, up to ``TRIED`` sequences with another in its place."""
    masks = torch.split(batch.mask, batch.lengths.tolist())
    sequences = torch.split(batch.token_ids, batch.lengths.tolist())
    made: dict[str, int] = {}
    for number, (ids, mask) in enumerate(zip(sequences, masks, strict=True)):
        learnt = mask.nonzero().flatten().tolist()
        if not learnt:
            continue
        for kind, changed, media in _changed(ids, mask, learnt, batch.media):
            if made.get(kind, 0) < TRIED:
                made[kind] = made.get(kind, 0) + 1
                one = batch.select([number])
                yield Swap(kind, one, replace(one, token_ids=changed, media={**one.media, **media}))


def _changed(
    ids: Tensor, mask: Tensor, learnt: Sequence[int], items: Mapping[int, Media]
) -> Iterator[tuple[str, Tensor, dict[int, Media]]]:
    shown = ids[: learnt[-1]]
    names = torch.unique(shown[shown >= FIRST_ID] >> PLACE_BITS).tolist()
    for name in names[:1]:
        item = items[name]
        other = _another(item)
        if other is not None:
            is_it = (ids >> PLACE_BITS == name) & (ids >= FIRST_ID)
            moved = torch.where(is_it, ids + ((other.name - name) << PLACE_BITS), ids)
            yield item.kind, moved, {other.name: other}
    between = [place for place in range(learnt[0], learnt[-1]) if not mask[place] and int(ids[place]) < FIRST_ID]
    told = ids[between]
    if len(between) > 1 and not torch.equal(told, told.flip(0)):
        moved = ids.clone()
        moved[between] = told.flip(0)
        yield "observation", moved, {}


def _another(item: Media) -> Media | None:
    """An item with as many tokens that shows something else; ``None`` where none can be made."""
    from nemorl_media.blanks import negative

    try:
        other = negative(item)
        return None if other.data == item.data else other
    except DataError:  # the batch will say what is wrong with it
        return None


def _changes(swap: Swap, read: Callable[[TokenBatch], Tensor], saturates_at: float | None) -> bool | None:
    """Whether another input changes anything; ``None`` where that cannot be told."""
    one, other = (read(batch)[batch.mask] for batch in (swap.one, swap.other))
    if not torch.equal(one, other):
        return True
    return None if saturates_at is not None and bool((one > saturates_at).all()) else False

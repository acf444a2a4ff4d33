"""Inputs that do not reach the model: found by putting another in their place.

A model that is trained without seeing its images learns something all the same, and its loss falls. So before the first
update each kind of input of the batch is replaced in one sequence: an image or a sound by another of as many tokens,
what an environment said between two answers by the same tokens in another order. The shapes are the same, so where the
input does not count the log-probs of what follows are equal to the last bit, and so is the gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import torch
from nemorl.errors import BackendError, DataError
from nemorl.media import FIRST_ID, PLACE_BITS, Media

if TYPE_CHECKING:
    from nemorl.contracts import Head
    from nemorl.resources.policies import TrainingPolicy
    from nemorl_tensors import TokenBatch
    from torch import Tensor

InputKind = Literal["image", "audio", "observation"]
WORDS: dict[InputKind, str] = {
    "image": "images do",
    "audio": "sounds do",
    "observation": "what the environment says between two answers does",
}
TRIED = 4
"""Sequences that are tried before a kind counts as dead: of one the log-probs may be saturated."""
SATURATED = -1e-6
"""Nats. Above it a log-prob is that of a certainty, which no input changes."""


@dataclass(frozen=True)
class Swap:
    """A sequence, and the same with another input of a kind."""

    kind: InputKind
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
    seen: dict[InputKind, bool] = {}
    for swap in swaps(batch):
        if not seen.get(swap.kind):
            found = _changes(policy, swap, head)
            if found is not None:
                seen[swap.kind] = found
    dead = [kind for kind, is_alive in seen.items() if not is_alive]
    if dead:
        raise BackendError(
            f"{' and '.join(WORDS[kind] for kind in dead)} not reach the model: with another in their place every "
            "log-prob after them is the same",
            fix="see that the model's own classes are used and its files are whole (`nemorl doctor`); nothing was "
            "trained",
        )


def swaps(batch: TokenBatch) -> Iterator[Swap]:
    """Of each kind of input that the batch has, up to ``TRIED`` sequences with another in its place."""
    masks = torch.split(batch.mask, batch.lengths.tolist())
    sequences = torch.split(batch.token_ids, batch.lengths.tolist())
    made: dict[InputKind, int] = {}
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
) -> Iterator[tuple[InputKind, Tensor, dict[int, Media]]]:
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


def _changes(policy: TrainingPolicy, swap: Swap, head: Head) -> bool | None:
    """Whether another input changes anything; ``None`` where that cannot be told."""
    read = policy.get_values if head == "value" else policy.get_logprobs
    one, other = (read(batch)[batch.mask] for batch in (swap.one, swap.other))
    if not torch.equal(one, other):
        return True
    return None if head != "value" and bool((one > SATURATED).all()) else False

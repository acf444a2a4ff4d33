"""Episodes of several seats as what is learnt from: one sample per seat, with its own reward and its own baseline.

In a zero-sum game the mean of an episode's rewards is 0 whatever the policy does, and so is every advantage made of it.
A baseline that all roles share is noisy where one of them is better off: its moves look good, and those of the other
bad, however they are played. So each role is compared with itself: role-conditioned advantages, arXiv:2506.24119.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import TYPE_CHECKING

from nemorl.types import Branch, Sample, Samples, Score

from nemorl_rl.agents.seats import SeatScores, role_of
from nemorl_rl.serving.requests import PlacedSample

if TYPE_CHECKING:
    from nemorl_rl.policy_gradient.config import SeatBaseline


def by_seat(samples: Samples, baseline: SeatBaseline = "role") -> Samples:
    """Each seat of each episode as a sample, in the order of the token sequences; groups are those of ``baseline``.

    ``prompt.index`` numbers the groups, so whatever compares samples of one prompt compares seats. A seat that was
    given no score, or answered nothing that is trained, has no verdict. Episodes without seats remain as they are.

    Args:
        samples: Of a step, one per episode.
        baseline: Who is compared with whom.

    Differs from the paper: the baseline is the mean over the group, not a moving average over steps.

    Example:
        >>> from nemorl.types import Prompt
        >>> from nemorl_rl.agents.seats import seat_scores
        >>> game = PlacedSample(Prompt(0, "", (5,)), (5, 6), (False, True), (0.0, -1.0), Score(0.0), "", "stop",
        ...                    branches=(Branch((5, 7), (False, True), (0.0, -1.0)),), seats=("white", "black"))
        >>> game = replace(game, score=seat_scores({"white": 1.0, "black": -1.0}))
        >>> [(seat.prompt.index, seat.reward, seat.token_ids) for seat in by_seat(Samples([game, game]))]
        [(0, 1.0, (5, 6)), (1, -1.0, (5, 7)), (0, 1.0, (5, 6)), (1, -1.0, (5, 7))]
    """
    if not any(isinstance(sample.score, SeatScores) for sample in samples):
        return samples
    parts = [(number, seat, part) for number, sample in enumerate(samples) for seat, part in _parts(sample)]
    company = Counter((number, part.prompt.index, role_of(seat)) for number, seat, part in parts)
    crowded = {(index, role) for (_, index, role), count in company.items() if count > 1}
    groups: dict[tuple[object, ...], int] = {}
    found = []
    for number, seat, part in parts:
        index, role = part.prompt.index, role_of(seat)
        is_within = baseline == "hierarchical" and (index, role) in crowded
        key = (index,) if baseline == "shared" else (index, role, number if is_within else None)
        group = groups.setdefault(key, len(groups))
        found.append(replace(part, prompt=replace(part.prompt, index=group)))
    return Samples(found)


def _parts(sample: Sample) -> Iterator[tuple[str, Sample]]:
    """The seats of an episode, each as a sample with its own score."""
    names = sample.seats if isinstance(sample, PlacedSample) else ()
    if not names:
        yield "", sample
        return
    sequences, stops = sample.sequences, [place for place in range(1, len(names)) if names[place] != names[place - 1]]
    for start, stop in zip([0, *stops], [*stops, len(names)], strict=True):
        yield names[start], _seat(sample, names[start], sequences[start:stop], start)


def _seat(sample: Sample, seat: str, sequences: tuple[Sample, ...], start: int) -> Sample:
    assert isinstance(sample, PlacedSample)
    first, *others = sequences
    assert isinstance(first, PlacedSample)
    numbers = range(start, start + len(sequences))
    places = [place for place in sample.turn_places if place.sequence in numbers]
    is_last = bool(places) and places[-1] == sample.turn_places[-1]
    return replace(
        first,
        score=_score_of(sample.score, seat, is_trained=any(any(part.response_mask) for part in sequences)),
        branches=tuple(Branch(**{each.name: getattr(part, each.name) for each in fields(Branch)}) for part in others),
        response=sample.response if is_last else "",
        finish_reason="length" if places and places[-1].is_cut else "stop",
        turns=len(places),
        turn_places=tuple(place._replace(sequence=place.sequence - start) for place in places),
        seats=(seat,) * len(sequences),
    )


def _score_of(score: Score, seat: str, *, is_trained: bool) -> Score:
    own = score.seats.get(seat) if isinstance(score, SeatScores) else score
    if own is None:
        own = Score(0.0, valid=False)
    return replace(own, outcome=score.outcome, cause=score.cause, valid=score.valid and own.valid and is_trained)

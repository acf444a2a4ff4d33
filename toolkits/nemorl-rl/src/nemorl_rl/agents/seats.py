"""Seats: several roles of one policy in an episode, each with a reward of its own.

An environment asks the policy in the name of a seat, ``Seated(policy, "white")``, and gives each seat its score,
``seat_scores({"white": 1.0, "black": -1.0})``. Seats of one role are numbered: ``solver/1``, ``solver/2``. Calls of two
seats never share a token sequence. What is learnt from them is in ``nemorl_rl.policy_gradient.seats``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from nemorl.contracts.environment import as_score
from nemorl.errors import ConfigIssue, UsageError
from nemorl.media import Media
from nemorl.types import Completion, Score

from nemorl_rl.agents.contract import (
    AS_THE_RUN,
    CallOptions,
    ChatMessage,
    ChatReply,
    EpisodePolicy,
    PassedOnPolicy,
    ToolChoice,
)

SeatUse = Literal["untrained", "frozen"]
"""``untrained``: the policy as it is plays the seat, and learns nothing from it. ``frozen``: its initial weights do."""
MOST_LETTERS = 100
"""Of a seat's name."""


def role_of(seat: str) -> str:
    """The role of a seat.

    Example:
        >>> role_of("solver/2"), role_of("judge")
        ('solver', 'judge')
    """
    return seat.partition("/")[0]


@dataclass(frozen=True, slots=True)
class SeatScores(Score):
    """The score of an episode of several seats: ``reward`` is their mean, and each learns from its own.

    Example:
        >>> seat_scores({"white": 1.0, "black": -1.0}).reward
        0.0
    """

    seats: Mapping[str, Score] = field(default_factory=dict)
    """By the seat's name. A seat that is not in it trains nothing."""


def seat_scores(scores: Mapping[str, float | Mapping[str, float] | Score], **facts: Any) -> SeatScores:
    """The score of an episode from those of its seats.

    Components and metrics are means over the seats that have them; ``reward_of_ROLE`` among the metrics is the mean of
    a role's rewards.

    Args:
        scores: By seat: what ``Environment.score`` may return.
        **facts: Other fields of the episode's ``Score``, e.g. ``turn_rewards``, ``outcome``.

    Raises:
        UsageError: There is no seat.

    Example:
        >>> dict(seat_scores({"solver/1": 1.0, "solver/2": 0.0, "judge": 0.5}).metrics)
        {'reward_of_solver': 0.5, 'reward_of_judge': 0.5}
    """
    if not scores:
        raise UsageError("an episode of seats has no seat", fix="score at least one seat, or return a number")
    seats = {seat: as_score(score, owner=f"the score of seat {seat!r}") for seat, score in scores.items()}
    judged = {seat: score for seat, score in seats.items() if score.valid}
    roles: dict[str, list[float]] = {}
    for seat, score in judged.items():
        roles.setdefault(role_of(seat), []).append(score.reward)
    metrics = {
        **_means([score.metrics for score in judged.values()]),
        **{f"reward_of_{role}": _mean(rewards) for role, rewards in roles.items()},
    }
    return SeatScores(
        **{
            "reward": _mean([score.reward for score in judged.values()]),
            "components": _means([score.components for score in judged.values()]),
            "valid": bool(judged),
            **facts,
            "metrics": {**metrics, **facts.get("metrics", {})},
        },
        seats=seats,
    )


def as_one(score: Score) -> Score:
    """The score of an episode without those of its seats, which all get the same then.

    Example:
        >>> as_one(seat_scores({"white": 1.0, "black": 0.0})).reward
        0.5
    """
    if not isinstance(score, SeatScores):
        return score
    return Score(**{each.name: getattr(score, each.name) for each in fields(Score)})


def rewards_of(score: Score) -> list[float]:
    """The rewards that an episode gave: of its seats that have a verdict, or its own.

    Example:
        >>> rewards_of(seat_scores({"white": 1.0, "black": -1.0})), rewards_of(Score(0.5))
        ([1.0, -1.0], [0.5])
    """
    if not isinstance(score, SeatScores):
        return [score.reward]
    return [seat.reward for seat in score.seats.values() if seat.valid]


def trained_seats(score: Score, untrained: Collection[str]) -> Score:
    """A score without the seats of these roles, which have no part in its mean either.

    Example:
        >>> trained_seats(seat_scores({"white": 1.0, "black": -1.0}), {"black"}).reward
        1.0
    """
    if not isinstance(score, SeatScores) or not untrained:
        return score
    kept = {seat: one for seat, one in score.seats.items() if role_of(seat) not in untrained}
    made = seat_scores(kept) if kept else SeatScores(0.0, valid=False)
    return replace(
        score,
        reward=made.reward,
        components=made.components,
        metrics={**score.metrics, **made.metrics},
        valid=score.valid and made.valid,
        seats=kept,
    )


def with_earned(score: Score, earned: Mapping[str, float]) -> Score:
    """A score with what answers of seats were given besides, e.g. by a program while it ran.

    Args:
        score: Of the episode. One without seats gets all of it; a seat that has no score gets none.
        earned: By seat.

    Example:
        >>> given = with_earned(seat_scores({"white": 1.0, "black": 0.0}), {"white": 0.5})
        >>> given.reward, given.seats["white"].reward
        (0.75, 1.5)
    """
    if not isinstance(score, SeatScores):
        return replace(score, reward=score.reward + sum(earned.values()))
    seats = {seat: replace(one, reward=one.reward + earned.get(seat, 0.0)) for seat, one in score.seats.items()}
    return replace(score, reward=_mean([one.reward for one in seats.values() if one.valid]), seats=seats)


class Seated(PassedOnPolicy):
    """An ``EpisodePolicy`` that asks in the name of a seat.

    Example:
        >>> async def rollout(prompt, policy):
        ...     white, black = Seated(policy, "white"), Seated(policy, "black")
        ...     opening = await white.chat([{"role": "user", "content": "You are white."}])
        ...     reply = await black.chat([{"role": "user", "content": f"You are black. White: {opening.text}"}])
        ...     return seat_scores({"white": 1.0, "black": -1.0})
    """

    def __init__(self, policy: EpisodePolicy, seat: str = "", *, untrained: Collection[str] = ()) -> None:
        """
        Args:
            policy: Of the episode.
            seat: ``ROLE`` or ``ROLE/NUMBER``. Unset: whoever a call names.
            untrained: Roles that nothing is learnt from.

        Raises:
            UsageError: The seat's name is too long.
        """
        if len(seat) > MOST_LETTERS:
            raise UsageError(f"seat {seat[:20]!r}… has {len(seat)} letters", fix=f"use at most {MOST_LETTERS}")
        super().__init__(policy)
        self._seat, self._untrained = seat, frozenset(untrained)

    async def chat(
        self,
        messages: Sequence[ChatMessage],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        tool_choice: ToolChoice = "auto",
        options: CallOptions = AS_THE_RUN,
    ) -> ChatReply:
        return await self._policy.chat(messages, tools=tools, tool_choice=tool_choice, options=self._with_seat(options))

    async def complete(
        self, token_ids: Sequence[int], media: Sequence[Media] = (), *, options: CallOptions = AS_THE_RUN
    ) -> Completion:
        return await self._policy.complete(token_ids, media, options=self._with_seat(options))

    def _with_seat(self, options: CallOptions) -> CallOptions:
        seat = self._seat or options.seat
        return replace(options, seat=seat, is_trained=options.is_trained and role_of(seat) not in self._untrained)


def seat_problems(seats: Mapping[str, SeatUse]) -> Iterator[ConfigIssue]:
    """Seats of a config's section ``seats`` that no engine can play as it says."""
    for role, use in seats.items():
        if "/" in role:
            yield ConfigIssue(f"seats.{role}", "a role is named, and this is one of its seats", f"say {role_of(role)}")
        if use == "frozen":
            what = (
                "no engine keeps the initial weights beside those that learn: `snapshots` holds the newest versions, "
                "and drops the first ones"
            )
            fix = "say untrained (the policy as it is plays the seat), or give the seat a model of its own"
            yield ConfigIssue(f"seats.{role}", what, fix)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _means(named: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for one in named for name in one)
    return {name: _mean([one[name] for one in named if name in one]) for name in names}

"""The calls of an episode as token sequences to train on: each token that was sampled is trained exactly once.

A call whose prompt goes on from where a sequence of its seat ends extends it. Any other begins a sequence of its own,
in which everything before its answer is context: an agent that forks, starts a sub-agent, retries or rewrites its
history.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, takewhile, zip_longest
from typing import TYPE_CHECKING

from nemorl.base.process.timing import Span
from nemorl.media import Media
from nemorl.types import Branch, Completion, Prompt, Sample, Score

from nemorl_rl.agents.seats import with_earned
from nemorl_rl.serving.requests import TimedSample, TurnPlace, TurnSpan

if TYPE_CHECKING:
    import numpy
    from nemorl_tensors.numbers import Numbers
    from numpy.typing import NDArray

    Routes = NDArray[numpy.int16]


@dataclass(frozen=True, slots=True)
class Call:
    """One answer of the policy.

    Example:
        >>> Call(0, (5, 6), Completion((7,), (-0.5,), "stop")).realigned_tokens
        0
    """

    number: int
    """In the order in which calls began."""
    prompt_ids: tuple[int, ...]
    completion: Completion
    realigned_tokens: int = 0
    """Sampled tokens of earlier answers that its prompt holds in another form."""
    malformed_tool_calls: int = 0
    broke_tool_choice: bool = False
    asked_s: float = 0.0
    """When the policy was asked: a moment of ``time.monotonic()``."""
    observed: Span | None = None
    """When what it continues was made, by the same clock. Unset: all the time since the answer before it."""
    span: Span = field(default=Span(0.0, 0.0))
    """When the answer was made, by the same clock."""
    media: tuple[Media, ...] = ()
    """Images and sounds in its prompt."""
    seat: str = ""
    """Who asked."""
    is_trained: bool = True
    """False: its answer is context."""
    is_constrained: bool = False
    """It was sampled within a schema, so that its log-probs are not the policy's own: context, which is not trained."""
    reward: float | None = None
    """The sum of the rewards that it was given while the episode ran."""


class _Sequence:
    """One token sequence while calls extend it; its numbers are arrays (``nemorl_tensors.numbers``)."""

    def __init__(self, seat: str = "") -> None:
        self.seat = seat
        self.size = 0
        """Tokens so far"""
        self.turn_rewards: list[tuple[int, float]] = []
        self.version_runs: list[tuple[int, int]] = []
        self.spans: list[tuple[int, Span]] = []
        """(one beyond its last token, when it was made) of each turn."""
        self.places: list[tuple[int, int, int, bool]] = []
        """(number of the call, its first token, one beyond its last, cut) of each answer that is trained."""
        self._ids: list[Numbers[int]] = []
        self._mask: list[NDArray[numpy.bool_]] = []
        self._logprobs: list[Numbers[float]] = []
        self._routes: Routes | None = None

    def is_continued_by(self, call: Call) -> bool:
        from nemorl_tensors.numbers import joined

        if self.seat != call.seat or self.size > len(call.prompt_ids):
            return False
        self._ids = [joined(self._ids)]
        return self._ids[0] == call.prompt_ids[: self.size]

    def append(self, call: Call, reward: float | None) -> None:
        context, answer = call.prompt_ids[self.size :], call.completion
        begin, end = len(call.prompt_ids), len(call.prompt_ids) + len(answer.token_ids)
        if self.spans and context:
            observed = call.observed or Span(self.spans[-1][1].ended_s, call.asked_s)
            self.spans.append((begin, observed))
        self.spans.append((end, call.span))
        is_learnt = call.is_trained and not call.is_constrained
        self._extend(context, answer, is_learnt)
        self.size = end
        self._routes = _first_routes(self._routes, answer.routes, end)
        for start, version in zip(answer.version_starts, answer.weight_versions, strict=False):
            if not self.version_runs or self.version_runs[-1][1] != version:
                self.version_runs.append((begin + start, version))
        if not call.is_trained:
            return
        if is_learnt:
            self.places.append((call.number, begin, end, answer.finish_reason == "length"))
        if reward is not None:
            self.turn_rewards.append((end - 1, reward))

    def _extend(self, context: Sequence[int], answer: Completion, is_learnt: bool) -> None:
        import numpy
        from nemorl_tensors.numbers import Numbers, logprobs, token_ids

        blank, said = len(context), len(answer.token_ids)
        self._ids += [token_ids(context), token_ids(answer.token_ids)]
        self._mask += [numpy.zeros(blank, bool), numpy.full(said, is_learnt)]
        own = logprobs(answer.logprobs) if is_learnt else Numbers[float](numpy.zeros(said, numpy.float32))
        self._logprobs += [Numbers(numpy.zeros(blank, numpy.float32)), own]

    def branch(self, *, has_runs: bool = True) -> Branch:
        import numpy
        from nemorl_tensors.numbers import Numbers, joined

        runs = self.version_runs if has_runs else ()
        mask: Numbers[bool] = Numbers(numpy.concatenate(self._mask))
        turns = tuple(self.turn_rewards), tuple(runs)
        return Branch(joined(self._ids).declared, mask.declared, joined(self._logprobs).declared, *turns, self._routes)


def _first_routes(before: Routes | None, answer: Routes | None, tokens: int) -> Routes | None:
    """The routes of a sequence of so many tokens, which an answer has made longer.

    Each token keeps those that were recorded first: a turn's log-probs came from them, whichever engine computes the
    turn again for the next one. The last token of a turn has its first routes when the next turn begins.
    """
    import numpy

    if answer is None and before is None:
        return None
    if before is None:
        return answer
    if answer is None:
        rest = numpy.full((tokens - len(before), *before.shape[1:]), -1, before.dtype)
        return numpy.concatenate((before, rest))
    held = answer[: len(before)]
    found: Routes = numpy.concatenate((numpy.where(before < 0, held, before), answer[len(before) :]))
    return found


def sequences(calls: Iterable[Call]) -> list[Branch]:
    """The token sequences of an episode, in the order in which they were begun.

    Args:
        calls: In any order; they are taken by number.

    Example:
        >>> first = Call(0, (1, 2), Completion((3,), (-0.1,), "stop"))
        >>> onward = Call(1, (1, 2, 3, 4), Completion((5,), (-0.2,), "stop"))
        >>> retried = Call(2, (1, 2, 3, 4), Completion((6,), (-0.3,), "stop"))
        >>> [(branch.token_ids, branch.response_mask) for branch in sequences([first, onward, retried])]
        [((1, 2, 3, 4, 5), (False, False, True, False, True)), ((1, 2, 3, 4, 6), (False, False, False, False, True))]
    """
    ordered = sorted(calls, key=lambda call: call.number)
    return [sequence.branch() for sequence in _sequences(ordered, ())]


def _sequences(calls: Sequence[Call], turn_rewards: Sequence[float]) -> list[_Sequence]:
    found: list[_Sequence] = []
    for call, reward in zip_longest(calls, turn_rewards[: len(calls)]):
        continued = [sequence for sequence in found if sequence.is_continued_by(call)]
        if continued:
            sequence = max(continued, key=lambda sequence: sequence.size)
        else:
            sequence = _Sequence(call.seat)
            found.append(sequence)
        sequence.append(call, reward)
    seats = list(dict.fromkeys(sequence.seat for sequence in found))
    return sorted(found, key=lambda sequence: seats.index(sequence.seat))


def dense_rewards(told: Iterable[tuple[int, float]]) -> tuple[float, ...]:
    """Rewards that were told of some turns, as ``Score.turn_rewards``: one of each turn up to the last one told.

    Args:
        told: (place of the answer among those of the episode, reward), in any order; several of one answer add up.

    Example:
        >>> dense_rewards([(2, 0.5), (0, 1.0), (2, 0.25)])
        (1.0, 0.0, 0.75)
    """
    earned: dict[int, float] = {}
    for turn, reward in told:
        earned[turn] = earned.get(turn, 0.0) + reward
    return tuple(earned.get(turn, 0.0) for turn in range(max(earned, default=-1) + 1))


def to_sample(
    prompt: Prompt, calls: Iterable[Call], score: Score, response: str, *, version: int, span: Span
) -> Sample:
    """An episode as it is trained. One without calls keeps its place in its group and trains nothing.

    Args:
        prompt: The task.
        calls: All that were answered, in any order.
        score: Of the episode. What its calls were given is added to it, and metrics of them.
        response: The text of the last answer.
        version: Of the weights, where no call says any.
        span: From its beginning until it was scored.

    Example:
        >>> prompt = Prompt(0, "1+1=", (5,))
        >>> to_sample(prompt, [], Score(0.0), "", version=3, span=Span(0.0, 1.5)).response_mask
        (False,)
    """
    ordered = sorted(calls, key=lambda call: call.number)
    score = with_given(score, ordered)
    sample = plain_sample(prompt, ordered, score, response, score.turn_rewards, versions=(version,), span=span)
    return replace(sample, score=_with_metrics(score, ordered, (sample, *sample.branches)))


def with_given(score: Score, calls: Sequence[Call]) -> Score:
    """A score and the rewards that calls were given: each adds to that of its turn, and all of them to the reward.

    Example:
        >>> answer = Completion((6,), (-0.5,), "stop")
        >>> calls = [Call(0, (5,), answer), Call(1, (5, 6, 5), answer, reward=2.0)]
        >>> score = with_given(Score(1.0, turn_rewards=(0.5,)), calls)
        >>> score.reward, score.turn_rewards
        (3.0, (0.5, 2.0))
    """
    if all(call.reward is None for call in calls):
        return score
    given = [call.reward or 0.0 for call in calls]
    own = score.turn_rewards[: len(given)]
    earned: dict[str, float] = {}
    for call, reward in zip(calls, given, strict=True):
        earned[call.seat] = earned.get(call.seat, 0.0) + reward
    by_turn = tuple(sum(pair) for pair in zip_longest(own, given, fillvalue=0.0))
    return replace(with_earned(score, earned), turn_rewards=by_turn)


def plain_sample(
    prompt: Prompt,
    calls: Sequence[Call],
    score: Score,
    response: str,
    turn_rewards: Sequence[float],
    *,
    versions: Iterable[int] = (),
    span: Span,
) -> TimedSample:
    """:func:`to_sample` for calls in their order, the score left as it is; ``versions`` where no call says any."""
    made = _sequences(calls, turn_rewards)
    known = {version for call in calls for version in call.completion.weight_versions}
    places = sorted(
        (place[0], TurnPlace(number, *place[1:])) for number, one in enumerate(made) for place in one.places
    )
    first, *others = [each.branch(has_runs=len(known) > 1) for each in made] or [_untouched(prompt)]
    return TimedSample(
        prompt=prompt,
        token_ids=first.token_ids,
        response_mask=first.response_mask,
        generation_logprobs=first.generation_logprobs,
        turn_rewards=first.turn_rewards,
        score=score,
        response=response,
        finish_reason=calls[-1].completion.finish_reason if calls else "stop",
        turns=len(calls),
        weight_versions=tuple(sorted(known or versions)),
        branches=tuple(others),
        version_runs=first.version_runs,
        routes=first.routes,
        span=span,
        media=tuple(dict.fromkeys(chain(prompt.media, *(call.media for call in calls)))),
        turn_spans=tuple(TurnSpan(number, *turn) for number, one in enumerate(made) for turn in one.spans),
        turn_places=tuple(place for _, place in places),
        seats=tuple(one.seat for one in made) if any(one.seat for one in made) else (),
    )


def _untouched(prompt: Prompt) -> Branch:
    ids = prompt.token_ids or (0,)  # no sequence is empty: where the environment speaks first, the prompt may be
    return Branch(ids, (False,) * len(ids), (0.0,) * len(ids))


def _with_metrics(score: Score, calls: list[Call], parts: Sequence[Branch | Sample]) -> Score:
    sampled = sum(len(call.completion.token_ids) for call in calls if call.is_trained)
    of_calls = {
        "calls": float(len(calls)),
        "sequences": float(len(parts) if calls else 0),
        "delivered_tokens": float(sampled if score.valid else 0),
        "dropped_tokens": float(0 if score.valid else sampled),
        "forked_tokens": float(_forked_tokens(parts)),
        "realigned_tokens": float(sum(call.realigned_tokens for call in calls)),
        "malformed_tool_calls": float(sum(call.malformed_tool_calls for call in calls)),
        "constrained_tokens": float(sum(len(call.completion.token_ids) for call in calls if call.is_constrained)),
        "broken_tool_choices": float(sum(call.broke_tool_choice for call in calls)),
    }
    return replace(score, metrics={**of_calls, **score.metrics})


def _forked_tokens(parts: Sequence[Branch | Sample]) -> int:
    """Tokens sampled in one sequence that stand at the beginning of another as context."""
    held = (max((_held(part, other) for other in parts[:n]), default=0) for n, part in enumerate(parts))
    return sum(held)


def _held(part: Branch | Sample, other: Branch | Sample) -> int:
    """How many tokens of ``other``'s answers ``part`` begins with as context."""
    both = zip(part.token_ids, other.token_ids, part.response_mask, other.response_mask, strict=False)
    alike = takewhile(lambda place: place[0] == place[1], both)
    return sum(was_sampled and not is_sampled for *_, is_sampled, was_sampled in alike)

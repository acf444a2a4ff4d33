"""Turns as what is credited: each answer of an episode learns from what was earned from there on.

# N = tokens of all sequences concatenated

R_k = r_k + turn_discount * R_(k+1)                          return to go of turn k
A_k = (R_k - mean) / (std + epsilon)                         over turns k of the other episodes of the group

What an episode earned beyond the rewards of its turns is paid at its last one. Discounted returns per turn, normalised
within the group, are GTPO's (arXiv:2511.14846); the recursion is that of AReaL's ``turn_discount``.

Differs from the paper: returns are compared with those of the same turn, so that a turn that comes late is not blamed
for the little that is left to earn; mean and spread are without the episode itself, unless GRPO's options say
otherwise; there is no shaping of rewards. Where rewards are of whole episodes, all of which have as many turns, and the
discount is 1, this is GRPO.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from nemorl.metrics import Metric
from nemorl.types import Sample, Samples

from nemorl_rl.policy_gradient.advantages import are_counted, clip_advantages
from nemorl_rl.serving.requests import PlacedSample, TurnPlace

if TYPE_CHECKING:
    from nemorl_tensors import TokenBatch


def turn_places(sample: Sample) -> Sequence[TurnPlace]:
    """The answers of an episode in their order. Of a sample that does not say: tokens that the policy chose one after
    the other, cut where a turn was paid, sequence by sequence.

    Example:
        >>> from nemorl.types import Prompt, Score
        >>> mask = (False, True, True, False, True)
        >>> sample = Sample(Prompt(0, "1+1=", (5,)), (5, 6, 7, 8, 9), mask, (0.0,) * 5, Score(1.0), "2", "stop")
        >>> [(place.start, place.stop) for place in turn_places(sample)]
        [(1, 3), (4, 5)]
    """
    if isinstance(sample, PlacedSample) and sample.turn_places:
        return sample.turn_places
    found = []
    for number, part in enumerate(sample.sequences):
        paid = {place for place, _ in part.turn_rewards}
        start: int | None = None
        for place, is_own in enumerate((*part.response_mask, False)):
            if start is not None and (not is_own or place - 1 in paid):
                found.append(TurnPlace(number, start, place))
                start = None
            if is_own and start is None:
                start = place
    return found


def returns_to_go(sample: Sample, reward: float, discount: float) -> list[float]:
    """The return of each answer of an episode, in the order of :func:`turn_places`.

    Args:
        sample: The episode.
        reward: What it earned in all. What its turns do not account for is paid at the last one.
        discount: By which a reward fades per turn.

    Example:
        >>> from nemorl.types import Prompt, Score
        >>> mask, paid = (False, True, False, True), ((1, 1.0), (3, 0.5))
        >>> sample = Sample(Prompt(0, "1+1=", (5,)), (5, 6, 7, 8), mask, (0.0,) * 4, Score(2.0), "2", "stop",
        ...                 turn_rewards=paid)
        >>> returns_to_go(sample, 2.0, discount=0.5)  # 1, then 0.5 and the 0.5 that is left
        [1.5, 1.0]
    """
    earned = {
        (number, place + 1): paid for number, part in enumerate(sample.sequences) for place, paid in part.turn_rewards
    }
    places, found = turn_places(sample), list[float]()
    # An answer that is context (sampled within a schema) may be paid as well: no place is its own.
    later = reward - sum(earned.get((place.sequence, place.stop), 0.0) for place in places)
    for place in reversed(places):
        now = earned.get((place.sequence, place.stop), 0.0)
        later = now + (discount * later if found else later)
        found.append(later)
    return found[::-1]


@dataclass(frozen=True)
class TurnCredit:
    """A batch transform: ``advantages`` turn by turn, in place of one for the whole episode.

    Example:
        >>> from nemorl.types import Prompt, Score
        >>> from nemorl_rl.policy_gradient.advantages import group_advantages
        >>> from nemorl_tensors import TokenBatch
        >>> def episode(*paid: float) -> Sample:
        ...     mask, turns = (False, True, False, True), ((1, paid[0]), (3, paid[1]))
        ...     facts = Score(sum(paid)), "", "stop"
        ...     return Sample(Prompt(0, "", (5,)), (5, 6, 7, 8), mask, (0.0,) * 4, *facts, turn_rewards=turns)
        >>> samples = Samples([episode(1.0, 0.0), episode(0.0, 1.0)])  # equal, but for the second turn
        >>> compare = lambda values, groups: group_advantages(values, groups, normalize_std=False)
        >>> credit = TurnCredit(lambda samples: samples.rewards, compare, 1.0, low=None, high=None, min_group=1)
        >>> batch, _ = credit(TokenBatch.from_samples(samples, [0.0, 0.0]), samples)
        >>> batch["advantages"].tolist()
        [0.0, 0.0, 0.0, -1.0, 0.0, 0.0, 0.0, 1.0]
    """

    requires: ClassVar[frozenset[str]] = frozenset({"advantages"})

    rewards: Callable[[Samples], list[float]]
    """Of whole episodes, shaped."""
    compare: Callable[[Sequence[float], Sequence[int]], list[float]]
    """Values and the groups that they are in -> how much better each is than its group."""
    discount: float
    low: float | None
    high: float | None
    """Bounds of an advantage."""
    min_group: int

    def __call__(self, batch: TokenBatch, samples: Samples) -> tuple[TokenBatch, dict[str, Metric]]:
        import torch

        spans, returns, groups = list[tuple[int, int]](), list[float](), list[int]()
        numbers: dict[tuple[int, int], int] = {}
        counted = are_counted(samples, self.min_group)
        offset = 0
        for sample, reward, counts in zip(samples, self.rewards(samples), counted, strict=True):
            starts = [offset]
            for part in sample.sequences:
                starts.append(starts[-1] + len(part.token_ids))
            offset = starts[-1]
            if not counts:
                continue
            places = turn_places(sample)
            returns += returns_to_go(sample, reward, self.discount)
            for turn, (number, start, stop, _) in enumerate(places):
                spans.append((starts[number] + start, starts[number] + stop))
                groups.append(numbers.setdefault((sample.prompt.index, turn), len(numbers)))
        found = torch.zeros_like(batch["advantages"])
        credit = clip_advantages(self.compare(returns, groups), self.low, self.high)
        for (start, stop), advantage in zip(spans, credit, strict=True):
            found[start:stop] = advantage
        return batch.with_tokens(advantages=found), {}

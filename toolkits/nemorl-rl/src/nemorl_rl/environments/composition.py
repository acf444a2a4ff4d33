"""Several environments as one: a weighted sum of all, or a chain that stops at the first that is not passed.

Parts may be one-turn or conversations, sync, async or batched, and compositions themselves. One part leads: where it
has several turns, its observations are what the policy reads, and the episode ends when it says so; the others score
each of those turns.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nemorl.base.text.suggest import did_you_mean
from nemorl.contracts import Episode
from nemorl.contracts.environment import Environment, as_step
from nemorl.errors import UsageError, boundary
from nemorl.types import Prompt, Score, Step

from nemorl_rl.environments.functions import RewardFunction
from nemorl_rl.environments.loop_thread import in_thread

if TYPE_CHECKING:
    from nemorl_rl.agents.contract import EpisodePolicy


@dataclass(frozen=True)
class Part:
    """One of several environments."""

    environment: Any
    """An environment, its config or name, or a reward function."""
    weight: float = 1.0
    """Factor of its reward in the sum."""


@dataclass(frozen=True)
class Stage(Part):
    """One of several environments in a row."""

    threshold: float = 0.5
    """Rewards below this end the chain."""


class _Composition(Environment):
    """Named parts; closes them all."""

    def __init__(self, parts: Mapping[str, Any], kind: type[Part]) -> None:
        from nemorl_rl.environments.sources import as_environment

        if not parts:
            raise UsageError(f"a {self.name} environment has no parts", fix="give it at least one, by name")
        self.parts: dict[str, Part] = {}
        """As they were given."""
        self._environments: dict[str, Environment] = {}
        for name, given in parts.items():
            part = given if isinstance(given, Part) else kind(*given) if isinstance(given, tuple) else kind(given)
            if not isinstance(part, kind):
                raise UsageError(f"part {name!r} is a Part, which has no threshold", fix="write Stage(…) in a chain")
            environment = as_environment(part.environment)
            if environment is None:
                raise UsageError(f"part {name!r} has no environment", fix="give an environment or f(prompt, response)")
            if environment.drives_policy:
                raise UsageError(
                    f"part {name!r} is an agent, which drives its own episodes: there is no response to share",
                    fix="add the other rewards to what its rollout() returns",
                )
            self.parts[name], self._environments[name] = part, environment
        self.needs_columns = frozenset().union(*(e.needs_columns for e in self._environments.values()))
        self.batched = any(environment.batched for environment in self._environments.values())
        self.policy_can_stall = any(environment.policy_can_stall for environment in self._environments.values())

    def _start_all(self, prompt: Prompt) -> dict[str, Episode]:
        episodes = {}
        for name, environment in self._environments.items():
            with boundary(f"environment {self.name}.{name}"):
                episodes[name] = environment.start(prompt)
        return episodes

    def _ask(self, name: str, episode: Episode, response: str) -> Step | Awaitable[Step]:
        """A part's answer, or one that comes later; its errors carry its name."""
        with boundary(f"environment {self.name}.{name}"):
            answer = episode.step(response)
            return self._named(name, answer) if isinstance(answer, Awaitable) else as_step(answer)

    async def _named(self, name: str, answer: Awaitable[Step]) -> Step:
        with boundary(f"environment {self.name}.{name}"):
            return as_step(await answer)

    def _total(self, steps: Mapping[str, Step]) -> tuple[float, dict[str, float], dict[str, float]]:
        """Reward, components (each part's own reward) and metrics (``part/metric``)."""
        reward = sum(self.parts[name].weight * step.score.reward for name, step in steps.items())
        components = {name: step.score.reward for name, step in steps.items()}
        metrics = {f"{name}/{key}": value for name, step in steps.items() for key, value in step.score.metrics.items()}
        return reward, components, metrics

    async def try_out(self, prompt: Prompt, policy: EpisodePolicy) -> None:
        for name, environment in self._environments.items():
            with boundary(f"environment {self.name}.{name}"):
                await environment.try_out(prompt, policy)

    def rehearsals(self) -> Iterator[Environment]:
        for environment in self._environments.values():
            yield from environment.rehearsals()

    def close(self) -> None:
        with ExitStack() as stack:  # all of them, also where one cannot be closed
            for environment in self._environments.values():
                stack.callback(environment.close)


def named_parts(sources: Sequence[Any]) -> dict[str, Any]:
    """Parts under their own names: those of functions, environments and installed plugins."""
    parts: dict[str, Any] = {}
    for given in sources:
        source = given.environment if isinstance(given, Part) else given[0] if isinstance(given, tuple) else given
        name = source if isinstance(source, str) else getattr(source, "__name__", None) or getattr(source, "name", None)
        name = str(name or type(source).__name__)
        if name in parts:
            raise UsageError(f"two rewards are named {name!r}", fix='name them: {"first": f, "second": g}')
        parts[name] = given
    return parts


class WeightedEnvironment(_Composition):
    """The weighted sum of several rewards; each part's own reward is a component of the score.

    Example:
        >>> def short(prompt, response):
        ...     return float(len(response) < 200)
        >>> environment = WeightedEnvironment({"answer": (lambda p, r: 1.0, 1.0), "short": (short, 0.1)})
    """

    name = "weighted"

    def __init__(self, parts: Mapping[str, Any], *, lead: str | None = None) -> None:
        """
        Args:
            parts: Name -> environment (or whatever becomes one), ``(environment, weight)`` or a :class:`Part`.
            lead: The part whose ``correct`` counts as the accuracy and which leads a conversation. Unset: the first.
        """
        super().__init__(parts, Part)
        self._may_abstain = {
            name for name, part in self._environments.items() if isinstance(part, RewardFunction) and part.may_abstain
        }
        self.lead = next(iter(parts)) if lead is None else lead
        if self.lead not in parts:
            hint = did_you_mean(self.lead, parts) or f"Name one of {', '.join(parts)}."
            raise UsageError(f"no part is named {self.lead!r}", fix=hint)

    def start(self, prompt: Prompt) -> Episode:
        return _WeightedEpisode(self, self._start_all(prompt))

    def combine(self, steps: Mapping[str, Step]) -> Step:
        """One turn of every part as one."""
        reward, components, metrics = self._total(steps)
        lead = steps[self.lead]
        correct = lead.score.correct
        if correct is None and self.lead == "correct":  # as where one function returns {"correct": …, …}
            correct = lead.score.reward > 0
        needed = {name: step for name, step in steps.items() if name not in self._may_abstain}
        valid = _all_valid(needed) and any(step.score.valid for step in steps.values())
        score = Score(reward, components, metrics, correct, lead.score.answer, valid, **_end(needed))
        return Step(score, lead.observation, lead.done)


def _all_valid(steps: Mapping[str, Step]) -> bool:
    """A total of which one part could not be judged is no judgement."""
    return all(step.score.valid for step in steps.values())


def _end(steps: Mapping[str, Step]) -> dict[str, Any]:
    """``outcome`` and ``cause`` of the first part that did not end with a verdict of its own; ``feedback`` of all."""
    ends = ((step.score.outcome, f"{name}: {step.score.cause}") for name, step in steps.items())
    outcome, cause = next((end for end in ends if end[0] != "scored"), ("scored", ""))
    feedback = "\n".join(step.score.feedback for step in steps.values() if step.score.feedback)
    return {"outcome": outcome, "cause": cause, "feedback": feedback}


class _WeightedEpisode:
    def __init__(self, environment: WeightedEnvironment, episodes: Mapping[str, Episode]) -> None:
        self._environment, self._episodes = environment, episodes

    def step(self, response: str) -> Step | Awaitable[Step]:
        answers = [self._environment._ask(name, episode, response) for name, episode in self._episodes.items()]
        if any(isinstance(answer, Awaitable) for answer in answers):
            return self._later(answers)
        return self._combine(answers)  # type: ignore[arg-type]

    async def _later(self, answers: Sequence[Step | Awaitable[Step]]) -> Step:
        return self._combine(await asyncio.gather(*(_settled(answer) for answer in answers)))

    def _combine(self, steps: Sequence[Step]) -> Step:
        return self._environment.combine(dict(zip(self._episodes, steps, strict=True)))


class ChainEnvironment(_Composition):
    """Parts in order, up to the first whose reward is below its threshold: a cheap gate before a costly judge.

    The reward is the weighted sum of the parts that were asked; give a gate the weight 0 to make it a condition only.
    The last part leads: its ``correct`` counts, and an episode whose chain stops before it is wrong and ends.

    Example:
        >>> gate = lambda prompt, response: float(response.isdigit())
        >>> right = lambda prompt, response: float(response == "4")
        >>> chain = ChainEnvironment({"digits": (gate, 0.2), "right": (right, 1.0)})
        >>> chain.start(Prompt(0, "2+2=", ())).step("four").score.reward
        0.0
    """

    name = "chain"

    def __init__(self, parts: Mapping[str, Any]) -> None:
        """
        Args:
            parts: Name -> environment (or whatever becomes one), ``(environment, weight, threshold)`` or a
                :class:`Stage`, in the order to ask them.
        """
        super().__init__(parts, Stage)

    def start(self, prompt: Prompt) -> Episode:
        return _ChainEpisode(self, self._start_all(prompt))

    def passes(self, name: str, step: Step) -> bool:
        """The reward of this answer reaches the threshold, so the next part is asked."""
        stage = self.parts[name]
        assert isinstance(stage, Stage)
        return step.score.reward >= stage.threshold

    def combine(self, steps: Mapping[str, Step]) -> Step:
        """The turns of the parts that were asked as one."""
        reward, components, metrics = self._total(steps)
        if len(steps) < len(self.parts):
            return Step(Score(reward, components, metrics, correct=False, valid=_all_valid(steps), **_end(steps)))
        last = list(steps.values())[-1]
        valid = _all_valid(steps)
        score = Score(reward, components, metrics, last.score.correct, last.score.answer, valid, **_end(steps))
        return Step(score, last.observation, last.done)


class _ChainEpisode:
    def __init__(self, environment: ChainEnvironment, episodes: Mapping[str, Episode]) -> None:
        self._environment, self._episodes = environment, episodes

    def step(self, response: str) -> Step | Awaitable[Step]:
        """Goes as far as it can at once, so that a batched part behind a quick gate is asked with the whole batch."""
        steps: dict[str, Step] = {}
        for name, episode in self._episodes.items():
            answer = self._environment._ask(name, episode, response)
            if isinstance(answer, Awaitable):
                return self._later(response, steps, name, answer)
            steps[name] = answer
            if not self._environment.passes(name, answer):
                break
        return self._environment.combine(steps)

    async def _later(self, response: str, steps: dict[str, Step], name: str, answer: Awaitable[Step]) -> Step:
        steps[name] = await answer
        rest = list(self._episodes)[len(steps) :]
        for after in rest:
            if not self._environment.passes(name, steps[name]):
                break
            name = after
            # A blocking part after an async one runs in a thread, since an event loop must not be blocked.
            result = await in_thread(self._environment._ask, name, self._episodes[name], response)
            steps[name] = await _settled(result)
        return self._environment.combine(steps)


async def _settled(answer: Step | Awaitable[Step]) -> Step:
    return await answer if isinstance(answer, Awaitable) else answer

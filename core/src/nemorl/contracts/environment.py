"""The contract of environments: their base class, and episodes."""

from __future__ import annotations

from collections.abc import Awaitable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, SupportsFloat

from nemorl.base.text.reading import shown
from nemorl.errors import UsageError
from nemorl.types import Prompt, Score, Step

if TYPE_CHECKING:
    from nemorl_rl.agents.contract import EpisodePolicy


class Episode(Protocol):
    """One conversation with an environment, single use.

    >>> class Echo:
    ...     def step(self, response): return Step(Score(0.0), observation=response, done=False)
    """

    def step(self, response: str) -> Step | Awaitable[Step]:
        """The environment's answer to the policy's latest response."""
        ...


class Environment:
    """Base class. Override ``score`` for one-turn tasks, ``start`` for conversations, or ``rollout`` for agents.

    Example:
        >>> class Shouting(Environment):
        ...     def score(self, prompt, response):
        ...         return float(response.isupper())
    """

    name = "environment"
    batched: bool = False
    """Whether awaiting one score computes all that were asked for by then. The pool lets every episode ask first."""
    has_side_effects: bool = True
    """Whether ``score`` costs time or money, or changes anything. Where it does not, one call is tried on the first row
    before the model is loaded, so that a mistake in it shows at once."""
    needs_columns: frozenset[str] = frozenset()
    """Columns of rows that it cannot do without, e.g. ``answer``. Asked of the first row before the model is loaded."""

    policy_can_stall: bool = False
    """Whether what the policy writes can make it hang: programs, tools, expressions. A time-out is then the policy's
    doing, and costs it; otherwise nothing is learnt from the episode."""

    drives_policy: ClassVar[bool] = False
    """It defines ``rollout``: episodes call the policy when they like."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "rollout" in cls.__dict__ and "drives_policy" not in cls.__dict__:
            cls.drives_policy = True

    @property
    def owner(self) -> str:
        """Its name in errors: its own, or its class where it has none."""
        of = "" if self.name != Environment.name else f" ({type(self).__module__}.{type(self).__qualname__})"
        return f"environment {self.name!r}{of}"

    def score(self, prompt: Prompt, response: str) -> float | Score | Awaitable[float | Score]:
        """The reward of one response: a number, or a :class:`Score` with parts and metrics. May be async."""
        raise NotImplementedError(f"{type(self).__name__} must define score() or start()")

    def start(self, prompt: Prompt) -> Episode:
        """A new episode. The default one asks ``score`` and ends."""
        return _OneTurn(self, prompt)

    async def rollout(self, prompt: Prompt, policy: EpisodePolicy) -> float | Score | None:
        """One whole episode, which calls the policy as often as it likes; its reward, ``None`` where nobody can say.

        Args:
            prompt: The task.
            policy: Answers chats and continues tokens until this returns; what it answered is what is trained.
        """
        raise NotImplementedError(f"{type(self).__name__} must define rollout()")

    async def try_out(self, prompt: Prompt, policy: EpisodePolicy) -> None:
        """Look whether episodes can begin, before the model is loaded: at the first row, at servers and programs.

        Args:
            prompt: Of the first row.
            policy: Answers a call or two with a word of its own.

        Raises:
            NemorlError: What is to be mended.
        """

    def rehearsals(self) -> Iterator[Environment]:
        """The environments whose ``score`` is tried before the run."""
        if not self.has_side_effects:
            yield self

    def close(self) -> None:
        """Release what the environment holds."""


class _OneTurn:
    def __init__(self, environment: Environment, prompt: Prompt) -> None:
        self._environment, self._prompt = environment, prompt

    def step(self, response: str) -> Step | Awaitable[Step]:
        result = self._environment.score(self._prompt, response)
        if isinstance(result, Awaitable):
            return self._later(result)
        return self._step(result)

    async def _later(self, result: Awaitable[float | Score]) -> Step:
        return self._step(await result)

    def _step(self, result: float | Score) -> Step:
        return Step(as_score(result, owner=self._environment.owner))


def as_step(result: object, *, owner: str = "the environment") -> Step:
    """The result of ``Episode.step`` as a :class:`Step`; what ``score`` may return is one that ends the episode.

    Args:
        result: What was returned. The score of a ``Step``, too, may be all that ``score`` may return.
        owner: Who returned it, for the error.

    >>> as_step(Step(0.5, "Go on.", done=False)).score
    Score(reward=0.5, ..., outcome='scored', cause='', feedback='')
    """
    if not isinstance(result, Step):
        return Step(as_score(result, owner=owner))
    return result if isinstance(result.score, Score) else replace(result, score=as_score(result.score, owner=owner))


def as_score(result: object, *, owner: str = "the environment") -> Score:
    """A bare number, or several, as a :class:`Score`.

    Several rewards add up and are kept as components: ``{"correct": 1.0, "format": 0.5}`` under their names, a list as
    ``reward1``, ``reward2``, … A part named ``correct`` says as well whether the answer is right: above 0 it is.

    Args:
        result: What was returned: a number, anything with ``__float__`` (a tensor of one element), several of them in
            a mapping, list or tuple, or a ``Score``.
        owner: Who returned it, for the error.

    >>> as_score({"correct": 1, "format": 0.5}).reward
    1.5
    """
    if isinstance(result, Score):
        return result
    if isinstance(result, list | tuple) and len(result) == 1:
        return Score(_as_float(result[0], owner))
    if isinstance(result, list | tuple) and result:
        result = {f"reward{number}": part for number, part in enumerate(result, start=1)}
    if isinstance(result, Mapping) and result:
        parts = {str(name): _as_float(part, f"{owner}, part {name!r},") for name, part in result.items()}
        correct = parts["correct"] > 0 if "correct" in parts else None
        return Score(sum(parts.values()), components=parts, correct=correct)
    return Score(_as_float(result, owner))


def _as_float(result: object, owner: str) -> float:
    try:
        # Text converts as well, but a reward that comes as text is a mistake in the making.
        return float(result if isinstance(result, SupportsFloat) else None)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError) as error:
        raise UsageError(
            f"{owner} returned {shown(result)} ({type(result).__name__}) as a reward",
            fix="return one number per response, several as a dict, or a nemorl.Score",
        ) from error

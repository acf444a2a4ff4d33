"""How an episode ended, and what that is worth."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, field, replace

from nemorl.contracts.environment import Environment, as_score
from nemorl.errors import UsageError, boundary
from nemorl.types import Prompt, Score
from nemorl_rl.agents.outcomes import Fate, worth
from nemorl_rl.environments.loop_thread import in_thread

from nemorl_agents.programs.episode import COLUMN, Episode

STDERR_CHARS = 2000


@dataclass(frozen=True)
class Play:
    """One played episode, before it is scored."""

    episode: Episode
    answer: str
    """The text that is scored."""
    own_score: Score | None = None
    """Where the agent is a coroutine that scores itself."""
    metrics: Mapping[str, float] = field(default_factory=dict)


class Judge:
    """Scores episodes. Safe to use from several event loops."""

    def __init__(self, reward: Environment | None, outcomes: Mapping[str, Fate]) -> None:
        """
        Args:
            reward: Scores answers.
            outcomes: What becomes of episodes that did not end well; 0 where nothing is said.
        """
        if reward is not None and type(reward).score is Environment.score:
            raise UsageError(
                f"{reward.owner} talks with the policy itself, so it cannot score an agent's answer",
                fix="set reward to an environment of one turn, or to a function",
            )
        self.reward, self._outcomes = reward, dict(outcomes)

    async def score(self, prompt: Prompt, play: Play) -> Score:
        """
        Raises:
            UsageError: The outcome is an error, as configured.
        """

        async def reward() -> Score:
            return play.own_score or await self._rewarded(prompt, play)

        score = await worth(play.episode.outcome, self._outcomes, reward, lambda: describe(play.episode))
        return replace(score, metrics={**score.metrics, **play.metrics})

    async def _rewarded(self, prompt: Prompt, play: Play) -> Score:
        reward = self.reward
        if reward is None:
            raise UsageError(
                "the coroutine returned no score, and nothing else scores its episode",
                fix="return a number from it, or set reward",
            )
        asked = replace(prompt, row={**prompt.row, COLUMN: play.episode})
        with boundary(reward.owner):
            result = await in_thread(reward.score, asked, play.answer)
            if isinstance(result, Awaitable):
                result = await result
            return as_score(result, owner=reward.owner)


def describe(episode: Episode) -> str:
    """How it ended, with the end of its errors."""
    code = episode.returncode
    how = "it was ended at its deadline" if episode.outcome == "timeout" else f"exit code {code}"
    if code is not None and code < 0:
        how = f"ended by signal {-code}"
    if episode.returncode is None and episode.outcome != "timeout":
        how = episode.outcome
    said = episode.stderr.strip()[-STDERR_CHARS:]
    return f"{how}, stderr:\n{said}" if said else f"{how}, nothing on stderr"

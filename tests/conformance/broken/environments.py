"""Environments with a mistake each."""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any, ClassVar

from nemorl.contracts.environment import Environment
from nemorl.plugins.kinds import EnvironmentConfig
from nemorl.types import Prompt, Score, Step
from nemorl_rl.agents.contract import EpisodePolicy


class GoodEnvironment(Environment):
    """1 for exactly the answer."""

    def score(self, prompt: Prompt, response: str) -> float:
        return float(response == prompt.answer)


class AnyEnvironment(EnvironmentConfig):
    """``mistake`` names a class of this module."""

    summary: ClassVar[str] = "an environment with a mistake"
    mistake: str = "GoodEnvironment"
    """Class name."""

    def build(self) -> Any:
        return globals()[self.mistake]()


class FailsOnEmpty(GoodEnvironment):
    def score(self, prompt: Prompt, response: str) -> float:
        return float(response.rsplit(maxsplit=1)[-1] == prompt.answer)


class DividesByLength(GoodEnvironment):
    def score(self, prompt: Prompt, response: str) -> float:
        return float("nan") if not response else super().score(prompt, response)


class Moody(GoodEnvironment):
    """Each instance finds another number for answers that it is not sure of."""

    def __init__(self) -> None:
        self._mood = random.random()

    def score(self, prompt: Prompt, response: str) -> float:
        return self._mood if "not know" in response else super().score(prompt, response)


class NotThreadSafe(GoodEnvironment):
    def score(self, prompt: Prompt, response: str) -> float:
        self._prompt, self._response = prompt, response
        time.sleep(0.001)
        return float(self._response == self._prompt.answer)


class WrongWayRound(GoodEnvironment):
    def score(self, prompt: Prompt, response: str) -> Score:
        return Score(1.0 - super().score(prompt, response))


class _FallsSilent:
    def __init__(self, environment: GoodEnvironment, prompt: Prompt) -> None:
        self._environment, self._prompt = environment, prompt

    def step(self, response: str) -> Step:
        reward = self._environment.score(self._prompt, response)
        return Step(Score(reward), observation=None, done=reward == 1.0)


class FallsSilent(GoodEnvironment):
    """A wrong answer may be corrected, but the policy is not told."""

    def start(self, prompt: Prompt) -> Any:
        return _FallsSilent(self, prompt)


class ClosesOnce(GoodEnvironment):
    is_open = True

    def close(self) -> None:
        if not self.is_open:
            raise RuntimeError("already closed")
        self.is_open = False


class SleepsOnTheLoop(GoodEnvironment):
    """Waits for a slow grader, and all episodes with it."""

    async def score(self, prompt: Prompt, response: str) -> float:  # type: ignore[override]
        time.sleep(0.001)
        return super().score(prompt, response)


class PopsFromTheRow(GoodEnvironment):
    def score(self, prompt: Prompt, response: str) -> float:
        prompt.row.pop("answer", None)  # type: ignore[attr-defined]
        return super().score(prompt, response)


class FailsOnFences(GoodEnvironment):
    def score(self, prompt: Prompt, response: str) -> float:
        _, found, code = response.partition("```\n")
        return super().score(prompt, code.split("\n```")[2] if found else response)


class TakesRaisedDigitsForNumbers(GoodEnvironment):
    def score(self, prompt: Prompt, response: str) -> float:
        return float(response.isdigit() and int(response) == int(prompt.answer or 0))


class TakesColumnsForText(GoodEnvironment):
    def score(self, prompt: Prompt, response: str) -> float:
        return float(response == prompt.row["answer"].strip())


class PassesNoNumbers(GoodEnvironment):
    """Compares with the column as it is, and a number is no text."""

    def score(self, prompt: Prompt, response: str) -> float:
        return float(response == prompt.row["answer"])


class _Game:
    def __init__(self, environment: GoodGame, prompt: Prompt) -> None:
        self._environment, self._prompt, self._tries = environment, prompt, 0

    def step(self, response: str) -> Step:
        self._tries += 1
        if response == self._prompt.answer:
            return Step(Score(self._environment.pays(self._tries)))
        is_over = self._tries == self._environment.tries
        return Step(Score(0.0), None if is_over else "No.", is_over)


class GoodGame(Environment):
    """Three tries; the second earns half."""

    tries = 3

    def start(self, prompt: Prompt) -> Any:
        return _Game(self, prompt)

    def pays(self, tries: int) -> float:
        return 1 / tries


class PaysLateAnswersInFull(GoodGame):
    def pays(self, tries: int) -> float:
        return 1.0


class EndsWithTheFirstMistake(GoodGame):
    tries = 1


class GoodAgent(Environment):
    """Asks until the policy says the answer, or has said something else three times."""

    async def rollout(self, prompt: Prompt, policy: EpisodePolicy) -> float | None:
        for _ in range(3):
            reply = await self.asked(prompt, policy)
            if reply == prompt.answer:
                return 1.0
        return 0.0

    async def asked(self, prompt: Prompt, policy: EpisodePolicy) -> str:
        return (await policy.chat([{"role": "user", "content": prompt.text}])).text


class DividesByWords(GoodAgent):
    async def rollout(self, prompt: Prompt, policy: EpisodePolicy) -> float:
        reply = await self.asked(prompt, policy)
        return float(reply == prompt.answer) / len(reply.split())


class SharesItsState(GoodAgent):
    said = ""

    async def rollout(self, prompt: Prompt, policy: EpisodePolicy) -> float:
        self.said = await self.asked(prompt, policy)
        await asyncio.sleep(0.001)
        return float(self.said == "42")


class GoesOnWhenCancelled(GoodAgent):
    async def asked(self, prompt: Prompt, policy: EpisodePolicy) -> str:
        while True:
            try:
                return await super().asked(prompt, policy)
            except asyncio.CancelledError:
                continue


class SleepsInARollout(GoodAgent):
    async def asked(self, prompt: Prompt, policy: EpisodePolicy) -> str:
        time.sleep(0.001)
        return await super().asked(prompt, policy)


class ListensOnce(GoodAgent):
    async def rollout(self, prompt: Prompt, policy: EpisodePolicy) -> float | None:
        return float(await self.asked(prompt, policy) == prompt.answer)


class PopsInARollout(GoodAgent):
    async def asked(self, prompt: Prompt, policy: EpisodePolicy) -> str:
        prompt.row.pop("prompt", None)  # type: ignore[attr-defined]
        return await super().asked(prompt, policy)

"""Environments of the harness: an agent that forks; programs and formulas out of responses that hold none."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from nemorl.contracts.environment import Environment
from nemorl.types import Prompt, Score
from nemorl_math_env.config import MathConfig
from nemorl_math_env.environment import MathEnvironment
from nemorl_rl.agents.contract import EpisodePolicy
from nemorl_rl.registration import register_environment
from nemorl_tasks.code.config import CodeConfig
from nemorl_tasks.code.environment import CodeEnvironment


@register_environment("drafts")
class Drafts(Environment):
    """Asks twice at the same time, then goes on from the first answer: a fork, three calls."""

    name = "drafts"

    async def rollout(self, prompt: Prompt, policy: EpisodePolicy) -> Score:
        first, other = await asyncio.gather(policy.complete(prompt.token_ids), policy.complete(prompt.token_ids))
        last = await policy.complete((*prompt.token_ids, *first.token_ids))
        answers = (first, other, last)
        return Score(sum(token for answer in answers for token in answer.token_ids) / 100.0)


@register_environment("digit-programs")
class ProgramsOfDigits(Environment):
    """``code`` on a program that prints how many digits a response has; the test wants an even number."""

    name = "digit-programs"

    def __init__(self, timeout_s: float = 5.0) -> None:
        self._code = CodeEnvironment(CodeConfig(timeout_s=timeout_s, workers=2))

    async def score(self, prompt: Prompt, response: str) -> Score:
        return await self._code.score(_with_tests(prompt), _program(response))

    def close(self) -> None:
        self._code.close()


@register_environment("formulas")
class Formulas(Environment):
    """``math`` on a formula that is right for an even number of digits; every answer needs a grader's algebra."""

    name = "formulas"

    def __init__(self, timeout_s: float = 5.0) -> None:
        self._math = MathEnvironment(MathConfig(timeout_s=timeout_s, workers=2))

    def score(self, prompt: Prompt, response: str) -> Score:
        answer = rf"\boxed{{(x - 1)(x + 1) + {_digits(response) % 2}}}"
        return self._math.score(replace(prompt, answer="x^2 - 1"), answer)

    def close(self) -> None:
        self._math.close()


def _with_tests(prompt: Prompt) -> Prompt:
    return Prompt(prompt.index, prompt.text, prompt.token_ids, row={"tests": [{"input": "2", "output": "0\n"}]})


def _program(response: str) -> str:
    return f"```python\nprint({_digits(response)} % int(input()))\n```"


def _digits(response: str) -> int:
    return sum(letter.isdigit() for letter in response)

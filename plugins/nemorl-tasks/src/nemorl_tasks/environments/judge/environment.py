"""The judge as an environment: verdicts as scores."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from nemorl.base.text.suggest import did_you_mean
from nemorl.contracts.environment import Environment
from nemorl.errors import DataError
from nemorl.types import Prompt, Score

from nemorl_tasks.environments.judge.cache import Verdict, VerdictCache
from nemorl_tasks.environments.judge.client import JudgeClient, JudgeUnavailableError, Reply
from nemorl_tasks.environments.judge.questions import question_of

if TYPE_CHECKING:
    from nemorl_tasks.environments.judge.config import JudgeConfig

log = logging.getLogger(__name__)

MAX_WARNINGS = 5
"""Failures of the server that are told; the metric ``environment_error`` counts them all."""


class Judge(Environment):
    """A language model that grades."""

    name = "judge"

    def __init__(self, config: JudgeConfig) -> None:
        self._config = config
        self._client = JudgeClient(config)
        self._cache = VerdictCache(Path(config.cache)) if config.cache is not None else None
        self._warned = 0

    async def score(self, prompt: Prompt, response: str) -> Score:
        config = self._config
        self._require_columns(prompt)
        graded = response.rpartition("</think>")[2] if config.ignore_thinking else response
        if len(graded) > config.max_response_chars:
            return self._scored(config.lowest, judge_too_long=1.0)
        question = question_of(config, prompt, graded)
        known = self._cache.get(question.key) if self._cache is not None else None
        if known is not None:
            return self._scored(known.score, said=known.reply, judge_cached=1.0)
        try:
            reply = await self._client.ask(question.parameters())
        except JudgeUnavailableError as error:
            self._warn(error)
            metrics = self._metrics(environment_error=1.0)
            return Score(0.0, metrics=metrics, valid=False, outcome="infrastructure", cause=f"the judge: {error}")
        score = question.score(reply.text)
        if score is None:
            metrics = self._metrics(reply, judge_no_verdict=1.0)
            return Score(0.0, metrics=metrics, valid=config.no_verdict == "lowest", correct=self._is_correct(None))
        if self._cache is not None:
            self._cache.put(question.key, Verdict(score, reply.text))
        return self._scored(score, reply, said=reply.text)

    def close(self) -> None:
        self._client.close()
        if self._cache is not None:
            self._cache.close()

    def _scored(self, score: float, reply: Reply | None = None, *, said: str = "", **counts: float) -> Score:
        config = self._config
        reward = (score - config.lowest) / (config.highest - config.lowest)
        metrics = self._metrics(reply, **counts)
        return Score(reward, metrics=metrics, correct=self._is_correct(score), feedback=said)

    def _is_correct(self, score: float | None) -> bool | None:
        if self._config.correct_from is None:
            return None
        return score is not None and score >= self._config.correct_from

    def _metrics(self, reply: Reply | None = None, **counts: float) -> dict[str, float]:
        """All of them always, so that their means are per response."""
        config, taken = self._config, reply or Reply("", 0, 0, 0)
        cost = (taken.prompt_tokens * config.prompt_price + taken.completion_tokens * config.completion_price) / 1e6
        return {
            "judge_prompt_tokens": float(taken.prompt_tokens),
            "judge_completion_tokens": float(taken.completion_tokens),
            "judge_cost": cost,
            "judge_cached": 0.0,
            "judge_retries": float(taken.retries),
            "judge_no_verdict": 0.0,
            "judge_too_long": 0.0,
            "environment_error": 0.0,
            **counts,
        }

    def _require_columns(self, prompt: Prompt) -> None:
        missing = [name for name in self._config.columns if name not in prompt.row]
        if missing:
            raise DataError(
                f"the row of prompt {prompt.text[:60]!r} has no column {', '.join(missing)}",
                fix=did_you_mean(missing[0], prompt.row) or f"it has {', '.join(map(str, prompt.row))}",
            )

    def _warn(self, error: Exception) -> None:
        self._warned += 1
        if self._warned <= MAX_WARNINGS:
            log.warning("the judge %s did not grade a response: %s", self._config.model, error)

"""The ``math`` environment: reward 1 for the right final answer, 0 for anything else.

Most answers are decided in microseconds by ``answers.py``; formulas go to ``grader.py``'s processes.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

from nemorl.contracts.environment import Environment
from nemorl.types import Prompt, Score
from nemorl_rl.rollouts.prompts import required_answer

from nemorl_math_env import worker
from nemorl_math_env.answers import canonical, decide, final_answer, is_number, reference_answer, without_nouns
from nemorl_math_env.grader import Grade, GraderPool, Outcome

if TYPE_CHECKING:
    from nemorl_math_env.config import GraderConfig, MathConfig


class AnswerGrader(Environment):
    """Grades the answer that a subclass finds against ``prompt.answer``. Safe to call from many threads."""

    policy_can_stall = True
    needs_columns = frozenset({"answer"})

    def __init__(self, config: GraderConfig, *, grader: Grade | None = None) -> None:
        self._accept_unevaluated = config.accept_unevaluated
        if grader is None:
            grader = worker.grade_unevaluated if config.accept_unevaluated else worker.grade
        self.pool = GraderPool(
            timeout_s=config.timeout_s, workers=config.workers, memory_gib=config.memory_gib, grader=grader
        )

    def score(self, prompt: Prompt, response: str) -> Score:
        truth = reference_answer(required_answer(prompt, self.name))
        given = self._given(truth, response)
        if given is not None:
            given = without_nouns(given, truth, prompt.text)
        return _as_score(self._judge(truth, given), truth, given)

    def outcome(self, answer: str, response: str) -> Outcome:
        """The outcome of one response, before it is turned into numbers."""
        truth = reference_answer(answer)
        return self._judge(truth, self._given(truth, response))

    @abstractmethod
    def _given(self, truth: str, response: str) -> str | None:
        """The answer in a response; ``None`` where there is none."""

    def _judge(self, truth: str, given: str | None) -> Outcome:
        if given is None:
            return "unparsable"
        decided = decide(truth, given, accept_unevaluated=self._accept_unevaluated)
        if decided is not None:
            return "right" if decided else "wrong"
        return self.pool.grade(truth, given)

    def close(self) -> None:
        self.pool.close()


class MathEnvironment(AnswerGrader):
    """Finds final answers however they are written."""

    name = "math"

    def __init__(self, config: MathConfig, *, grader: Grade | None = None) -> None:
        super().__init__(config, grader=grader)
        self._config = config

    def _given(self, truth: str, response: str) -> str | None:
        return final_answer(
            response,
            markers=self._config.answer_markers,
            require_marker=self._config.require_marker,
            numeric=is_number(truth),
        )


def _as_score(outcome: Outcome, truth: str, given: str | None) -> Score:
    correct = outcome == "right"
    # All three always, so that their means are rates.
    metrics = {
        "grader_timeout": float(outcome == "timeout"),
        "grader_crash": float(outcome == "crash"),
        "unparsable": float(outcome == "unparsable"),
    }
    # All right answers are one, however they are written.
    said = truth if correct else given
    return Score(
        reward=float(correct),
        correct=correct,
        metrics=metrics,
        answer=None if said is None else canonical(said, truth=truth),
    )

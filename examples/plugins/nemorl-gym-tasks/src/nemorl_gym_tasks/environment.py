"""Grades one response."""

from __future__ import annotations

from nemorl.contracts.environment import Environment
from nemorl.errors import DataError
from nemorl.types import Prompt, Score

from nemorl_gym_tasks.problems import Origin
from nemorl_gym_tasks.rows import COLUMN


class GymTasksEnvironment(Environment):
    """The task's own score of the final answer: 1 is right, values between are partly right."""

    name = "gym_tasks"

    def score(self, prompt: Prompt, response: str) -> Score:
        from reasoning_gym.utils import extract_answer

        column = prompt.row.get(COLUMN)
        if column is None:
            raise DataError(f"{prompt.text[:60]!r} is no reasoning-gym task", fix="use `data: {name: gym_tasks, …}`")
        origin = Origin(**column)
        answer = extract_answer(response) or response.strip()
        try:
            reward, failed = float(origin.generator.score_answer(answer, origin.entry)), 0.0
        except Exception:  # scorers parse the answer, and some raise on what they cannot parse
            reward, failed = 0.0, 1.0
        metrics = {"scorer_error": failed, f"{origin.task}_reward": reward}
        return Score(reward, metrics=metrics, correct=reward >= 1.0, answer=answer)

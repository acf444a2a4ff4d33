"""reasoning-gym: its tasks as rows, its scorers as rewards.

A row keeps where a task comes from (generator, options, seed, size, index) and not the task's own data, which JSON
would change (tuples become lists) and some scorers would then refuse.
"""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from nemorl.base.text.suggest import did_you_mean
from nemorl.contracts.environment import Environment
from nemorl.errors import DataError, UsageError, boundary
from nemorl.types import Prompt, Row, Score

from nemorl_agents.interop.answer_forms import readings

if TYPE_CHECKING:
    from nemorl_agents.interop.config import ReasoningGymTasksConfig

COLUMN = "reasoning_gym"
NONSENSE = "no such answer"
DRAWS = 4
"""Tasks generated per task wanted, at most, since some occur twice."""


class ReasoningGym(Environment):
    """The generator's own score of the final answer."""

    name = "reasoning_gym"

    def score(self, prompt: Prompt, response: str) -> Score:
        origin = prompt.row.get(COLUMN)
        if not isinstance(origin, dict):
            raise DataError(
                f"prompt {prompt.text[:60]!r} does not say which reasoning-gym task it is",
                fix="use `data: {name: reasoning_gym, task: …}`",
            )
        source = (origin["task"], json.dumps(origin["options"]), origin["seed"], origin["size"])
        dataset, entry = _dataset(*source), _entry(*source, origin["index"], origin.get("question"))
        # Some scorers pay for any text, as that of game_of_life_halting does.
        if (_score(dataset, entry, NONSENSE) or 0.0) >= 1.0:
            right = str(entry["answer"]).casefold() in map(str.casefold, readings(response))
            return Score(float(right), metrics={"scorer_error": 0.0}, correct=right)
        found = [_score(dataset, entry, answer) for answer in readings(response)]
        rewards = [reward for reward in found if reward is not None]
        reward = max(rewards, default=0.0)
        return Score(reward, metrics={"scorer_error": float(not rewards)}, correct=reward >= 1.0)


def _score(dataset: Any, entry: Any, answer: str) -> float | None:
    """``None`` where the generator's scorer fails: it parses the answer, and some raise on what they cannot parse."""
    with suppress(Exception):
        return float(dataset.score_answer(answer, entry))
    return None


def rows(config: ReasoningGymTasksConfig) -> dict[str, list[Row]]:
    """Distinct tasks of both splits; held-out ones first, so that they do not depend on ``num_train``."""
    wanted = config.num_validation + config.num_train
    # As many as are wanted, since generators may make all of them at once; more where some occur twice.
    for size in (wanted, DRAWS * wanted):
        made = list(_distinct(config, wanted, size).values())
        if len(made) == wanted:
            return {"validation": made[: config.num_validation], "train": made[config.num_validation :]}
    raise DataError(
        f"reasoning-gym task {config.task!r} gave {len(made)} distinct tasks in {DRAWS * wanted} draws, "
        f"{wanted} were asked for",
        fix="lower num_train, or set options that allow more tasks",
    )


def _distinct(config: ReasoningGymTasksConfig, wanted: int, size: int) -> dict[str, Row]:
    """Question -> row, of the first tasks of a generator that is asked for ``size``."""
    dataset = _new_dataset(config.task, json.dumps(config.options), config.seed, size)
    found: dict[str, Row] = {}
    for index in range(size):
        with boundary(f"reasoning-gym task {config.task!r}"):
            try:
                entry = dataset[index]
            except (IndexError, StopIteration):  # it has no more
                break
        question = entry["question"]
        origin = {"task": config.task, "options": config.options, "seed": config.seed, "size": size}
        origin |= {"index": index, "question": _digest(question)}
        found.setdefault(question, _row(config, entry, origin))
        if len(found) == wanted:
            break
    return found


def _row(config: ReasoningGymTasksConfig, entry: dict[str, Any], origin: dict[str, Any]) -> Row:
    text = f"{entry['question']}\n{config.instruction}".strip()
    prompt: object = [{"role": "user", "content": text}] if config.chat else f"{text}\n"
    return {"prompt": prompt, "answer": None if entry["answer"] is None else str(entry["answer"]), COLUMN: origin}


def _new_dataset(task: str, options: str, seed: int, size: int) -> Any:
    import reasoning_gym
    from reasoning_gym.composite import DatasetSpec
    from reasoning_gym.factory import DATASETS

    given = json.loads(options)
    parts = given.get("datasets", []) if task == "composite" else []
    for name in (task, *(str(part["name"]) for part in parts)):
        if name not in DATASETS:
            raise UsageError(f"reasoning-gym has no task {name!r}", fix=did_you_mean(name, DATASETS))
    with boundary(f"reasoning-gym task {task!r}"):
        if parts:
            given["datasets"] = [DatasetSpec(**{"weight": 1.0, "config": {}, **part}) for part in parts]
        return reasoning_gym.create_dataset(task, seed=seed, size=size, **given)


_dataset = lru_cache(maxsize=64)(_new_dataset)


@lru_cache(maxsize=4096)
def _entry(task: str, options: str, seed: int, size: int, index: int, question: str | None) -> Any:
    """A task, generated again; the samples of a group share it. Rows that were made long ago do not know its question.

    Raises:
        DataError: It is another one now.
    """
    entry = _dataset(task, options, seed, size)[index]
    if question not in (None, _digest(entry["question"])):  # some generators remember what they made before: begin anew
        dataset = _new_dataset(task, options, seed, size)
        entry = [dataset[number] for number in range(index + 1)][-1]
    if question not in (None, _digest(entry["question"])):
        raise DataError(
            f"reasoning-gym makes another task of {task!r}, seed {seed}, number {index}, than when the rows were made",
            fix="install the version of reasoning-gym that made them, or make them again",
        )
    return entry


def _digest(question: str) -> str:
    return hashlib.sha256(question.encode()).hexdigest()[:16]

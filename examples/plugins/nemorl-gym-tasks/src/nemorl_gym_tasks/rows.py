"""Draws the rows of a mixture."""

from __future__ import annotations

import itertools
import random
from typing import TYPE_CHECKING

from nemorl.errors import DataError, boundary
from nemorl.types import Row

from nemorl_gym_tasks.problems import Origin

if TYPE_CHECKING:
    from nemorl_gym_tasks.config import GymMixtureConfig

COLUMN = "gym_task"
DRAWS = 4
"""Problems drawn per problem wanted, at most: some occur twice."""


def mixture(config: GymMixtureConfig) -> list[Row]:
    """Distinct problems, held-out ones first, so that they do not depend on ``num_train``.

    Raises:
        DataError: the tasks have too few distinct problems.
    """
    wanted = config.num_validation + config.num_train
    names = list(config.tasks)
    weights = [task.weight for task in config.tasks.values()]
    place = {name: itertools.count() for name in names}
    found: dict[str, Row] = {}
    for name in random.Random(config.seed).choices(names, weights, k=DRAWS * wanted):
        origin = Origin.of(name, config.tasks[name].options, config.seed, next(place[name]))
        with boundary(f"reasoning-gym task {name!r}"):
            entry = origin.entry
        found.setdefault(entry["question"], _row(config, entry["question"], entry["answer"], origin))
        if len(found) == wanted:
            return list(found.values())
    raise DataError(
        f"{', '.join(names)} gave {len(found)} distinct problems in {DRAWS * wanted} draws, {wanted} were asked for",
        fix="lower num_train, or set options that allow more",
    )


def _row(config: GymMixtureConfig, question: str, answer: object, origin: Origin) -> Row:
    text = f"{question}\n{config.instruction}".strip()
    prompt: object = [{"role": "user", "content": text}] if config.chat else f"{text}\n"
    return {"prompt": prompt, "answer": None if answer is None else str(answer), COLUMN: origin.as_column()}

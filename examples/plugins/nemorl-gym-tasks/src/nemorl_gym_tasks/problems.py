"""One problem of reasoning-gym, by where it comes from.

Rows carry this origin and not the problem's own data: rows pass through JSON, which turns tuples into lists, and some
scorers then refuse them. A problem is generated again when an answer to it is graded.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

from nemorl.base.text.suggest import did_you_mean
from nemorl.errors import UsageError, boundary

SIZE = 2**31 - 1
"""Part of a generator's config. A fixed one, so that problem i is the same whatever number is asked for."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a problem comes from."""

    task: str
    options: str
    """As JSON"""
    seed: int
    index: int

    @classmethod
    def of(cls, task: str, options: dict[str, Any], seed: int, index: int) -> Origin:
        return cls(task, json.dumps(options, sort_keys=True), seed, index)

    def as_column(self) -> dict[str, Any]:
        """As it stands in a row."""
        return asdict(self)

    @property
    def generator(self) -> Any:
        """reasoning-gym's dataset, which also scores."""
        return _generator(self.task, self.options, self.seed)

    @property
    def entry(self) -> Any:
        """The problem as reasoning-gym has it."""
        return _entry(self)


@lru_cache(maxsize=256)
def _generator(task: str, options: str, seed: int) -> Any:
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if task not in DATASETS:
        raise UsageError(f"reasoning-gym has no task {task!r}", fix=did_you_mean(task, DATASETS) or "see its gallery")
    with boundary(f"reasoning-gym task {task!r}"):
        return reasoning_gym.create_dataset(task, seed=seed, size=SIZE, **json.loads(options))


@lru_cache(maxsize=4096)  # the responses of a group share their problem
def _entry(origin: Origin) -> Any:
    return origin.generator[origin.index]

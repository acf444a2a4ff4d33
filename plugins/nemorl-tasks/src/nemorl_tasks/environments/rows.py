"""Rows of the generated datasets: distinct tasks, drawn from a seed, held-out ones first.

The held-out tasks are drawn before the others, so that they do not depend on ``num_train`` and runs with more or less
data stay comparable.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, TypeVar

from nemorl.errors import DataError
from nemorl.types import Row

from nemorl_tasks.environments.boards import TILE_FROM_GAP, Board, scramble, show, slide, solved
from nemorl_tasks.environments.expressions import evaluate

if TYPE_CHECKING:
    from nemorl_tasks.environments.datasets import CalculationsConfig, GeneratedConfig, SlidingPuzzlesConfig

T = TypeVar("T", bound=Hashable)
Splits = dict[str, list[Row]]

MAX_DRAWS = 100
"""Per task. The config sees to it that there are at least twice as many tasks as are asked for."""


def num_puzzles(config: SlidingPuzzlesConfig) -> int | None:
    """How many distinct puzzles the options allow; ``None`` where there are far more than asked for."""
    boards = _few_boards(config)
    return None if boards is None else len(boards)


def puzzle_rows(config: SlidingPuzzlesConfig) -> Splits:
    """Boards as rows, with ``board`` as nested lists for the environment."""

    def draw(rng: random.Random) -> Board:
        return scramble(config.size, rng.randint(config.min_scramble, config.max_scramble), rng)

    def write(board: Board) -> Row:
        return _row(f"{config.instruction}\n{show(board)}", config.chat, board=[list(line) for line in board])

    boards = _few_boards(config)
    if boards is None:
        return _splits(draw, write, config)
    # Where there are few, random walks would take long to find them all.
    remaining = random.Random(f"sliding_puzzle/{config.seed}").sample(boards, len(boards))
    return _splits(lambda rng: remaining.pop(), write, config)


def _few_boards(config: SlidingPuzzlesConfig) -> list[Board] | None:
    # The 12 boards of 2 x 2 are always few: walks that never turn back go in a circle there, maybe to the solved one.
    limit = max(12, 4 * (config.num_train + config.num_validation))
    near = _boards_within(config.size, config.max_scramble, limit)
    return None if near is None else [board for board, moves in near.items() if moves >= config.min_scramble]


@lru_cache(maxsize=4)
def _boards_within(size: int, moves: int, limit: int) -> dict[Board, int] | None:
    """Every board within so many moves of the solved one, with its distance; ``None`` if they exceed ``limit``."""
    distance = {solved(size): 0}
    edge = list(distance)
    for move_count in range(1, moves + 1):
        around = {slide(board, move): None for board in edge for move in TILE_FROM_GAP}
        edge = [board for board in around if board is not None and board not in distance]
        distance.update(dict.fromkeys(edge, move_count))
        if len(distance) > limit:
            return None
        if not edge:
            break
    return distance


def calculation_rows(config: CalculationsConfig) -> Splits:
    """Expressions as rows, with their value as ``answer``."""

    def draw(rng: random.Random) -> str:
        numbers = [str(rng.randint(1, 10**config.max_digits - 1)) for _ in range(config.operands)]
        return numbers[0] + "".join(f" {rng.choice(config.operations)} {number}" for number in numbers[1:])

    def write(expression: str) -> Row:
        text = config.instruction.replace("{problem}", expression)
        return _row(text, config.chat, answer=str(evaluate(expression)), expression=expression)

    return _splits(draw, write, config)


def split_or_none(rows: Splits, split: str) -> Sequence[Row] | None:
    """Only ``train`` and ``validation`` exist, and an empty validation split does not."""
    return rows.get(split) or None


def _splits(draw: Callable[[random.Random], T], write: Callable[[T], Row], config: GeneratedConfig) -> Splits:
    """Distinct tasks for both splits. Repeats are drawn again."""
    rng = random.Random(f"{type(config).__name__}/{config.seed}")
    tasks: dict[T, None] = {}
    wanted = config.num_validation + config.num_train
    for _ in range(MAX_DRAWS * wanted):
        if len(tasks) == wanted:
            break
        tasks[draw(rng)] = None
    else:
        raise DataError(
            f"found {len(tasks)} distinct tasks where {wanted} were asked for",
            fix="lower num_train, or allow more tasks (max_scramble, max_digits, operands)",
        )
    rows = [write(task) for task in tasks]
    return {"validation": rows[: config.num_validation], "train": rows[config.num_validation :]}


def _row(text: str, chat: bool, **columns: object) -> Row:
    prompt: object = [{"role": "user", "content": text}] if chat else f"{text}\n"
    return {"prompt": prompt, **columns}

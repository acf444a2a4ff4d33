"""The options of the generated datasets. Rows are made in ``rows.py``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

from nemorl.errors import ConfigIssue
from nemorl.plugins.kinds import DatasetConfig
from pydantic import Field

if TYPE_CHECKING:
    from nemorl.types import Row


class GeneratedConfig(DatasetConfig):
    """Common options of the generated datasets."""

    num_train: int = Field(500, ge=1)
    """Distinct tasks to train on."""
    num_validation: int = Field(100, ge=0)
    """Distinct held-out tasks, none of which occurs in training. 0: no validation split."""
    seed: int = Field(0, ge=0)
    """Chooses the tasks. The same seed gives the same rows everywhere."""
    chat: bool = True
    """Ask in a chat message. Turn it off for base models, which then get the same text as a raw prompt."""


class SlidingPuzzlesConfig(GeneratedConfig):
    """Scrambled boards for the ``sliding_puzzle`` environment."""

    summary: ClassVar[str] = "generated sliding puzzles, no download"

    size: int = Field(3, ge=2, le=6)
    """Rows and columns of the board."""
    min_scramble: int = Field(1, ge=1)
    """Fewest random moves away from the solved board."""
    max_scramble: int = Field(12, ge=1, le=1000)
    """Most random moves away from the solved board. Raise it as the policy gets better."""
    instruction: str = (
        "Slide the tiles into order, the gap (_) last. A move names the direction in which a tile slides into the gap. "
        "Reply with one move: up, down, left or right."
    )
    """Stands before the board."""

    def problems(self) -> Iterator[ConfigIssue]:
        yield from super().problems()
        if self.min_scramble > self.max_scramble:
            message = f"fewest moves {self.min_scramble} exceed the most, {self.max_scramble}"
            yield ConfigIssue("min_scramble", message, "lower it, or raise max_scramble")
            return
        from nemorl_tasks.environments.rows import num_puzzles

        available = num_puzzles(self)
        wanted = self.num_train + self.num_validation
        if available is not None and available < wanted:
            message = f"{self.num_train} + {self.num_validation} validation = {wanted} puzzles asked for, "
            fix = "lower num_train, or raise max_scramble or size"
            yield ConfigIssue("num_train", f"{message}but these options allow {available} distinct ones", fix)

    def build(self, split: str) -> Sequence[Row] | None:
        from nemorl_tasks.environments.rows import puzzle_rows, split_or_none

        return split_or_none(puzzle_rows(self), split)


class CalculationsConfig(GeneratedConfig):
    """Calculations that are hard without a tool, for the ``calculator`` environment: ``347 * 28 + 91``."""

    summary: ClassVar[str] = "generated calculations for tool use, no download"

    operations: tuple[Literal["+", "-", "*"], ...] = Field(("+", "-", "*"), min_length=1)
    """Operations to mix."""
    operands: int = Field(3, ge=2, le=10)
    """Numbers in an expression."""
    max_digits: int = Field(3, ge=1, le=9)
    """Digits of the largest number."""
    instruction: str = (
        "You may use a calculator: write an expression as <tool>12*7</tool> and stop; its value follows. "
        "Then end with 'Answer: <number>'. What is {problem}?"
    )
    """The request; ``{problem}`` stands for the expression."""

    @property
    def num_expressions(self) -> int:
        """Distinct expressions that the options allow."""
        numbers = 10**self.max_digits - 1
        return int(numbers**self.operands * len(set(self.operations)) ** (self.operands - 1))

    def problems(self) -> Iterator[ConfigIssue]:
        yield from super().problems()
        if "{problem}" not in self.instruction:
            yield ConfigIssue("instruction", "does not contain {problem}", "write {problem} where the expression goes")
        wanted = self.num_train + self.num_validation
        if 2 * wanted > self.num_expressions:
            message = f"{wanted} expressions asked for, more than half of the {self.num_expressions} that there are"
            yield ConfigIssue("num_train", message, "lower it, or raise max_digits or operands")

    def build(self, split: str) -> Sequence[Row] | None:
        from nemorl_tasks.environments.rows import calculation_rows, split_or_none

        return split_or_none(calculation_rows(self), split)

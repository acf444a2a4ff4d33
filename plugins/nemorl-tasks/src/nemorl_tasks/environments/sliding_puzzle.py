"""The ``sliding_puzzle`` environment: the policy moves tiles, the environment shows the board.
Its report section shows each move with the board after it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nemorl.contracts.environment import Environment
from nemorl.errors import DataError
from nemorl.types import Prompt, Score, Step
from nemorl_cli.report.sections import Curves, Table, Text, TranscriptSection

from nemorl_tasks.environments.boards import Board, read, show, slide, solved

if TYPE_CHECKING:
    from nemorl_tasks.environments.config import SlidingPuzzleConfig


_MOVE = re.compile(r"\b(up|down|left|right)\b", re.IGNORECASE)


class SlidingPuzzle(Environment):
    """Games that begin with the row's ``board``."""

    name = "sliding_puzzle"

    def __init__(self, config: SlidingPuzzleConfig) -> None:
        self._config = config

    def start(self, prompt: Prompt) -> _Game:
        board = read(prompt.row.get("board"))
        if board is None:
            raise DataError(
                f"the sliding_puzzle environment found no board for prompt {prompt.text[:60]!r} "
                f"(board = {prompt.row.get('board')!r})",
                fix="use `data: sliding_puzzle`, or give rows a `board` like [[1, 2], [0, 3]], 0 being the gap",
            )
        return _Game(self._config, board)


class _Game:
    def __init__(self, config: SlidingPuzzleConfig, board: Board) -> None:
        self._config, self._board = config, board
        self._moves = 0

    def step(self, response: str) -> Step:
        """One move. Reward, and correct, when it brings the board into order."""
        self._moves += 1
        move = last_move(response)
        after = None if move is None else slide(self._board, move)
        self._board = after or self._board
        is_solved = self._board == solved(len(self._board))
        score = Score(
            reward=float(is_solved) - (self._config.illegal_penalty if after is None else 0.0),
            metrics={"moves": 1.0, "illegal_moves": float(after is None)},
            correct=is_solved,
        )
        if is_solved or self._moves >= self._config.max_moves:
            return Step(score)
        return Step(score, self._config.observation(self._describe(move, after)), done=False)

    def _describe(self, move: str | None, after: Board | None) -> str:
        board = show(self._board)
        if move is None:
            return f"That is no move. Write up, down, left or right.\n{board}"
        if after is None:
            return f"No tile can move {move}.\n{board}"
        return board


def last_move(response: str) -> str | None:
    """The move that a response ends on: the last direction it names."""
    found = _MOVE.findall(response)
    return found[-1].lower() if found else None


class Games(TranscriptSection):
    """A table of moves and boards above the turns of each game."""

    def transcript(self, record: Mapping[str, Any]) -> Sequence[Text | Table | Curves] | None:
        """The moves of a record; ``None`` where nothing in it is a board."""
        rows: list[list[str]] = []
        for turn in record["turns"]:
            board = board_in(str(turn["text"] or ""))
            if turn["author"] == "policy":
                rows.append(
                    [str(sum(bool(row[0]) for row in rows) + 1), last_move(str(turn["text"] or "")) or "no move", ""]
                )
            elif board is not None and rows and not rows[-1][2]:
                rows[-1][2] = _told(board)
            elif board is not None:
                rows.append(["", "", _told(board)])
        return [Table(["move", "said", "board after it"], rows)] if any(board for _, _, board in rows) else None


def board_in(text: str) -> Board | None:
    """The last board that a text shows, as the environment writes it.

    Example:
        >>> board_in("No tile can move up.\\n1 2\\n3 _")
        ((1, 2), (3, 0))
    """
    lines = [[0 if cell == "_" else cell for cell in line.split()] for line in text.splitlines()]
    for stop in range(len(lines), 1, -1):
        size = len(lines[stop - 1])
        board = read(lines[stop - size : stop]) if 1 < size <= stop else None
        if board is not None:
            return board
    return None


def _told(board: Board) -> str:
    return show(board) + ("\n(solved)" if board == solved(len(board)) else "")

"""Games of the sliding puzzle as the page shows them: each move with the board after it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nemorl_cli.report.sections import Curves, Table, Text, TranscriptSection

from nemorl_tasks.environments.boards import Board, read, show, solved
from nemorl_tasks.environments.sliding_puzzle import last_move


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

"""The board of the sliding puzzle: n x n tiles numbered 1 to n*n - 1 and a gap, which is 0.

Solved is the order of reading with the gap last. A move is named after the direction in which a tile slides into the
gap: ``left`` moves the tile on the right of the gap to the left.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

Board = tuple[tuple[int, ...], ...]

TILE_FROM_GAP = {"up": (1, 0), "down": (-1, 0), "left": (0, 1), "right": (0, -1)}
"""Where, seen from the gap, the tile is that the move slides: (row, column)."""
OPPOSITE = {"up": "down", "down": "up", "left": "right", "right": "left"}


def solved(size: int) -> Board:
    """The board in order."""
    tiles = [*range(1, size * size), 0]
    return tuple(tuple(tiles[row * size : (row + 1) * size]) for row in range(size))


def slide(board: Board, move: str) -> Board | None:
    """The board after a move; ``None`` where no tile can move that way."""
    size = len(board)
    ((row, column),) = [(r, c) for r in range(size) for c in range(size) if board[r][c] == 0]
    down, right = TILE_FROM_GAP[move]
    tile_row, tile_column = row + down, column + right
    if not (0 <= tile_row < size and 0 <= tile_column < size):
        return None
    cells = [list(line) for line in board]
    cells[row][column], cells[tile_row][tile_column] = cells[tile_row][tile_column], 0
    return tuple(tuple(line) for line in cells)


def scramble(size: int, moves: int, rng: random.Random) -> Board:
    """A solvable board: ``moves`` random moves away from the solved one, none undoing the last, and not solved."""
    while True:
        board, last = solved(size), ""
        for _ in range(moves):
            options = [(move, after) for move in TILE_FROM_GAP if (after := slide(board, move)) is not None]
            last, board = rng.choice([option for option in options if option[0] != OPPOSITE.get(last)])
        if board != solved(size):
            return board


def show(board: Board) -> str:
    """The board as text, one line per row, ``_`` for the gap."""
    width = len(str(len(board) ** 2 - 1))
    return "\n".join(" ".join(str(tile or "_").rjust(width) for tile in line) for line in board)


def read(cells: Any) -> Board | None:
    """A board from a row's nested lists; ``None`` where they are not one."""
    if not isinstance(cells, Sequence) or isinstance(cells, str):
        return None
    try:
        board = tuple(tuple(int(tile) for tile in line) for line in cells)
    except (TypeError, ValueError):
        return None
    is_square = len(board) > 1 and all(len(line) == len(board) for line in board)
    is_complete = sorted(tile for line in board for tile in line) == list(range(len(board) ** 2))
    return board if is_square and is_complete else None

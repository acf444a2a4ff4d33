"""Games of the sliding puzzle as pages show them."""

from __future__ import annotations

from typing import Any

import pytest
from nemorl_cli.report.sections import Table
from nemorl_tasks.environments.boards import read, show
from nemorl_tasks.environments.sliding_puzzle import Games, board_in


def record(*turns: tuple[str, str]) -> dict[str, Any]:
    return {"turns": [{"author": author, "text": text} for author, text in turns]}


def test_each_move_stands_beside_the_board_after_it() -> None:
    game = record(
        ("prompt", "Slide the tiles.\n1 _\n3 2"),
        ("policy", "I think up, no: down."),
        ("environment", "No tile can move down.\n1 _\n3 2"),
        ("policy", "up"),
        ("environment", "1 2\n3 _"),
        ("policy", "what?"),
    )
    assert Games().transcript(game) == [
        Table(
            ["move", "said", "board after it"],
            [
                ["", "", "1 _\n3 2"],
                ["1", "down", "1 _\n3 2"],
                ["2", "up", "1 2\n3 _\n(solved)"],
                ["3", "no move", ""],
            ],
        )
    ]


def test_other_environments_responses_are_left_alone() -> None:
    assert Games().transcript(record(("prompt", "1 + 1 = ?"), ("policy", "2"))) is None
    assert Games().transcript({"turns": []}) is None


@pytest.mark.parametrize("text", ["", "1 2 3", "1 2\n3 4", "_\n", "a b\nc d", "1 _\n\n3 2", "1 1\n2 _", "²\n_ 1"])
def test_text_that_is_no_board(text: str) -> None:
    assert board_in(text) is None


def test_boards_are_read_as_they_are_written() -> None:
    board = read([[15, 14, 13, 12], [11, 10, 9, 8], [7, 6, 5, 4], [3, 2, 1, 0]])
    assert board is not None
    assert board_in(f"Go on:\n{show(board)}\n") == board

"""The game of sliding tiles: moves, episodes and generated boards."""

from __future__ import annotations

import random
from typing import Any

import pytest
from nemorl.errors import DataError
from nemorl.types import Prompt, Step
from nemorl_tasks.environments import SlidingPuzzleConfig, SlidingPuzzlesConfig
from nemorl_tasks.environments.boards import OPPOSITE, Board, read, scramble, show, slide, solved
from nemorl_tasks.environments.sliding_puzzle import SlidingPuzzle, last_move
from pydantic import ValidationError
from recorded_messages import Raises

# 1 2    The gap is at the bottom left: `left` slides 3 to the left, which solves it; `down` slides 1 down.
# _ 3
NEARLY = [[1, 2], [0, 3]]


def play(board: Any, *responses: str, **options: Any) -> list[Step]:
    environment = SlidingPuzzle(SlidingPuzzleConfig(**options))
    game = environment.start(Prompt(0, "play", (1,), row={"board": board}))
    return [game.step(response) for response in responses]


def distance(board: Board) -> int:
    """Fewest moves to the solved board, by search."""
    seen, edge, moves = {board}, [board], 0
    while solved(len(board)) not in seen:
        edge = [after for b in edge for move in OPPOSITE if (after := slide(b, move)) is not None and after not in seen]
        seen.update(edge)
        moves += 1
    return moves


def test_a_move_slides_a_tile_into_the_gap_in_its_direction() -> None:
    board = ((1, 2), (0, 3))
    assert slide(board, "left") == ((1, 2), (3, 0))
    assert slide(board, "down") == ((0, 2), (1, 3))
    assert slide(board, "up") is None
    assert slide(board, "right") is None


def test_solving_the_puzzle_ends_it_with_reward_one() -> None:
    (only,) = play(NEARLY, "I slide it left.")
    assert (only.score.reward, only.score.correct, only.done, only.observation) == (1.0, True, True, None)


def test_the_board_is_shown_until_it_is_solved() -> None:
    # down: _ 2 / 1 3, up undoes it, left solves.
    first, second, third = play(NEARLY, "down", "up", "left")
    assert (first.observation, first.done, first.score.reward) == ("\n_ 2\n1 3\n", False, 0.0)
    assert second.observation == "\n1 2\n_ 3\n"
    assert (third.score.reward, third.done) == (1.0, True)


def test_what_is_no_legal_move_leaves_the_board_costs_the_penalty_and_is_counted() -> None:
    nothing, illegal, solving = play(NEARLY, "hello", "up", "left", illegal_penalty=0.25)
    assert nothing.observation == "\nThat is no move. Write up, down, left or right.\n1 2\n_ 3\n"
    assert illegal.observation == "\nNo tile can move up.\n1 2\n_ 3\n"
    assert [step.score.reward for step in (nothing, illegal, solving)] == [-0.25, -0.25, 1.0]
    assert [step.score.metrics["illegal_moves"] for step in (nothing, illegal, solving)] == [1.0, 1.0, 0.0]


def test_the_game_is_lost_after_max_moves() -> None:
    first, second = play(NEARLY, "down", "up", max_moves=2)
    assert (first.done, second.done, second.score.reward, second.score.correct) == (False, True, 0.0, False)


def test_chat_templates_can_wrap_the_board() -> None:
    (step,) = play(NEARLY, "down", turn_template="<user>{text}</user>")
    assert step.observation == "<user>_ 2\n1 3</user>"


@pytest.mark.parametrize(
    ("response", "move"),
    [("Left", "left"), ("not up but down", "down"), ("<move>right</move>", "right"), ("upward", None), ("", None)],
)
def test_the_last_direction_of_a_response_counts(response: str, move: str | None) -> None:
    assert last_move(response) == move


@pytest.mark.parametrize("board", [None, "12", [[1, 2], [3]], [[1, 2], [3, 3]], [[0]], [[1, 2, 3], [4, 5, 0]], [["a"]]])
def test_a_row_without_a_board_is_an_error(board: Any, raises: Raises) -> None:
    with raises(DataError):
        play(board)


def test_scrambled_boards_are_that_many_moves_away_at_most_and_never_solved() -> None:
    rng = random.Random(0)
    for moves in range(1, 9):
        board = scramble(3, moves, rng)
        assert 0 < distance(board) <= moves


def test_one_board_of_two_by_two_is_found_where_each_walk_leads_back_to_the_solved_one() -> None:
    # There are 12 boards in a circle, and a walk of 12 moves that never turns back goes round it once.
    (row,) = SlidingPuzzlesConfig(size=2, min_scramble=6, max_scramble=12, num_train=1, num_validation=0).build("train")
    assert row["board"] != [[1, 2], [3, 0]]


def test_boards_are_shown_in_columns() -> None:
    assert show(solved(4)).splitlines()[2:] == [" 9 10 11 12", "13 14 15  _"]


def test_rows_hold_boards_within_the_wanted_distance() -> None:
    rows = SlidingPuzzlesConfig(num_train=20, num_validation=5, min_scramble=2, max_scramble=5).build("train")
    assert rows is not None
    boards = [read(row["board"]) for row in rows]
    assert len({board for board in boards if board is not None}) == 20
    assert all(board is not None and 2 <= distance(board) <= 5 for board in boards)


def test_rows_depend_on_the_seed_and_held_out_ones_not_on_the_size_of_the_training_set() -> None:
    small, large, other = (
        SlidingPuzzlesConfig(num_train=count, seed=seed).build("validation")
        for count, seed in ((50, 0), (300, 0), (50, 1))
    )
    assert small != other
    far = SlidingPuzzlesConfig(num_train=50, size=4, min_scramble=30, max_scramble=60)
    assert far.build("validation") == far.model_copy(update={"num_train": 90}).build("validation")
    assert small is not None
    assert large is not None
    assert len(small) == len(large) == 100


def test_asking_for_more_puzzles_than_there_are_is_a_config_error(raises: Raises) -> None:
    # 2 x 2 tiles have 4! / 2 = 12 boards that can be solved, one of them solved.
    assert len(SlidingPuzzlesConfig(size=2, num_train=8, num_validation=3).build("train") or ()) == 8
    with raises(ValidationError, 11, path="num_train"):
        SlidingPuzzlesConfig(size=2, num_train=9, num_validation=3)
    with raises(ValidationError, path="min_scramble"):
        SlidingPuzzlesConfig(min_scramble=5, max_scramble=4)

"""Rows to batches and rows to prompts."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from nemorl.config import load_config
from nemorl.errors import BackendError, DataError
from nemorl_rl.data.rows import RowDataModule, open_data
from nemorl_rl.data.tokenizer import Tokenizer
from nemorl_rl.rollouts.prompts import to_prompt, to_prompts
from recorded_messages import Raises


def rows(count: int) -> list[dict[str, Any]]:
    return [{"prompt": str(number)} for number in range(count)]


def drawn(data: RowDataModule, batches: int) -> list[str]:
    return [row["prompt"] for _ in range(batches) for row in data.next_batch()]


@pytest.mark.parametrize(("count", "batch_size"), [(10, 5), (10, 3), (7, 7), (3, 8), (1, 4)])
def test_every_row_is_seen_exactly_once_per_epoch(count: int, batch_size: int) -> None:
    data = RowDataModule(rows(count), batch_size, seed=1)
    seen = drawn(data, count)  # batch_size whole epochs
    for epoch in range(batch_size):
        assert Counter(seen[epoch * count : (epoch + 1) * count]) == Counter(map(str, range(count)))


def test_every_batch_has_the_same_size_across_the_end_of_an_epoch() -> None:
    data = RowDataModule(rows(5), 3, seed=1)
    assert [len(data.next_batch()) for _ in range(10)] == [3] * 10


def test_each_epoch_has_another_order() -> None:
    data = RowDataModule(rows(20), 20, seed=1)
    first, second = drawn(data, 1), drawn(data, 1)
    assert first != second
    assert first != [str(number) for number in range(20)]


def test_the_order_follows_from_the_seed() -> None:
    assert drawn(RowDataModule(rows(20), 4, seed=1), 9) == drawn(RowDataModule(rows(20), 4, seed=1), 9)
    assert drawn(RowDataModule(rows(20), 4, seed=1), 5) != drawn(RowDataModule(rows(20), 4, seed=2), 5)


def test_without_shuffling_rows_come_as_they_are() -> None:
    assert drawn(RowDataModule(rows(3), 2, seed=1, shuffle=False), 3) == ["0", "1", "2", "0", "1", "2"]


@pytest.mark.parametrize("after", range(7))
def test_a_loaded_position_continues_exactly_there(after: int) -> None:
    whole = RowDataModule(rows(5), 3, seed=1)
    expected = drawn(whole, 10)
    first, second = RowDataModule(rows(5), 3, seed=1), RowDataModule(rows(5), 3, seed=1)
    seen = drawn(first, after)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert seen + drawn(second, 10 - after) == expected
    assert second.epoch == whole.epoch


def test_the_epoch_counts_finished_passes() -> None:
    data = RowDataModule(rows(4), 2, seed=1)
    epochs = []
    for _ in range(5):
        epochs.append(data.epoch)
        data.next_batch()
    assert epochs == [0, 0, 1, 1, 2]


@pytest.mark.parametrize(
    ("count", "size", "epochs", "steps"), [(10, 5, 1, 2), (10, 3, 1, 3), (10, 3, 3, 10), (2, 8, 1, 1)]
)
def test_steps_of_epochs_are_whole_batches_and_at_least_one(count: int, size: int, epochs: int, steps: int) -> None:
    assert RowDataModule(rows(count), size, seed=1).steps(epochs) == steps


def test_a_position_in_other_data_is_refused(raises: Raises) -> None:
    state = RowDataModule(rows(5), 3, seed=1).state_dict()
    with raises(DataError, 5, 6):
        RowDataModule(rows(6), 3, seed=1).load_state_dict(state)
    with raises(DataError, 1, 2):
        RowDataModule(rows(5), 3, seed=2).load_state_dict(state)


def test_no_rows_are_refused(raises: Raises) -> None:
    with raises(DataError):
        RowDataModule([], 3, seed=1)


# Prompts


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Tokenizer:
    return Tokenizer.load(str(tiny_model))


def tokens(tokenizer: Tokenizer, ids: tuple[int, ...]) -> str:
    return " ".join(tokenizer.inner.convert_ids_to_tokens(list(ids)))


def test_text_is_continued_as_it_is(tokenizer: Tokenizer) -> None:
    prompt = to_prompt({"prompt": "1+1=", "answer": 2, "level": "easy"}, 3, tokenizer)
    assert (prompt.index, prompt.text, prompt.messages, prompt.answer) == (3, "1+1=", (), "2")
    assert tokens(tokenizer, prompt.token_ids) == "1 + 1 ="
    assert prompt.row["level"] == "easy"


CHAT = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]


@pytest.mark.parametrize("column", ["prompt", "messages"])
def test_messages_end_where_the_assistant_begins(tokenizer: Tokenizer, column: str) -> None:
    prompt = to_prompt({column: CHAT}, 0, tokenizer)
    assert tokens(tokenizer, prompt.token_ids) == "<system> a <user> b <assistant>"
    assert prompt.text == "b"
    assert prompt.answer is None


def test_a_final_assistant_turn_is_the_answer_not_the_task(tokenizer: Tokenizer) -> None:
    prompt = to_prompt({"messages": [*CHAT, {"role": "assistant", "content": "c"}]}, 0, tokenizer)
    assert prompt.messages == tuple(CHAT)


def test_a_conversation_without_a_user_shows_its_last_message(tokenizer: Tokenizer) -> None:
    assert to_prompt({"prompt": [{"role": "system", "content": "a"}]}, 0, tokenizer).text == "a"


def test_messages_stand_in_for_a_prompt_that_is_missing(tokenizer: Tokenizer) -> None:
    # Tables of several shapes fill the other column with nothing.
    assert to_prompt({"prompt": None, "messages": CHAT}, 0, tokenizer).text == "b"


@pytest.mark.parametrize(
    "row",
    [
        {"text": "a"},
        {"prompt": ""},
        {"prompt": [], "messages": [{"role": "assistant", "content": "c"}]},
        {"prompt": None},
        {"prompt": 3},
        {"prompt": ["hi"]},
        {"prompt": [{"role": "user"}]},
        {"messages": [{"role": "assistant", "content": "c"}]},
    ],
    ids=str,
)
def test_a_row_without_a_task_is_refused(row: dict[str, Any], tokenizer: Tokenizer, raises: Raises) -> None:
    with raises(DataError, "fix:"):
        to_prompt(row, 4, tokenizer)


def test_messages_for_a_model_without_a_template_are_refused(tiny_model: Path, raises: Raises) -> None:
    bare = Tokenizer.load(str(tiny_model))
    bare.inner.chat_template = None
    with raises(BackendError):
        to_prompt({"prompt": CHAT}, 0, bare)


def test_prompts_are_numbered_by_place_even_when_equal(tokenizer: Tokenizer) -> None:
    assert [prompt.index for prompt in to_prompts([{"prompt": "1"}, {"prompt": "1"}], tokenizer)] == [0, 1]


def test_a_config_may_keep_the_order_of_its_rows(tiny_model) -> None:
    config = load_config({"algorithm": "sft", "model": str(tiny_model), "shuffle": False})
    data, _ = open_data([{"prompt": str(number), "response": "a"} for number in range(5)], None, config, 3)
    assert [row["prompt"] for _ in range(3) for row in data.next_batch()] == list("012340123")

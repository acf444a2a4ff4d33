"""What a policy reads that teaches itself: prompts that say more, and where both sides speak of the same token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from nemorl.config import PolicyConfig
from nemorl.errors import DataError
from nemorl.media import is_media
from nemorl.types import Prompt
from nemorl_distillation.contexts import filled, given_text, placeholders, privileged_prompt
from nemorl_distillation.privileged import behind_prompts
from nemorl_rl.data.tokenizer import Tokenizer
from nemorl_rl.models.tiny_sight import write_tiny_sight
from nemorl_rl.rollouts.prompts import to_prompt
from nemorl_tensors import TokenBatch
from nemorl_testing.models import tiny_model
from nemorl_testing.seeing import drawing
from recorded_messages import Raises

# P prompt, a answer, E observation, Q privileged prompt: tokens of the three sequences below
#   0: P P a a        1: P a E a        2: P a
BATCH = TokenBatch.from_sequences(
    [[1, 2, 11, 12], [3, 13, 5, 14], [4, 15]],
    [[False, False, True, True], [False, True, False, True], [False, True]],
    loss_aggregation="token",
    temperature=0.7,
)


def test_responses_stand_behind_other_prompts_and_both_sides_find_each_token() -> None:
    behind = behind_prompts(BATCH, [2, 1, 1], [[21], [22, 23, 24], [25, 26]], 9)
    assert behind.batch.token_ids.tolist() == [21, 11, 12, 22, 23, 24, 13, 5, 14, 25, 26, 15]
    assert behind.batch.lengths.tolist() == [3, 6, 3]
    assert behind.batch.temperature == 0.7
    assert behind.own.tolist() == [2, 3, 5, 6, 7, 9]
    assert behind.theirs.tolist() == [1, 2, 6, 7, 8, 11]
    assert torch.equal(BATCH.token_ids[behind.own], behind.batch.token_ids[behind.theirs])
    assert torch.equal(BATCH.mask[behind.own], behind.batch.mask[behind.theirs])  # an observation is read, not said
    assert int(behind.batch.mask.sum()) == int(BATCH.mask.sum()) == 5


def test_what_nobody_reads_trains_nothing_and_weighs_nothing() -> None:
    # The first has no privileged prompt; the second would have 3 + 3 tokens.
    behind = behind_prompts(BATCH, [2, 1, 1], [None, [22, 23, 24], [25, 26]], 5)
    assert behind.is_read.tolist() == [False, False, True]
    assert (behind.own.tolist(), behind.theirs.tolist()) == ([9], [2])
    taught = behind.taught(BATCH)
    assert taught.mask.tolist() == [False] * 9 + [True]
    assert taught.loss_weights.tolist() == [0.0] * 9 + [1.0]
    nobody = behind_prompts(BATCH, [2, 1, 1], [None, None, None], 5)
    assert (len(nobody.batch), len(nobody.own)) == (0, 0)
    assert float(nobody.taught(BATCH).loss_weights.sum()) == 0


def test_placeholders_are_filled_once_and_values_may_hold_braces() -> None:
    assert placeholders("{prompt}: {solution} {}") == ["prompt", "solution"]
    assert filled("{prompt}: {solution}", {"prompt": "{solution}", "solution": "{x}"}) == "{solution}: {x}"


@pytest.mark.parametrize(
    "row",
    [
        {"response": "12"},
        {"response": 12},
        {"response": [{"role": "assistant", "content": "12"}]},
        {"messages": [{"role": "user", "content": "1"}, {"role": "assistant", "content": "12"}]},
    ],
)
def test_the_text_is_in_a_column_or_said_last(row: Any) -> None:
    assert given_text(row, "response") == "12"


@pytest.mark.parametrize("row", [{}, {"response": " "}, {"messages": [{"role": "user", "content": "1"}]}])
def test_a_row_without_the_text_is_an_error_that_names_the_column(row: Any, raises: Raises) -> None:
    with raises(DataError, "response"):
        given_text(row, "response")


def test_the_template_takes_the_place_of_the_last_user_message() -> None:
    tokenizer = Tokenizer.load(str(tiny_model(num_hidden_layers=1)))
    plain = privileged_prompt(Prompt(0, "1+1=", (5,)), "{solution}:{prompt}", {"solution": "2"}, tokenizer)
    assert plain == list(tokenizer.encode("2:1+1="))
    said = [("system", "add"), ("user", "1+1="), ("assistant", "3"), ("user", "no")]
    row = {"prompt": [{"role": role, "content": content} for role, content in said]}
    chat = privileged_prompt(to_prompt(row, 0, tokenizer), "{prompt} {solution}", {"solution": "2"}, tokenizer)
    expected = [*row["prompt"][:3], {"role": "user", "content": "no 2"}]
    assert chat == list(to_prompt({"prompt": expected}, 0, tokenizer).token_ids)


@pytest.mark.parametrize("in_a_column", [True, False])
def test_the_teacher_is_shown_the_images_of_the_prompt_where_they_stand(in_a_column: bool, tmp_path: Path) -> None:
    """Two of them around the first text, of an earlier message one; the text of the last user message is replaced."""
    first, second, third = (drawing(seed) for seed in (1, 2, 3))
    shown = [{"type": "image", **({} if in_a_column else {"image": item.data})} for item in (first, second, third)]
    turns = [
        {"role": "user", "content": [shown[0], {"type": "text", "text": "see"}]},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": [shown[1], {"type": "text", "text": "how many?"}, shown[2], "and here?"]},
    ]
    column = {"images": [item.data for item in (first, second, third)]} if in_a_column else {}
    tokenizer = Tokenizer.of(PolicyConfig(model_name=str(write_tiny_sight(tmp_path / "model")), init="random"))
    prompt = to_prompt({"prompt": turns, **column}, 0, tokenizer)
    told = privileged_prompt(prompt, "{prompt} It is {solution}.", {"solution": "2"}, tokenizer)
    turns[2]["content"] = [shown[1], {"type": "text", "text": "how many?\nand here? It is 2."}, shown[2]]
    assert told == list(to_prompt({"prompt": turns, **column}, 0, tokenizer).token_ids)
    assert [token for token in told if is_media(token)] == [token for token in prompt.token_ids if is_media(token)]

    ids, mask = [*prompt.token_ids, 20, 21], [False] * len(prompt.token_ids) + [True] * 2
    student = TokenBatch.from_sequences([ids], [mask], media=prompt.media)
    behind = behind_prompts(student, [len(prompt.token_ids)], [told], 500)
    assert behind.batch.media == student.media
    assert len(student.media) == 3

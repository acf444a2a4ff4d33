"""What SFT learns from each shape of row, token by token.

The tiny model's template writes ``<user>1+1=<assistant>2<eos>``; letters under the tokens mark what is learnt (L).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from nemorl.errors import BackendError, DataError
from nemorl_rl.data.encoding import encode_row
from nemorl_rl.data.tokenizer import Tokenizer
from nemorl_sft import SFTConfig
from nemorl_sft.trainer import SFTTrainer
from recorded_messages import Raises


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Tokenizer:
    return Tokenizer.load(str(tiny_model))


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def shown(tokenizer: Tokenizer, row: dict[str, Any], **options: Any) -> tuple[str, str]:
    """Tokens in one line, and under each L (learnt) or a dot."""
    ids, mask, _ = encode_row(row, tokenizer, **options)
    return " ".join(tokenizer.inner.convert_ids_to_tokens(ids)), "".join("L" if learn else "." for learn in mask)


def test_plain_prompt_and_response(tokenizer: Tokenizer) -> None:
    assert shown(tokenizer, {"prompt": "1+1=", "response": "2"}) == ("1 + 1 = 2 <eos>", "....LL")


def test_chat_prompt_and_response(tokenizer: Tokenizer) -> None:
    row = {"prompt": [user("1+1=")], "response": "2"}
    assert shown(tokenizer, row) == ("<user> 1 + 1 = <assistant> 2 <eos>", "......LL")


def test_chat_of_one_turn(tokenizer: Tokenizer) -> None:
    row = {"messages": [{"role": "system", "content": "a"}, user("b"), assistant("cd")]}
    assert shown(tokenizer, row) == ("<system> a <user> b <assistant> c d <eos>", ".....LLL")


MANY_TURNS = {"messages": [user("1"), assistant("2"), user("3"), assistant("45")]}
MANY_TOKENS = "<user> 1 <assistant> 2 <eos> <user> 3 <assistant> 4 5 <eos>"


def test_every_assistant_turn_is_learnt(tokenizer: Tokenizer) -> None:
    assert shown(tokenizer, MANY_TURNS) == (MANY_TOKENS, "...LL...LLL")


def test_only_the_last_turn_is_learnt_on_request(tokenizer: Tokenizer) -> None:
    assert shown(tokenizer, MANY_TURNS, only_last_turn=True) == (MANY_TOKENS, "........LLL")


def test_what_follows_the_last_assistant_turn_is_left_out(tokenizer: Tokenizer) -> None:
    row = {"messages": [user("1"), assistant("2"), user("3")]}
    assert shown(tokenizer, row) == ("<user> 1 <assistant> 2 <eos>", "...LL")


def test_an_assistant_may_begin(tokenizer: Tokenizer) -> None:
    row = {"messages": [assistant("2"), user("3"), assistant("4")]}
    tokens, learnt = shown(tokenizer, row)
    assert tokens == "<assistant> 2 <eos> <user> 3 <assistant> 4 <eos>"
    assert learnt[-2:] == "LL"


def test_a_number_as_response_is_text(tokenizer: Tokenizer) -> None:
    assert shown(tokenizer, {"prompt": "x=", "response": 7}) == ("x = 7 <eos>", "..LL")


@pytest.mark.parametrize(
    "row",
    [
        {"text": "a"},
        {"prompt": "a"},
        {"messages": []},
        {"messages": [user("a")]},
    ],
    ids=["other columns", "no response", "no messages", "no assistant"],
)
def test_a_row_of_another_shape_is_refused(row: dict[str, Any], tokenizer: Tokenizer, raises: Raises) -> None:
    with raises(DataError):
        encode_row(row, tokenizer)


def test_chat_without_a_template_is_refused(tiny_model: Path, raises: Raises) -> None:
    bare = Tokenizer.load(str(tiny_model))
    bare.inner.chat_template = None
    with raises(BackendError):
        encode_row({"messages": [user("1"), assistant("2")]}, bare)


def test_a_template_may_rewrite_the_past(tiny_model: Path) -> None:
    # This one numbers the conversation's turns at its start, so a later turn changes earlier tokens.
    tokenizer = Tokenizer.load(str(tiny_model))
    tokenizer.inner.chat_template = "{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}"
    assert shown(tokenizer, MANY_TURNS) == ("4 1 2 3 4 5", "..L.LL")


def test_a_template_that_works_on_what_it_has_written_is_refused(tiny_model: Path, raises: Raises) -> None:
    tokenizer = Tokenizer.load(str(tiny_model))
    tokenizer.inner.chat_template = (
        "{% set all %}{% for m in messages %}{{ m.content }}{% endfor %}{% endset %}{{ all[:3] }}"
    )
    with raises(DataError):
        encode_row(MANY_TURNS, tokenizer)


def trainer(tokenizer: Tokenizer, **knobs: Any) -> SFTTrainer:
    made = SFTTrainer(SFTConfig(model="some/model", **knobs))
    made.tokenizer = tokenizer  # to_batch needs no more
    return made


def test_rows_become_one_ragged_batch_cut_at_the_limit(tokenizer: Tokenizer) -> None:
    rows = [{"prompt": "1=", "response": "1"}, {"prompt": "12=", "response": "12"}]
    batch = trainer(tokenizer, policy={"max_sequence_tokens": 4}).to_batch(rows)
    assert batch.lengths.tolist() == [4, 4]  # "1 = 1 <eos>" fits; "1 2 = 1 2 <eos>" is cut after "1"
    assert batch.mask.tolist() == [False, False, True, True, False, False, False, True]


def test_a_batch_with_nothing_to_learn_is_refused(tokenizer: Tokenizer, raises: Raises) -> None:
    with raises(DataError):
        trainer(tokenizer, policy={"max_sequence_tokens": 2}).to_batch([{"prompt": "123=", "response": "1"}])


def test_a_completion_is_what_trl_calls_a_response(tokenizer: Tokenizer) -> None:
    named = {"prompt": "1+1=", "completion": "2"}
    assert encode_row(named, tokenizer) == encode_row({"prompt": "1+1=", "response": "2"}, tokenizer)


def test_of_a_conversation_in_two_parts_the_completion_alone_is_learnt(tokenizer: Tokenizer) -> None:
    prompt = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    ids, mask, _ = encode_row({"prompt": prompt, "completion": [{"role": "assistant", "content": "d"}]}, tokenizer)
    # <user> a <assistant> b <eos> <user> c <assistant> d <eos>
    assert len(ids) == 10
    assert mask == [False] * 8 + [True, True]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "a", "completion": [{"role": "assistant", "content": "b"}]},
        {"prompt": [{"role": "user", "content": "a"}], "completion": ["b"]},
        {
            "prompt": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
            "completion": [{"role": "user", "content": "c"}],
        },
    ],
)
def test_a_completion_of_another_shape_is_refused(row: dict[str, Any], tokenizer: Tokenizer, raises: Raises) -> None:
    with raises(DataError):
        encode_row(row, tokenizer)

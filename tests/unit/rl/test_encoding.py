"""What preference rows become, token by token. Demonstrations are in ``tests/unit/sft``.

The tiny model's template writes ``<user>1+1=<assistant>2<eos>``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from nemorl.errors import DataError
from nemorl_rl.data.encoding import encode_pair
from nemorl_rl.data.tokenizer import Tokenizer
from recorded_messages import Raises


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Tokenizer:
    return Tokenizer.load(str(tiny_model))


def shown(tokenizer: Tokenizer, row: dict[str, Any]) -> tuple[str, str, str]:
    """The tokens of prompt, chosen and rejected response in one line each."""

    def line(ids: list[int]) -> str:
        return " ".join(tokenizer.inner.convert_ids_to_tokens(ids))

    pair = encode_pair(row, tokenizer)
    return line(pair.prompt), line(pair.chosen), line(pair.rejected)


def test_text_pairs_share_their_prompt_and_end(tokenizer: Tokenizer) -> None:
    row = {"prompt": "1+1=", "chosen": "2", "rejected": "11"}
    assert shown(tokenizer, row) == ("1 + 1 =", "2 <eos>", "1 1 <eos>")


def test_chat_pairs_go_through_the_template(tokenizer: Tokenizer) -> None:
    prompt = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    found = shown(tokenizer, {"prompt": prompt, "chosen": "d", "rejected": "e"})
    assert found == ("<user> a <assistant> b <eos> <user> c <assistant>", "d <eos>", "e <eos>")


def test_an_empty_response_is_its_end(tokenizer: Tokenizer) -> None:
    assert shown(tokenizer, {"prompt": "a", "chosen": "", "rejected": 7}) == ("a", "<eos>", "7 <eos>")


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "a", "chosen": "b"},
        {"prompt": "", "chosen": "b", "rejected": "c"},
        {"prompt": "a", "chosen": [{"role": "user", "content": "b"}], "rejected": "c"},
    ],
    ids=["no rejected", "empty prompt", "messages"],
)
def test_a_row_of_another_shape_is_refused(row: dict[str, Any], tokenizer: Tokenizer, raises: Raises) -> None:
    with raises(DataError):
        encode_pair(row, tokenizer)


def test_a_template_that_changes_the_prompt_is_refused(tiny_model: Path, raises: Raises) -> None:
    tokenizer = Tokenizer.load(str(tiny_model))
    tokenizer.inner.chat_template = "{{ messages[1].content }}{% for m in messages %}{{ m.content }}{% endfor %}"
    row = {"prompt": [{"role": "user", "content": "a"}], "chosen": "b", "rejected": "c"}
    with raises(DataError):
        encode_pair(row, tokenizer)

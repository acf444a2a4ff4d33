"""Dataset rows to token sequences with a mask on what is to be learnt."""

from __future__ import annotations

from collections.abc import Sequence

from nemorl.errors import DataError
from nemorl.tokenizer import Tokenizer
from nemorl.types import Row


def encode_row(row: Row, tokenizer: Tokenizer, *, only_last_turn: bool = False) -> tuple[list[int], list[bool]]:
    """Tokens and mask of one row.

    ``messages`` (chat), ``prompt`` as messages with ``response``, or both as plain text. Learnt are the assistant's
    words including the token that ends them.

    Raises:
        DataError: the row has neither shape.
    """
    prompt, response = row.get("prompt"), row.get("response")
    if response is not None and isinstance(prompt, str):
        ids = tokenizer.encode(prompt)
        target = tokenizer.encode_observation(str(response)) + sorted(tokenizer.stop_token_ids)
        return ids + target, [False] * len(ids) + [True] * len(target)
    if response is not None and isinstance(prompt, Sequence):
        messages = [*prompt, {"role": "assistant", "content": str(response)}]
    elif row.get("messages"):
        messages = list(row["messages"])
    else:
        raise DataError(
            f"a row has neither `messages` nor `prompt` with `response` (columns: {', '.join(map(str, row))})",
            fix="map your columns to these names in `data:`",
        )
    ids, mask = tokenizer.encode_chat(messages)
    return ids, _last_run(mask) if only_last_turn else mask


def _last_run(mask: list[bool]) -> list[bool]:
    """Only the last unbroken run of True."""
    end = len(mask) - mask[::-1].index(True)
    start = end - 1
    while start > 0 and mask[start - 1]:
        start -= 1
    return [start <= index < end for index in range(len(mask))]

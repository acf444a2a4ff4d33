"""Responses that the dataset gives, as if the student had written them."""

from __future__ import annotations

import math

from nemorl.errors import DataError
from nemorl.types import Prompt, Row, Sample, Score
from nemorl_rl.data.encoding import encode_row
from nemorl_rl.data.tokenizer import Tokenizer
from nemorl_rl.rollouts.prompts import to_prompt


def given_count(fraction: float, batch_size: int, step: int) -> int:
    """How many of the rows of step ``step`` (1 is the first) use the dataset's response.

    Exact over many steps, whatever the batch size: 0.3 of batches of 2 is 0, 1, 0, 1, 1, …
    """
    return math.floor(fraction * batch_size * step) - math.floor(fraction * batch_size * (step - 1))


def prompt_of(row: Row, index: int, tokenizer: Tokenizer) -> Prompt:
    """A row as a task; unlike elsewhere its prompt may be empty text, where the response is all there is."""
    if row.get("prompt") == "":
        return Prompt(index, "", tuple(tokenizer.encode("")), row=row)
    return to_prompt(row, index, tokenizer)


def given_sample(row: Row, index: int, tokenizer: Tokenizer, limit: int) -> Sample:
    """A row's own response as a sample, cut after ``limit`` tokens. The token that ends it is learnt too.

    Raises:
        DataError: the row has no response, or its prompt alone fills the limit.
    """
    ids, mask = encode_row(row, tokenizer, only_last_turn=True)
    kept = mask[:limit]
    if not any(kept):
        raise DataError(
            f"the prompt of row {index} leaves no room for its response within {limit} tokens",
            fix="raise policy.max_sequence_tokens, or filter long prompts from the dataset",
        )
    return Sample(
        prompt=prompt_of(row, index, tokenizer),
        token_ids=tuple(ids[:limit]),
        response_mask=tuple(kept),
        generation_logprobs=(0.0,) * len(kept),
        score=Score(0.0),
        response=tokenizer.decode([token for token, is_said in zip(ids, mask, strict=True) if is_said]),
        finish_reason="stop" if len(kept) == len(ids) else "length",
    )

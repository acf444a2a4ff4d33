"""Rows of KTO as labelled responses: one with a ``label``, or a pair, which is one of each kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

import torch
from nemorl.errors import DataError
from nemorl.media import Media
from nemorl.types import Row
from nemorl_rl.data.encoding import encode_pair, encode_row
from nemorl_rl.data.tokenizer import Tokenizer
from nemorl_tensors import TokenBatch


@dataclass(frozen=True, slots=True)
class Judged:
    """A response to a prompt, and whether it is a good one."""

    prompt: list[int]
    response: list[int]
    mask: list[bool]
    """Of the response: True at its own tokens, False at what the chat template puts after them"""
    desirable: bool
    media: tuple[Media, ...] = ()
    """Images and sounds in them"""


def judged(row: Row, tokenizer: Tokenizer) -> list[Judged]:
    """The labelled responses of a row, in tokens.

    Args:
        row: ``label`` with a demonstration (``prompt`` with ``response`` or ``completion``, or ``messages``, whose last
            turn is the response); or ``prompt``, ``chosen`` and ``rejected``.
        tokenizer: The policy's.

    Raises:
        DataError: The row has neither shape, or its label is none.
    """
    label = row.get("label")
    if label is None and row.get("chosen") is not None:
        pair = encode_pair(row, tokenizer)
        sides = ((pair.chosen, True), (pair.rejected, False))
        return [Judged(pair.prompt, said, [True] * len(said), good, pair.media) for said, good in sides]
    if label not in (0, 1):
        raise DataError(
            f"the label of a row is {label!r}, neither true nor false",
            fix="give `label`: true for a desirable response and false for an undesirable one, or `chosen` and "
            "`rejected`",
        )
    ids, mask, media = encode_row(row, tokenizer, only_last_turn=True)
    start = mask.index(True) if True in mask else len(ids)
    return [Judged(ids[:start], ids[start:], mask[start:], bool(label), media)]


def mismatched(answers: Sequence[Judged]) -> list[Judged]:
    """The same prompts and the same responses, but each prompt with the response to the one before it."""
    others = [*answers[-1:], *answers[:-1]]
    return [
        replace(other, prompt=one.prompt, media=(*one.media, *other.media))
        for one, other in zip(answers, others, strict=True)
    ]


def to_batch(answers: Sequence[Judged], limit: int) -> TokenBatch:
    """One ragged batch in which every response weighs the same. What is beyond ``limit`` tokens is cut off."""
    return TokenBatch.from_sequences(
        [(one.prompt + one.response)[:limit] for one in answers],
        [([False] * len(one.prompt) + one.mask)[:limit] for one in answers],
        loss_aggregation="sequence",
        media=chain.from_iterable(one.media for one in answers),
    ).with_sequences(desirable=torch.tensor([one.desirable for one in answers]))

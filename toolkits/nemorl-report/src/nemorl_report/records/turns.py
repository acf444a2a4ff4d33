"""The turns of an episode: who wrote which tokens, and the text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from nemorl.types import Sample

from nemorl_report.records.tokens import Tokens

Decode = Callable[[Sequence[int]], str]


def turns_of(sample: Sample, sequences: Sequence[Tokens], decode: Decode, prompt_text: str) -> list[dict[str, Any]]:
    """Each run of tokens that one author wrote, sequence by sequence.

    What stands before the first token that the policy chose is the prompt; what follows and it did not choose is the
    environment's.

    Args:
        sample: The episode.
        sequences: Its token sequences.
        decode: Token ids to text.
        prompt_text: The text of the prompt of its first sequence, which a group has in common.
    """
    found = []
    for number, (part, tokens) in enumerate(zip(sample.sequences, sequences, strict=True)):
        earned = dict(part.turn_rewards)
        for author, start, stop in spans(tokens.mask.tolist()):
            if number == 0 and author == "prompt":
                text = prompt_text
            elif author == "policy" and stop == len(tokens.mask) and len(sequences) == 1:
                text = sample.response
            else:
                text = decode(tokens.token_ids[start:stop].tolist())
            turn = {"author": author, "text": text, "sequence": number, "start": start, "stop": stop}
            found.append({**turn, "reward": earned.get(stop - 1)})
    return found


def spans(mask: Sequence[bool]) -> Iterator[tuple[str, int, int]]:
    """(author, first token, one beyond the last) of each run of a mask that is True where the policy chose.

    Example:
        >>> list(spans([False, False, True, False, True]))
        [('prompt', 0, 2), ('policy', 2, 3), ('environment', 3, 4), ('policy', 4, 5)]
    """
    values = np.asarray(mask, np.bool_)
    bounds = [0, *(np.flatnonzero(values[1:] != values[:-1]) + 1).tolist(), len(values)] if len(values) else []
    for start, stop in pairwise(bounds):
        author = "policy" if values[start] else "environment" if start else "prompt"
        yield author, start, stop

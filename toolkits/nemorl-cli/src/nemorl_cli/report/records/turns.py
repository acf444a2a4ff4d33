"""The turns of episodes: who wrote which tokens, the text, what it earned, and when it was made.

# S = token sequences, T = tokens of all sequences, N = turns of all sequences
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from nemorl.base.process.timing import Span
from nemorl.types import Sample
from nemorl_rl.serving.requests import TimedTurns

from nemorl_cli.report.records.columns import doubles, strings
from nemorl_cli.report.records.items import Shown, shown_column, shown_in
from nemorl_cli.report.records.schema import TURN
from nemorl_cli.report.records.tokens import Array, Tokens

Decode = Callable[[Sequence[int]], str]
NO_SPAN = (None, None)


class Runs(NamedTuple):
    """Tokens that one author wrote, one after the other."""

    sequence: Array
    """[N] of which sequence"""
    start: Array
    """[N] the first token, by its place in the sequence"""
    stop: Array
    """[N] one beyond the last"""
    is_policy: Array
    """[N] bool"""

    @classmethod
    def of(cls, mask: Array, starts: Array) -> Runs:
        """
        Args:
            mask: [T] True where the policy chose the token.
            starts: [S + 1] the first token of each sequence, and the end.

        Example:
            >>> runs = Runs.of(np.array([False, True, True, False]), np.array([0, 3, 4]))
            >>> runs.sequence.tolist(), runs.start.tolist(), runs.stop.tolist(), runs.is_policy.tolist()
            ([0, 0, 1], [0, 1, 0], [1, 3, 1], [False, True, False])
        """
        firsts = starts[:-1][np.diff(starts) > 0]
        changes = np.flatnonzero(mask[1:] != mask[:-1]) + 1
        begins = np.union1d(firsts, changes)
        sequence = np.searchsorted(starts, begins, side="right") - 1
        offset = starts[sequence]
        return cls(sequence, begins - offset, np.append(begins[1:], len(mask)) - offset, mask[begins])

    @property
    def authors(self) -> list[str]:
        """[N] What stands before the first token that the policy chose is the prompt; what follows and it did not
        choose is the environment's."""
        pairs = zip(self.is_policy.tolist(), self.start.tolist(), strict=True)
        return ["policy" if is_own else "environment" if start else "prompt" for is_own, start in pairs]


def turns_column(
    samples: Sequence[Sample],
    tokens: Tokens,
    shown: Shown,
    decode: Decode,
    prompts: Sequence[str],
    began_s: float | None,
) -> pa.Array:
    """The column ``turns``.

    Args:
        samples: The episodes.
        tokens: Theirs.
        shown: Their images and sounds.
        decode: Token ids to text.
        prompts: The text of the prompt of each one's first sequence.
        began_s: When the step began, by the clock of ``TimedTurns``. Unset: no times are known.
    """
    runs = Runs.of(tokens.mask, tokens.starts)
    episode = np.searchsorted(tokens.episodes, runs.sequence, side="right") - 1
    number = runs.sequence - tokens.episodes[episode]
    rewards = [_rewards(sample) for sample in samples]
    spans = [{} if began_s is None else _spans(sample, -began_s) for sample in samples]
    ids, ends = tokens.token_ids, tokens.lengths[runs.sequence]
    texts, earned, began, ended, shown_of = [], [], [], [], []
    places = zip(runs.authors, episode.tolist(), number.tolist(), runs.start.tolist(), runs.stop.tolist(), strict=True)
    for (author, which, part, start, stop), number_of_all, offset, length in zip(
        places, runs.sequence.tolist(), tokens.starts[runs.sequence].tolist(), ends.tolist(), strict=True
    ):
        sample = samples[which]
        if part == 0 and author == "prompt" and sample.token_ids[:stop] == sample.prompt.token_ids:
            texts.append(prompts[which])
        elif author == "policy" and stop == length and not sample.branches:
            texts.append(sample.response)
        else:
            texts.append(decode(ids[offset + start : offset + stop].tolist()))
        earned.append(rewards[which].get((part, stop)))
        span = NO_SPAN if author == "prompt" else spans[which].get((part, stop), NO_SPAN)
        began.append(span[0])
        ended.append(span[1])
        seen = shown.runs.get(number_of_all)
        shown_of.append(shown_in(seen, ids[offset + start : offset + stop].tolist(), start, decode) if seen else ())
    columns = {
        "author": strings(runs.authors),
        "text": strings(texts),
        "sequence": pa.array(number.astype(np.int32)),
        "start": pa.array(runs.start.astype(np.int32)),
        "stop": pa.array(runs.stop.astype(np.int32)),
        "reward": doubles(earned),
        "began_s": doubles(began),
        "ended_s": doubles(ended),
        "shown": shown_column(shown_of),
    }
    structs = pa.StructArray.from_arrays([columns[field.name] for field in TURN], fields=list(TURN))
    bounds = np.searchsorted(episode, np.arange(len(samples) + 1))
    return pa.ListArray.from_arrays(pa.array(bounds.astype(np.int32)), structs)


def _rewards(sample: Sample) -> dict[tuple[int, int], float]:
    """Rewards of turns, by their sequence and one beyond their last token."""
    earned = [sample.turn_rewards, *(branch.turn_rewards for branch in sample.branches)]
    return {(number, end + 1): reward for number, part in enumerate(earned) for end, reward in part}


def _spans(sample: Sample, shift_s: float) -> Mapping[tuple[int, int], Span]:
    if not isinstance(sample, TimedTurns):
        return {}
    return {(turn.sequence, turn.stop): turn.span.shifted(shift_s) for turn in sample.turn_spans}

"""The tokens of recorded episodes, end to end, and what of each episode follows from them.

Everything is done for all tokens of a file at once: a loop over token sequences would cost ten times as much.

# R = episodes, S = token sequences of all episodes, T = tokens of all sequences
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from nemorl.base.files.jsonl import JsonlWriter, read_jsonl
from nemorl.types import Sample

if TYPE_CHECKING:
    import pyarrow as pa


Array = np.ndarray[Any, np.dtype[Any]]
FIELDS = ("old_logprobs", "policy_logprobs", "reference_logprobs", "advantages", "loss_weights")
"""Per-token fields that a batch may have and samples do not."""


@dataclass(frozen=True)
class Trained:
    """Fields of token sequences that train: those of a minibatch."""

    sequences: int
    fields: Mapping[str, Array]
    """Each as long as the sequences together, float32; ``loss_weights`` is among them."""


@dataclass(frozen=True)
class Field:
    """Of the tokens of those sequences that have it."""

    has: Array
    """[S] bool"""
    values: Array
    """Of the sequences that have it, end to end; float32."""


@dataclass(frozen=True)
class Tokens:
    """All token sequences of some episodes."""

    starts: Array
    """[S + 1] the first token of each sequence, and the end"""
    episodes: Array
    """[R + 1] the first sequence of each episode, and the end"""
    token_ids: Array
    """[T] int64; those of images and sounds as :mod:`nemorl.media` has them"""
    mask: Array
    """[T] bool, True where the policy chose the token"""
    generation_logprobs: Array
    """[T] float32"""
    fields: Mapping[str, Field]
    """Those of ``FIELDS`` that any sequence has."""

    @classmethod
    def of(cls, episodes: Sequence[Sequence[Sample]], trained: Sequence[Trained]) -> Tokens:
        """
        Args:
            episodes: The token sequences of each episode, each as a sample.
            trained: Of the first sequences, in order.
        """
        parts = [part for episode in episodes for part in episode]
        starts = _starts(len(part.token_ids) for part in parts)
        return cls(
            starts,
            _starts(map(len, episodes)),
            _laid_out([part.token_ids for part in parts], starts, np.int64),
            _laid_out([part.response_mask for part in parts], starts, np.bool_),
            _laid_out([part.generation_logprobs for part in parts], starts, np.float32),
            {name: field for name in FIELDS if (field := _field(name, trained, len(parts))) is not None},
        )

    @cached_property
    def lengths(self) -> Array:
        """[S] tokens"""
        return np.diff(self.starts)

    def whole(self, name: str) -> Array:
        """[T] float64 of a field; NaN where a sequence lacks it."""
        found = np.full(len(self.token_ids), np.nan)
        if name in self.fields:
            field = self.fields[name]
            found[np.repeat(field.has, self.lengths)] = field.values
        return found

    def mean(self, values: Array, counted: Array) -> list[float | None]:
        """[R] means of values [T] over the tokens counted [T]; ``None`` where an episode has none."""
        of_episode = self._episode_of_token[counted]
        counts = np.bincount(of_episode, minlength=len(self.episodes) - 1)
        sums = np.bincount(of_episode, values[counted], minlength=len(self.episodes) - 1)
        means = sums / np.maximum(counts, 1)
        return [mean if count else None for mean, count in zip(means.tolist(), counts.tolist(), strict=True)]

    @cached_property
    def chosen(self) -> list[int]:
        """[R] tokens that the policy chose"""
        counts: list[int] = np.bincount(self._episode_of_token[self.mask], minlength=len(self.episodes) - 1).tolist()
        return counts

    @property
    def is_trained(self) -> list[bool]:
        """[R] a token of the episode has a weight in the loss"""
        weights = self.whole("loss_weights")
        return [bool(mean) for mean in self.mean(np.abs(weights), ~np.isnan(weights))]

    @property
    def advantage(self) -> list[float | None]:
        """[R] the mean advantage of what the policy chose"""
        advantages = self.whole("advantages")
        return self.mean(advantages, self.mask & ~np.isnan(advantages))

    @property
    def kl(self) -> list[float | None]:
        """[R] nats per token between the policy and the reference, where their log-probs are known.

        The k3 estimate, mean(exp(r - p) - (r - p) - 1) over the tokens that the policy chose, with r of the reference
        and p of the policy before the update, else of the sampler. http://joschu.net/blog/kl-approx.html
        """
        if "reference_logprobs" not in self.fields:
            return [None] * (len(self.episodes) - 1)
        reference, old = self.whole("reference_logprobs"), self.whole("old_logprobs")
        difference = reference - np.where(np.isnan(old), self.generation_logprobs, old)
        return self.mean(np.exp(difference) - difference - 1, self.mask & ~np.isnan(reference))

    @property
    def uneven_advantages(self) -> Field | None:
        """The advantages of those episodes in which tokens that the policy chose have different ones."""
        field = self.fields.get("advantages")
        if field is None:
            return None
        lengths = np.where(field.has, self.lengths, 0)
        sequence = np.repeat(np.arange(len(lengths)), lengths)
        chosen = self.mask[np.repeat(field.has, self.lengths)]
        owner, values = self._episode_of_sequence[sequence[chosen]], field.values[chosen]
        first = np.flatnonzero(np.diff(owner, prepend=-1))
        differs = values != np.repeat(values[first], np.diff(first, append=len(owner)))
        is_uneven = np.zeros(len(self.episodes) - 1, np.bool_)
        is_uneven[owner[differs]] = True
        has = is_uneven[self._episode_of_sequence] & field.has
        return Field(has, field.values[has[sequence]])

    @cached_property
    def _episode_of_sequence(self) -> Array:
        return np.repeat(np.arange(len(self.episodes) - 1), np.diff(self.episodes))

    @cached_property
    def _episode_of_token(self) -> Array:
        return np.repeat(self._episode_of_sequence, self.lengths)


def selected(minibatches: Sequence[Any], wanted: Sequence[int]) -> list[Any]:
    """The wanted sequences of minibatches (``TokenBatch``), by their number over all; copies that are theirs alone."""
    found, start = [], 0
    for batch in minibatches:
        places = [number - start for number in wanted if start <= number < start + len(batch)]
        if places:
            found.append(batch.select(places))
        start += len(batch)
    return found


def of_minibatches(minibatches: Sequence[Any]) -> list[Trained]:
    """The fields of minibatches (``TokenBatch``): views, nothing is copied on the CPU."""
    return [
        Trained(
            len(batch),
            {name: _numpy(batch[name]) for name in FIELDS[:-1] if name in batch and batch[name].dim() == 1}
            | {"loss_weights": _numpy(batch.loss_weights)},
        )
        for batch in minibatches
    ]


def _field(name: str, trained: Sequence[Trained], sequences: int) -> Field | None:
    having = [part for part in trained if name in part.fields]
    if not having:
        return None
    has = np.repeat([name in part.fields for part in trained], [part.sequences for part in trained])
    values = np.concatenate([part.fields[name] for part in having])
    return Field(np.append(has, np.zeros(sequences - len(has), np.bool_)), values.astype(np.float32, copy=False))


def _laid_out(rows: Sequence[Sequence[Any]], starts: Array, dtype: type[Any]) -> Array:
    """[T] the values of sequences end to end. Those that are arrays already are copied as such."""
    found = np.empty(starts[-1], dtype)
    for row, start, stop in zip(rows, starts.tolist(), starts[1:].tolist(), strict=False):
        found[start:stop] = row
    return found


def _starts(lengths: Iterable[int]) -> Array:
    return np.cumsum([0, *lengths])


def _numpy(tensor: Any) -> Array:
    found: Array = tensor.detach().cpu().numpy()
    return found


# The text of each token that occurs in records, so that no reader needs a tokenizer


FILE = "_tokens.jsonl"
"""Readers of a folder of Parquet files leave names with an underscore alone."""


class Vocabulary:
    """Adds tokens to the file when they occur for the first time."""

    def __init__(self, folder: Path, decode: Callable[[Sequence[int]], str]) -> None:
        """
        Args:
            folder: Of the records.
            decode: Token ids to text.
        """
        self._path, self._decode = folder / FILE, decode
        self._known: set[int] | None = None

    def add(self, table: pa.Table) -> None:
        """Those of a table of records."""
        if self._known is None:
            self._known = set(token_texts(self._path.parent))
        tokens = (
            table["sequences"].combine_chunks().flatten().field("token_ids").flatten().to_numpy(zero_copy_only=False)
        )
        new = sorted({token for token in np.unique(tokens).tolist() if token >= 0} - self._known)
        if not new:
            return
        with JsonlWriter(self._path) as file:
            for token in new:
                file.write({"id": token, "text": self._decode([token])})
        self._known.update(new)


def token_texts(folder: Path) -> dict[int, str]:
    """Token id -> its text, of all that occur in a folder of records."""
    lines = read_jsonl(folder / FILE)
    return {line["id"]: str(line["text"]) for line in lines if isinstance(line.get("id"), int) and "text" in line}

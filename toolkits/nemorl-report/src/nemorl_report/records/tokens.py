"""The per-token fields of recorded sequences, as numpy arrays.

# T = tokens of one sequence
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from nemorl.types import Sample

Array = np.ndarray[Any, np.dtype[Any]]
FIELDS = ("old_logprobs", "policy_logprobs", "reference_logprobs", "advantages")
"""What a batch may have of each token beside what its sample has."""


@dataclass(frozen=True)
class Tokens:
    """One token sequence of an episode."""

    token_ids: Array
    """[T] int32"""
    mask: Array
    """[T] bool, True where the policy chose the token"""
    generation_logprobs: Array
    """[T] float32"""
    trained: Mapping[str, Array] = field(default_factory=dict)
    """Fields of the batch, [T] float32 each, ``loss_weights`` among them; empty for what trains nothing."""

    @classmethod
    def of(cls, sequence: Sample, trained: Mapping[str, Array] | None = None) -> Tokens:
        """Of a sample that is one sequence."""
        return cls(
            np.asarray(sequence.token_ids, np.int32),
            np.asarray(sequence.response_mask, np.bool_),
            np.asarray(sequence.generation_logprobs, np.float32),
            trained or {},
        )

    @property
    def is_trained(self) -> bool:
        """A token of it has a weight in the loss."""
        return "loss_weights" in self.trained and bool(self.trained["loss_weights"].any())


def selected(minibatches: Sequence[Any], wanted: Sequence[int]) -> list[Any]:
    """The wanted sequences of minibatches (``TokenBatch``), by their number over all; copies that are theirs alone."""
    found, start = [], 0
    for batch in minibatches:
        places = [number - start for number in wanted if start <= number < start + len(batch)]
        if places:
            found.append(batch.select(places))
        start += len(batch)
    return found


def of_minibatches(minibatches: Sequence[Any]) -> Iterator[Mapping[str, Array]]:
    """The fields of each sequence of minibatches (``TokenBatch``), in order: views, nothing is copied on the CPU."""
    for batch in minibatches:
        fields = {name: _numpy(batch[name]) for name in FIELDS if name in batch and batch[name].dim() == 1}
        fields["loss_weights"] = _numpy(batch.loss_weights)
        start = 0
        for length in batch.lengths.tolist():
            yield {name: values[start : start + length] for name, values in fields.items()}
            start += length


def _numpy(tensor: Any) -> Array:
    found: Array = tensor.detach().cpu().numpy()
    return found


def advantage_of(sequences: Sequence[Tokens]) -> float | None:
    """The mean advantage of what the policy chose in an episode; ``None`` where it has none."""
    parts = [one.trained["advantages"][one.mask] for one in sequences if "advantages" in one.trained]
    values = np.concatenate(parts) if parts else np.empty(0)
    return float(values.mean()) if values.size else None


def kl_of(sequences: Sequence[Tokens]) -> float | None:
    """Nats per token between the policy and the reference, where their log-probs are known.

    The k3 estimate, mean(exp(r - p) - (r - p) - 1) over the tokens that the policy chose, with r of the reference and p
    of the policy before the update, else of the sampler. http://joschu.net/blog/kl-approx.html
    """
    parts = []
    for one in sequences:
        if "reference_logprobs" in one.trained:
            policy = one.trained.get("old_logprobs", one.generation_logprobs)
            parts.append((one.trained["reference_logprobs"] - policy)[one.mask])
    values = np.concatenate(parts).astype(np.float64) if parts else np.empty(0)
    return float((np.exp(values) - values - 1).mean()) if values.size else None


def differs(values: Array, mask: Array) -> bool:
    """Tokens that the policy chose have different values."""
    chosen = values[mask]
    return bool(chosen.size) and bool((chosen != chosen[0]).any())

"""Log-probs under the initial policy, computed once and kept: ``reference: precomputed``.

# N = tokens of all sequences concatenated, B = sequences, S = sequences in the table

Before the first update the policy *is* the reference. What DPO and KTO need of it is one number per response, so a
table of these numbers stands in for a second model in memory and for its forward pass in every step. The table is
written to the run directory; a resumed run reads it.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import torch
from nemorl.errors import DataError
from nemorl_tensors import TokenBatch, segment_sum
from safetensors.torch import load_file, save_file
from torch import Tensor


class ReferenceTable:
    """Response -> the sum of the reference's log-probs of its tokens. Responses are known by their tokens and mask."""

    def __init__(self, path: Path) -> None:
        """
        Args:
            path: A safetensors file; read if it exists.
        """
        self._path = path
        self._logprobs: dict[int, float] = {}
        if path.is_file():
            stored = load_file(path)
            self._logprobs = dict(zip(stored["responses"].tolist(), stored["logprobs"].tolist(), strict=True))

    def __len__(self) -> int:
        return len(self._logprobs)

    def missing(self, batch: TokenBatch) -> list[int]:
        """The sequences of ``batch`` that are not in the table, each once."""
        places = {key: index for index, key in enumerate(_keys(batch)) if key not in self._logprobs}
        return sorted(places.values())

    def add(self, batch: TokenBatch, logprobs: Tensor) -> None:
        """Take in the reference's log-probs [N] of all sequences of ``batch``."""
        sums = segment_sum(logprobs.double(), batch.mask, batch.lengths)
        self._logprobs.update(zip(_keys(batch), sums.tolist(), strict=True))

    def save(self) -> None:
        """Write the table; a kill meanwhile leaves the old file or none."""
        stored = {
            "responses": torch.tensor(list(self._logprobs), dtype=torch.int64),
            "logprobs": torch.tensor(list(self._logprobs.values()), dtype=torch.float64),
        }
        unfinished = self._path.with_suffix(".tmp")
        save_file(stored, unfinished)
        os.replace(unfinished, self._path)

    def lookup(self, batch: TokenBatch) -> Tensor:
        """[B] float32 sums for the sequences of ``batch``.

        Raises:
            DataError: one of them is not in the table.
        """
        try:
            return torch.tensor([self._logprobs[key] for key in _keys(batch)], dtype=torch.float32)
        except KeyError:
            raise DataError(
                "a response was not among those whose reference log-probs were computed before the first step",
                fix="set `reference: model` for data that changes while it is read",
            ) from None


def _keys(batch: TokenBatch) -> list[int]:
    """A 64-bit digest of each sequence's tokens and mask."""
    marked = (batch.token_ids * 2 + batch.mask).numpy()
    bounds = torch.cumsum(batch.lengths, 0).tolist()
    keys, start = [], 0
    for end in bounds:
        digest = hashlib.blake2b(marked[start:end].tobytes(), digest_size=8).digest()
        keys.append(int.from_bytes(digest, "little", signed=True))
        start = end
    return keys

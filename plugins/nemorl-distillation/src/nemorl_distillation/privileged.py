"""The responses of a batch behind prompts that say more: what a policy reads that is to teach itself. The prompts are
made in ``contexts``.

    student   P  P  a  b  .          prompt, response
    teacher   Q  Q  Q  Q  a  b  .    privileged prompt, the same response tokens

# N = tokens of the student's batch, B = its sequences, M = response tokens that the teacher reads
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from nemorl_tensors import TokenBatch
from torch import Tensor


@dataclass(frozen=True)
class PrivilegedBatch:
    """The teacher's side of a batch, and where both speak of the same token."""

    batch: TokenBatch
    """The sequences that have a privileged prompt, in their order"""
    own: Tensor
    """[M] int64 places in the student's batch"""
    theirs: Tensor
    """[M] int64 places of the same tokens in ``batch``"""
    is_read: Tensor
    """[B] bool, sequences of the student's batch that are in ``batch``"""

    def taught(self, batch: TokenBatch) -> TokenBatch:
        """The student's batch, in which sequences that nobody reads train nothing and weigh nothing."""
        return replace(batch, mask=batch.mask & self.is_read[batch.sequence_ids]).with_new_weights()


def behind_prompts(
    batch: TokenBatch, prompt_tokens: Sequence[int], prompts: Sequence[Sequence[int] | None], limit: int
) -> PrivilegedBatch:
    """Each sequence with another prompt before what follows its own, observations between responses included.

    Prompts show no other images and sounds than the student's batch does.

    Args:
        batch: The student's: one sequence per sample.
        prompt_tokens: Length of each sequence's own prompt.
        prompts: [B] token ids of each sequence's privileged prompt. None: it has none.
        limit: Most tokens of a sequence. One that would be longer is not read.

    Example:
        >>> batch = TokenBatch.from_sequences([[5, 7, 8]], [[False, True, True]])
        >>> behind = behind_prompts(batch, [1], [[5, 9, 9]], 10)
        >>> behind.batch.token_ids.tolist(), behind.own.tolist(), behind.theirs.tolist()
        ([5, 9, 9, 7, 8], [1, 2], [3, 4])
    """
    sequences, masks, own, theirs = [], [], [], []
    is_read = torch.zeros(len(batch), dtype=torch.bool)
    begins = written = 0
    for index, (length, before, prompt) in enumerate(zip(batch.lengths.tolist(), prompt_tokens, prompts, strict=True)):
        said = slice(begins + before, begins + length)
        begins += length
        if prompt is None or len(prompt) + length - before > limit:
            continue
        is_read[index] = True
        sequences.append([*prompt, *batch.token_ids[said].tolist()])
        masks.append([False] * len(prompt) + batch.mask[said].tolist())
        own.append(torch.arange(said.start, said.stop))
        theirs.append(torch.arange(length - before) + written + len(prompt))
        written += len(sequences[-1])
    read = TokenBatch.from_sequences(sequences, masks, temperature=batch.temperature, media=batch.media.values())
    nowhere = torch.zeros(0, dtype=torch.int64)
    return PrivilegedBatch(read, torch.cat([nowhere, *own]), torch.cat([nowhere, *theirs]), is_read)

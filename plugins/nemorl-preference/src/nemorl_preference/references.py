"""What the initial policy says of whole responses: from a table filled before the first step, or from a frozen model.

# B = sequences
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from nemorl.contracts import DataModule
from nemorl.run import Run
from nemorl.types import Row
from nemorl_tensors import TokenBatch, segment_sum
from torch import Tensor

from nemorl_preference.reference_table import ReferenceTable


class References:
    """Log-probs of responses under the initial policy, of one run."""

    def __init__(self, run: Run, *, precomputed: bool) -> None:
        """
        Args:
            run: Has the policy, and the frozen model where nothing is precomputed.
            precomputed: Answer from a table in the run directory; :meth:`precompute` fills it.
        """
        self._run = run
        self._table = ReferenceTable(run.path / "reference.safetensors") if precomputed else None

    def precompute(self, batches: Iterable[TokenBatch]) -> None:
        """Fill the table, if there is one, for all responses that the run will see.

        ``setup`` of a trainer comes before any checkpoint is loaded: the policy is the initial one, in a resumed run
        too, so whatever is missing can still be computed.
        """
        table = self._table
        if table is None:
            return
        found = len(table)
        self._run.console.phase("computing reference log-probs")
        for together in batches:
            batch = replace(together, sequences_per_group=1)  # a response counts alone here
            missing = table.missing(batch)
            if missing:
                asked = batch.select(missing)
                table.add(asked, self._run.policy.get_logprobs(asked))
        if len(table) > found:
            table.save()
        self._run.directory.event("reference_logprobs", computed=len(table) - found, read=found)

    def of(self, batch: TokenBatch) -> Tensor:
        """[B] float32 nats: the sum over the response tokens of each sequence."""
        if self._table is not None:
            return self._table.lookup(batch)
        with self._run.timer.phase("policy_and_reference_logprobs"):
            logprobs = self._run.policy.get_logprobs(batch, "reference")
        return segment_sum(logprobs, batch.mask, batch.lengths)


def look_ahead(data: DataModule, steps: int, *, epochs: float = 1) -> Iterator[list[Row]]:
    """The next ``steps`` batches, or those of ``epochs`` if these are fewer; then ``data`` is where it was."""
    position = data.state_dict()
    try:
        for _ in range(steps):
            yield data.next_batch()
            if data.epoch >= epochs:
                break
    finally:
        data.load_state_dict(position)

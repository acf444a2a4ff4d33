"""Which layout a batch gets: rows that share tokens where that is worth it, else padded or packed ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import lcm

from nemorl.metrics import Mean, Metrics

from nemorl_tensors.batch import TokenBatch
from nemorl_tensors.engines.prefix_forest import PrefixForest, plan_trees
from nemorl_tensors.engines.rows import Rows, fed_lengths, plan_microbatches, to_rows
from nemorl_tensors.engines.tree_rows import to_tree_rows

EACH_FOR_ITSELF = "tokens that sequences have in common are computed for each of them"
"""Remark of a layout that does not share, before the reason."""
REMARKED_RATIO = 1.01
"""Tokens per distinct one below which nobody misses sharing: a template's first words."""
MAX_PADDING = 2.0
"""Padded tokens per token from which rows of their own are given up for a row without padding."""
REPEATED_ROW = 32
"""The width of one row alone is rounded up to a multiple of this, so that it repeats.

For each number of tokens that a product has not had before, oneDNN compiles its kernel anew, in 0.2 to 1 ms. Of several
rows widths repeat without it: on responses of at most 64 tokens multiples of 4 gained nothing.
"""
MIN_REPEATED = 16
"""Widths of fewer multiples stay as they are: rounding may add a sixteenth to what is computed, and no more."""
PROBE_TREE = ((0, 1, 2, 3, 4, 5), (0, 1, 2, 3, 6), (0, 1, 7, 8, 9, 10, 11), (0, 1, 2), (12, 13))
"""Sequences of a check, as indices of distinct tokens: branches at two depths, a prefix of another, a stranger."""


def probe_batch(vocabulary: int) -> TokenBatch:
    """``PROBE_TREE`` in token ids below ``vocabulary``, all tokens scored."""
    sequences = [[1 + index * 7 % max(1, vocabulary - 1) for index in members] for members in PROBE_TREE]
    return TokenBatch.from_sequences(sequences, [[True] * len(members) for members in sequences])


class Layout:
    """How batches become rows."""

    def __init__(self, *, packed: bool, min_ratio: float | None, remarks: Sequence[str] = ()) -> None:
        """
        Args:
            packed: Sequences share rows where they do not share tokens.
            min_ratio: Tokens of the sequences per computed one above which they share tokens; ``None``: never.
            remarks: Why it is not another one, where the config would let it be.
        """
        self.is_packed, self._min_ratio = packed, min_ratio
        self._remarks = tuple(remarks)
        self._first_ratio: float | None = None

    @property
    def remarks(self) -> tuple[str, ...]:
        """Why it is not another one, and why the first batch shares no tokens though its sequences have some."""
        ratio = self._first_ratio
        if ratio is None or self._min_ratio is None or not REMARKED_RATIO <= ratio <= self._min_ratio:
            return self._remarks
        found = f"the first batch has {ratio:.3g} tokens per distinct one"
        reason = f"{found}, and sharing begins above {self._min_ratio:g}"
        return (*self._remarks, f"{EACH_FOR_ITSELF}: {reason}")

    def plan(self, batch: TokenBatch, budget: int) -> list[list[int]]:
        """Sequence indices per microbatch, up to ``budget`` computed tokens."""
        if self._min_ratio is not None:
            forest = PrefixForest.of_batch(batch)
            if self._first_ratio is None:
                self._first_ratio = forest.ratio
            if forest.ratio > self._min_ratio:
                return plan_trees(batch, forest, budget)
        return plan_microbatches(batch, budget, padded=not self.is_packed)

    def computed_tokens(self, batch: TokenBatch) -> int:
        """Tokens that a forward pass over a batch computes, padding not counted."""
        if self._min_ratio is None:
            return int(fed_lengths(batch).sum())
        forest = PrefixForest.of_batch(batch)
        return forest.tokens if forest.ratio > self._min_ratio else forest.sequence_tokens

    def rows(
        self, microbatch: TokenBatch, *, width_multiple: int, candidates: bool = False, repeat_widths: bool = False
    ) -> Rows:
        """A microbatch of the plan, laid out for the model.

        Args:
            microbatch: The sequences.
            width_multiple: Of the rows' width.
            candidates: That of ``to_rows``.
            repeat_widths: Round the width of one long row up, so that fewer widths occur.
        """
        forest = self._shared(microbatch)
        if repeat_widths:
            width_multiple = self._repeated_multiple(microbatch, forest, width_multiple)
        if forest is not None:
            return to_tree_rows(microbatch, width_multiple=width_multiple, candidates=candidates, forest=forest)
        return to_rows(microbatch, packed=self.is_packed, width_multiple=width_multiple, candidates=candidates)

    def _repeated_multiple(self, microbatch: TokenBatch, forest: PrefixForest | None, required: int) -> int:
        """A multiple of ``required`` to round the width of one row to so that it repeats, where that adds little."""
        if forest is None and not self.is_packed:
            return required
        width = int(fed_lengths(microbatch).sum()) if forest is None else forest.tokens
        multiple = lcm(required, REPEATED_ROW)
        return multiple if width >= MIN_REPEATED * multiple else required

    def metrics(self, laid_out: Iterable[Rows]) -> Metrics:
        """``tree_ratio``: tokens of the sequences per computed one, padding not counted."""
        computed = saved = 0
        for rows in laid_out:
            computed += rows.real_tokens
            saved += sum(rows.tree.lengths) - sum(rows.tree.new) if rows.tree is not None else 0
        return {"tree_ratio": Mean(float(computed + saved), float(computed))} if computed else {}

    def _shared(self, microbatch: TokenBatch) -> PrefixForest | None:
        """The forest of a microbatch that is laid out as one."""
        if self._min_ratio is None:
            return None
        forest, fed = PrefixForest.of_batch(microbatch), fed_lengths(microbatch)
        padded = int(fed.max()) * int((fed > 0).sum()) if len(fed) else 0
        # A plan by trees may leave sequences together that share nothing and are of all lengths.
        is_wasteful = not self.is_packed and padded > MAX_PADDING * forest.tokens
        return forest if forest.ratio > self._min_ratio or is_wasteful else None

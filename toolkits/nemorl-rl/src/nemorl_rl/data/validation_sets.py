"""Held-out rows in one set or several, and their metrics: each set's own, and those of all sets together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce

from nemorl.errors import boundary
from nemorl.metrics import Mean
from nemorl.types import Row

from nemorl_rl.data.fingerprints import rows_fingerprint
from nemorl_rl.data.row_sizes import require_size

FAILED = "failed_frac"
"""The metric that tells the share of responses without a verdict, where there are any."""


class HeldOutRows:
    """The rows that a run validates on.

    Example:
        >>> held_out = HeldOutRows({"easy": [{"prompt": "1+1="}], "hard": [{"prompt": "7*8="}] * 3})
        >>> held_out.measure(lambda rows: {"accuracy": 1.0 if len(rows) == 1 else 0.0}, max_rows=256)
        {'easy/accuracy': 1.0, 'hard/accuracy': 0.0, 'accuracy': 0.25}
    """

    def __init__(self, sets: Mapping[str, Sequence[Row]], max_tokens: int | None = None) -> None:
        """
        Args:
            sets: Name -> rows. A set alone is called ``""``, and its metrics stand under their own names.
            max_tokens: Of a sequence: rows that are far longer are refused. Unset: nobody asks.
        """
        self._sets, self._max_tokens = sets, max_tokens

    def read(self, max_rows: int) -> Mapping[str, Sequence[Row]]:
        """The first rows of each set."""
        with boundary("the validation dataset"):
            read = {name: [rows[i] for i in range(min(len(rows), max_rows))] for name, rows in self._sets.items()}
        for name, rows in read.items():
            for number, row in enumerate(rows if self._max_tokens is not None else ()):
                require_size(row, f"validation row {number}{name and f' of {name}'}", self._max_tokens or 0)
        return read

    def fingerprint(self) -> str:
        """Of each set, by name."""
        with boundary("the validation dataset"):
            return "; ".join(f"{name} {rows_fingerprint(rows)}".strip() for name, rows in self._sets.items())

    def measure(self, validate: Callable[[Sequence[Row]], Mapping[str, float]], max_rows: int) -> dict[str, float]:
        """Metrics of each set's first rows as ``set/metric``, and over all sets under the metrics' own names.

        The latter are means weighted by the rows of the sets, of metrics that all sets have: what one set of all rows
        together would give, where a metric is a mean over rows. The share ``failed_frac`` of a set's responses, which
        have no verdict and of which its other metrics know nothing, weighs nothing in these.
        """
        read = self.read(max_rows)
        measured = {name: validate(rows) for name, rows in read.items()}
        if list(measured) == [""]:
            return dict(measured[""])
        found = {f"{name}/{metric}": value for name, metrics in measured.items() for metric, value in metrics.items()}
        failed = {
            name: Mean(metrics.get(FAILED, 0.0) * len(read[name]), len(read[name]))
            for name, metrics in measured.items()
        }
        judged = {name: share.count - share.total for name, share in failed.items() if share.value < 1.0}
        metrics_of = [measured[name].keys() for name in judged]
        for metric in [name for name in next(iter(metrics_of), ()) if all(name in others for others in metrics_of)]:
            weighted = [Mean(measured[name][metric] * weight, weight) for name, weight in judged.items()]
            found[metric] = reduce(Mean.merge, weighted).value
        share = reduce(Mean.merge, failed.values()).value
        return {**found, FAILED: share} if share else found

"""Curriculum: the rows of each draw, those whose responses are on their way, and what became of the others.

A row is *in flight* from the draw until it is settled: its group was scored, or given up. What is in flight is not
drawn again, and is part of the state: after a restart the same rows are drawn again under the same numbers, whatever
the statistics would say by now.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nemorl.errors import PluginError, boundary
from nemorl.metrics import Mean, Metric
from nemorl.types import Sample

from nemorl_rl.curriculum.sampler import Draw, PromptSampler
from nemorl_rl.curriculum.statistics import Outcome, PromptStatistics
from nemorl_rl.rollouts.seeding import derive_seed

DIFFICULTIES = {"hard": (0.0, 1 / 3), "medium": (1 / 3, 2 / 3), "easy": (2 / 3, 1.01)}
"""Pass rates of a prompt's first group, from and up to but without."""


@dataclass
class _OpenDraw:
    rows: list[int]
    settled: set[int] = field(default_factory=set)
    """Places in it."""

    @property
    def is_settled(self) -> bool:
        return len(self.settled) == len(self.rows)


class Curriculum:
    """Chooses the rows of a run by a sampler.

    Example:
        >>> curriculum = Curriculum(Uniform(), [3], seed=1)
        >>> curriculum.draw(1, [2, 0])
        [2, 0]
        >>> curriculum.in_flight
        {0, 2}
    """

    def __init__(self, sampler: PromptSampler, sizes: Sequence[int], *, seed: int) -> None:
        """
        Args:
            sampler: Chooses.
            sizes: Rows of each part of the data. A part keeps the places that the order of the epoch gives it.
            seed: Of the run.
        """
        self._sampler, self._seed = sampler, seed
        self._parts: list[range] = []
        for size in sizes:
            start = self._parts[-1].stop if self._parts else 0
            self._parts.append(range(start, start + size))
        self.statistics = PromptStatistics(sampler.half_life)
        self._open: dict[int, _OpenDraw] = {}
        """By number, none left out: from the oldest that is not settled to the newest."""
        self._newest = 0

    @property
    def rows(self) -> int:
        """Rows of the data."""
        return self._parts[-1].stop

    @property
    def newest(self) -> int:
        """The number of the last draw."""
        return self._newest

    @property
    def in_flight(self) -> set[int]:
        """Rows that were drawn and are not settled."""
        draws = self._open.values()
        return {row for draw in draws for place, row in enumerate(draw.rows) if place not in draw.settled}

    def draw(self, number: int, in_order: Sequence[int]) -> list[int]:
        """The rows of a draw. One that was drawn before a restart and is not settled has the same rows again.

        Args:
            number: Of the draw, from 1 on.
            in_order: The rows that stand at its places in the order of the epoch.
        """
        self._newest = number
        if number not in self._open:
            self._open[number] = _OpenDraw(self._choose(number, in_order))
        return self._open[number].rows

    def settle(self, number: int, place: int, group: Sequence[Sample] | None, step: int) -> None:
        """What became of a row of a draw.

        Args:
            number: Of the draw.
            place: Of the row in it.
            group: Its samples; ``None``: it was given up.
            step: The training step for which it was drawn.
        """
        draw = self._open.get(number)
        if draw is None or place >= len(draw.rows):  # not drawn from here
            return
        draw.settled.add(place)
        outcome = None if group is None else Outcome.of(group)
        if outcome is not None:
            self.statistics.add(draw.rows[place], outcome, step)
        for oldest in list(self._open):
            if not self._open[oldest].is_settled:
                break
            del self._open[oldest]

    def metrics(self) -> dict[str, Metric]:
        """How much of the data was met, and how well prompts go at present, by how hard they were when first met."""
        records = [record for _, record in self.statistics]
        found: dict[str, Metric] = {
            "prompts/seen_frac": Mean(float(len(records)), float(self.rows)),
            "prompts/visits": Mean.of(record.visits for record in records),
        }
        for name, (low, high) in DIFFICULTIES.items():
            rates = [record.pass_rate for record in records if low <= record.first_pass_rate < high]
            if rates:
                found[f"prompts/pass_rate/{name}"] = Mean.of(rates)
        return found

    def state_dict(self) -> dict[str, Any]:
        drawn = [[number, draw.rows, sorted(draw.settled)] for number, draw in self._open.items()]
        known = {"drawn": drawn, "statistics": self.statistics.state_dict()}
        return {"rows": self.rows, "newest": self._newest, **known}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The counterpart of ``state_dict``. Of other data, which the user accepted, nothing is known."""
        self._newest = int(state["newest"])
        if state["rows"] != self.rows:
            self._open, self.statistics = {}, PromptStatistics(self._sampler.half_life)
            return
        self._open = {number: _OpenDraw(list(rows), set(settled)) for number, rows, settled in state["drawn"]}
        self.statistics.load_state_dict(state["statistics"])

    def _choose(self, number: int, in_order: Sequence[int]) -> list[int]:
        chosen, in_flight = list(in_order), self.in_flight
        for place, part in enumerate(self._parts):
            places = [here for here, row in enumerate(in_order) if row in part]
            if not places:
                continue
            free: Sequence[int] = [row for row in part if row not in in_flight] if in_flight else part
            draw = Draw(
                len(places),
                [in_order[here] for here in places],
                free if len(free) >= len(places) else part,
                self.statistics,
                derive_seed(self._seed, "prompts", number, place),
            )
            for here, row in zip(places, self._rows_of(draw, part), strict=True):
                chosen[here] = row
        return chosen

    def _rows_of(self, draw: Draw, part: range) -> list[int]:
        """The sampler's choice, if it is one.

        Raises:
            PluginError: it chose too few or too many rows, or some that there are not.
        """
        owner = f"prompt sampler {type(self._sampler).__name__}"
        with boundary(owner):
            rows = list(self._sampler.choose(draw))
        if len(rows) != draw.count or any(row not in part for row in rows):
            raise PluginError(f"{owner} chose {rows!r:.80} of {draw.count} rows of {part}", fix="choose from draw.free")
        return rows

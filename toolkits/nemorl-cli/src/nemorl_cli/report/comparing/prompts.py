"""The same prompts in two runs, side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemorl_cli.report.records.picking import is_right, prompt_key
from nemorl_cli.report.records.reading import FOLDER, read_records, record_files

Record = Mapping[str, Any]


@dataclass(frozen=True)
class Pairs:
    """Prompts that two runs answered at the same step."""

    split: str
    step: int
    pairs: Sequence[tuple[Record, Record]]
    """A response of each run, those first whose rewards differ most."""

    @property
    def counts(self) -> dict[str, int]:
        """How many prompts both runs, one or none of them got right."""
        right = [(is_right(one), is_right(other)) for one, other in self.pairs]
        return {
            "both": right.count((True, True)),
            "first_only": right.count((True, False)),
            "second_only": right.count((False, True)),
            "neither": right.count((False, False)),
        }


def pairs_of(first: Path, second: Path) -> Pairs | None:
    """The newest validation that both runs recorded, else the newest training step; ``None`` where prompts have none
    in common."""
    for split in ("validation", "train"):
        steps = [{file.step for file in record_files(run / FOLDER, split=split)} for run in (first, second)]
        for step in sorted(steps[0] & steps[1], reverse=True)[:5]:
            ones, others = (_by_prompt(run, split, step) for run in (first, second))
            pairs = [(ones[prompt], others[prompt]) for prompt in ones if prompt in others]
            if pairs:
                pairs.sort(key=lambda pair: -abs((pair[1]["reward"] or 0.0) - (pair[0]["reward"] or 0.0)))
                return Pairs(split, step, pairs)
    return None


def _by_prompt(run: Path, split: str, step: int) -> dict[tuple[str, ...], Record]:
    """The first response to each prompt."""
    found: dict[tuple[str, ...], Record] = {}
    for record in read_records(run, split=split, step=step):
        found.setdefault(prompt_key(record), record)
    return found

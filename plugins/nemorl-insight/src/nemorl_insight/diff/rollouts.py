"""Rollout records of one step in two runs: the first sample, column and token that differ, part by part of the step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemorl_cli.report.records.items import named_ids
from nemorl_cli.report.records.reading import FOLDER, NAMED, read_table, record_files

from nemorl_insight.diff.stages import Point, Stage
from nemorl_insight.diff.tensors import is_equal

Row = Mapping[str, Any]
TOKEN_FIELDS: Mapping[Stage, Sequence[str]] = {
    "tokens": ("token_ids", "generation_logprobs"),
    "advantages": ("advantages",),
    "logprobs": ("old_logprobs", "reference_logprobs", "loss_weights"),
    "weights": ("policy_logprobs",),
}
"""Per-token lists of ``sequences``, by the part of the step that makes them, in its order."""
COLUMNS: Mapping[Stage, Sequence[str]] = {
    "data": ("prompt", "answer"),
    "tokens": ("finish_reason", "num_turns"),
    "rewards": ("components", "metrics", "given", "correct", "valid", "reward"),
    "advantages": ("filtered", "advantage"),
    "logprobs": ("kl",),
}
"""Columns of one value per sample. Parts of a reward come before the reward."""
READ = (
    "sample_id",
    "group",
    "prompt_tokens",
    *dict.fromkeys(n for c in COLUMNS.values() for n in c),
    "sequences",
    "media",
)


@dataclass(frozen=True)
class StepRecords:
    """The training records of one step of a run, by ``group`` and place in it."""

    rows: Mapping[tuple[str, int], Row]

    @classmethod
    def read(cls, run_dir: Path, step: int) -> StepRecords | None:
        """``None`` where the run kept none of this step.

        Raises:
            ValueError, OSError: a file is damaged.
        """
        files = record_files(run_dir / FOLDER, split="train", step=step)
        if not files:
            return None
        rows = [_named(row) for file in files for row in read_table(file, READ).to_pylist()]
        return cls({_key(row): row for row in rows})


def _named(row: Row) -> Row:
    """With images and sounds among token ids by what they show, wherever the episode lists them."""
    if not row["media"]:
        return row
    parts = [{**part, "token_ids": named_ids(part["token_ids"], row["media"])} for part in row["sequences"] or ()]
    return {**row, "sequences": parts}


def _key(row: Row) -> tuple[str, int]:
    """The group's number, with an ``r`` for a rejected one, and the place in the group; sorts like the step."""
    _, group, place = str(row["sample_id"]).rsplit("-", 2)
    return group.rjust(9), int(place)


@dataclass(frozen=True)
class RecordPair:
    """Records of the same step in two runs."""

    first: StepRecords
    second: StepRecords
    tolerance: float

    @property
    def common(self) -> list[tuple[str, int]]:
        return sorted(self.first.rows.keys() & self.second.rows.keys())

    @property
    def covers(self) -> str | None:
        """``None`` where both kept the same samples, else how many are in both."""
        one, other = len(self.first.rows), len(self.second.rows)
        both = len(self.common)
        return None if one == other == both else f"{both} samples are in both records, of {one} and {other}"

    def first_difference(self, stage: Stage) -> Point | None:
        """In the order of the batch; within a sample, in the order of its tokens."""
        return next((point for key in self.common for point in self._of_sample(key, stage)), None)

    def has(self, stage: Stage) -> bool:
        """Both recorded something of this part of the step."""
        if stage in COLUMNS:
            names = COLUMNS[stage]
            if stage != "logprobs" and any(self._given(key, name) for key in self.common for name in names):
                return True
        fields = TOKEN_FIELDS.get(stage, ())
        return any(self._has_tokens(key, name) for key in self.common for name in fields)

    def _given(self, key: tuple[str, int], name: str) -> bool:
        return self.first.rows[key][name] is not None and self.second.rows[key][name] is not None

    def _has_tokens(self, key: tuple[str, int], name: str) -> bool:
        sides = (self.first.rows[key]["sequences"] or (), self.second.rows[key]["sequences"] or ())
        return all(any(sequence[name] is not None for sequence in side) for side in sides)

    def _of_sample(self, key: tuple[str, int], stage: Stage) -> Iterator[Point]:
        one, other = self.first.rows[key], self.second.rows[key]
        name = str(one["sample_id"])
        if stage == "data":
            yield from self._of_prompt(one, other, name)
        else:
            yield from self._of_tokens(one, other, name, TOKEN_FIELDS.get(stage, ()))
        for column in COLUMNS.get(stage, ()):
            yield from self._of_value(column, one[column], other[column], name)

    def _of_prompt(self, one: Row, other: Row, name: str) -> Iterator[Point]:
        """Prompts as text, which their token ids follow from, and then as ids: tokenizers differ."""
        if one["prompt"] == other["prompt"]:
            ids = [row["sequences"][0]["token_ids"][: row["prompt_tokens"]] for row in (one, other)]
            place = _first_place(ids[0], ids[1], 0.0)
            if place is not None:
                yield Point("prompt token", _at(ids[0], place), _at(ids[1], place), name, place)

    def _of_tokens(self, one: Row, other: Row, name: str, fields: Sequence[str]) -> Iterator[Point]:
        sides = one["sequences"] or (), other["sequences"] or ()
        for number, pair in enumerate(zip(*sides, strict=False)):
            found: list[tuple[int, int, Point]] = []
            for order, field in enumerate(fields):
                values = [sequence[field] for sequence in pair]
                if None in values:
                    continue  # one of them did not keep it
                place = _first_place(values[0], values[1], self.tolerance)
                if place is not None:
                    where = f"sequence {number}" if len(sides[0]) > 1 else ""
                    point = Point(_singular(field), _at(values[0], place), _at(values[1], place), name, place, where)
                    found.append((place, order, point))
            yield from (point for _, _, point in sorted(found, key=lambda item: item[:2]))
        if fields and fields[0] == "token_ids" and len(sides[0]) != len(sides[1]):
            yield Point("token sequences", len(sides[0]), len(sides[1]), name)

    def _of_value(self, column: str, one: Any, other: Any, name: str) -> Iterator[Point]:
        if column in NAMED:
            parts = [{pair["name"]: pair["value"] for pair in value or ()} for value in (one, other)]
            for part in dict.fromkeys([*parts[0], *parts[1]]):
                yield from self._of_value(f"{column}.{part}", parts[0].get(part), parts[1].get(part), name)
        elif column == "kl" and None in (one, other):
            return  # one of them has no reference
        elif not is_equal(one, other, self.tolerance):
            yield Point(column, one, other, name)


def _first_place(one: Sequence[Any], other: Sequence[Any], tolerance: float) -> int | None:
    for place, pair in enumerate(zip(one, other, strict=False)):
        if not is_equal(*pair, tolerance):
            return place
    return min(len(one), len(other)) if len(one) != len(other) else None


def _at(values: Sequence[Any], place: int) -> Any:
    """``None``: it ends before."""
    return values[place] if place < len(values) else None


def _singular(field: str) -> str:
    names = {"token_ids": "token", "generation_logprobs": "sampler log-prob", "old_logprobs": "old log-prob"}
    names |= {"reference_logprobs": "reference log-prob", "policy_logprobs": "log-prob after the update"}
    return {**names, "advantages": "advantage of the token", "loss_weights": "loss weight"}[field]

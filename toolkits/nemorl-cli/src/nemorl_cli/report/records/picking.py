"""Choosing among records: which step, which groups, which samples of them, in which order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from nemorl.errors import UsageError

from nemorl_cli.report.records.reading import FOLDER, read_records, record_files
from nemorl_cli.report.run_data import is_number, no_run

Record = Mapping[str, Any]


@dataclass(frozen=True)
class Choice:
    """Selection of a run's records."""

    split: str | None = None
    step: int | None = None
    """Unset: the newest; all where a text is searched for."""
    group: int | None = None
    order: Literal["best", "worst"] | None = None
    all_wrong: bool = False
    """Groups alone in which no response is right."""
    truncated: bool = False
    filtered: bool = False
    """Samples alone that train nothing."""
    search: str | None = None
    """In prompt, response or answer, in any case of letters."""
    limit: int | None = None

    def of_run(self, run_dir: Path, *, heavy: bool, on_damage: Callable[[Path, str], None]) -> list[dict[str, Any]]:
        """The records of a run that are wanted, in the order wanted.

        Args:
            run_dir: Of the run.
            heavy: With turns and tokens, which are read for these records alone.
            on_damage: Told of each file that cannot be read, and why.

        Raises:
            UsageError: the run has no records, or none of the step.
        """
        step = self._step(run_dir)
        # Whether nobody in a group is right is seen of the whole group alone, and so is searched in afterwards.
        search = None if self.all_wrong else self.search
        found = read_records(run_dir, split=self.split, step=step, search=search, on_damage=on_damage)
        chosen = self.pick(list(found))
        return with_turns(run_dir, chosen, on_damage) if heavy else chosen

    def pick(self, records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Those wanted of one step's records, or of several."""
        found = list(records)
        if self.all_wrong:
            solved = {record["group_id"] for record in found if is_right(record)}
            found = [record for record in found if record["group_id"] not in solved]
        if self.group is not None:
            found = [record for record in found if record["group"] == self.group]
        if self.truncated:
            found = [record for record in found if record["finish_reason"] == "length"]
        if self.filtered:
            found = [record for record in found if record["filtered"] is not None]
        if self.search is not None:
            found = [record for record in found if _holds(record, self.search)]
        if self.order is not None:
            found.sort(key=_reward, reverse=self.order == "best")
        return found[: self.limit]

    def _step(self, run_dir: Path) -> int | None:
        files = record_files(run_dir / FOLDER, split=self.split)
        steps = sorted({file.step for file in files})
        if not steps:
            if not (run_dir / "config.yaml").is_file() and not record_files(run_dir / FOLDER):
                raise no_run(run_dir)
            kind = f"{self.split} records" if self.split else "records"
            raise UsageError(f"{run_dir} has no {kind}", fix="it must have sampled something: SFT and DPO do not")
        if self.step is None:
            return None if self.search is not None else steps[-1]
        if self.step not in steps:
            below = [step for step in steps if step < self.step]
            near = [*below[-1:], *[step for step in steps if step > self.step][:1]]
            raise UsageError(
                f"{run_dir} has no records of step {self.step}",
                fix=f"the closest are of step {' and '.join(map(str, near))}; `records.every` says how many are kept",
            )
        return self.step


def with_turns(
    run_dir: Path, records: Sequence[Record], on_damage: Callable[[Path, str], None] = lambda _path, _why: None
) -> list[dict[str, Any]]:
    """These records with ``turns`` and ``sequences``."""
    columns, heavy = ["sample_id", "turns", "sequences"], {}
    for split, step in {(record["split"], record["step"]) for record in records}:
        wanted = {record["sample_id"] for record in records if (record["split"], record["step"]) == (split, step)}
        for row in read_records(run_dir, split=split, step=step, columns=columns, on_damage=on_damage):
            if row["sample_id"] in wanted:
                heavy[row["sample_id"]] = row
    return [{**record, **heavy.get(record["sample_id"], {"turns": None, "sequences": None})} for record in records]


def prompt_key(record: Record) -> tuple[str, ...]:
    """Equal for responses to the same question: its text, its answer, and the images and sounds that it shows.

    Example:
        >>> prompt_key({"prompt": "what?", "answer": "2", "media": [{"digest": "1f3a"}], "prompt_media": 1})
        ('what?', '2', '1f3a')
    """
    shown = prompt_items(record)
    return (str(record.get("prompt")), str(record.get("answer")), *(item["digest"] for item in shown))


def prompt_items(record: Record) -> Sequence[Mapping[str, Any]]:
    """Images and sounds that the prompt shows, of ``media``."""
    items: Sequence[Mapping[str, Any]] = record.get("media") or ()
    return items[: record.get("prompt_media") or 0]


def is_right(record: Record) -> bool:
    """The environment says so; where it says nothing, a reward above a half does."""
    correct = record.get("correct")
    return bool(correct) if correct is not None else _reward(record) > 0.5


def _reward(record: Record) -> float:
    reward: Any = record.get("reward")
    return float(reward) if is_number(reward) else float("-inf")


def _holds(record: Record, text: str) -> bool:
    wanted = text.casefold()
    return any(wanted in str(record.get(name) or "").casefold() for name in ("prompt", "response", "answer"))

"""Records inside a page that needs no server: whole groups of steps spread over the run, within a budget."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from nemorl_cli.report.records.reading import FOLDER, RecordFile, read_table, record_files
from nemorl_cli.report.records.tokens import token_texts
from nemorl_cli.report.run_data import RunData
from nemorl_cli.report.sections import TranscriptSection
from nemorl_cli.report.viewing.details import Detail, light_details, whole_columns, with_sequences
from nemorl_cli.report.viewing.facts import summary_of
from nemorl_cli.report.viewing.overview import shown_by, spread

MOST_BYTES = 4 * 2**20
"""Of records in one page, roughly."""
BYTES_PER_TOKEN, BYTES_PER_RECORD = 48, 900
"""Of what a record takes beside its texts."""


def inlined(
    run: RunData, run_dir: Path, transcripts: Sequence[tuple[str, TranscriptSection]], most_bytes: int = MOST_BYTES
) -> dict[str, Any]:
    """``{"steps": summaries, "records": whole ones, "of_steps": how many steps the run has records of}``.

    The first and the last step of each split come first, then those between, half by half, until the budget is used.

    Args:
        run: As its records are shown.
        run_dir: Of the run.
        transcripts: Plugins that show responses in their own way.
        most_bytes: The budget.
    """
    files = record_files(Path(run_dir) / FOLDER)
    texts = token_texts(Path(run_dir) / FOLDER) if files else {}
    steps: list[dict[str, Any]] = []
    records: list[Detail] = []
    for file in _in_turn(files):
        if most_bytes <= 0:
            break
        found, kept, most_bytes = _details(file, texts, most_bytes)
        for detail in kept:
            detail["shown"] = shown_by(transcripts, detail)
        records += kept
        if kept:
            summary = {"split": file.split, "step": file.step, "part": file.part, "damage": None}
            steps.append({**summary, **summary_of(found)})
    steps.sort(key=lambda step: (step["step"], step["split"], step["part"]))
    return {"steps": steps, "records": records, "of_steps": len(files)}


def _in_turn(files: Sequence[RecordFile]) -> Iterator[RecordFile]:
    """One of each split after the other, so that none takes the whole budget."""
    waiting = [spread([file for file in files if file.split == split]) for split in sorted({f.split for f in files})]
    while waiting:
        for source in list(waiting):
            file = next(source, None)
            if file is None:
                waiting.remove(source)
            else:
                yield file


def _details(file: RecordFile, texts: dict[int, str], most_bytes: int) -> tuple[list[Detail], list[Detail], int]:
    """All records of a file without their tokens, whole ones of the groups within the budget, and what is left of it.

    The numbers of tokens become Python's for the latter alone: a step may have a thousand times as many.
    """
    try:
        table = whole_columns(read_table(file))
        found = light_details(table, file.path.parents[1])
        rows, left = _within(found, most_bytes)
        return found, with_sequences([found[row] for row in rows], table, rows, texts), left
    except (ValueError, OSError):  # pyarrow's errors are both; `nemorl view samples` names them
        return [], [], most_bytes


def _within(details: Sequence[Detail], most_bytes: int) -> tuple[list[int], int]:
    """Places of whole groups until the budget is used, and what is left of it."""
    groups: dict[str, list[int]] = {}
    for place, detail in enumerate(details):
        groups.setdefault(detail["group_id"], []).append(place)
    kept: list[int] = []
    for members in groups.values():
        if most_bytes <= 0:
            break
        kept += members
        most_bytes -= sum(_bytes(details[place]) for place in members)
    return kept, most_bytes


def _bytes(detail: Detail) -> int:
    texts = sum(len(turn["text"] or "") for turn in detail["turns"]) + len(detail["prompt"] or "")
    return texts + len(detail["response"] or "") + BYTES_PER_TOKEN * (detail["total_tokens"] or 0) + BYTES_PER_RECORD

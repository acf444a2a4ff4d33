"""The overview of a run on its page, as plain data. Text stays as the run wrote it: the page shows it as text."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from nemorl.errors import NemorlError, boundary

from nemorl_cli.report import charts, parts
from nemorl_cli.report.declared import Declarations, admitted
from nemorl_cli.report.efficiency.totals import summed_up
from nemorl_cli.report.records.reading import FOLDER, read_records, record_files, steps_of
from nemorl_cli.report.run_data import RunData, cell
from nemorl_cli.report.sections import Curves, Section, Table, Text, TranscriptSection, sections_of
from nemorl_cli.report.viewing.alerts import alerts_of, mark
from nemorl_cli.report.viewing.prompts import prompt_section
from nemorl_cli.report.viewing.settings import settings_of

JSON: dict[str, Any] = {"allow_nan": False, "separators": (",", ":")}
"""How a page's data is written."""
PAIRED = (
    *("split", "step", "prompt", "answer", "response", "reward", "finish_reason", "tokens"),
    *("media", "prompt_media"),
)
"""Columns of records that are shown early and late."""
MOST_PAIRED = 4000
Data = dict[str, Any]
Blocks = list[dict[str, Any]]


def overview(run: RunData) -> Data:
    """Everything that needs neither the records nor a plugin's section."""
    plugins = admitted(run)
    declarations, alerts = Declarations.of(run, plugins), alerts_of(run)
    return {
        "name": run.name,
        "last_step": run.last_step,
        "header": parts.header(run, declarations),
        "alerts": alerts,
        "curves": _cards(charts.cards(run, declarations), alerts),
        "time": {**charts.time_shares(run), "chart": charts.timing_chart(run)},
        "efficiency": {
            "line": summed_up(run.metrics).line,
            "curves": _cards(charts.cards(run, declarations, charts.EFFICIENCY), alerts),
        },
        "metrics": parts.metrics_rows(run, declarations),
        "config": run.config_text,
        "settings": settings_of(run),
        "environment": parts.environment_rows(run),
        "events": parts.events(run),
    }


def extra(run: RunData, run_dir: Path, failed: Callable[[NemorlError], None]) -> Data:
    """The slower parts of a page: the same prompts early and late, the history of each prompt, the sections of plugins.

    Args:
        run: To show.
        run_dir: Of the run.
        failed: Told of a section that raises, which says so in its place.
    """
    prompts = prompt_section(run, run_dir)
    sections = [*([prompts] if prompts is not None else []), *sections_of(run, admitted(run), failed)]
    few = replace(run, samples=early_and_late(run_dir))
    return {"samples": parts.samples(few), "sections": [drawn(section, failed) for section in sections]}


def early_and_late(run_dir: Path) -> list[dict[str, Any]]:
    """Records of the first and the last step, in order, and of those between as far as ``MOST_PAIRED`` go; of
    validations where there are any."""
    files = record_files(run_dir / FOLDER)
    split = "validation" if any(file.split == "validation" for file in files) else "train"
    found: list[dict[str, Any]] = []
    for number, step in enumerate(spread(steps_of(run_dir, split))):
        if number >= 2 and len(found) >= MOST_PAIRED:
            break
        found += read_records(run_dir, split=split, step=step, columns=PAIRED)
    return sorted(found, key=lambda record: record["step"])


def drawn(section: Section, failed: Callable[[NemorlError], None]) -> Data:
    """A section of a plugin, or why it cannot be drawn: a run must not fail over the looks of its report."""
    try:
        with boundary(f"report section {section.title!r}"):
            blocks = blocks_of(section.blocks)
    except NemorlError as error:
        failed(error)
        blocks = [{"kind": "text", "text": str(error)}]
    return {"title": str(section.title), "blocks": blocks}


def shown_by(transcripts: Sequence[tuple[str, TranscriptSection]], record: Mapping[str, Any]) -> Blocks:
    """A response as its environment's plugins show it; what one raises stands in its place.

    Args:
        transcripts: Of :func:`nemorl_cli.report.sections.transcripts_of`.
        record: With its turns.
    """
    found: Blocks = []
    for owner, section in transcripts:
        try:
            with boundary(owner):
                found += blocks_of(section.transcript(record) or ())
        except NemorlError as error:
            found.append({"kind": "text", "text": str(error)})
    return found


def blocks_of(given: Sequence[Text | Table | Curves]) -> Blocks:
    """Blocks as plain data. Raises what malformed ones raise."""
    blocks: Blocks = []
    for block in given:
        match block:
            case Curves():
                card = charts.card(str(block.title), block.series, meaning=str(block.hint), smooth=block.smooth)
                if blocks and blocks[-1]["kind"] == "charts":  # those in a row stand side by side
                    blocks[-1]["charts"].append(card)
                else:
                    blocks.append({"kind": "charts", "charts": [card]})
            case Text(text):
                blocks.append({"kind": "text", "text": str(text)})
            case Table():
                rows = [[str(cell(value)) for value in row] for row in block.rows]
                blocks.append({"kind": "table", "columns": [str(column) for column in block.columns], "rows": rows})
            case _:
                blocks.append({"kind": "text", "text": f"not a Text, Table or Curves: {block!r:.80}"})
    json.dumps(blocks, **JSON)
    return blocks


def _cards(found: charts.Cards, alerts: Sequence[Data]) -> Data:
    mark((*found.moving, *found.still), alerts)
    return {
        "moving": found.moving,
        "still": found.still,
        "constants": found.constants,
        "left_out": found.left_out,
    }


Item = TypeVar("Item")


def spread(items: Sequence[Item]) -> Iterator[Item]:
    """The first, the last, the middle, the middles of the halves, and so on.

    Example:
        >>> list(spread([1, 2, 3, 4, 5]))
        [1, 5, 3, 2, 4]
    """
    if items:
        yield items[0]
    if len(items) > 1:
        yield items[-1]
    ranges = [(0, len(items) - 1)]
    while ranges:
        low, high = ranges.pop(0)
        if high - low > 1:
            middle = (low + high) // 2
            yield items[middle]
            ranges += [(low, middle), (middle, high)]

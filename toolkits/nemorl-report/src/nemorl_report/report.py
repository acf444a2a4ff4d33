"""``report.html``: a run, or several stages of one, as a single page that needs no network.

The page is made of templates/*.html.j2, which escape every text, with CSS, scripts and data inlined. Chart data is JSON
without ``<``; and the page's own policy lets no script run but ours, named by hash.
"""

from __future__ import annotations

import base64
import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemorl.errors import NemorlError, boundary
from nemorl_base.files import replace_text, storing

from nemorl_report import charts, parts
from nemorl_report.declared import Declarations, admitted
from nemorl_report.efficiency.totals import summed_up
from nemorl_report.run_data import RunData
from nemorl_report.sections import Curves, Section, Table, Text, sections_of
from nemorl_report.words import cell, number

if TYPE_CHECKING:
    from jinja2 import Environment

PARTS = ("curves", "time", "efficiency", "samples", "metrics", "config", "events")
"""What the page of one run links to."""
JSON: dict[str, Any] = {"allow_nan": False, "separators": (",", ":")}
"""How chart data is written."""


def _tell_nobody(text: str) -> None:
    """Errors stand in the report."""


def write_report(run_dir: Path, output: Path | None = None, *, warn: Callable[[str], None] = _tell_nobody) -> Path:
    """Write the report of one run.

    Args:
        run_dir: A run directory; whatever is missing there is missing in the report.
        output: The file to write. Unset: ``report.html`` in the run directory.
        warn: Told of sections that fail; a report is written all the same.

    Returns:
        The file written.

    Raises:
        ForeignError: a section tried to end the process. The report is there, without it.
    """
    run = RunData.load(run_dir)
    failures: list[NemorlError] = []
    output = output or Path(run_dir) / "report.html"
    page = _write_page(output, run.name, None, [("", run)], failures.append)
    for error in failures:
        warn(str(error))
        if error.__cause__ is not None and not isinstance(error.__cause__, Exception):
            raise error
    return page


def write_combined_report(stages: Sequence[tuple[str, Path]], output: Path, summary: Mapping[str, str | float]) -> Path:
    """Write one report of several runs that belong together, in order.

    Args:
        stages: (name, run directory), e.g. ``("SFT warm-up", …), ("GRPO", …)``.
        output: The file to write.
        summary: Headline tiles: label -> text, or a number. Keys may be ``title`` to name the page.

    Returns:
        The file written.
    """
    runs = [(name, RunData.load(path)) for name, path in stages]
    title = str(summary.get("title", " → ".join(name for name, _ in runs)))
    tiles = [
        parts.Tile(label, value if isinstance(value, str) else number(value))
        for label, value in summary.items()
        if label != "title"
    ]
    return _write_page(Path(output), title, {"facts": None, "tiles": tiles}, runs, lambda error: None)


def _write_page(
    output: Path,
    title: str,
    header: Mapping[str, Any] | None,
    runs: Sequence[tuple[str, RunData]],
    failed: Callable[[NemorlError], None],
) -> Path:
    data: dict[str, Any] = {}
    stages = [_stage(f"s{index}", name, run, data, failed) for index, (name, run) in enumerate(runs, start=1)]
    links = [(stage["key"], stage["name"]) for stage in stages]
    if len(stages) == 1:
        links = [(f"{stages[0]['key']}-{name}", name.capitalize()) for name in PARTS]
    script = f"{_asset('uplot.min.js')}\n{_asset('report.js')}"
    page = _render(
        "page.html.j2",
        title=title,
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        css=f"{_asset('uplot.min.css')}\n{_asset('report.css')}",
        nav=links,
        header=header or stages[0]["header"],
        stages=stages,
        written=time.strftime("%Y-%m-%d %H:%M"),
        data=data,
        script=script,
    )
    with storing(output):
        output.parent.mkdir(parents=True, exist_ok=True)
    replace_text(output, page)
    return output


def _render(template: str, **values: Any) -> str:
    return _templates().get_template(template).render(values)


@cache
def _templates() -> Environment:
    """The page's templates; each is compiled when it is first used."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    templates = Environment(
        loader=PackageLoader("nemorl_report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.policies["json.dumps_kwargs"] = JSON
    return templates


def _stage(
    key: str, name: str, run: RunData, data: dict[str, Any], failed: Callable[[NemorlError], None]
) -> dict[str, Any]:
    """The sections of one run as plain data; its chart data goes to ``data``."""
    plugins = admitted(run)
    declarations = Declarations.of(run, plugins)
    curves = charts.cards(run, declarations)
    data[key] = {"charts": curves.moving, "still": curves.still, "timing": charts.timing_chart(run)}
    efficiency = charts.cards(run, declarations, charts.EFFICIENCY)
    data[f"{key}-efficiency"] = {"charts": efficiency.moving, "still": efficiency.still}
    sections = enumerate(sections_of(run, plugins, failed))
    return {
        "key": key,
        "name": name,
        "header": parts.header(run, declarations),
        "curves": curves,
        "time": charts.time_shares(run),
        "efficiency": {"line": summed_up(run.metrics).line, "charts": efficiency},
        "samples": parts.samples(run),
        "sections": [_drawn(f"{key}-x{index}", section, data, failed) for index, section in sections],
        "metrics": parts.metrics_rows(run, declarations),
        "config": parts.config_lines(run),
        "environment": parts.environment_rows(run),
        "events": parts.events(run),
    }


def _drawn(key: str, section: Section, data: dict[str, Any], failed: Callable[[NemorlError], None]) -> dict[str, Any]:
    """A section of a plugin, or why it cannot be drawn: a run must not fail over the looks of its report."""
    drawn: dict[str, Any] = {}
    try:
        with boundary(f"report section {section.title!r}"):
            blocks = plugin_blocks(key, section, drawn)
            json.dumps(drawn, **JSON)
    except NemorlError as error:
        failed(error)
        blocks, drawn = [{"kind": "text", "text": str(error)}], {}
    data.update(drawn)
    return {"key": key, "title": str(section.title), "blocks": blocks}


def plugin_blocks(key: str, section: Section, data: dict[str, Any]) -> list[dict[str, Any]]:
    """A plugin's section as plain data; its charts go to ``data``. Raises what malformed blocks raise."""
    blocks: list[dict[str, Any]] = []
    cards: list[Any] | None = None  # of the charts that the block before belongs to
    for position, block in enumerate(section.blocks):
        match block:
            case Curves():
                if cards is None:  # those in a row stand side by side
                    place, cards = f"{key}-{position}", []
                    data[place] = {"charts": cards}
                    blocks.append({"kind": "charts", "place": place})
                cards.append(charts.card(str(block.title), block.series, meaning=str(block.hint), smooth=block.smooth))
                continue
            case Text(text):
                blocks.append({"kind": "text", "text": str(text)})
            case Table():
                rows = [[cell(value) for value in row] for row in block.rows]
                blocks.append({"kind": "table", "columns": [str(column) for column in block.columns], "rows": rows})
            case _:
                blocks.append({"kind": "text", "text": f"not a Text, Table or Curves: {block!r:.80}"})
        cards = None
    return blocks


def _asset(name: str) -> str:
    return (files("nemorl_report") / "assets" / name).read_text(encoding="utf-8")

"""``report.html``: a run, or several stages of one, as a single page that needs no network.

The page is assets/report.html with CSS, scripts and data inlined. Text from runs (model output among it) is
HTML-escaped by ``report_parts``; chart data is JSON without ``<``; and the page's own policy lets no script run but
ours, named by hash.
"""

from __future__ import annotations

import base64
import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from nemorl.config.plugin_lists import PluginsConfig, policy_of
from nemorl.errors import NemorlError, boundary
from nemorl.plugins.registry import Registry, registry
from nemorl.storage.files import replace_text, storing
from pydantic import ValidationError

from nemorl_report import parts
from nemorl_report.run_data import RunData
from nemorl_report.sections import Curves, Section, Table, Text, sections_of


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
    header = f'{parts.facts(run)}<div class="tiles">{parts.tiles(run)}</div>'
    failures: list[NemorlError] = []
    page = _write_page(output or Path(run_dir) / "report.html", run.name, header, [("", run)], failures.append)
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
        parts.tile(label, value if isinstance(value, str) else parts.number(value))
        for label, value in summary.items()
        if label != "title"
    ]
    return _write_page(Path(output), title, f'<div class="tiles">{"".join(tiles)}</div>', runs, lambda error: None)


def _write_page(
    output: Path, title: str, header: str, runs: Sequence[tuple[str, RunData]], failed: Callable[[NemorlError], None]
) -> Path:
    data: dict[str, Any] = {}
    sections = [_stage(f"s{index}", name, run, data, failed) for index, (name, run) in enumerate(runs, start=1)]
    script = f"{_asset('uplot.min.js')}\n{_asset('report.js')}"
    page = Template(_asset("report.html")).substitute(
        title=parts.esc(title),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        css=f"{_asset('uplot.min.css')}\n{_asset('report.css')}",
        nav=_nav(runs),
        header=header,
        sections="".join(sections),
        written=time.strftime("%Y-%m-%d %H:%M"),
        data=_embed(data),
        script=script,
    )
    with storing(output):
        output.parent.mkdir(parents=True, exist_ok=True)
    replace_text(output, page)
    return output


def _nav(runs: Sequence[tuple[str, RunData]]) -> str:
    if len(runs) > 1:
        return "".join(f'<a href="#s{index}">{parts.esc(name)}</a>' for index, (name, _) in enumerate(runs, start=1))
    names = ("curves", "time", "samples", "metrics", "config", "events")
    return "".join(f'<a href="#s1-{name}">{name.capitalize()}</a>' for name in names)


def _stage(key: str, name: str, run: RunData, data: dict[str, Any], failed: Callable[[NemorlError], None]) -> str:
    """The sections of one run; its chart data goes to ``data[key]``."""
    data[key] = {"charts": parts.charts(run), "timing": parts.timing_chart(run)}
    top = ""
    if name:
        top = f'<h2 class="stage">{parts.esc(name)}</h2>{parts.facts(run)}<div class="tiles">{parts.tiles(run)}</div>'
    warnings = len(run.warnings())
    events_title = "Events" + (f" ({warnings} warning{'s' if warnings > 1 else ''})" if warnings else "")
    none = "" if data[key]["charts"] else '<p class="empty">No curves were recorded.</p>'
    samples = _section(f"{key}-samples", "Samples, before and after", parts.samples(run))
    if name and not run.samples:  # a stage that does not sample, such as SFT
        samples = ""
    body = (
        _section(f"{key}-curves", "Curves", f'{none}<div class="charts" data-charts="{key}"></div>')
        + _section(f"{key}-time", "Where the time goes",
                   f'<div class="split"><div>{parts.timing_bar(run)}</div><div data-timing="{key}"></div></div>')
        + samples
        + "".join(
            _drawn(f"{key}-x{number}", section, data, failed)
            for number, section in enumerate(sections_of(run, _admitted(run), failed))
        )
        + _section(f"{key}-metrics", "All metrics", parts.metrics_table(run), folded=bool(name))
        + _section(f"{key}-config", "Config", parts.config(run), folded=True)
        + _section(f"{key}-events", events_title, parts.events(run), folded=not warnings)
    )  # fmt: skip
    return f'<div id="{key}">{top}{body}</div>'


def _admitted(run: RunData) -> Registry:
    """The plugins that the run allowed itself."""
    try:
        return registry().restricted(policy_of(run.config.get("plugins") or {}))
    except ValidationError:
        return registry().restricted(PluginsConfig(allow=()).policy())  # an unreadable policy admits nobody


def _drawn(key: str, section: Section, data: dict[str, Any], failed: Callable[[NemorlError], None]) -> str:
    """A section of a plugin, or why it cannot be drawn: a run must not fail over the looks of its report."""
    charts: dict[str, Any] = {}
    try:
        with boundary(f"report section {section.title!r}"):
            drawn = plugin_section(key, section, charts)
            _embed(charts)
    except NemorlError as error:
        failed(error)
        return _section(key, str(section.title), f"<p>{parts.esc(error)}</p>")
    data.update(charts)
    return drawn


def plugin_section(key: str, section: Section, data: dict[str, Any]) -> str:
    """The HTML of a section of a plugin; its charts go to ``data``. Raises what malformed blocks raise."""
    body: list[str] = []
    cards: list[Any] | None = None  # of the charts that the block before belongs to
    for number, block in enumerate(section.blocks):
        match block:
            case Curves():
                if cards is None:  # those in a row stand side by side
                    place, cards = f"{key}-{number}", []
                    data[place] = {"charts": cards}
                    body.append(f'<div class="charts" data-charts="{place}"></div>')
                cards.append(parts.chart_card(block.title, block.hint, block.smooth, block.series))
                continue
            case Text(text):
                body.append(f"<p>{parts.esc(text)}</p>")
            case Table():
                body.append(parts.table(block.columns, block.rows))
            case _:
                body.append(f"<p>{parts.esc(f'not a Text, Table or Curves: {block!r:.80}')}</p>")
        cards = None
    return _section(key, section.title, "".join(body))


def _section(key: str, title: str, body: str, *, folded: bool | None = None) -> str:
    """A titled section; ``folded`` given: one that folds, closed if True."""
    if folded is None:
        return f'<section id="{key}"><h2>{parts.esc(title)}</h2>{body}</section>'
    is_open = "" if folded else " open"
    summary = f"<summary><h2>{parts.esc(title)}</h2></summary>"
    return f'<section id="{key}"><details{is_open}>{summary}{body}</details></section>'


def _embed(value: Any) -> str:
    """JSON for a script element. No ``<`` or ``&`` is left, so no text in it can end the element."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _asset(name: str) -> str:
    return (files("nemorl_report") / "assets" / name).read_text(encoding="utf-8")

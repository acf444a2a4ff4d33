"""``report.html``: the page of ``nemorl view`` as a single file that needs no network and no server."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nemorl.base.files.atomic import replace_text, storing
from nemorl.errors import NemorlError, UsageError
from nemorl.plugins.hooks import hookimpl
from nemorl.storage.run_directory import RunDirectory
from nemorl_trust.lock import FILE, differences, locked_plugins, read_lock, write_lock
from nemorl_trust.provenance import describe_environment

from nemorl_cli.report import parts
from nemorl_cli.report.declared import admitted
from nemorl_cli.report.records.reading import FOLDER
from nemorl_cli.report.run_data import RunData, number
from nemorl_cli.report.sections import transcripts_of
from nemorl_cli.report.viewing.offline import MOST_BYTES, inlined
from nemorl_cli.report.viewing.overview import extra, overview
from nemorl_cli.report.viewing.page import single_file
from nemorl_cli.report.viewing.thumbnails import digests_of, inlined_media


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
    run_dir = Path(run_dir)
    failures: list[NemorlError] = []
    output = output or run_dir / "report.html"
    run = _of_run("", run_dir, failures.append, MOST_BYTES, output.parent)
    page = _write(output, {"title": run["name"], "tiles": [], "runs": [run]})
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
    runs = [
        _of_run(name, Path(path), lambda _: None, MOST_BYTES // len(stages), Path(output).parent)
        for name, path in stages
    ]
    title = str(summary.get("title", " → ".join(name for name, _ in stages)))
    tiles = [
        parts.Tile(label, value if isinstance(value, str) else number(value))._asdict()
        for label, value in summary.items()
        if label != "title"
    ]
    return _write(Path(output), {"title": title, "tiles": tiles, "runs": runs})


def _of_run(
    label: str, run_dir: Path, failed: Callable[[NemorlError], None], most_bytes: int, beside: Path
) -> dict[str, Any]:
    run = RunData.load(run_dir)
    transcripts = transcripts_of(run, admitted(run))
    slower, kept = extra(run, run_dir, failed), inlined(run, run_dir, transcripts, most_bytes)
    pairs = slower["samples"]["pairs"]
    return {
        "name": label or run.name,
        "overview": overview(run),
        "extra": slower,
        **kept,
        "media": inlined_media(run_dir / FOLDER, digests_of([*pairs, *kept["records"]]), beside),
    }


def _write(output: Path, data: dict[str, Any]) -> Path:
    page = single_file(data["title"], {**data, "written": time.strftime("%Y-%m-%d %H:%M")})
    with storing(output):
        output.parent.mkdir(parents=True, exist_ok=True)
    replace_text(output, page)
    return output


# The hook that is part of every run


class Records:
    """The hook ``records``."""

    essential = True  # a report that cannot be written, or a section that tries to exit, is an error of the run

    def on_build_end(self, trainer: Any) -> None:
        directory: RunDirectory = trainer.directory
        replace_text(
            directory.path / "environment.json", json.dumps(describe_environment(directory.config.registry), indent=1)
        )
        _record_plugins(directory)

    @hookimpl(trylast=True)
    def on_fit_end(self, trainer: Any) -> None:
        for log in trainer.directory.logs:
            log.flush()
        write_report(trainer.directory.path, warn=trainer.directory.warn)


def _record_plugins(directory: RunDirectory) -> None:
    plugins, record = locked_plugins(directory.config), directory.path / FILE
    try:
        before = read_lock(record) if record.exists() else plugins
    except UsageError as error:
        directory.warn(f"which plugins it used before is not known: {error.message}")
        before = plugins
    for line in differences(before, plugins):
        directory.warn(f"other plugins than before: {line} (--locked refuses this)")
    write_lock(directory.path, plugins)

"""What every run leaves behind beside the kernel's own files: what it ran on, with which plugins, and its report.

Written by a hook that is part of every run: ``environment.json`` and ``plugins.lock.json`` when its parts are built,
``report.html`` when it ends.
"""

from __future__ import annotations

import json
from typing import Any

from nemorl.base.files.atomic import replace_text
from nemorl.errors import UsageError
from nemorl.plugins.hooks import hookimpl
from nemorl.storage.run_directory import RunDirectory
from nemorl_trust.lock import FILE, differences, locked_plugins, read_lock, write_lock
from nemorl_trust.provenance import describe_environment

from nemorl_cli.report.report import write_report


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

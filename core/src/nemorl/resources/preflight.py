"""Before anything loads: what would end the run later and can be known now. A check takes seconds at most.

The kernel looks at the run's directory. What else there is to look at, such as the models and the memory, installed
toolkits and plugins say: entry points of the group ``nemorl.launch_checks`` are functions
``check(config, run_dir, warn)`` that yield :class:`~nemorl.errors.ConfigIssue`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from nemorl.base.files.atomic import folder_refusal
from nemorl.base.packages.plugin_policy import normalize
from nemorl.base.process.deadlines import deadline
from nemorl.base.text.reading import shown
from nemorl.errors import ConfigIssue, boundary
from nemorl.plugins.registry import registry

if TYPE_CHECKING:
    from nemorl.config.run import RunConfig


def launch_problems(config: RunConfig, run_dir: Path, warn: Callable[[str], None]) -> Iterator[ConfigIssue]:
    """Problems that show without loading anything: of the directory, and of what is installed to look at a run.

    Args:
        config: The run.
        run_dir: Where it would write.
        warn: Told what may go wrong.
    """
    warn_of_unused_names(config, warn)
    if refusal := folder_refusal(run_dir):
        yield ConfigIssue("run_dir", refusal, "choose another run_dir (--run-dir), or make this one writable")
    for name, point in config.registry.index.launch_checks.items():
        owner, limit_s = f"launch check {name}", config.plugins.build_timeout_s
        with boundary(owner), deadline(owner, limit_s, setting="plugins.build_timeout_s"):
            found = list(point.load()(config, run_dir, warn))
        yield from found


def warn_of_unused_names(config: RunConfig, warn: Callable[[str], None]) -> None:
    """Distributions that ``plugins.allow`` and ``block`` name and that are not installed. A list may serve several
    machines, so this is no mistake."""
    installed = {normalize(entry.distribution) for entry in registry().index.entries}
    for name in sorted({*(config.plugins.allow or ()), *config.plugins.block}):
        if normalize(name) not in installed:
            warn(f"plugins.allow or block names {shown(name)}, which is not installed here")

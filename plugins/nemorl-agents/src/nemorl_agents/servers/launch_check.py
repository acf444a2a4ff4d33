"""Before a run starts, and in ``nemorl train --dry-run``: are its servers there, and do they fit?

Called of every run, so it looks at the config first. A server that does not answer is a warning: it may still start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from nemorl.errors import ConfigIssue, NemorlError
from nemorl_rl.config import RolloutRunConfig

from nemorl_agents.servers.config import ServerConfig

if TYPE_CHECKING:
    from nemorl.config.run import RunConfig


def server_problems(config: RunConfig, run_dir: Path, warn: Callable[[str], None]) -> Iterator[ConfigIssue]:
    """A problem for each server that is there and does not fit, and for workers that would be in each other's way.

    Args:
        config: The run.
        run_dir: Where it would write.
        warn: Told of servers that do not answer.
    """
    if not isinstance(config, RolloutRunConfig) or not isinstance(config.generation.backend, ServerConfig):
        return
    workers = config.cluster.generation_replicas() if config.cluster.uses_ray else 1
    if workers > 1:
        yield ConfigIssue(
            "cluster.generation_workers",
            f"{workers} generation workers would each give the servers their weights",
            "set it to 1: one worker serves any number of servers",
        )
    import asyncio

    from nemorl_agents.servers.first_look import rehearse

    for number, (url, outcome) in enumerate(asyncio.run(rehearse(config, config.generation.backend)).items()):
        if isinstance(outcome, NemorlError):
            yield ConfigIssue(f"generation.backend.urls.{number}", outcome.message, outcome.fix, here=True)
        elif outcome is not None:
            warn(f"no server at {url} yet: {outcome}")

"""Before a run starts: does it fit? Called of every run, so it reads a ``config.json`` and nothing else.

A run is refused only when tensors that are certain to exist, less a declared margin, exceed a device that is known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemorl.errors import ConfigIssue

if TYPE_CHECKING:
    from nemorl.config.run import RunConfig
    from nemorl_rl.planning.memory.budgets import Budget


def memory_problems(config: RunConfig, run_dir: Path, warn: Callable[[str], None]) -> Iterator[ConfigIssue]:
    """A problem where the run cannot fit, with what each tenant needs and the smallest change that fits.

    Args:
        config: The run.
        run_dir: Where it would write.
        warn: Told what may go wrong; this check says what is certain, or nothing.
    """
    from nemorl_rl.planning.memory.budgets import fullest
    from nemorl_rl.planning.memory.layouts import as_fix, smallest_change
    from nemorl_rl.planning.memory.parts import GIB
    from nemorl_rl.planning.memory.reading import LEAST, known_scene

    least, scene = known_scene(config, LEAST), known_scene(config)
    if least is None or scene is None or not fullest(least).cannot_fit:
        return
    memory = fullest(scene)
    taking_turns = ", even taking turns," if scene.takes_turns else ""
    yield ConfigIssue(
        "policy",
        f"the run cannot fit{taking_turns} in {memory.phase}: {memory.needed / GIB:.1f} GiB on the fullest device "
        f"({memory.where}), which has {memory.capacity / GIB:.1f}: {_needs(memory)}",
        as_fix(scene, smallest_change(scene)),
        here=True,
    )


def _needs(memory: Budget) -> str:
    """Needs of each tenant in GiB, the largest first, with their parts."""
    from nemorl_rl.planning.memory.parts import GIB, total

    needs = {**memory.held, f"the work ({memory.moment})": memory.work, "processes and allocators": memory.overhead}
    found = []
    for name, parts in sorted(needs.items(), key=lambda need: -total(need[1])):
        if size := total(parts):
            largest = sorted((part for part in parts if part.size), key=lambda part: -part.size)
            found.append(f"{name} {size / GIB:.1f} ({', '.join(f'{part.name} {part.gib:.1f}' for part in largest)})")
    return ", ".join(found)


def memory_plan(config: RunConfig) -> dict[str, Any] | None:
    """Memory of the fullest device, for ``nemorl train --dry-run``; ``None`` where it cannot be told.

    Returns:
        ``gib``: part -> GiB; ``capacity_gib``; ``free_gib``; ``phase`` and ``moment``, the fullest ones.

    >>> nemorl.memory_plan(nemorl.load_config("grpo.yaml"))["free_gib"]  # doctest: +SKIP
    12.3
    """
    from nemorl_rl.planning.memory.budgets import fullest
    from nemorl_rl.planning.memory.parts import GIB
    from nemorl_rl.planning.memory.reading import known_scene

    scene = known_scene(config)
    if scene is None:
        return None
    memory = fullest(scene)
    return {
        "gib": {part.name: round(part.gib, 3) for part in memory.parts},
        "capacity_gib": round(memory.capacity / GIB, 2),
        "free_gib": round(memory.free / GIB, 2),
        "phase": str(memory.phase),
        "moment": memory.moment,
    }

"""Before a run starts: does it fit? Called of every run, so it reads a ``config.json`` and nothing else.

A run is refused only when tensors that are certain to exist, less a declared margin, exceed a device that is known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemorl.errors import ConfigIssue, UsageError

if TYPE_CHECKING:
    from nemorl.config.run import RunConfig

    from nemorl_plan.scene import Scene


def memory_problems(config: RunConfig, run_dir: Path, warn: Callable[[str], None]) -> Iterator[ConfigIssue]:
    """A problem where the run cannot fit, with the smallest change that fits.

    Args:
        config: The run.
        run_dir: Where it would write.
        warn: Told what may go wrong; this check says what is certain, or nothing.
    """
    scene = known_scene(config)
    if scene is None:
        return
    from nemorl_plan.candidates import judged, present

    memory = judged(scene, present(scene)).memory
    if not memory.cannot_fit:
        return
    from nemorl_plan.parts import GIB
    from nemorl_plan.plan import Plan, words

    change = Plan.of(scene).smallest_change
    yield ConfigIssue(
        "policy",
        f"the run cannot fit: {memory.needed / GIB:.1f} GiB on the fullest device ({memory.where}), which has "
        f"{memory.capacity / GIB:.1f}; the largest part is {memory.largest.name}, {memory.largest.gib:.1f} GiB",
        f"the smallest change that fits: {' '.join(words(scene, change))}"
        if change is not None
        else "use a smaller model, LoRA, or more devices (`nemorl plan` shows what fits where)",
        here=True,
    )


def memory_plan(config: RunConfig) -> dict[str, Any] | None:
    """Memory of the fullest device, for ``nemorl train --dry-run``; ``None`` where it cannot be told.

    Returns:
        ``gib``: part -> GiB; ``capacity_gib``; ``free_gib``; ``moment``, the fullest one.

    >>> nemorl.memory_plan(nemorl.load_config("grpo.yaml"))["free_gib"]  # doctest: +SKIP
    12.3
    """
    scene = known_scene(config)
    if scene is None:
        return None
    from nemorl_plan.candidates import judged, present
    from nemorl_plan.parts import GIB

    memory = judged(scene, present(scene)).memory
    return {
        "gib": {part.name: round(part.gib, 3) for part in memory.parts},
        "capacity_gib": round(memory.capacity / GIB, 2),
        "free_gib": round(memory.free / GIB, 2),
        "moment": memory.moment,
    }


def known_scene(config: RunConfig) -> Scene | None:
    """The run on the devices that it will have; ``None`` where they or its models are not known here."""
    from nemorl_plan.plan import fleet_of
    from nemorl_plan.reading import Sizes, scene_of

    if config.cluster.address is not None:
        return None  # other machines, of which this one knows nothing
    try:
        return scene_of(config, fleet_of(config.cluster, None, None, None), Sizes())
    except UsageError:
        return None

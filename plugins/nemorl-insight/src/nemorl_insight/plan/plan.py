"""A plan: a run judged as its config has it, what else could be chosen, and the same as data and as a config."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemorl_rl.planning.memory.budgets import Budget, budgets
from nemorl_rl.planning.memory.layouts import (
    MODE,
    as_overrides,
    enough_devices,
    fleet_overrides,
    keeps_learning,
    least,
    overrides,
    present,
)
from nemorl_rl.planning.memory.parts import GIB, total
from nemorl_rl.planning.memory.scene import Scene

from nemorl_insight.plan.candidates import Candidate, candidates, distinct, judged
from nemorl_insight.plan.efficiencies import Efficiencies

if TYPE_CHECKING:
    from nemorl.config.run import RunConfig


@dataclass(frozen=True)
class Plan:
    """Result of planning one run."""

    scene: Scene
    now: Candidate
    """As the config has it"""
    ranked: tuple[Candidate, ...]
    """All layouts: those that fit first, the fastest before the others"""
    allowed: frozenset[str] = frozenset()
    """Settings that may change although they change what is learnt"""

    @classmethod
    def of(cls, scene: Scene, efficiencies: Efficiencies | None = None, *, allowed: Collection[str] = ()) -> Plan:
        """Judge the present layout and all others."""
        now = judged(scene, present(scene), efficiencies)
        return cls(scene, now, tuple(candidates(scene, efficiencies, allowed=allowed)), frozenset(allowed))

    @property
    def best(self) -> Candidate | None:
        """The fastest layout that fits and learns the same."""
        return next((one for one in self._equal if one.fits), None)

    @property
    def _equal(self) -> Iterator[Candidate]:
        """Layouts that learn the same, or what is allowed instead."""
        return (one for one in self.ranked if MODE in self.allowed or keeps_learning(self.scene, one.choice))

    @property
    def smallest_change(self) -> Candidate | None:
        """Of those that fit and learn the same, the one that changes least of the config."""
        choice = least(self.scene, ((one.choice, one.memory) for one in self._equal))
        return next((one for one in self.ranked if one.choice == choice), None)

    def shown(self, top: int) -> list[Candidate]:
        """The best layouts, each with its best sizes."""
        return list(islice(distinct(self.ranked), top))

    @property
    def verdict(self) -> str:
        """One sentence."""
        memory = self.now.memory
        if memory.fits:
            return f"fits with {memory.free / GIB:.1f} GiB free on the fullest device ({memory.where})"
        largest = memory.largest
        text = (
            f"does not fit: {-memory.free / GIB:.1f} GiB too much ({memory.where}); the largest part is "
            f"{largest.name}, {largest.gib:.1f} GiB"
        )
        change = self.smallest_change
        if change is None:
            enough = enough_devices(self.scene)
            where = "" if enough is None else f", one on {enough.nodes} x {enough.per_node} {enough.device.name} does"
            return f"{text}; no layout on these devices fits{where}"
        return f"{text}; the smallest change that fits: {', '.join(words(self.scene, change))}"

    def as_dict(self, top: int = 5) -> dict[str, Any]:
        """For ``--json``."""
        change = self.smallest_change
        return {
            "device": asdict(self.scene.fleet.device),
            "nodes": self.scene.fleet.nodes,
            "devices_per_node": self.scene.fleet.per_node,
            "model": {
                "parameters": self.scene.policy.geometry.parameters(),
                "type": self.scene.policy.geometry.model_type,
                "counted_exactly": self.scene.policy.geometry.is_exact,
            },
            "work": asdict(self.scene.work),
            "verdict": self.verdict,
            "cannot_fit": self.now.memory.cannot_fit,
            "smallest_change": overrides(self.scene, change.choice) if change is not None else None,
            "present": _candidate_dict(self.scene, self.now, with_parts=True),
            "candidates": [_candidate_dict(self.scene, one) for one in self.shown(top)],
            "judged": len(self.ranked),
        }


def words(scene: Scene, candidate: Candidate) -> list[str]:
    """The overrides of a layout, as ``nemorl train`` takes them."""
    return as_overrides(overrides(scene, candidate.choice))


def write_config(source: Path, given: Sequence[str], scene: Scene, candidate: Candidate, target: Path) -> list[str]:
    """The config with a layout in it, as a file that ``nemorl train`` takes; returns the overrides that it holds."""
    from nemorl.base.files.atomic import replace_text
    from nemorl.base.text.mappings import apply_overrides, read_source
    from nemorl.base.text.yaml_text import format_yaml

    changes = [*as_overrides(fleet_overrides(scene.fleet)), *words(scene, candidate)]
    data = apply_overrides(read_source(source), [*given, *changes], str(source))
    head = f"# {source.name} as planned by nemorl plan: {' '.join(changes) or 'nothing changed'}\n"
    replace_text(target, head + format_yaml(data))
    return changes


def _candidate_dict(scene: Scene, one: Candidate, *, with_parts: bool = False) -> dict[str, Any]:
    found: dict[str, Any] = {
        "overrides": overrides(scene, one.choice),
        "fits": one.fits,
        "gib": round(one.memory.needed / GIB, 3),
        "free_gib": round(one.memory.free / GIB, 3),
        "seconds_per_step": round(one.time.seconds, 3),
        "tokens_per_second_per_device": round(one.time.tokens_per_device, 1),
    }
    if with_parts:
        found["memory"] = [
            {"name": part.name, "gib": round(part.gib, 4), "formula": part.formula} for part in one.memory.parts
        ]
        found["moment"] = one.memory.moment
        found["memory_by_phase"] = [_budget_dict(budget) for budget in budgets(scene).values()]
        found["takes_turns"] = scene.takes_turns
        found["phases"] = [asdict(phase) for phase in one.time.phases]
        found["mfu"] = round(one.time.mfu, 4)
    return found


def _budget_dict(budget: Budget) -> dict[str, Any]:
    held = {name: round(total(parts) / GIB, 3) for name, parts in budget.held.items() if parts}
    gib = {"work": total(budget.work) / GIB, "overhead": total(budget.overhead) / GIB, "free": budget.free / GIB}
    return {"phase": str(budget.phase), "where": budget.where, "held_gib": held} | {
        f"{name}_gib": round(value, 3) for name, value in gib.items()
    }


def plan_run(config: RunConfig, nodes: int | None = None, gpus: str | None = None) -> dict[str, Any]:
    """The plan of a run on given devices, as plain data. Needs no GPU, no weights and no torch.

    Args:
        config: The run.
        nodes: Machines. Unset: the run's.
        gpus: Devices of each, e.g. ``8xH100``. Unset: the run's, of this machine's kind.

    Returns:
        ``verdict`` in words; ``present``, the layout of the config, with ``fits`` and ``seconds_per_step``;
        ``cannot_fit``, whether that is certain not to fit; ``smallest_change`` that fits, as keys of the config with
        their values, or ``None``; ``candidates``, the fastest layouts.

    Raises:
        UsageError: The devices or the sizes of the model are not known.

    >>> nemorl.plan_run(nemorl.load_config("grpo.yaml"), 2, "8xH100")["verdict"]  # doctest: +SKIP
    'fits with 12.3 GiB free on the fullest device (training)'
    """
    from nemorl_rl.planning.memory.reading import Lengths, Sizes, fleet_of, scene_of

    return Plan.of(scene_of(config, fleet_of(config.cluster, nodes, gpus), Sizes(), Lengths())).as_dict()

"""Holds tenants to their plan, phase by phase: remarks where they hold more, an error where work cannot fit.

An error of a backend that ran out of memory is told again with who holds what, what was planned, and the smallest
change that fits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

from nemorl.contracts.memory import DeviceMemoryError, MemoryPart

from nemorl_rl.placement.tenants import Holdings, Phase, account, told
from nemorl_rl.planning.memory.budgets import REFUSAL_MARGIN_FRAC, Budget, budgets, closest
from nemorl_rl.planning.memory.models import MICROBATCH_TOKENS
from nemorl_rl.planning.memory.parts import GIB, total

if TYPE_CHECKING:
    from nemorl.config.run import RunConfig

    from nemorl_rl.planning.memory.scene import Scene

COMPARISONS = 3
"""Of each phase: an optimizer's moments come with its first step."""
REMARKED_FRAC = 0.1
"""Of what was planned; so much more is remarked upon."""
REMARKED_BYTES = 64 * 2**20
"""Less than this more is not: caches and buffers of small models."""
SPARE_FRAC = 0.1
"""Of the memory that did not suffice, which a change has to leave free."""


class MemoryWatch:
    """Of one run."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._compared: Counter[Phase] = Counter()
        self._remarked: set[tuple[Phase, str]] = set()
        self._remarks: list[str] = []

    @cached_property
    def scene(self) -> Scene | None:
        """The run as it is planned; ``None`` where its models or devices are not known here."""
        from nemorl_rl.planning.memory.reading import known_scene

        return known_scene(self._config)

    @cached_property
    def budgets(self) -> Mapping[Phase, Budget]:
        """By phase."""
        return budgets(self.scene) if self.scene is not None else {}

    @cached_property
    def _least(self) -> Mapping[Phase, Budget]:
        """Of the same phases, whatever the data is."""
        from nemorl_rl.planning.memory.reading import LEAST, known_scene

        assert self.scene is not None, "it has budgets"
        least = known_scene(self._config, LEAST)
        assert least is not None, "what is known of it does not depend on lengths"
        return budgets(replace(least, takes_turns=self.scene.takes_turns))

    def chosen_microbatch(self) -> str:
        """Why microbatches are smaller than backends take by themselves, in words."""
        assert self.scene is not None, "it has chosen"
        most, chosen = MICROBATCH_TOKENS[self.scene.fleet.device.is_cpu], self.scene.policy.default_budget
        now = closest(self.budgets)
        verdict = f"leave {now.free / GIB:.2f} GiB free" if now.fits else f"lack {-now.free / GIB:.2f} GiB all the same"
        return (
            f"microbatches have {chosen} tokens, as {most} do not fit by the memory plan: they {verdict} of "
            f"{now.capacity / GIB:.2f} in {now.phase} (policy.microbatch_tokens takes another size)"
        )

    def new_remarks(self) -> Sequence[str]:
        """Those since the last call."""
        found, self._remarks = self._remarks, []
        return found

    def entered(self, phase: Phase, holdings: Callable[[], Holdings]) -> None:
        """A phase begins: the first few times, compare who holds what with its budget.

        Raises:
            DeviceMemoryError: what is there, and most of what the work is planned to take, exceed the device.
        """
        budget = self.budgets.get(phase)
        if budget is None or self._compared[phase] == COMPARISONS:
            return
        self._compared[phase] += 1
        held = holdings()
        here, coming = _bytes(held), _coming(self._least[phase], held)
        if here + (1 - REFUSAL_MARGIN_FRAC) * coming > budget.capacity:
            message = (
                f"{phase} cannot begin: its work takes about {_words(budget)} besides, and the device has "
                f"{budget.capacity / GIB:.2f} GiB ({account(held)}; {_planned(budget)})"
            )
            raise DeviceMemoryError(message, fix=self._fix(budget, here + _coming(budget, held)))
        for name, parts in held.items():
            planned = sum(budget.held_bytes(name).values())
            excess = _bytes({name: parts}) - planned
            is_new = (phase, name) not in self._remarked
            if is_new and excess > max(REMARKED_BYTES, REMARKED_FRAC * planned):
                self._remarked.add((phase, name))
                self._remarks.append(
                    f"in {phase}, {name} holds {excess / GIB:.2f} GiB more than planned "
                    f"({account({name: parts})}; {_planned(budget, name)})"
                )

    def explained(
        self, phase: Phase, error: DeviceMemoryError, holdings: Callable[[], Holdings] | None = None
    ) -> DeviceMemoryError:
        """An error of work that ran out of memory, with who holds what and what was planned.

        Args:
            phase: Of the work.
            error: As its backend raised it.
            holdings: Asks the tenants; unset: they cannot be asked.
        """
        said = [told(holdings)] if holdings is not None else []
        budget = self.budgets.get(phase)
        if budget is None:
            return DeviceMemoryError(
                f"in {phase}, {error.message} ({'; '.join(said)})" if said else error.message, fix=error.fix
            )
        said += [_planned(budget), f"for its work {_words(budget)}"]
        message = f"in {phase}, {error.message} ({'; '.join(said)})"
        return DeviceMemoryError(message, fix=self._fix(budget, budget.capacity))

    def _fix(self, budget: Budget, taken: float) -> str:
        """The smallest change that fits, if the phase takes as much more than planned as was seen."""
        from nemorl_rl.planning.memory.layouts import as_fix, smallest_change

        assert self.scene is not None, "it has a budget"
        # A change has to take less than what did not fit, by the plan's own count.
        enough = (1 - SPARE_FRAC) * min(budget.capacity, budget.needed * budget.capacity / max(taken, 1.0))
        return as_fix(self.scene, smallest_change(self.scene, at_most={budget.phase: enough}))


def _coming(budget: Budget, held: Holdings) -> float:
    """Bytes that a phase takes beside what is held as it begins."""
    return total(budget.work) + _not_yet_there(budget, held)


def _not_yet_there(budget: Budget, held: Holdings) -> float:
    """Planned bytes of parts that come with the work, such as gradients, and of tenants that cannot be asked."""
    planned = {(name, part): size for name in budget.held for part, size in budget.held_bytes(name).items()}
    return sum(size for (name, part), size in planned.items() if not held.get(name, {}).get(part))


def _bytes(holdings: Mapping[str, Mapping[MemoryPart, int]]) -> int:
    return sum(size for parts in holdings.values() for size in parts.values())


def _planned(budget: Budget, tenant: str | None = None) -> str:
    """The memory that was planned to be there, in words."""
    tenants = [tenant] if tenant is not None else list(budget.held)
    return account({name: budget.held_bytes(name) for name in tenants}).replace("in memory", "planned")


def _words(budget: Budget) -> str:
    parts = ", ".join(f"{part.name} {part.gib:.2f}" for part in budget.work if part.size)
    return f"{total(budget.work) / GIB:.2f} GiB" + (f" ({parts})" if parts else "")

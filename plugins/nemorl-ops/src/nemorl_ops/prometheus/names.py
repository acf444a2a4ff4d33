"""Names by Prometheus' conventions for metrics of nemorl: ``nemorl_``, base units, labels for the parts of a pattern.

``timing/train/generation`` (seconds) is ``nemorl_timing_train_generation_seconds``, ``train/reward/<part>``
``nemorl_train_reward_part{part="format"}``, and ``system/node.<n>.mem_gib`` ``nemorl_system_node_mem_bytes{node="0"}``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from nemorl.metrics import MetricInfo, is_called

PREFIX = "nemorl"
_PLACE = re.compile(r"(?:(?P<word>\w+)\.)?<(?P<name>\w+)>")
"""A part of a pattern that stands for any text, and the word that a dot joins to it."""
SCALES = {
    "GiB": ("bytes", 2.0**30),
    "percent": ("ratio", 0.01),
    "percent of all cores": ("ratio", 0.01),
    "share": ("ratio", 1.0),
    "seconds": ("seconds", 1.0),
}
"""Units that Prometheus has another one for, or that our names abbreviate: (its name, how many of it)."""
ABBREVIATED = re.compile(r"_(gib|percent|frac|ratio|s)$")
"""Units at the end of nemorl's names, which those of ``SCALES`` replace."""
UNDECLARED = MetricInfo()


@dataclass(frozen=True)
class Family:
    """A declared metric as Prometheus has it: one name, and a series for each set of labels."""

    name: str
    info: MetricInfo = UNDECLARED
    labels: tuple[str, ...] = ()
    """Names of the labels that the pattern's parts become."""
    scale: float = 1.0
    """Multiplies values, which are then in the unit of the name."""

    @classmethod
    def of(cls, declared: str, info: MetricInfo = UNDECLARED) -> Family:
        """Of a declared name or pattern.

        Example:
            >>> Family.of("system/node.<n>.gpu.<i>.mem_gib", MetricInfo(unit="GiB")).name
            'nemorl_system_node_gpu_mem_bytes'
            >>> Family.of("performance/generator_busy_s", MetricInfo(unit="seconds")).name
            'nemorl_performance_generator_busy_seconds'
        """
        labels = tuple(match["word"] or match["name"] for match in _PLACE.finditer(declared))
        plain = _slug(f"{PREFIX}/" + _PLACE.sub(lambda match: match["word"] or match["name"], declared))
        unit, scale = SCALES.get(info.unit, (_slug(info.unit), 1.0))
        if info.unit in SCALES:
            plain = ABBREVIATED.sub("", plain)
        named = plain.replace("_per_sec_", "_per_second_")
        named = f"{named.removesuffix('_per_sec')}_per_second" if named.endswith("_per_sec") else named
        is_named = not unit or named.endswith(f"_{unit}") or ("per_second" in unit and "_per_second" in named)
        return cls(named if is_named else f"{named}_{unit}", info, labels, scale)

    @property
    def help(self) -> str:
        """Meaning, and what to watch for."""
        parts = (self.info.title, self.info.meaning, self.info.watch_for and f"Watch for: {self.info.watch_for}")
        return ". ".join(part.replace("`", "") for part in parts if part) or "a metric that no part of the run declares"


@dataclass
class Families:
    """The families of a run's metrics, by the names that nemorl has for them."""

    declared: Mapping[str, MetricInfo]
    _known: dict[str, Family] = field(default_factory=dict)
    """By declared name or pattern."""
    _found: dict[str, tuple[Family, tuple[str, ...]]] = field(default_factory=dict)

    def of(self, metric: str) -> tuple[Family, tuple[str, ...]]:
        """The family of a metric, and the values of its labels."""
        if metric not in self._found:
            fitting = (
                [metric] if metric in self.declared else [name for name in self.declared if is_called(metric, name)]
            )
            declared = max(fitting, key=_literal, default=metric)
            self._found[metric] = (self._family(declared), _values(metric, declared))
        return self._found[metric]

    def _family(self, declared: str) -> Family:
        if declared not in self._known:
            family, taken = Family.of(declared, self.declared.get(declared, UNDECLARED)), self._names
            number = 2
            name = family.name
            while name in taken:  # two names that differ in punctuation alone
                name, number = f"{family.name}_{number}", number + 1
            self._known[declared] = Family(name, family.info, family.labels, family.scale)
        return self._known[declared]

    @property
    def _names(self) -> set[str]:
        return {family.name for family in self._known.values()}


def _literal(pattern: str) -> int:
    """Characters that are no placeholder: of several patterns that fit, the one with most is meant."""
    return len(re.sub(r"<\w+>", "", pattern))


def _values(metric: str, declared: str) -> tuple[str, ...]:
    pattern = re.sub(r"<\w+>", "(.+)", re.escape(declared))
    match = re.fullmatch(pattern, metric, re.DOTALL)
    return tuple(match.groups()) if match else ()


def _slug(text: str) -> str:
    """Letters, digits and single underscores."""
    return re.sub(r"[^a-zA-Z0-9]+", "_", text.replace("@", "_at_")).strip("_").lower()

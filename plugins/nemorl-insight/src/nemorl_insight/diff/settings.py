"""Settings, inputs and surroundings of two runs: config, plugins, inputs, libraries."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from nemorl_cli.report.comparing.causes import stage_of
from nemorl_cli.report.comparing.variants import (
    ENVIRONMENT,
    Difference,
    Variant,
    config_differences,
    surrounding_differences,
    unknown_inputs,
)

from nemorl_insight.diff.run_files import RunFiles
from nemorl_insight.diff.stages import Stage

OF_MACHINE = ("environment.machine", "environment.cpus", "environment.threads", "environment.git")
"""Told, but no difference of the runs by themselves."""
EFFECT: dict[str, Stage] = {
    "data": "data",
    "generation": "tokens",
    "rewards": "rewards",
    "loss": "advantages",
    "update": "gradient",
}
"""The first part of a step in which a setting of ``nemorl_cli.report.comparing.causes`` may show."""


@dataclass(frozen=True)
class Setting:
    """A setting that differs."""

    difference: Difference
    earliest: Stage | None
    """The first part of a step in which it may show; ``None``: any."""

    @property
    def kind(self) -> str:
        key = self.difference.key
        if key.startswith("the "):
            return "inputs"
        is_of_machine = key.startswith("environment.") and key.split(".")[1] in ENVIRONMENT
        return "plugins" if key == "plugin" else "libraries" if is_of_machine else "config"

    @property
    def text(self) -> str:
        return str(self.difference.second) if self.difference.key == "plugin" else self.difference.text

    @property
    def counts(self) -> bool:
        """It may change results: the runs are not the same."""
        return not self.difference.is_neutral and not self.difference.key.startswith(OF_MACHINE)


def settings_between(first: RunFiles, second: RunFiles) -> list[Setting]:
    """Those that differ: of the config, of plugins, inputs and libraries, those that may change results first."""
    variants = _variants(first, second)
    found = [*_seed(first, second), *config_differences(*variants), *surrounding_differences(*variants)]
    settings = [Setting(difference, _effect(difference, variants)) for difference in found]
    return sorted(settings, key=lambda setting: not setting.counts)


def _seed(first: RunFiles, second: RunFiles) -> Iterator[Difference]:
    seeds = first.data.config.get("seed"), second.data.config.get("seed")
    if seeds[0] != seeds[1]:
        yield Difference("seed", *seeds)


def _effect(difference: Difference, variants: tuple[Variant, Variant]) -> Stage | None:
    if difference.key == "seed":
        return "data"
    if difference.key == "the validation rows":
        return "validation"
    stage = stage_of(difference, *variants)
    return None if stage is None else EFFECT[stage]


def unrecorded(first: RunFiles, second: RunFiles) -> Sequence[str]:
    """Plugins, libraries and inputs of which one of the runs has no record."""
    files = {"plugins": "plugins.lock.json", "libraries": "environment.json"}
    lacking = [kind for kind, name in files.items() if not all((run.path / name).is_file() for run in (first, second))]
    return [*lacking, *unknown_inputs(*_variants(first, second))]


def _variants(first: RunFiles, second: RunFiles) -> tuple[Variant, Variant]:
    return Variant([first.data], [first.path]), Variant([second.data], [second.path])

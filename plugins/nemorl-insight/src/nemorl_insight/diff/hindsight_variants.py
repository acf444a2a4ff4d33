"""Variants of a recorded step: another loss, other clip bounds, a bound on staleness, samples left out.

Each changes one thing. Settings that all policy-gradient algorithms have stay those of the run, and so do its
advantages where the other algorithm has the same knobs; what an algorithm defines of its own, such as its clip bounds,
is at its vetted default.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nemorl.config.load import load_config
from nemorl.errors import NemorlError, UsageError
from nemorl.plugins.registry import registry
from nemorl.types import Samples
from nemorl_rl.policy_gradient.advantages import has_spread
from nemorl_rl.policy_gradient.config import ClippedRatio, PolicyGradientConfig

USUAL = ("grpo", "cispo", "gspo", "sapo", "dppo", "dr_grpo", "gmpo")
"""Losses compared by default, those of them that are installed: the first four that are not the run's own."""
NUM_USUAL = 4
FILTERS = ("equal_rewards", "truncated")
CREDIT = ("normalize_std", "leave_one_out")
"""Knobs of advantages. Algorithms have defaults of their own, which would hide what their losses change."""


@dataclass(frozen=True)
class Variant:
    """One way in which the step could have been taken."""

    name: str
    config: PolicyGradientConfig
    to_sampler: bool = False
    """The ratio is that of policy and sampler, in place of that of policy and old policy, which is 1 at first."""
    only_mixed: bool = False
    """Groups with equal rewards are left out; without a KL term, that only raises the weight of the others."""
    max_staleness: int | None = None
    """Responses of older weights are left out: steps between the weights that sampled and those that learn."""

    def kept(self, samples: Samples, step: int) -> Samples:
        """The responses that it learns from.

        Args:
            samples: All of the step.
            step: Its number: the weights before it are those of ``step - 1``.
        """
        kept = list(samples)
        if self.only_mixed:
            groups: dict[int, list[Any]] = {}
            for sample in kept:
                groups.setdefault(sample.prompt.index, []).append(sample)
            spread = {index for index, group in groups.items() if has_spread([s for s in group if s.score.valid])}
            kept = [sample for sample in kept if sample.prompt.index in spread]
        if self.max_staleness is not None:
            oldest = step - 1 - self.max_staleness
            kept = [sample for sample in kept if min(sample.weight_versions, default=step - 1) >= oldest]
        return Samples(kept)


@dataclass(frozen=True)
class Asked:
    """What the command is to compare."""

    losses: Sequence[str] = ()
    """Names of algorithms. Empty: the usual ones."""
    clips: Sequence[tuple[float, float]] = ()
    """Clip bounds (low, high). Empty: the run's own, if it has any."""
    staleness: Sequence[int] = ()
    filters: Sequence[str] = FILTERS
    skipped: dict[str, str] = field(default_factory=dict)
    """Filled in: usual losses that cannot be had with this run's settings, and why."""

    def variants(self, own: PolicyGradientConfig, data: Mapping[str, Any]) -> Iterator[Variant]:
        """All variants, the run's own first.

        Args:
            own: The run's config.
            data: The same as it is written.

        Raises:
            UsageError: a loss is unknown, of another family, or refuses a setting of the run.
        """
        name = own.algorithm
        yield Variant(name, own)
        for loss in self.losses or self._usual(name):
            if loss == name:
                continue
            try:
                yield Variant(loss, config_of(loss, own, data))
            except NemorlError as error:
                if self.losses:
                    raise
                self.skipped[loss] = error.message
        yield from self._clipped(own, data)
        for bound in self.staleness:
            yield Variant(f"{name}, staleness <= {bound}", own, max_staleness=bound)
        if "equal_rewards" in self.filters:
            yield Variant(f"{name}, drop equal_rewards", own, only_mixed=True)
        if "truncated" in self.filters:
            yield Variant(f"{name}, drop truncated", _with(data, overlong_filtering=True))

    def _usual(self, own: str) -> list[str]:
        installed = {entry.name for entry in registry().index.of_kind("algorithms") if not entry.diagnostics}
        return [name for name in USUAL if name in installed and name != own][:NUM_USUAL]

    def _clipped(self, own: PolicyGradientConfig, data: Mapping[str, Any]) -> Iterator[Variant]:
        if not isinstance(own, ClippedRatio):
            if self.clips:
                raise UsageError(
                    f"--clip: the loss of {own.algorithm} does not clip a token's ratio",
                    fix="leave out --clip, or replay a run of grpo or its kin",
                )
            return
        for low, high in self.clips or [(own.clip_low, own.clip_high)]:
            clipped = _with(data, clip_low=low, clip_high=high)
            yield Variant(f"{own.algorithm}, clip to sampler {low:g}:{high:g}", clipped, to_sampler=True)


def _with(data: Mapping[str, Any], **changes: Any) -> PolicyGradientConfig:
    """The run's config with other settings of its algorithm."""
    found = load_config({**data, **changes})
    assert isinstance(found, PolicyGradientConfig), "of the run's algorithm"
    return found


def config_of(loss: str, own: PolicyGradientConfig, data: Mapping[str, Any]) -> PolicyGradientConfig:
    """The run's config under another algorithm of the family.

    Raises:
        UsageError: it is of another family.
        PluginNotFoundError: it is not installed.
        ConfigError: it refuses a setting of the run.
    """
    chosen = registry().load("algorithms", loss)
    if not issubclass(chosen, PolicyGradientConfig):
        raise UsageError(
            f"{loss} is no policy-gradient algorithm of groups", fix=f"give one such as {', '.join(USUAL)}"
        )
    fields, known = type(own).model_fields, chosen.model_fields
    shared = (set(PolicyGradientConfig.model_fields) & set(known)) - set(inspect.get_annotations(chosen))
    alike = (name for name in CREDIT if name in fields and name in known)
    shared |= {name for name in alike if fields[name].annotation == known[name].annotation}
    return _with({key: value for key, value in data.items() if key in shared}, algorithm=loss)

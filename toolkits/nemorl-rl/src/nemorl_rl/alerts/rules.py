"""``Rule``: a condition on one metric, and what it means when it holds. Plugins bring some, configs others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Protocol, runtime_checkable

from nemorl.config.base import Config
from nemorl.errors import BackendError, ConfigIssue, NemorlError
from pydantic import Field

Severity = Literal["info", "warning", "error"]
Action = Literal["warn", "stop", "fail", "lower_rate", "save"]

CONDITIONS = ("above", "below", "above_usual", "below_usual", "collapses", "not_finite", "at_least")
"""Fields of a rule that say when it holds; one of them is set."""


class Rule(Config):
    """A condition on a metric: when it holds for ``patience`` records in a row, it is an alert.

    Example:
        >>> Rule(metric="train/environment/moves", above=30, patience=5, meaning="Games get long.").condition
        'above 30'
    """

    metric: str = ""
    """Full name, e.g. ``train/reward``. ``<part>`` stands for any text: each metric it fits is watched by itself."""
    above: float | None = None
    """Holds while the value is greater than this, or NaN."""
    below: float | None = None
    """Holds while the value is smaller than this."""
    above_usual: float | None = Field(None, gt=1)
    """Holds while the value is more than this many times the median of the ``window`` records before it."""
    least: float | None = None
    """Of ``above_usual``: a value that is not greater than this is never too much. Set it where usual values may be
    next to nothing, of which anything is a multiple."""
    below_usual: float | None = Field(None, gt=0, lt=1)
    """Holds while the value is less than this fraction of the median of the ``window`` records before it."""
    collapses: float | None = Field(None, gt=0, lt=1)
    """Holds while the mean of ``window`` records is below its best by more than this share of the range that it has
    covered, by a quarter of its best, and by eight times its noise: what was learnt is lost again."""
    not_finite: bool | None = None
    """``true``: holds while the value is NaN or infinite."""
    at_least: float | None = None
    """Holds while the value is this or greater."""
    window: int = Field(20, ge=2, le=10_000)
    """Records that ``above_usual``, ``below_usual`` and ``collapses`` look back on. With fewer they do not hold."""
    patience: int = Field(1, ge=1, le=10_000)
    """Records in a row for which it must hold to be an alert, and for which it must not hold to be over."""
    at_start: bool = False
    """Judged at the first record of a run, and at the first after it was resumed; never again."""
    unless: str = ""
    """Full name of a metric: records in which it is above 0 are passed over."""
    severity: Severity = "warning"
    """How bad it is."""
    meaning: str = ""
    """Its meaning, in a sentence."""
    remedy: str = ""
    """The remedy, in a sentence."""
    action: Action = "warn"
    """The run's action: tell (``warn``), and also end after this step (``stop``), end with an error that
    names the remedy (``fail``), lower the learning rate (``lower_rate``) or write a checkpoint (``save``)."""
    rate_factor: float = Field(0.5, gt=0, lt=1)
    """``lower_rate``: the learning rate is multiplied by this, each time that the alert is raised."""

    @property
    def condition(self) -> str:
        """When it holds, in words that follow the metric's name."""
        match self.conditions:
            case ["above" | "at_least" | "below" as name]:
                return f"{name.replace('_', ' ')} {getattr(self, name):g}"
            case ["above_usual"]:
                least = f", and above {self.least:g}" if self.least is not None else ""
                return f"more than {self.above_usual:g} times what it was in the {self.window} records before{least}"
            case ["below_usual"]:
                return f"less than {self.below_usual:g} of what it was in the {self.window} records before"
            case ["collapses"]:
                return f"down by more than {self.collapses:.0%} of the range it has covered"
            case _:
                return "not finite"

    @property
    def deed(self) -> str:
        """The run's action when it holds, in a sentence; empty where it only tells."""
        match self.action:
            case "stop":
                return "The run ends after this step."
            case "fail":
                return "The run ends here."
            case "save":
                return "A checkpoint is written after this step."
            case "lower_rate":
                return f"The learning rate is multiplied by {self.rate_factor:g}."
            case _:
                return ""

    def finding(self, metric: str, step: int, value: float, record: Mapping[str, Any]) -> str:
        """The event and its meaning."""
        return " ".join(filter(None, (f"{metric} is {value:.4g} at step {step}: {self.condition}.", self.meaning)))

    def text(self, finding: str) -> str:
        """The alert's text: ``finding``, what to do, and what the run does of itself."""
        parts = filter(None, (finding, self.remedy, self.deed))
        return " ".join(part if part.endswith(".") else f"{part}." for part in parts)

    def error(self, finding: str) -> NemorlError:
        """The error that ``action: fail`` raises."""
        return BackendError(finding, fix=self.remedy[:1].lower() + self.remedy[1:].rstrip("."))

    @property
    def conditions(self) -> list[str]:
        """The fields of ``CONDITIONS`` that are set."""
        return [name for name in CONDITIONS if not (getattr(self, name) is None or getattr(self, name) is False)]

    def over(self, base: Rule) -> Rule:
        """``base`` with what is set here. A condition that is set takes the place of that of ``base``."""
        own = {name: getattr(self, name) for name in self.model_fields_set}
        cleared = dict.fromkeys((*CONDITIONS, "least")) if self.conditions else {}
        return base.model_copy(update={**cleared, **own})

    def mistake(self) -> ConfigIssue | None:
        """Why nobody can watch it, with a path inside the rule."""
        if len(self.conditions) != 1:
            found = ", ".join(self.conditions) or "none"
            return ConfigIssue(
                "", f"a rule has one condition, this one has {found}", f"set one of {', '.join(CONDITIONS)}"
            )
        if self.least is not None and self.above_usual is None:
            return ConfigIssue(
                "least", "it belongs to above_usual, which is not set", "leave it out, or set above_usual"
            )
        if not self.metric:
            return ConfigIssue("metric", "no metric given", "write its full name, e.g. train/reward")
        return None


@runtime_checkable
class BringsAlerts(Protocol):
    """A config class with rules of its own: any plugin that a run uses may have them.

    Example:
        >>> class Maze(EnvironmentConfig):
        ...     alert_rules = {"maze_loops": Rule(metric="train/environment/moves", above=100, patience=5)}
    """

    alert_rules: Mapping[str, Rule]
    """By name."""

"""Evaluation suites: published protocols by name. What is asked, how, how it is sampled and scored, and who says so.

A suite is a YAML file; those of this package are in ``suite_files/``, users write their own the same way. Running them
is ``nemorl eval --suite``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

from nemorl.base.text.mappings import apply_overrides, read_source
from nemorl.base.text.reading import expanded, shown
from nemorl.base.text.suggest import did_you_mean
from nemorl.config.base import Config
from nemorl.config.load import validate
from nemorl.errors import ConfigIssue, DataError, InfrastructureError, UsageError
from nemorl.types import Row
from pydantic import Field

from nemorl_rl.config import RolloutValidationConfig
from nemorl_rl.data.rows import rows_of
from nemorl_rl.evaluation.evaluation import Evaluation, errors_over_prompts
from nemorl_rl.rollouts.outcomes import failure_causes

FOLDER = Path(__file__).parent / "suite_files"
"""The suites of this package, one file each."""
ALL_ROWS = 1_000_000_000


class Suite(Config):
    """One protocol."""

    name: str
    """Its name."""
    summary: str
    """One line about it."""
    source: tuple[str, ...] = Field(min_length=1)
    """Papers, model cards and harnesses that define the protocol, and what of it each defines."""
    data: dict[str, Any]
    """The dataset: its ``name`` and options, as under ``data:`` of a config."""
    environment: str | dict[str, Any]
    """Environment that finds the answer of a response and scores it: a name, or a mapping with ``name`` and options."""
    num_generations: int = Field(1, ge=1, le=100_000)
    """Responses per question."""
    temperature: float = Field(0.0, ge=0)
    """Of sampling; 0 is greedy."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus sampling."""
    top_k: int = Field(0, ge=0)
    """Sample among so many tokens; 0: all."""
    max_new_tokens: int = Field(ge=1)
    """Longest response in tokens."""
    max_samples: int | None = Field(None, ge=1)
    """Questions, from the first. Unset: all, as is published."""
    metrics: tuple[str, ...] = ("pass@1",)
    """Reported metrics: ``pass@1`` is the mean correctness of single responses, ``pass@k`` and ``cons@k`` are as
    ``nemorl eval`` computes them."""

    def problems(self) -> Iterator[ConfigIssue]:
        yield from super().problems()
        if self.num_generations > 1 and self.temperature == 0:
            yield ConfigIssue(
                "temperature",
                "greedy responses to one question are all the same",
                "set it above 0, or num_generations: 1",
            )
        for metric in self.metrics:
            kind, _, k = metric.partition("@")
            if kind not in ("pass", "cons") or not k.isdecimal() or not 1 <= int(k) <= self.num_generations:
                yield ConfigIssue(
                    "metrics",
                    f"{metric!r} is not measured",
                    f"pass@k or cons@k with k from 1 to {self.num_generations}",
                )

    @property
    def settings(self) -> RolloutValidationConfig:
        """How the questions are asked and responses drawn."""
        names = ("num_generations", "temperature", "top_p", "top_k", "max_new_tokens")
        asked = {name: getattr(self, name) for name in names}
        return RolloutValidationConfig(max_samples=self.max_samples or ALL_ROWS, min_p=0.0, **asked)

    def rows(self) -> Sequence[Row]:
        """The questions.

        Raises:
            DataError: they cannot be had, or there are none.
        """
        rows = rows_of(self.data, "validation")
        rows = rows_of(self.data, "train") if rows is None else rows
        if not rows:
            raise DataError(f"the dataset of {self.name} has no rows", fix="check its path and split")
        return rows


@dataclass(frozen=True)
class SuiteResult:
    """The result of a suite."""

    values: Mapping[str, float]
    """The suite's metrics."""
    errors: Mapping[str, float]
    """Their standard errors over the questions; none for a single question."""
    questions: int
    evaluation: Evaluation


def suite_result(suite: Suite, evaluation: Evaluation) -> SuiteResult:
    """The metrics that a suite reports, with standard errors over its questions.

    Raises:
        InfrastructureError: no response has a verdict, which is no 0.
    """
    if evaluation.metrics.get("failed_frac") == 1.0:
        raise InfrastructureError(
            f"no response to the suite has a verdict: {failure_causes(evaluation.samples) or 'its grader abstains'}",
            fix="see whether what grades it is up, then evaluate again",
        )
    groups = [list(group) for _, group in groupby(evaluation.samples, key=lambda sample: sample.prompt.index)]
    errors = errors_over_prompts(groups)
    # Of one response the share of right ones is all there is to know.
    measured = {metric: "accuracy" if metric.endswith("@1") else metric for metric in suite.metrics}
    # Where no response had an answer, nobody voted: that is wrong.
    values = {metric: evaluation.metrics.get(name, 0.0) for metric, name in measured.items()}
    of_metrics = {metric: errors.get(name, 0.0) for metric, name in measured.items()} if len(groups) > 1 else {}
    return SuiteResult(values, of_metrics, len(groups), evaluation)


def find_suite(name: str, overrides: Sequence[str] = ()) -> Suite:
    """The suite of a name, or in a file.

    Args:
        name: As in the list of suites, or the path of a suite file: ``./mine.yaml``.
        overrides: ``num_generations=4``: what is to differ from the protocol.

    Raises:
        UsageError: there is none; names the closest.
        ConfigError: the file, or an override, is not in order.

    Example:
        >>> find_suite("aime24").num_generations
        64
    """
    path = expanded(name) if Path(name).suffix in (".yaml", ".yml") else FOLDER / f"{folded(name)}.yaml"
    if path.parent == FOLDER and folded(name) not in suite_names():
        raise UsageError(
            f"no evaluation suite is called {shown(name)}",
            fix=did_you_mean(folded(name), suite_names())
            or f"there are {', '.join(suite_names())}; for one of your own give a file: ./mine.yaml",
        )
    data = read_source(path)
    published = data.get("num_generations", 1)
    data = apply_overrides(data, overrides)
    if not any(text.startswith("metrics") for text in overrides):  # cons@64 of 4 responses is cons@4
        renamed = {f"@{published}": f"@{data.get('num_generations', 1)}"}
        data["metrics"] = [_at(metric, renamed) for metric in data.get("metrics", ["pass@1"])]
    return validate(Suite, data, source=f"suite {name}")


def _at(metric: object, renamed: Mapping[str, str]) -> str:
    kind, _, k = str(metric).partition("@")
    return kind + (renamed.get(f"@{k}", f"@{k}") if k != "1" else "@1")


@cache
def suite_names() -> tuple[str, ...]:
    """The names of the suites of this package."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.yaml")))


def folded(name: str) -> str:
    """``AIME-24`` and ``aime24`` are one name."""
    return name.casefold().replace("-", "").replace(" ", "")


def changed_fields(suite: Suite, published: Suite) -> dict[str, tuple[Any, Any]]:
    """The fields in which a suite differs from what is published: name -> (published, here)."""
    ours, theirs = suite.model_dump(), published.model_dump()
    return {name: (theirs[name], value) for name, value in ours.items() if value != theirs[name]}

"""``nemorl eval --suite``: published protocols in one table (:mod:`nemorl_rl.evaluation.suites`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from nemorl.errors import DataError, NemorlError, PluginError, PluginNotFoundError, UsageError

from nemorl_cli.answers import echo_json
from nemorl_cli.eval_output import Display, open_display, open_samples
from nemorl_cli.terminal import print_table

if TYPE_CHECKING:
    from nemorl.types import Row, Sample
    from nemorl_rl.config import RolloutRunConfig
    from nemorl_rl.evaluation.suites import Suite, SuiteResult

PROMPT_ROOM = 2048
"""Tokens left for a question beside the longest response."""


@dataclass(frozen=True)
class Asked:
    """A suite as it is to be run."""

    name: str
    suite: Suite
    rows: Sequence[Row]
    changed: Mapping[str, tuple[Any, Any]]
    """Field -> (as published, here)."""


@dataclass(frozen=True)
class Options:
    """Command-line options of an evaluation by suites."""

    changes: Sequence[str]
    """``num_generations=4``: what differs from the protocols"""
    places: Sequence[str]
    """``aime24=rows.jsonl``: where the rows of a suite are, if not where its dataset has them"""
    max_turns: int | None
    batch_size: int
    output: Path | None
    as_json: bool
    failed: dict[str, str] = field(default_factory=dict)
    """Suites that could not be run, and why"""

    def fail(self, name: str, error: Exception, display: Display) -> None:
        """Go on without this suite."""
        self.failed[name] = str(error)
        display.say(f"{name} is left out: {error}")


def list_suites(*, as_json: bool) -> None:
    """Show every suite with its protocol and where that comes from."""
    from nemorl_rl.evaluation.suites import find_suite, suite_names

    suites = [find_suite(name) for name in suite_names()]
    if as_json:
        echo_json([suite.model_dump(mode="json") for suite in suites])
        return
    columns = ("SUITE", "RESPONSES", "TEMPERATURE", "TOP-P", "TOKENS", "METRICS", "WHAT, AND BY WHOM")
    rows = [
        (
            suite.name, suite.num_generations, f"{suite.temperature:g}", f"{suite.top_p:g}", suite.max_new_tokens,
            ", ".join(suite.metrics), "\n".join([suite.summary, *(f"- {text}" for text in suite.source)]),
        )
        for suite in suites
    ]  # fmt: skip
    print_table(columns, rows, whole=("SUITE",), numbers=columns[1:5])


def named(suites: Sequence[str]) -> list[str]:
    """``["a,b", "c"]`` as three names.

    Raises:
        UsageError: one comes twice.
    """
    names = [name.strip() for text in suites for name in text.split(",") if name.strip()]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UsageError(f"suite {twice} is asked for twice", fix="name each once")
    return names


def ask(names: Sequence[str], options: Options, display: Display) -> list[Asked]:
    """The suites with their rows; those whose rows cannot be had are left out, with the reason."""
    from nemorl_rl.evaluation.suites import changed_fields, find_suite
    from nemorl_trust.site import require
    from nemorl_trust.site_policy import names_of_path

    rows_at = dict(_place(text, names) for text in options.places)
    asked = []
    for name in names:
        published = find_suite(name)
        suite = find_suite(name, options.changes)
        if name in rows_at:
            suite = suite.model_copy(update={"data": {**suite.data, "path": rows_at[name]}})
        differing = {key: value for key, value in changed_fields(suite, published).items() if key != "data"}
        try:
            require("datasets", *names_of_path(str(suite.data.get("path", name))))
            asked.append(Asked(name, suite, suite.rows(), differing))
        except DataError as error:
            here = "" if name in rows_at else f"where the hub cannot be reached: --rows {name}=rows.jsonl"
            fix = "; ".join(filter(None, (error.fix, here)))
            options.fail(name, DataError(error.message, fix=fix or None), display)
        except NemorlError as error:
            options.fail(name, error, display)
    return asked


def _place(text: str, names: Sequence[str]) -> tuple[str, str]:
    name, equals, path = text.partition("=")
    if not equals or not path or name not in names:
        raise UsageError(f"--rows {text} is not SUITE=PATH", fix=f"SUITE is one of {', '.join(names)}")
    return name, path


def run(config: RolloutRunConfig, asked: Sequence[Asked], options: Options, display: Display) -> dict[str, SuiteResult]:
    """Load the model once and run the suites, one after the other. What cannot be run goes to ``options.failed``."""
    from nemorl_rl.environments.sources import Unscored, as_environment
    from nemorl_rl.evaluation.evaluation import Evaluator
    from nemorl_rl.evaluation.suites import suite_result

    results: dict[str, SuiteResult] = {}
    if not asked:
        return results
    config = _with_room(config, [one.suite for one in asked], display)
    display.begin(f"loading {config.policy.model_name}", None)
    with (
        Evaluator(config, max_turns=options.max_turns, environment=Unscored()) as evaluator,
        open_samples(options.output, evaluator.decode) as writer,
    ):
        for one in asked:
            settings = one.suite.settings
            display.begin(one.name, min(len(one.rows), settings.max_samples))

            def on_group(_seed: int, group: Sequence[Sample], name: str = one.name) -> None:
                display.advance()
                writer.add(name, 0, group)

            try:
                evaluation = evaluator.evaluate(
                    one.rows,
                    batch_size=options.batch_size,
                    on_group=on_group,
                    settings=settings,
                    environment=as_environment(one.suite.environment),
                )
            except (UsageError, DataError, PluginError, PluginNotFoundError) as error:  # its rows, or its environment
                options.fail(one.name, error, display)
            else:
                results[one.name] = suite_result(one.suite, evaluation)
    return results


def evaluate_suites(config: RolloutRunConfig, names: Sequence[str], options: Options) -> None:
    """Run suites and show one table; exit 1 if one of them could not be run.

    Args:
        config: The model and its engine.
        names: Of suites, or suite files.
        options: What differs, and where it is shown.
    """
    with open_display(quiet=options.as_json) as display:
        asked = ask(names, options, display)
        results = run(config, asked, options, display)
    told = {one.name: one for one in asked}
    if options.as_json:
        echo_json(_summary(config, names, told, results, options.failed))
    else:
        _print(names, told, results, options.failed)
    if options.failed:
        raise typer.Exit(1)


def _with_room(config: RolloutRunConfig, suites: Sequence[Suite], display: Display) -> RolloutRunConfig:
    """The config with room for the longest response, as far as the model goes."""
    from nemorl_rl.data.tokenizer import context_tokens

    wanted = max(suite.max_new_tokens for suite in suites) + PROMPT_ROOM
    context = context_tokens(config.policy.model_name)
    limit = wanted if context is None else min(wanted, context)
    if limit < wanted - PROMPT_ROOM:
        display.say(f"responses are cut where question and response have {limit} tokens, the model's context")
    policy = config.policy.model_copy(update={"max_sequence_tokens": limit})
    return config.model_copy(update={"policy": policy})


def _summary(
    config: RolloutRunConfig,
    names: Sequence[str],
    asked: Mapping[str, Asked],
    results: Mapping[str, SuiteResult],
    failed: Mapping[str, str],
) -> dict[str, Any]:
    suites: dict[str, Any] = {}
    for name in names:
        if name in failed:
            suites[name] = {"error": failed[name]}
            continue
        result, one = results[name], asked[name]
        suites[name] = {
            **result.values,
            "standard_errors": dict(result.errors),
            "questions": result.questions,
            "truncation_rate": result.evaluation.metrics["truncation_rate"],
            "avg_length": result.evaluation.metrics["avg_length"],
            "protocol": one.suite.model_dump(mode="json", exclude={"name", "summary"}),
            "changed": {key: {"published": old, "here": new} for key, (old, new) in one.changed.items()},
        }
    return {"model": config.policy.model_name, "suites": suites}


def _print(
    names: Sequence[str],
    asked: Mapping[str, Asked],
    results: Mapping[str, SuiteResult],
    failed: Mapping[str, str],
) -> None:
    rows: list[tuple[object, ...]] = []
    for name in names:
        if name in failed:
            rows.append((name, "–", "not run", "", "", ""))
            continue
        result, suite = results[name], asked[name].suite
        cut = f"{result.evaluation.metrics['truncation_rate']:.1%}"
        for metric, value in result.values.items():
            error = f" ± {result.errors[metric]:.4f}" if metric in result.errors else ""
            rows.append((name, metric, f"{value:.4f}{error}", result.questions, suite.num_generations, cut))
    columns = ("SUITE", "METRIC", "VALUE", "QUESTIONS", "RESPONSES EACH", "CUT")
    print_table(columns, rows, whole=("SUITE", "METRIC", "VALUE"), numbers=columns[2:])
    for one in asked.values():
        differing = [f"{key} {new} (published: {old})" for key, (old, new) in one.changed.items()]
        if differing and one.name in results:
            typer.echo(f"{one.name} differs from its protocol: {', '.join(differing)}")
    for name, reason in failed.items():
        typer.echo(f"{name} was not run: {reason}", err=True)

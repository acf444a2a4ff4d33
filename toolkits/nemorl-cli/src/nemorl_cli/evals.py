"""``nemorl eval``: which model, which datasets, and how the numbers are shown. What they mean is in ``evaluation``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from nemorl.errors import DataError, UsageError
from nemorl_trust.listening import allow_more_open_files

from nemorl_cli.answers import AsJson, echo_json
from nemorl_cli.eval_output import Display, open_display, open_samples, refuse_unknown_form
from nemorl_cli.runs import Overrides
from nemorl_cli.suites import Options, evaluate_suites, list_suites, named
from nemorl_cli.terminal import print_table

if TYPE_CHECKING:
    from nemorl.types import Row, Sample
    from nemorl_rl.config import RolloutRunConfig
    from nemorl_rl.evaluation.evaluation import Evaluation

SUITE_PREFIX = "suite."
"""Overrides of a suite's protocol: ``suite.max_new_tokens=4096``."""


def evaluate(
    config: Annotated[
        Path | None, typer.Argument(help="Config file or run directory. May be left out.", show_default=False)
    ] = None,
    overrides: Overrides = None,
    model: Annotated[str | None, typer.Option(help="Evaluate this model instead of the config's.")] = None,
    data: Annotated[
        list[str] | None, typer.Option(help="Dataset: a name, path or org/name. Repeat it for several.")
    ] = None,
    environment: Annotated[str | None, typer.Option(help="What scores responses, e.g. math.")] = None,
    max_samples: Annotated[int | None, typer.Option(min=1, help="Rows of each dataset.")] = None,
    generations: Annotated[int | None, typer.Option(min=1, help="Responses per prompt: pass@k and cons@k.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0, help="0 is greedy.")] = None,
    max_turns: Annotated[int | None, typer.Option(min=1, help="Responses per episode. Unset: as in training.")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Repetitions: mean and standard error of each metric.")] = 1,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts that the generator gets at a time.")] = 256,
    output: Annotated[Path | None, typer.Option(help="Every sample: a .jsonl file, or a folder of records.")] = None,
    suite: Annotated[
        list[str] | None, typer.Option(help="Published protocols by name, e.g. aime24,math500; or a file of your own.")
    ] = None,
    suite_rows: Annotated[
        list[str] | None,
        typer.Option("--rows", help="SUITE=PATH: read the rows of this suite here instead of on the hub."),
    ] = None,
    suites: Annotated[bool, typer.Option("--suites", help="List the suites, with their sources.")] = False,
    as_json: AsJson = False,
) -> None:
    """Measure a model on held-out data.

    CONFIG may be a run directory: its config and its exported model are used. Without CONFIG, give --model, --data and
    --environment.

    Examples:

      nemorl eval runs/grpo-1a2b3c4d --generations 8 --temperature 1 --seeds 3

      nemorl eval --model Qwen/Qwen2.5-1.5B-Instruct --data word_problems --data tests/hard.jsonl --environment math

      nemorl eval examples/grpo_arithmetic.yaml --model runs/grpo-1a2b3c4d/model --json

      nemorl eval runs/grpo-1a2b3c4d --suite aime24,math500,gpqa
    """
    if suites:
        list_suites(as_json=as_json)
        return
    refuse_unknown_form(output)
    allow_more_open_files()
    if config is not None and "=" in config.name and not config.exists():
        config, overrides = None, [str(config), *(overrides or [])]
    settings = {"max_samples": max_samples, "num_generations": generations, "temperature": temperature}
    if suite:
        if data or environment or seeds > 1:
            fix = "leave out --data, --environment and --seeds, or write a suite file of your own"
            raise UsageError("a suite says itself what is asked, how often, and what scores it", fix=fix)
        changes = [f"{name}={value}" for name, value in settings.items() if value is not None]
        changes += [text.removeprefix(SUITE_PREFIX) for text in overrides or [] if text.startswith(SUITE_PREFIX)]
        of_config = [text for text in overrides or [] if not text.startswith(SUITE_PREFIX)]
        options = Options(changes, suite_rows or [], max_turns, batch_size, output, as_json)
        evaluate_suites(_load(config, of_config, model, has_data=True), named(suite), options)
        return
    if suite_rows:
        raise UsageError("--rows says where the rows of a suite are", fix="give --suite, or the path as --data")
    changes = [f"validation.{name}={value}" for name, value in settings.items() if value is not None]
    changes += [f"environment={environment}"] if environment else []
    loaded = _load(config, [*changes, *(overrides or [])], model, has_data=bool(data))
    results = _evaluate_data(loaded, data or [], seeds, batch_size, max_turns, output, quiet=as_json)
    if as_json:
        echo_json(_summary(loaded.policy.model_name, results, seeds))
    else:
        _print_results(results)


def _evaluate_data(
    config: RolloutRunConfig,
    sources: Sequence[str],
    seeds: int,
    batch_size: int,
    max_turns: int | None,
    output: Path | None,
    *,
    quiet: bool,
) -> dict[str, Evaluation]:
    """Ask the model about each dataset; without any, about the rows that the config validates on."""
    from nemorl_rl.evaluation.evaluation import Evaluator, held_out_sets

    results: dict[str, Evaluation] = {}
    with ExitStack() as stack:
        display = stack.enter_context(open_display(quiet=quiet))
        display.begin(f"loading {config.policy.model_name}", None)
        datasets = {source: _rows(source, display) for source in sources} or held_out_sets(config)
        evaluator = stack.enter_context(Evaluator(config, max_turns=max_turns))
        writer = stack.enter_context(open_samples(output, evaluator.decode))
        for dataset, rows in datasets.items():
            display.begin(dataset, seeds * min(len(rows), config.validation.max_samples))

            def on_group(seed: int, group: Sequence[Sample], dataset: str = dataset) -> None:
                display.advance()
                writer.add(dataset, seed, group)

            results[dataset] = evaluator.evaluate(rows, seeds=seeds, batch_size=batch_size, on_group=on_group)
    return results


def _load(config: Path | None, changes: Sequence[str], model: str | None, *, has_data: bool) -> RolloutRunConfig:
    """The config to evaluate: of a file, of a run with its exported model, or made of the command line alone."""
    from nemorl.base.text.mappings import apply_overrides
    from nemorl.config.load import load_config, validate
    from nemorl_rl.config import RolloutRunConfig

    if config is None:
        if model is None or not has_data:
            raise UsageError("nothing to evaluate", fix="give a config or a run, or --model with --data")
        return _recorded(validate(RolloutRunConfig, apply_overrides({"model": model}, changes), source="eval"))
    chosen = _model_overrides(model, "model", "policy.model_name") if model else []
    if (config / "config.yaml").is_file():
        exported = config / "model"
        if not model and not (exported / "config.json").is_file():
            raise UsageError(
                f"{config} has no exported model yet", fix="let the run finish, or give a config and --model"
            )
        chosen = chosen or _model_overrides(str(exported), "policy.model_name")
        config = config / "config.yaml"
    loaded = load_config(config, [*chosen, *changes], for_launch=not has_data)
    if not isinstance(loaded, RolloutRunConfig):
        raise UsageError(
            f"{config} is of the algorithm {loaded.algorithm}, which samples no responses",
            fix="evaluate its model: --model RUN/model --data NAME environment=NAME",
        )
    return _recorded(loaded)


def _recorded(config: RolloutRunConfig) -> RolloutRunConfig:
    """A config that is about to be evaluated, which the site's policy admits and the audit log says."""
    from nemorl_trust.audit.recording import record
    from nemorl_trust.site_check import refuse

    refuse(config)
    record("evaluation_started", {"model": config.policy.model_name, "algorithm": config.algorithm})
    return config


def _model_overrides(model: str, *keys: str) -> list[str]:
    """The overrides that choose a model, in quotes: a folder may have any name."""
    return [*(f"{key}={json.dumps(model)}" for key in keys), "policy.init=pretrained"]


def _rows(source: str, display: Display) -> Sequence[Row]:
    """The validation rows of a dataset by name or path; all of its rows where it has no such split."""
    from nemorl_rl.data.rows import rows_of
    from nemorl_trust.site import require
    from nemorl_trust.site_policy import names_of_path

    require("datasets", *names_of_path(source))
    rows = rows_of(source, "validation")
    if rows is None:
        display.say(f"{source} has no validation split: all its rows are used")
        rows = rows_of(source, "train")
    if not rows:
        raise DataError(f"{source} has no rows", fix="check its path, split and filters")
    return rows


# What is shown


def _summary(model: str, results: Mapping[str, Evaluation], seeds: int) -> dict[str, Any]:
    """One dataset: its metrics at the top. Several: ``datasets``, by name."""
    records: dict[str, dict[str, Any]] = {}
    for dataset, evaluation in results.items():
        records[dataset] = dict(evaluation.metrics)
        if seeds > 1:
            records[dataset] |= {"standard_errors": dict(evaluation.standard_errors)}
    about = {"model": model} | ({"seeds": seeds} if seeds > 1 else {})
    if len(records) > 1:
        return {**about, "datasets": records}
    (only,) = records
    return {**about, "dataset": only, **records[only]}


def _print_results(results: Mapping[str, Evaluation]) -> None:
    """Metrics by dataset. Of many ``@k``, powers of two and the last are shown; ``--json`` has them all."""
    names = list(dict.fromkeys(name for evaluation in results.values() for name in evaluation.metrics))
    last = max((_k(name) for name in names), default=0)
    shown = [name for name in names if not ((k := _k(name)) & (k - 1)) or k == last]
    rows = [(name, *(_cell(evaluation, name) for evaluation in results.values())) for name in shown]
    print_table(("METRIC", *results), rows, whole=("METRIC",), numbers=tuple(results))


def _k(name: str) -> int:
    """4 for ``pass@4``, 0 for other metrics."""
    k = name.partition("@")[2]
    return int(k) if k.isdecimal() else 0


def _cell(evaluation: Evaluation, name: str) -> str:
    if name not in evaluation.metrics:
        return "–"
    error = evaluation.standard_errors.get(name)
    return f"{evaluation.metrics[name]:.4f}" + ("" if error is None else f" ± {error:.4f}")

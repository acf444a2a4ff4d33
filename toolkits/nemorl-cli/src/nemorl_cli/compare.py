"""``nemorl compare``: runs or configs beside one another, and what could explain that they differ."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from nemorl.base.text.suggest import did_you_mean
from nemorl.errors import UsageError
from rich.table import Table

from nemorl_cli.answers import AsJson, echo_json
from nemorl_cli.help_texts import App, group_with_default
from nemorl_cli.terminal import console, print_list, print_table, say, styled
from nemorl_cli.transcripts import clipped

if TYPE_CHECKING:
    from nemorl_cli.report.comparing.causes import Causes
    from nemorl_cli.report.comparing.numbers import Contrast, Estimate
    from nemorl_cli.report.comparing.prompts import Pairs
    from nemorl_cli.report.comparing.variants import Difference, Variant

HEADLINES = 12
"""Metrics shown, unless all are wanted."""


app = App(
    cls=group_with_default(lambda given: "configs" if any(map(os.path.isfile, given)) else "metrics"),
    no_args_is_help=True,
    help="Compare runs or configs: numbers, settings, likely causes.\n\n"
    "`nemorl compare A B` is `compare metrics` of runs and `compare configs` of config files.",
)


@app.command()
def metrics(
    run_dirs: Annotated[list[Path], typer.Argument(help="Two or more run directories.", show_default=False)],
    metric: Annotated[list[str] | None, typer.Option(help="Only these, by part of their name. Repeat it.")] = None,
    all_metrics: Annotated[bool, typer.Option("--all", help="All metrics, not the most telling ones.")] = False,
    prompts: Annotated[int, typer.Option(min=0, help="Prompts shown side by side.")] = 3,
    as_json: AsJson = False,
) -> None:
    """Compare runs: metrics with their noise, config and plugins, the same prompts, and likely causes.

    Runs that differ in their seed alone are one variant, whose noise is that of its seeds. Each variant is compared
    with the first; 'differs' means beyond the 95% interval of the difference (Welch's t). With one run per variant the
    noise is that of its last steps, which is smaller than that of seeds: 'differs (one seed)'.

    Examples:

      nemorl compare runs/base runs/lower-lr

      nemorl compare runs/base-s1 runs/base-s2 runs/base-s3 runs/new-s1 runs/new-s2 runs/new-s3

      nemorl compare runs/base runs/new --metric reward --prompts 10 --json
    """
    from nemorl_cli.report.comparing.variants import split, variants_of

    if len(run_dirs) < 2:
        raise UsageError("one run is nothing to compare", fix="give two or more run directories")
    variants = variants_of(run_dirs)
    if len(variants) == 1:
        variants = split(variants[0])
    if len(variants) == 1:
        raise UsageError("these are one and the same run", fix="give two or more different run directories")
    answers = [_compared(variants[0], other, metric or [], prompts) for other in variants[1:]]
    if as_json:
        echo_json({"first": _about(variants[0]), "compared": [_as_data(*answer) for answer in answers]}, default=str)
        return
    for number, answer in enumerate(answers):
        if number:
            say()
        _show(variants[0], answer, show_all=all_metrics or bool(metric), prompts=prompts)


@app.command()
def configs(
    one: Annotated[Path, typer.Argument(help="A config file, or a run's directory.", show_default=False)],
    other: Annotated[Path, typer.Argument(help="Another one.", show_default=False)],
    as_json: AsJson = False,
) -> None:
    """Show where two configs differ once every default is filled in. Exit 1 if they do.

    Examples:

      nemorl compare grpo.yaml dapo.yaml

      nemorl compare configs runs/grpo-1a2b3c4d runs/grpo-5e6f7a8b --json
    """
    from nemorl_cli.report.run_data import flatten

    absent = [reason for path in (one, other) if (reason := _no_config(path)) is not None]
    if absent:
        raise UsageError("; ".join(absent), fix="give two config files or directories of runs")
    left, right = (dict(flatten(_resolved(path))) for path in (one, other))
    found: list[dict[str, Any]] = [
        {"path": path, "one": left.get(path), "other": right.get(path)}
        for path in dict.fromkeys([*left, *right])
        if (path in left, left.get(path)) != (path in right, right.get(path))
    ]
    if as_json:
        echo_json(found)
    elif not found:
        say("no difference")
    else:
        shown = ["–" if value is None else str(value) for each in found for value in each.values()]
        print_table(("PATH", str(one), str(other)), list(zip(*[iter(shown)] * 3, strict=True)))
    if found:
        raise typer.Exit(1)


def _no_config(path: Path) -> str | None:
    """Why there is no config at a path."""
    if not path.exists():
        return f"there is no {str(path)!r}"
    if path.is_dir() and not (path / "config.yaml").is_file():
        return f"the folder {str(path)!r} is no run: it has no config.yaml"
    return None


def _resolved(path: Path) -> dict[str, Any]:
    from nemorl.config.load import load_config

    loaded = load_config(path / "config.yaml" if path.is_dir() else path)
    return loaded.model_dump(mode="json")


Answer = tuple["Variant", list["Contrast"], list["Difference"], "Causes", "Pairs | None", list[str]]


def _compared(first: Variant, second: Variant, wanted: Sequence[str], prompts: int) -> Answer:
    from nemorl_cli.report.comparing.causes import causes
    from nemorl_cli.report.comparing.numbers import contrasts, metric_names
    from nemorl_cli.report.comparing.prompts import pairs_of
    from nemorl_cli.report.comparing.variants import config_differences, surrounding_differences, unknown_inputs

    names = metric_names([first, second])
    chosen = [name for name in names if not wanted or any(part in name for part in wanted)]
    if not chosen:
        guess = did_you_mean(wanted[0], {*names, *(name.rpartition("/")[2] for name in names)})
        fix = guess or "--all shows all of them"
        raise UsageError(f"no metric has {' or '.join(map(repr, wanted))} in its name", fix=fix)
    found = [*config_differences(first, second), *surrounding_differences(first, second)]
    pairs = pairs_of(first.folders[0], second.folders[0]) if prompts else None
    unknown = unknown_inputs(first, second)
    return second, list(contrasts(first, second, chosen)), found, causes(first, second, found), pairs, unknown


def _about(variant: Variant) -> dict[str, Any]:
    return {"name": variant.name, "runs": [str(folder) for folder in variant.folders], "seeds": variant.seeds}


def _as_data(
    second: Variant,
    numbers: list[Contrast],
    found: list[Difference],
    why: Causes,
    pairs: Pairs | None,
    unknown: list[str],
) -> dict[str, Any]:
    return {
        **_about(second),
        "metrics": {
            one.metric: {
                "first": asdict(one.first),
                "second": asdict(one.second),
                "difference": one.difference,
                "margin": one.margin,
                "verdict": one.verdict,
            }
            for one in numbers
        },
        "differences": [asdict(one) for one in found],
        "parting": None if why.parting is None else asdict(why.parting),
        "likely_causes": [one.key if one.key != "plugin" else one.second for one in why.likely],
        "not_recorded": unknown,
        "prompts": None if pairs is None else {"split": pairs.split, "step": pairs.step, **pairs.counts},
    }


# What is shown


def _show(first: Variant, answer: Answer, *, show_all: bool, prompts: int) -> None:
    second, numbers, found, why, pairs, unknown = answer
    say(f"{first.name} and {second.name}")
    say()
    shown = numbers if show_all else [one for one in numbers if one.verdict != "same"][:HEADLINES]
    rows = [(one.metric, _value(one.first), _value(one.second), _difference(one), one.verdict) for one in shown]
    print_list(("METRIC", "FIRST", "SECOND", "DIFFERENCE", "VERDICT"), rows)
    if len(shown) < len(numbers):
        say(f"… {len(numbers) - len(shown)} more: --all")
    _show_causes(found, why)
    if unknown:
        _tell(f"Not recorded in both, and so perhaps a cause: {', '.join(unknown)}.")
    if pairs is not None:
        _show_pairs(pairs, prompts, first.folders[0])


def _value(estimate: Estimate) -> str:
    error = "" if estimate.error is None else f" ± {estimate.error:.2g}"
    return f"{estimate.mean:.4g}{error}"


def _difference(contrast: Contrast) -> str:
    margin = "" if contrast.margin is None else f" ± {contrast.margin:.2g}"
    return f"{contrast.difference:+.3g}{margin}"


def _show_causes(found: Sequence[Difference], why: Causes) -> None:
    say()
    if not found:
        _tell("They were told the same, but for the seed, and ran on the same.")
    parting = why.parting
    if parting is not None:
        _tell(
            f"With the same seed they part at step {parting.step}, in its {parting.stage}: {parting.metric} is "
            f"{parting.first:.6g} and {parting.second:.6g}."
        )
    elif found:
        _tell("No two of their runs have the same seed and part: where a cause takes effect is not known.")
    for title, differences in (
        ("Likely causes", why.likely),
        ("Possible causes" if parting is not None else "Differences", why.possible),
        ("No cause: it takes effect later, or changes no result", why.unlikely),
    ):
        if differences:
            say(f"{title}:")
            for difference in differences:
                text = difference.second if difference.key == "plugin" else difference.text
                console().print(styled(f"  {text}"))


def _tell(text: str) -> None:
    """A sentence, broken between words."""
    console().print(styled(text))


def _show_pairs(pairs: Pairs, count: int, run_dir: Path) -> None:
    from nemorl_cli.report.records.media_labels import labels_of
    from nemorl_cli.report.records.picking import prompt_items

    counts = pairs.counts
    say()
    _tell(
        f"The same {len(pairs.pairs)} prompts in {pairs.split} at step {pairs.step}: both right {counts['both']}, "
        f"only the first {counts['first_only']}, only the second {counts['second_only']}, neither {counts['neither']}."
    )
    for one, other in pairs.pairs[:count]:
        say()
        table = Table.grid(padding=(0, 2))
        table.add_column(no_wrap=True, style="dim")
        table.add_column(overflow="fold")
        prompt = " ".join([*labels_of(run_dir, prompt_items(one)), str(one["prompt"] or "")])
        table.add_row("prompt", styled(clipped(prompt), "cyan"))
        for title, record in (("first", one), ("second", other)):
            reward = "–" if record["reward"] is None else f"{record['reward']:.3g}"
            table.add_row(f"{title}, reward {reward}", styled(clipped(str(record["response"] or ""))))
        console().print(table)

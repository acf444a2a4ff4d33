"""``nemorl plugins list | show | check``. ``install`` and ``uninstall`` are in ``plugin_installs``.

``list`` reads metadata and parses source; ``show`` imports one config module; ``check`` looks at each plugin in a
process of its own, so that one that hangs, prints or exits disturbs nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from textwrap import indent, shorten
from typing import Annotated, Any

import typer
from nemorl.base.files.atomic import storing
from nemorl.base.packages.plugin_policy import normalize
from nemorl.base.packages.standard_plugins import how_to_install
from nemorl.base.text.suggest import did_you_mean
from nemorl.errors import PluginNotFoundError, UsageError
from nemorl.plugins import PluginEntry, registry
from nemorl.plugins.index import kind_called, singular
from nemorl_trust.source import diagnose, read_source, template_text
from rich.table import Table

from nemorl_cli.answers import AsJson, echo_json
from nemorl_cli.help_texts import App
from nemorl_cli.plugin_checks import LOSSES, check_entry, check_loss
from nemorl_cli.terminal import console, plain, print_table, say, styled

app = App(no_args_is_help=True, help="See which plugins are installed and whether they work; get more.")
COLUMN_GAP = 2
SUMMARY_CHARACTERS = 20
"""Fewer say nothing: the column is left out."""
MAX_ROWS = 2000
"""Of the table: laying out a row takes a millisecond."""
DEFAULT_CHARACTERS = 40
"""Of a default, in a table; nested configs would fill it."""
AT_ONCE = 2
"""Processes of ``check`` that run at the same time: backends load models."""
Kind = Annotated[str | None, typer.Option("--kind", help="Only this kind, e.g. algorithms.", show_default=False)]


@app.command("list")
def list_plugins(kind: Kind = None, as_json: AsJson = False) -> None:
    """Show every installed plugin with its distribution, version, status and summary. Runs none of their code.

    Examples:

      nemorl plugins list

      nemorl plugins list --kind environments --json
    """
    entries = [as_dict(entry) for entry in _of_kind(registry().index.entries, kind)]
    if as_json:
        echo_json(entries, indent=2)
        return
    out = console()
    shown = entries[:MAX_ROWS]
    out.print(listed(shown, out.width))
    if len(entries) > len(shown):
        say(f"and {len(entries) - len(shown)} more: choose with --kind, or see them all with --json")
    for entry in shown:
        for found in entry["diagnostics"]:
            out.print()
            _print_diagnostic(found, f"{entry['id']}: ")


def _print_diagnostic(found: Mapping[str, str], about: str = "") -> None:
    lead = typer.style(found["code"], fg="red")
    say(f" {about}{found['message']}\n  fix: {found['fix']}", lead=lead)


def listed(entries: Sequence[dict[str, Any]], width: int) -> Table:
    """A row per plugin. Summaries get the room that is left, if it is worth while; nothing else is ever cut off."""
    rows = [
        (
            singular(entry["kind"]),
            entry["name"],
            f"{entry['distribution']}{' (isolated)' if entry['venv'] else ''}",
            entry["version"],
            entry["status"],
        )
        for entry in entries
    ]
    columns = ("KIND", "NAME", "DISTRIBUTION", "VERSION", "STATUS")
    used = sum(max(map(len, column)) + COLUMN_GAP for column in zip(columns, *rows, strict=True))
    room = width - used
    table = Table(box=None, pad_edge=False, padding=(0, COLUMN_GAP, 0, 0))
    for column in columns:
        # On a narrow terminal names take two lines.
        table.add_column(column, no_wrap=column not in ("NAME", "DISTRIBUTION"), overflow="fold")
    if room >= SUMMARY_CHARACTERS:
        table.add_column("SUMMARY", no_wrap=True, overflow="ellipsis", width=room)
    for row, entry in zip(rows, entries, strict=True):
        status = styled(row[-1], "green" if row[-1] == "ok" else "red")
        summary = [styled(entry["summary"])] if room >= SUMMARY_CHARACTERS else []
        table.add_row(*map(styled, row[:-1]), status, *summary)
    return table


@app.command()
def show(
    name: Annotated[str, typer.Argument(help="Plugin name, or distribution:name.")], as_json: AsJson = False
) -> None:
    """Show a plugin's options with their types, defaults and meaning, what it can do, and where it comes from.

    Example:

      nemorl plugins show dtensor
    """
    shown = [_details(entry) for entry in _named(name)]
    if as_json:
        echo_json(shown, indent=2, default=str)
        return
    for details in shown:
        lead = typer.style(plain(details["name"]), bold=True)
        say(f" ({singular(details['kind'])}): {details['status']}\n{details['summary']}\n", lead=lead)
        facts = {
            "provided by": f"{details['distribution']} {details['version']}",
            "defined in": details["value"],
            "installed in": details["venv"],
            "can do": ", ".join(details["supports"]),
            "weights travel by": ", ".join(details["weight_transports"]),
            "needs": ", ".join(details["requires_modules"]),
        }
        for label, fact in facts.items():
            if fact:
                say(f"{label:>18}  {fact}")
        for found in details["diagnostics"]:
            _print_diagnostic(found)
        if details["options"]:
            rows = []
            for option in details["options"]:
                default = "required" if option["required"] else shorten(repr(option["default"]), DEFAULT_CHARACTERS)
                rows.append((option["name"], option["type"], default, option["description"]))
            say()
            print_table(("OPTION", "TYPE", "DEFAULT", "MEANING"), rows)


@app.command()
def check(
    names: Annotated[
        list[str] | None,
        typer.Argument(help="Plugins or distributions; a loss as MODULE:NAME. Unset: all plugins.", show_default=False),
    ] = None,
    kind: Kind = None,
    full: Annotated[bool, typer.Option("--full", help="Every conformance check, not only the quick ones.")] = False,
    device: Annotated[
        str, typer.Option(help="Where backends compute: cpu, cuda:0, or sim, which has a GPU's rules without one.")
    ] = "cpu",
    timeout: Annotated[float, typer.Option(min=1, help="Seconds that one plugin may take.")] = 120.0,
    badge: Annotated[
        Path | None,
        typer.Option(help="Folder for a badge and a listing of what was seen of all its parts.", show_default=False),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Import, build and try each plugin in its own process. Exit 1 if any does not keep its contract.

    Quick checks take seconds for a plugin; --full runs the whole conformance kit, minutes for a backend. The losses of
    an algorithm are certified: a clause that one breaks is printed with its simplest counterexample, as a test.

    Examples:

      nemorl plugins check grpo my-environments

      nemorl plugins check --kind environments --full

      nemorl plugins check my-backend --full --device sim

      nemorl plugins check acme.losses:MyLoss

      nemorl plugins check acme-grader --full --badge ../plugin-index/plugins
    """
    if find_spec("nemorl_testing") is None:
        what = "`nemorl plugins check` tries plugins by nemorl-testing, which is not installed"
        raise UsageError(what, fix=how_to_install("nemorl-testing"))
    # By id: a plugin and its distribution may both be named.
    losses = [name for name in names or () if _is_loss(name)]
    named = {(e.kind, e.id): e for name in names or () if name not in losses for e in _named(name)}
    entries = _of_kind(named.values() if names else registry().index.entries, kind)
    if badge is not None:
        with storing(badge):  # before minutes of checks
            badge.mkdir(parents=True, exist_ok=True)
        entries = _whole_distributions(entries, is_part=kind is not None or bool(losses))
    with _counting(len(entries) + len(losses), quiet=as_json) as done, ThreadPoolExecutor(AT_ONCE) as threads:
        results = list(threads.map(lambda entry: done(entry.id, check_entry(entry, full, device, timeout)), entries))
        results += threads.map(lambda loss: done(loss, check_loss(loss, timeout)), losses)
    if as_json:
        echo_json(results, indent=2)
    else:
        _print_results(results)
    if badge is not None:
        from nemorl_cli.directory.badges import write_badges

        for path in write_badges(results, entries, badge, full=full, device=device):
            say(f"wrote {path}", err=as_json)
    if not all(result["ok"] for result in results):
        raise typer.Exit(1)


def _print_results(results: Sequence[dict[str, Any]]) -> None:
    for result in results:
        mark = typer.style("    ok", fg="green") if result["ok"] else typer.style("FAILED", fg="red")
        tried = f"{len(result['passed'])} checks" if result["passed"] else "loads"
        what = "loss" if result["kind"] == LOSSES else singular(result["kind"])
        say(f"  {result['id']} ({what}){f': {tried}' if result['ok'] else ''}", lead=mark)
        for problem in result["problems"]:
            shown = (problem["what"], problem.get("traceback", ""), f"fix: {problem['fix']}")
            say(indent("\n".join(filter(None, shown)), " " * 8))
        for note in result["notes"]:
            say(f"        note: {note}")
    things = ("loss", "losses") if all(result["kind"] == LOSSES for result in results) else ("plugin", "plugins")
    failed, count = sum(not result["ok"] for result in results), f"{len(results)} {things[len(results) != 1]}"
    say(f"{count}, {failed} of them unusable" if failed else f"{count}, all usable")


def _of_kind(entries: Iterable[PluginEntry], kind: str | None) -> list[PluginEntry]:
    wanted = None if kind is None else kind_called(kind)
    return [entry for entry in entries if wanted in (None, entry.kind)]


def _whole_distributions(entries: Iterable[PluginEntry], *, is_part: bool) -> list[PluginEntry]:
    """All parts of the distributions of some: a badge speaks of a version, not of the parts that do well."""
    if is_part:
        raise UsageError("a badge is of all parts of a plugin's version", fix="name distributions, without --kind")
    owners = {normalize(entry.distribution) for entry in entries}
    return [entry for entry in registry().index.entries if normalize(entry.distribution) in owners]


def _named(name: str) -> list[PluginEntry]:
    entries = registry().index.entries
    found = [entry for entry in entries if name in (entry.name, entry.id, entry.distribution)]
    if not found:
        names = sorted({entry.name for entry in entries})
        fix = did_you_mean(name, names) or f"installed: {', '.join(names)}"
        raise PluginNotFoundError(f"no plugin named {name!r} is installed", fix=fix)
    return found


def as_dict(entry: PluginEntry) -> dict[str, Any]:
    """Facts about an entry that need none of its code, as JSON."""
    facts = read_source(entry)
    found = (*entry.diagnostics, *([facts.problem] if facts.problem else []))
    return {
        "kind": entry.kind,
        "name": entry.name,
        "id": entry.id,
        "distribution": entry.distribution,
        "version": entry.version,
        "value": entry.value,
        "venv": str(entry.venv.folder) if entry.venv is not None else None,
        "status": found[0].state if found else "ok",
        "summary": facts.summary,
        "diagnostics": [diagnostic.as_dict() for diagnostic in found],
    }


def _details(entry: PluginEntry) -> dict[str, Any]:
    from nemorl.config.base import Config  # pydantic takes 0.2 s, which `list` need not wait for
    from nemorl.plugins.kinds import GenerationBackendConfig, PluginConfig, TrainingBackendConfig

    known = as_dict(entry)
    details = {**known, "supports": [], "weight_transports": [], "requires_modules": [], "options": []}
    if entry.kind == "templates" and known["status"] == "ok":
        return {**details, "text": template_text(entry)}
    diagnostic = diagnose(entry, registry())
    if diagnostic is not None:
        details |= {"status": diagnostic.state, "diagnostics": [diagnostic.as_dict()]}
        if diagnostic.state != "missing":
            return details
    loaded = registry().load(entry.kind, entry.id)
    if not (isinstance(loaded, type) and issubclass(loaded, Config)):
        return details
    details["options"] = loaded.describe_options()
    if issubclass(loaded, PluginConfig):
        details |= {"supports": sorted(loaded.supports), "requires_modules": list(loaded.requires_modules)}
    if issubclass(loaded, (TrainingBackendConfig, GenerationBackendConfig)):
        details["weight_transports"] = list(loaded.weight_transports)
    return details


def _is_loss(name: str) -> bool:
    """The name is a place in a module, and no plugin's id."""
    module, colon, attribute = name.partition(":")
    is_id = any(name in (entry.name, entry.id) for entry in registry().index.entries)
    return bool(colon) and not is_id and all(part.isidentifier() for part in (*module.split("."), attribute))


@contextmanager
def _counting(total: int, *, quiet: bool) -> Iterator[Any]:
    """A status line on stderr that counts the plugins done."""
    count = 0
    with console(err=True, quiet=quiet).status(f"checking {total} plugins") as status:

        def done(name: str, result: Any) -> Any:
            nonlocal count
            count += 1
            status.update(styled(f"checked {count} of {total}: {name}"))
            return result

        yield done

"""``nemorl plugins search | index``: what people type and read. pydantic is imported where an index is read."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from nemorl.errors import UsageError
from nemorl.plugins.index import kind_called, singular

from nemorl_cli.answers import AsJson, echo_json
from nemorl_cli.terminal import say

if TYPE_CHECKING:
    from nemorl_cli.directory.indexes import ReadIndex
    from nemorl_cli.directory.search import Found

SHOWN_PARTS = 6
"""Of one distribution; the rest is counted."""
NOTHING_FOUND = 1
REFUSED = 2
COLOURS = {"passed": "green", "partial": "yellow", "failed": "red"}
"""Of verdicts of the conformance kit."""


def search(
    words: Annotated[
        list[str] | None, typer.Argument(help="Words that must all occur. Unset: everything.", show_default=False)
    ] = None,
    kind: Annotated[
        str | None, typer.Option("--kind", help="Only this kind, e.g. algorithm.", show_default=False)
    ] = None,
    index: Annotated[
        str | None, typer.Option("--index", help="One more index: a file, or a URL of https.", show_default=False)
    ] = None,
    key: Annotated[
        Path | None, typer.Option("--key", help="The public key of who signs that index.", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Find plugins that can be installed: what they are, whether they work with this nemorl, how to get them.

    Looks in the list that comes with nemorl, and in the indexes of the site and of yours (plugins.indexes in
    config.yaml, or NEMORL_PLUGIN_INDEX). Runs and installs nothing. Exit 1: nothing is found. Exit 2: an index is
    refused, because it is not signed by its key, or older than one that was read before.

    Examples:

      nemorl plugins search vllm

      nemorl plugins search sandbox --kind environment

      nemorl plugins search grader --index https://plugins.example.org/index.json --key example.pub --json
    """
    from nemorl_cli.directory import search as searching
    from nemorl_cli.directory.indexes import read_all

    wanted = None if kind is None else kind_called(kind)
    read = read_all(index, key)
    found = searching.search(words or (), read, wanted)
    near = [] if found else searching.near_misses(words or (), read)
    if as_json:
        answer = {"plugins": [hit.as_dict() for hit in found], "indexes": [_as_dict(each) for each in read]}
        echo_json({**answer, "near": near}, indent=2)
    else:
        for hit in found:
            _print_found(hit)
        if not found:
            what = f"no {singular(wanted)}" if wanted else "no plugin"
            hint = f"Did you mean {' or '.join(map(repr, near))}?" if near else "`nemorl plugins search` shows all"
            say(f"{what} is about {' '.join(words or ())!r}. {hint}", err=True)
    for each in read:
        _print_state(each)
    if any(each.refusal for each in read):
        raise typer.Exit(REFUSED)
    if not found:
        raise typer.Exit(NOTHING_FOUND)


def _as_dict(read: ReadIndex) -> dict[str, object]:
    index, refusal = read.index, read.refusal
    return {
        "location": read.location,
        "name": index.name if index else None,
        "serial": index.serial if index else None,
        "note": read.note,
        "refused": {"what": refusal.message, "fix": refusal.fix} if refusal else None,
    }


def _print_found(hit: Found) -> None:
    listing, release = hit.listing, hit.release
    where = "" if hit.is_own else f", from the index {hit.index.name} of {hit.index.date}"
    say(f" {release.version}: {listing.summary}{where}", lead=typer.style(listing.name, bold=True))
    for kind in dict.fromkeys(part[0] for part in hit.parts):
        names = [name for group, name, _ in hit.parts if group == kind]
        more = f" and {len(names) - SHOWN_PARTS} more" if len(names) > SHOWN_PARTS else ""
        say(f"  {singular(kind)}: {', '.join(names[:SHOWN_PARTS])}{more}")
    if listing.licence or listing.homepage:
        say(f"  {', '.join(filter(None, (listing.licence, listing.homepage)))}")
    if release.conformance is not None:
        verdict, seen = release.conformance.verdict, release.conformance
        lead = "  conformance " + typer.style(verdict, fg=COLOURS[verdict])
        say(f" ({seen.summary}; kit {seen.kit}, nemorl {seen.nemorl}, {seen.date})", lead=lead)
    for problem in hit.problems:
        say(f" {problem}", lead=typer.style("  not here:", fg="red"))
    if hit.installed is not None:
        say(f" {hit.installed}", lead=typer.style("  installed", fg="green"))
    elif not hit.problems:
        say(f"  {hit.install}")


def _print_state(read: ReadIndex) -> None:
    if read.note:
        say(read.note, lead=typer.style("note: ", fg="yellow"), err=True)
    if read.refusal is not None:
        text = f"{read.refusal.message}\n  fix: {read.refusal.fix}"
        say(text, lead=typer.style("refused: ", fg="red", bold=True), err=True)


def index(
    given: Annotated[
        list[Path],
        typer.Argument(
            metavar="SOURCES...",
            help="Listings that `nemorl plugins check --badge` wrote, and folders of them.",
            show_default=False,
        ),
    ],
    output: Annotated[
        Path | None, typer.Option(help="The index to write, e.g. index.json.", show_default=False)
    ] = None,
    key: Annotated[
        Path | None, typer.Option(help="File with the private key that signs it.", show_default=False)
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Whose index it is. Unset: as in the output that is there.", show_default=False)
    ] = None,
    page: Annotated[
        Path | None, typer.Option(help="Also show it as a table in Markdown, in this file.", show_default=False)
    ] = None,
) -> None:
    """Check listings of plugins, and sign an index of them for others to search.

    Without --output, only checks: for pull requests of a repository that holds listings. An index is a file to be
    served as it is; who uses it needs the public key. `nemorl plugins sign --new-key FILE` makes a pair.

    Examples:

      nemorl plugins index plugins/

      nemorl plugins index plugins/ --output index.json --key site.key --name example --page plugins.md
    """
    from nemorl_cli.directory.publishing import read_listings, write_index

    listings = read_listings(given)
    if output is not None:
        if key is None:
            raise UsageError("an index is signed", fix="--key FILE; nemorl plugins sign --new-key FILE makes one")
        written = write_index(listings, output, key, name)
        say(f"{output}: index {written.name}, serial {written.serial}, plugins: {len(listings)}")
    elif key is not None or name is not None:
        raise UsageError("nothing is signed without --output", fix="name the file to write, e.g. --output index.json")
    else:
        say(f"listings that are as they should be: {len(listings)}")
    if page is not None:
        from nemorl.base.files.atomic import replace_text

        from nemorl_cli.directory.publishing import table

        replace_text(page, table(listings))
        say(f"{page}: the same as a table")

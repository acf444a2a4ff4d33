"""``nemorl view samples``: what a run's model wrote, from its rollout records."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from nemorl.base.text.suggest import did_you_mean
from nemorl.errors import UsageError

from nemorl_cli.answers import AsJson, echo_json
from nemorl_cli.terminal import console, print_table, say
from nemorl_cli.transcripts import token_table, transcript

if TYPE_CHECKING:
    from nemorl_cli.report.records.picking import Choice

SPLITS = ("train", "validation", "evaluation")
SHOWN = 5
"""Samples, unless a number is given."""


def samples(
    run_dir: Annotated[Path, typer.Argument(help="A run, or the output of eval.", show_default=False)],
    step: Annotated[int | None, typer.Option(min=0, help="Unset: the newest recorded one.")] = None,
    split: Annotated[str | None, typer.Option(help="train, validation or evaluation. Unset: all.")] = None,
    worst: Annotated[int | None, typer.Option(min=1, help="This many with the lowest rewards.")] = None,
    best: Annotated[int | None, typer.Option(min=1, help="This many with the highest rewards.")] = None,
    group: Annotated[int | None, typer.Option(min=0, help="All responses to the step's prompt of this number.")] = None,
    all_wrong: Annotated[bool, typer.Option("--all-wrong", help="Of groups without a right response.")] = False,
    truncated: Annotated[bool, typer.Option("--truncated", help="Those that the token limit cut.")] = False,
    filtered: Annotated[bool, typer.Option("--filtered", help="Those that trained nothing, and why.")] = False,
    search: Annotated[str | None, typer.Option(help="Text in prompt, response or answer; of any step.")] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help=f"At most this many. Unset: {SHOWN}, all of a group.")
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="Every turn, in full length.")] = False,
    tokens: Annotated[bool, typer.Option("--tokens", help="Every token with its log-probs and weight.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show what the model wrote: prompt, response, reward and advantage of the samples that a run recorded.

    A response is right if the environment says so, else if its reward is above a half. Groups count from 0 in a step.

    With --json, --full adds the turns and --tokens the token sequences.

    Examples:

      nemorl view samples runs/grpo-1a2b3c4d --step 20 --worst 5

      nemorl view samples runs/grpo-1a2b3c4d --all-wrong --split train --full

      nemorl view samples runs/grpo-1a2b3c4d --search "I cannot" --json

      nemorl view samples runs/grpo-1a2b3c4d --step 20 --group 3 --tokens
    """
    from nemorl_cli.report.records.media_labels import labels_of
    from nemorl_cli.report.records.reading import FOLDER
    from nemorl_cli.report.records.tokens import token_texts

    choice = _choice(step, split, worst, best, group, all_wrong, truncated, filtered, search, limit)
    found = choice.of_run(
        run_dir, heavy=full or tokens, on_damage=lambda path, why: say(f"skipped {path}: {why}", err=True)
    )
    if as_json:
        echo_json([_as_answer(record, full=full, tokens=tokens) for record in found], indent=2)
        return
    if not found:
        say("no such samples")
    texts = token_texts(run_dir / FOLDER) if tokens else {}
    for record in found:
        labels = labels_of(run_dir, record.get("media"))
        console().print(transcript(record, labels, full=full))
        if tokens:
            columns = ("PLACE", "TOKEN", "AUTHOR", "SAMPLER", "TRAINER", "DIFFERENCE", "WEIGHT")
            print_table(columns, token_table(record, texts, labels), whole=("PLACE",), numbers=columns[3:])
            say()


def _choice(
    step: int | None,
    split: str | None,
    worst: int | None,
    best: int | None,
    group: int | None,
    all_wrong: bool,
    truncated: bool,
    filtered: bool,
    search: str | None,
    limit: int | None,
) -> Choice:
    from nemorl_cli.report.records.picking import Choice

    if worst is not None and best is not None:
        raise UsageError("--worst and --best ask for opposite ends", fix="give one of them, or call it twice")
    if split not in (None, *SPLITS):
        raise UsageError(f"no split {split!r}", fix=did_you_mean(split, SPLITS) or f"one of {', '.join(SPLITS)}")
    order = "worst" if worst is not None else "best" if best is not None else None
    most = limit or worst or best or (None if group is not None else SHOWN)
    return Choice(split, step, group, order, all_wrong, truncated, filtered, search, most)  # type: ignore[arg-type]


def _as_answer(record: dict[str, Any], *, full: bool, tokens: bool) -> dict[str, Any]:
    unwanted = {*(() if full or tokens else ("turns",)), *(() if tokens else ("sequences",))}
    shown = {name: value for name, value in record.items() if name not in unwanted}
    # Routes are bytes, which JSON has not.
    parts = shown.get("sequences") or ()
    readable = [{name: value for name, value in part.items() if name != "routes"} for part in parts]
    return {**shown, "sequences": readable} if readable else shown

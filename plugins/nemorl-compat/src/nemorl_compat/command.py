"""``nemorl config migrate``: old configs in, nemorl configs out, without loss or not at all. ``nemorl runs
import-checkpoint``: a checkpoint of NeMo RL in, a Hugging Face folder out."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from textwrap import shorten
from typing import Annotated, Literal

import typer
from nemorl.base.files.atomic import replace_text
from nemorl.errors import UsageError
from nemorl_cli.answers import AsJson, echo_json
from nemorl_cli.plugin_app import plugin_app
from nemorl_cli.terminal import print_table, say

from nemorl_compat.migration import Migration, migrate_file
from nemorl_compat.migration_report import as_data, refusal, summary, table
from nemorl_compat.migration_tree import Entry, migrate_tree
from nemorl_compat.peers.reading import script_run
from nemorl_compat.peers.tables import table as peer_table
from nemorl_compat.peers.translation import translate_file

app = plugin_app()
NOT_ALL = 1
"""Exit status when some files of a tree were not migrated."""
REFUSED = 2


@app.command()
def migrate(
    old: Annotated[Path, typer.Argument(help="Config of the other system, or for NeMo RL a folder of them.")],
    system: Annotated[
        Literal["nemo_rl", "trl", "verl", "openrlhf"], typer.Option("--from", help="The system that the config is of.")
    ] = "nemo_rl",
    algorithm: Annotated[
        Literal["grpo", "sft", "dpo", "kto", "orpo", "cpo"] | None,
        typer.Option(help="What the config is for, where a file of TRL or OpenRLHF does not say it."),
    ] = None,
    given: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME=VALUE]...", help="Of a script: variables, and its arguments.")
    ] = None,
    command: Annotated[
        int | None, typer.Option(help="Which command of a script is meant, where it has several.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write here instead of to stdout: a file, or a folder.")
    ] = None,
    allow_loss: Annotated[
        list[str] | None, typer.Option(metavar="KEY", help="Leave out this key (a pattern) if nothing here is like it.")
    ] = None,
    report: Annotated[bool, typer.Option("--report", help="List what became of every key.")] = False,
    as_json: AsJson = False,
) -> None:
    """Translate a config of NeMo RL, verl, TRL or OpenRLHF; of a folder, all configs of NeMo RL below it.

    With --from trl, verl or openrlhf, a config of theirs (YAML, JSON) or the shell script that starts the run: bash
    says what it would run, with nothing of your environment but what you give, and nothing is run.

    Values that equal nemorl's defaults are left out. A key that asks for what nemorl has not is refused by the name of
    the missing feature, unless --allow-loss says that it may go. The result loads on the machines that it asks for;
    whether it does on this one, `nemorl config validate` says.

    Examples:

      nemorl config migrate grpo_math_1B.yaml -o grpo.yaml

      nemorl config migrate examples/configs -o migrated

      nemorl config migrate --from verl run_qwen3_grpo.sh -o grpo.yaml

      nemorl config migrate --from verl run_qwen3_grpo.sh MODEL_PATH=Qwen/Qwen3-4B -o grpo.yaml

      nemorl config migrate old.yaml --allow-loss 'policy.dtensor_cfg.lora_cfg.exclude_modules' --report
    """
    if old.is_dir() and system == "nemo_rl":
        _migrate_folder(old, output, allow_loss or [], as_json=as_json)
        return
    if system == "nemo_rl":
        title, migration = "NEMO RL", migrate_file(old, allow_loss=allow_loss or ())
    else:
        title = peer_table(system).system.upper()
        run = script_run(given or (), command)
        migration = translate_file(old, system, family=algorithm, allow_loss=allow_loss or (), run=run)
    if output is not None and migration.is_complete:
        replace_text(output, migration.to_yaml())
    if as_json:
        echo_json(as_data(migration))
    elif migration.is_complete:
        _tell(migration, output)
    if report and not as_json:
        print_table(("CLASS", title, "NEMORL"), table(migration))
    if not migration.is_complete:
        if as_json:
            raise typer.Exit(REFUSED)
        raise refusal(migration, old.name)


def _tell(migration: Migration, output: Path | None) -> None:
    if output is None:
        say(migration.to_yaml(), nl=False)
    else:
        say(f"wrote {output}")
    for line in summary(migration):
        say(line, err=True)


def _migrate_folder(old: Path, output: Path | None, allow_loss: list[str], *, as_json: bool) -> None:
    if output is not None and output.is_file():
        raise UsageError(f"{output} is a file", fix="give a folder for the configs of a folder")
    entries = list(migrate_tree(old, allow_loss=allow_loss))
    for entry in entries:
        if output is not None and entry.migration is not None and entry.verdict == "loads":
            target = output / entry.path
            target.parent.mkdir(parents=True, exist_ok=True)
            replace_text(target, entry.migration.to_yaml())
    if as_json:
        echo_json([{"file": str(e.path), "result": e.verdict, "text": e.text} for e in entries])
    else:
        _tell_of_all(entries)
    if any(entry.verdict in ("missing feature", "refused") for entry in entries):
        raise typer.Exit(NOT_ALL)


def _tell_of_all(entries: list[Entry]) -> None:
    rows = [(str(entry.path), entry.verdict, shorten(entry.text, 120, placeholder=" …")) for entry in entries]
    print_table(("FILE", "RESULT", "WHAT IS MISSING"), rows)
    counts = Counter(entry.verdict for entry in entries)
    say(", ".join(f"{count} {verdict}" for verdict, count in counts.most_common()), err=True)


import_app = plugin_app()


@import_app.command()
def import_checkpoint(
    checkpoint: Annotated[Path, typer.Argument(help="A folder step_N of NeMo RL.", show_default=False)],
    output: Annotated[Path, typer.Argument(help="The model folder to write.", show_default=False)],
    model: Annotated[str | None, typer.Option(help="The model that was trained. Unset: as its config says.")] = None,
    as_json: AsJson = False,
) -> None:
    """Write the policy of a checkpoint of NeMo RL (DTensor or Megatron) as a Hugging Face folder, to start from.

    Reading it runs no code that is in it. Optimizer state stays behind.

    Example:

      nemorl runs import-checkpoint results/grpo/step_100 models/start
    """
    from nemorl_compat.checkpoints import import_checkpoint as convert

    name = convert(checkpoint, output, model)
    if as_json:
        echo_json({"model": str(output), "trained_from": name})
    else:
        say(f"wrote {output}, trained from {name}: use model: {output}")

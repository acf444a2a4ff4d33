"""``nemorl runs prune``: remove checkpoints that a run need not keep. What goes can be looked at first."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from nemorl.errors import UsageError

from nemorl_cli.answers import AsJson, echo_json
from nemorl_cli.terminal import print_list, say

GIB = 2**30


def prune(
    run: Annotated[Path, typer.Argument(help="A run's directory.", show_default=False)],
    keep_last: Annotated[int | None, typer.Option("--keep", "--keep-last", min=1, show_default=False)] = None,
    keep_best: Annotated[int | None, typer.Option(min=0, show_default=False)] = None,
    keep_every: Annotated[int | None, typer.Option(min=1, show_default=False)] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would go, remove nothing.")] = False,
    as_json: AsJson = False,
) -> None:
    """Remove a run's checkpoints, but those that its config keeps: the newest, the best, every so many steps.

    The options take the place of checkpoint.keep_last, keep_best and keep_every of its config. What a removal or a save
    that was cut short left behind goes as well. A run that is under way is refused.

    Examples:

      nemorl runs prune runs/grpo-1a2b3c4d --keep 1 --dry-run

      nemorl runs prune runs/grpo-1a2b3c4d --keep 1 --keep-best 1
    """
    from nemorl.base.files.ownership import Ownership
    from nemorl.config.load import load_config
    from nemorl.storage.checkpoints import CheckpointManager

    if not (run / "config.yaml").is_file():
        raise UsageError(f"{run} is not a run directory (no config.yaml)", fix="give the path of a run")
    manager = CheckpointManager.of_run(run, load_config(run / "config.yaml"))
    given = {"keep_last": keep_last, "keep_best": keep_best, "keep_every": keep_every}
    changes = {name: value for name, value in given.items() if value is not None}
    manager.config = manager.config.model_copy(update={**changes, "asynchronous": False})
    doomed = {checkpoint.path: _bytes(checkpoint.path) for checkpoint in manager.surplus()}
    kept = [checkpoint for checkpoint in manager.all() if checkpoint.path not in doomed]
    if not dry_run:
        owner = Ownership(run)
        try:
            manager.repair()
            manager.prune()
        finally:
            owner.close()
    facts: dict[str, Any] = {
        "run": str(run),
        "removed" if not dry_run else "would_remove": [path.name for path in doomed],
        "kept": [checkpoint.path.name for checkpoint in kept],
        "bytes": sum(doomed.values()),
    }
    if as_json:
        echo_json(facts)
        return
    states = {c.path: (_bytes(c.path), "stays") for c in kept}
    states |= {path: (size, "would go" if dry_run else "removed") for path, size in doomed.items()}
    rows = [(path.name, f"{size / GIB:.3f}", state) for path, (size, state) in sorted(states.items())]
    print_list(("CHECKPOINT", "GIB", "STATE"), rows, first_to_go=())
    say(f"{'would free' if dry_run else 'freed'} {facts['bytes'] / GIB:.3f} GiB")


def _bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())

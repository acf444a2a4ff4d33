"""``nemorl runs copy``: a run or one checkpoint to another place, verified; again after an interruption."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from nemorl.base.files.sealed_folders import MANIFEST
from nemorl.errors import UsageError
from nemorl_cli.answers import AsJson, echo_json
from nemorl_cli.console import Console
from nemorl_cli.plugin_app import plugin_app
from nemorl_cli.terminal import say
from nemorl_trust.audit.recording import record
from nemorl_trust.encryption import PLAINTEXT, plaintext_problem
from nemorl_trust.site import require

from nemorl_ops.replicate.place import Place
from nemorl_ops.replicate.transfer import Copied, copy_checkpoint, copy_run

app = plugin_app()
PROGRESS_S = 2.0
"""Between two lines about how far it is."""
GIB = 2**30


@app.command()
def copy(
    source: Annotated[str, typer.Argument(help="A run's directory, or one checkpoint: a path or a URL.")],
    target: Annotated[str, typer.Argument(help="The folder to be: a path or a URL (s3://…, gs://…).")],
    checkpoints: Annotated[
        str, typer.Option(help="Of a run: all, latest, none, or steps such as 100,200.", show_default=True)
    ] = "all",
    endpoint: Annotated[
        str | None, typer.Option(help="Address of an S3-compatible store that is not Amazon's.", show_default=False)
    ] = None,
    plaintext: Annotated[bool, typer.Option("--plaintext", help="Let http to another machine pass.")] = False,
    as_json: AsJson = False,
) -> None:
    """Copy a run or a checkpoint to another place. Every file is read back and compared with its checksum.

    What is there already is not sent again, so the same command continues after an interruption. A checkpoint's
    manifest comes last: no part of one is ever taken for a whole. Copy back to continue a run whose directory is gone.

    Examples:

      nemorl runs copy runs/grpo-1a2b3c4d s3://bucket/runs/grpo-1a2b3c4d --checkpoints latest

      nemorl runs copy s3://bucket/runs/grpo-1a2b3c4d runs/grpo-1a2b3c4d

      nemorl runs copy runs/grpo-1a2b3c4d/checkpoints/step_000100 /mnt/archive/step_000100
    """
    if endpoint is not None and (problem := plaintext_problem(endpoint)) is not None:
        if not plaintext:
            raise UsageError(problem[0], fix=problem[1])
        require("unlock", PLAINTEXT)
    here, there = (Place(_absolute(url), _options(url, endpoint)) for url in (source, target))
    copied = Copied()
    with Console(quiet=as_json) as console:
        copied.progress = _progress(console)
        steps = _copy(here, there, copied, checkpoints)
    facts = {"source": source, "target": target, "checkpoints": steps}
    record("weights_copied", {"run": here.url, "to": there.url, "checkpoints": steps, "bytes": copied.bytes})
    sums = {"files": copied.files, "bytes": copied.bytes, "already_there": copied.same}
    if as_json:
        echo_json({**facts, **sums})
        return
    same = f", {copied.same} were there already" if copied.same else ""
    say(f"copied {copied.files} files, {copied.bytes / GIB:.3f} GiB, to {target}{same}")


def _copy(source: Place, target: Place, copied: Copied, checkpoints: str) -> list[int]:
    if source.size(MANIFEST) is not None:
        copy_checkpoint(source, target, copied)
        return [source.read_json(MANIFEST)["step"]]
    if source.size("config.yaml") is None:
        raise UsageError(
            f"{source.url} is neither a run (no config.yaml) nor a checkpoint (no {MANIFEST})",
            fix="give a run's directory, or a folder checkpoints/step_… of one",
        )
    return copy_run(source, target, copied, steps=lambda found: _chosen(found, checkpoints))


def _chosen(found: list[int], wanted: str) -> list[int]:
    """The steps that are meant.

    Raises:
        UsageError: There is no such checkpoint.
    """
    if wanted in ("all", "latest", "none"):
        return {"all": found, "latest": found[-1:], "none": []}[wanted]
    there = f"there are {', '.join(map(str, found)) or 'none'}"
    try:
        steps = [int(step) for step in wanted.split(",")]
    except ValueError:
        raise UsageError(f"--checkpoints {wanted!r}: {there}", fix="give all, latest, none, or steps") from None
    if absent := sorted(set(steps) - set(found)):
        raise UsageError(f"no whole checkpoint of step {absent[0]}: {there}", fix="choose among these")
    return steps


def _absolute(url: str) -> str:
    return url if "://" in url else str(Path(url).resolve())


def _options(url: str, endpoint: str | None) -> dict[str, object]:
    return {"client_kwargs": {"endpoint_url": endpoint}} if endpoint is not None and url.startswith("s3") else {}


def _progress(console: Console) -> Callable[[str, int], None]:
    """Says what is being sent, once it takes longer than a moment."""
    said = time.monotonic()

    def tell(name: str, sent: int) -> None:
        nonlocal said
        if time.monotonic() - said > PROGRESS_S:
            said = time.monotonic()
            console.message(f"{sent / GIB:.2f} GiB sent, now {name}")

    return tell

"""``nemorl compare replay``: a step of a run made again, and the first value that is another."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from nemorl.errors import UsageError
from nemorl_cli.answers import AsJson, echo_json
from nemorl_cli.console import Console
from nemorl_cli.plugin_app import plugin_app
from nemorl_cli.terminal import console, print_list, styled

if TYPE_CHECKING:
    from nemorl_insight.diff.replaying import Replay
    from nemorl_insight.diff.walking import Walk

DIFFERS = 1
"""Exit code."""
HALVES = ("trainer", "sampler")

app = plugin_app()


@app.command()
def replay(
    run: Annotated[Path, typer.Argument(help="A run directory.", show_default=False)],
    step: Annotated[
        int | None, typer.Option(min=1, help="The step to make again. Unset: the last.", show_default=False)
    ] = None,
    from_start: Annotated[
        bool, typer.Option("--from-start", help="Begin with the run, and make every step up to this one again.")
    ] = False,
    changes: Annotated[
        list[str] | None, typer.Option("--set", help="path=value: another setting. Repeat it.", show_default=False)
    ] = None,
    backend: Annotated[str | None, typer.Option(help="Another training backend.", show_default=False)] = None,
    generation: Annotated[str | None, typer.Option(help="Another generation backend.", show_default=False)] = None,
    only: Annotated[
        str | None, typer.Option(help="trainer or sampler: the other half comes from the record.", show_default=False)
    ] = None,
    tolerance: Annotated[
        float, typer.Option(min=0, help="Numbers this close are equal, relative to the larger or absolute.")
    ] = 0.0,
    output: Annotated[
        Path | None, typer.Option(help="Keep the replay there, as a run. Unset: it is removed.", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Make a step again from the checkpoint before it, and say whether it is bit-equal or what differs first.

    With --set, --backend or --generation under another setting, that of this step alone: the difference is what that
    changes. With --only trainer the update is made from the recorded samples, as it always is where rollouts ran beside
    training; with --only sampler the samples from the checkpoint's weights.

    The run is read, and nothing in its folder changes. Exit 0 if all that it kept is equal, 1 if something differs.

    Examples:

      nemorl compare replay runs/grpo-1a2b3c4d --step 12

      nemorl compare replay runs/tinker/runs/3f16.train.0 --from-start

      nemorl compare replay runs/grpo-1a2b3c4d --step 12 --set policy.max_grad_norm=0.1

      nemorl compare replay runs/grpo-1a2b3c4d --step 12 --only trainer --backend megatron --tolerance 1e-4
    """
    from nemorl_insight.diff.replaying import Replay, compare, compare_before, make
    from nemorl_insight.diff.run_files import RunFiles

    if only not in (None, *HALVES):
        raise UsageError(f"a step has no half {only!r}", fix=f"give {' or '.join(HALVES)}")
    if output is not None and output.exists():
        raise UsageError(f"{output} exists", fix="choose another folder")
    others = [f"policy.backend={backend}"] if backend is not None else []
    others += [f"generation.backend={generation}"] if generation is not None else []
    with tempfile.TemporaryDirectory(prefix="nemorl-replay-") as scratch:
        folder = output if output is not None else Path(scratch) / "replay"
        files = RunFiles.of(run)
        last = files.last_step if step is None else step
        wanted = Replay(files, last, folder, [*(changes or []), *others], only, from_start)  # type: ignore[arg-type]
        make(wanted, Console(quiet=as_json))
        before, found = compare_before(wanted, tolerance), compare(wanted, tolerance)
        if as_json:
            echo_json(_as_data(wanted, before, found, tolerance), indent=2, default=str)
        else:
            _show(wanted, before, found, tolerance)
    if found.parting is not None or (before is not None and before.parting is not None):
        raise typer.Exit(DIFFERS)


def _as_data(wanted: Replay, before: Walk | None, found: Walk, tolerance: float) -> dict[str, object]:
    from nemorl_insight.diff.telling import as_data, steps_data
    from nemorl_insight.diff.words_of_replay import metric_rows, sentences

    return {
        **as_data(found, tolerance),
        "step": wanted.step,
        "begins_after": wanted.begins_after,
        "changes": list(wanted.changes),
        "only": wanted.only,
        "samples": "record" if wanted.half == "trainer" or wanted.scores else "replay",
        "steps_before": [] if before is None else steps_data(before),
        "metrics_of_step": found.last_step,
        "metrics": {name: {"run": one, "replay": other} for name, one, other in metric_rows(wanted, found, tolerance)},
        "text": list(sentences(wanted, before, found, tolerance)),
    }


def _show(wanted: Replay, before: Walk | None, found: Walk, tolerance: float) -> None:
    from nemorl_insight.diff.telling import step_rows, value_text
    from nemorl_insight.diff.words_of_replay import metric_rows, sentences

    for sentence in sentences(wanted, before, found, tolerance):
        console().print(styled(sentence))
    console().print()
    of_step = f" OF STEP {found.last_step}"
    print_list(
        (f"PART{of_step}", "KNOWN BY", "VERDICT", "RUN", "REPLAY"), list(step_rows(found)), first_to_go=("KNOWN BY",)
    )
    differing = [
        (name, value_text(one), value_text(other)) for name, one, other in metric_rows(wanted, found, tolerance)
    ]
    if differing:
        console().print()
        print_list((f"METRIC{of_step}", "RUN", "REPLAY"), differing)

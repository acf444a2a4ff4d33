"""``nemorl doctor``: what this machine has, what is wrong with it, whether two engines agree about a model, and whether
a run's inputs reach its model.

Alone it reads metadata only (:mod:`nemorl_insight.doctor.examination`); with ``--model`` it builds the engines and
compares their log-probs; with a run it builds its model (:mod:`nemorl_insight.doctor.inputs`).
"""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from nemorl.errors import UsageError
from nemorl_cli.answers import AsJson, echo_json
from nemorl_cli.console import Console
from nemorl_cli.plugin_app import plugin_app
from nemorl_cli.terminal import print_table, say

AUDIT_NEW_TOKENS = 32
"""Response length of an audit, unless overridden: errors show from the first token on."""


app = plugin_app()


@app.command()
def doctor(
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[RUN] [PATH=VALUE]...", help="A run's directory, and settings.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Compare two engines on this model.", show_default=False)] = None,
    generation: Annotated[str | None, typer.Option(help="Generation backend of the comparison. Unset: hf.")] = None,
    training: Annotated[str | None, typer.Option(help="Training backend. Unset: dtensor.")] = None,
    precision: Annotated[str | None, typer.Option(help="float32 (unset) or bfloat16.")] = None,
    init: Annotated[str | None, typer.Option(help="random: the model's architecture without its weights.")] = None,
    clean: Annotated[bool, typer.Option("--clean", help="Remove what killed runs left here. Asks first.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="With --clean: do not ask.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show what this machine has, and what is known to go wrong with it: versions, devices, disk, Ray, plugins.

    Each finding has a code, what it is, why it matters and how to fix it. Exit 1 if one of them is a problem, 0 if
    all are notes. Nothing is imported.

    With --model, sample with one engine, recompute the log-probs with another, compare what both compute in each layer,
    update the weights and do it again. Exit 1 if log-probs disagree by more than rollouts.mismatch_warning and than
    rounding explains, if the update did not arrive, or if the engines part somewhere in the model: then the layer and
    token are named.

    With a run's directory, put other images, sounds and words of the environment in the place of those that its model
    was shown, in recorded episodes and with the weights of its newest checkpoint: a kind of input with which every
    log-prob stays the same does not reach the model. Exit 1 if there is one, or if the model cannot be built.

    With --clean, find temporary folders (sessions of Ray with processes and sockets, sandboxes, scratch) whose run was
    killed, show them and remove them: only what this user's nemorl made and marked, and whose process has ended.

    Examples:

      nemorl doctor

      nemorl doctor --clean

      nemorl doctor runs/grpo-1a2b3c4d

      nemorl doctor --json

      nemorl doctor --model Qwen/Qwen2.5-0.5B --generation vllm --precision bfloat16 generation.temperature=0.8
    """
    choices = {
        "generation.backend": generation,
        "policy.backend": training,
        "policy.precision": precision,
        "policy.init": init,
    }
    runs = [Path(text) for text in arguments or () if "=" not in text or Path(text).is_dir()]
    overrides = [text for text in arguments or () if Path(text) not in runs]
    changes = [f"{path}={value}" for path, value in choices.items() if value is not None] + overrides
    if clean:
        from nemorl_insight.doctor.clean import clean_up

        clean_up(yes=yes, as_json=as_json)
    elif len(runs) > 1 or (runs and model is not None):
        raise UsageError(
            f"{', '.join(filter(None, [model, *map(str, runs)]))}: one thing can be looked at at a time",
            fix="give one run's directory, or --model",
        )
    elif runs:
        _show_inputs(runs[0], changes, as_json)
    elif model is not None:
        _compare_engines(model, changes, as_json)
    elif changes:
        raise UsageError(f"{changes[0]} needs a model to compare engines on", fix="add --model NAME_OR_FOLDER")
    else:
        _describe_machine(as_json)


def _describe_machine(as_json: bool) -> None:
    from nemorl_insight.doctor.examination import Examination

    examination = Examination.of_this_machine()
    if as_json:
        echo_json(examination.as_dict(), indent=2)
    else:
        examination.show()
    if not examination.ok:
        raise typer.Exit(1)


ANSWERS = {
    "reaches": "reaches the model",
    "does_not_reach": "does not reach the model",
    "absent": "not in this run",
    "unknown": "cannot be told",
}


def _show_inputs(run: Path, changes: list[str], as_json: bool) -> None:
    from nemorl_insight.doctor.inputs import examine_inputs

    with tempfile.TemporaryDirectory(prefix="nemorl-doctor-") as scratch, Console(quiet=as_json) as console:
        report = examine_inputs(run, changes, Path(scratch), console)
    if as_json:
        echo_json(report.as_dict(), indent=2)
    elif report.problem is not None:
        say(f" {report.problem}", lead=typer.style("the inputs could not be examined:", fg="red"))
    else:
        weights = "those that the run began with" if report.checkpoint is None else f"those of step {report.checkpoint}"
        say(f"weights: {weights}")
        rows = [(kind, ANSWERS[found.answer], found.rows) for kind, found in report.inputs.items()]
        print_table(("INPUT", "ANSWER", "LOOKED FOR IN"), rows)
    if not report.ok:
        raise typer.Exit(1)


def _compare_engines(model: str, changes: list[str], as_json: bool) -> None:
    from nemorl.base.text.mappings import apply_overrides
    from nemorl.config.load import validate
    from nemorl_rl.config import RolloutRunConfig

    data: dict[str, Any] = {"model": model, "generation": {"max_new_tokens": AUDIT_NEW_TOKENS}}
    config = validate(RolloutRunConfig, apply_overrides(data, changes, "doctor"), source="doctor")
    from nemorl_rl.alerts.rollout_rules import likely_causes
    from nemorl_rl.audit.mismatch import measure_mismatch

    with Console(quiet=as_json) as console:
        console.message(f"comparing engines on {model}")
        report = measure_mismatch(config, phase=console.phase)
    if as_json:
        echo_json({"model": model, **report.as_dict()})
    else:
        parts = (report.before, report.after)
        rows = [(label, *(f"{getattr(part, name):.4g}" for part in parts)) for name, label in _ROWS.items()]
        print_table(("", "BEFORE THE UPDATE", "AFTER IT"), rows)
        say(
            f"the update moved the trainer's log-probs by {report.shift:.4g} nats on average: "
            f"a sampler that missed it would show about {math.exp(report.shift):.4g}"
        )
        for finding in report.findings:
            say(f" {finding}", lead=typer.style("wrong:", fg="red"))
        for note in report.notes:
            say(f" {note}", lead=typer.style("note:", fg="yellow"))
        if report.parting is not None:
            say("What usually causes that:" + "".join(f"\n  - {cause}" for cause in report.parting.causes))
        elif report.findings:
            say(likely_causes())
        else:
            say(lead=typer.style("the engines agree", fg="green"))
        if report.layers_skipped is not None:
            say(f" {report.layers_skipped}", lead="layers were not compared:")
        elif report.parting is None:
            say(f"{len(report.layers[0].differences)} tensors of the model were compared, on both sides of the update")
    if not report.ok:
        raise typer.Exit(1)


_ROWS = {
    "tokens": "tokens",
    "mean_error": "mean |difference|, nats",
    "max_error": "largest, nats",
    "token_mult_prob_error": "token_mult_prob_error",
    "gen_kl_error": "gen_kl_error",
}

"""``nemorl train | generate | runs | export | report``. ``nemorl eval`` is in ``evals``."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from signal import SIGHUP
from typing import TYPE_CHECKING, Annotated, Any

import typer
from nemorl.base.process.stopping import NOBODY_WATCHES
from nemorl.errors import ConfigError, ConfigIssue, TerminalLostError, UsageError
from nemorl_rl.slots import MEMORY_PLAN
from nemorl_trust.listening import allow_more_open_files

from nemorl_cli.answers import AsJson, echo_json
from nemorl_cli.console import Console
from nemorl_cli.forwarding import is_launched, launch
from nemorl_cli.help_texts import App, group_with_default
from nemorl_cli.pruning import prune
from nemorl_cli.terminal import plain, print_list, say

if TYPE_CHECKING:
    from nemorl.config.run import RunConfig
    from nemorl.run import TrainResult

TERMINAL_LOST = (f"received {SIGHUP.name}", NOBODY_WATCHES)
"""Stop reasons that no person gave: the run is saved, and its command ends with an error."""

ConfigPath = Annotated[Path, typer.Argument(help="Config file (.yaml or .json).", show_default=False)]
Overrides = Annotated[list[str] | None, typer.Argument(help="path=value, e.g. policy.precision=bfloat16")]


def train(
    config: ConfigPath,
    overrides: Overrides = None,
    run_dir: Annotated[Path | None, typer.Option(help="Where the run keeps its files.", show_default=False)] = None,
    resume: Annotated[
        bool | None,
        typer.Option(
            "--resume/--fresh", help="Demand a run to continue / start a new one. Neither: continue if there is one."
        ),
    ] = None,
    from_step: Annotated[
        int | None,
        typer.Option(min=0, help="Continue from this checkpoint; what is newer is set aside.", show_default=False),
    ] = None,
    accept_changed_data: Annotated[
        bool,
        typer.Option("--accept-changed-data", help="Continue with other rows than the run has had so far."),
    ] = False,
    locked: Annotated[
        bool,
        typer.Option("--locked", help="Refuse other plugins, or versions or files of them, than the run recorded."),
    ] = False,
    lock_file: Annotated[
        Path | None, typer.Option(help="Hold a run to another run's plugins.lock.json.", show_default=False)
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything, train nothing.")] = False,
    as_json: AsJson = False,
) -> None:
    """Train, or continue a run that was interrupted.

    The same command continues after a kill: a run's directory follows from its config. Ctrl-C finishes the step,
    saves and exits; a second one stops at once. A config with a section `launch:` is submitted, as by `nemorl launch`;
    launch=null trains on this machine.

    Examples:

      nemorl train examples/grpo_arithmetic.yaml

      nemorl train grpo.yaml policy.optimizer.lr=1e-5 --run-dir runs/small-lr

      nemorl train grpo.yaml --from-step 200

      nemorl train grpo.yaml --lock-file ../paper/plugins.lock.json
    """
    if is_launched(config, overrides or []):
        here_only = {"--resume": resume, "--fresh": resume is False, "--from-step": from_step is not None}
        here_only |= {"--accept-changed-data": accept_changed_data}
        here_only |= {"--locked": locked, "--lock-file": lock_file is not None}
        options = ["--dry-run"] * dry_run + ["--json"] * as_json
        launch(config, overrides or [], run_dir=run_dir, here_only=here_only, options=options)
        return
    allow_more_open_files()
    console = Console(quiet=as_json)
    console.announce(f"reading {config}")
    with console:
        loaded = _checked_config(config, overrides or [], run_dir, locked, lock_file)
        from nemorl.resources.preflight import launch_problems
        from nemorl.storage.run_directory import run_path

        console.announce("checking the run directory, the model and the reward")
        if dry_run:
            _rehearse(config, loaded, console, as_json=as_json)
            return
        if from_step is not None and resume is False:
            raise UsageError("--from-step continues a run, --fresh starts one", fix="drop one of them")
        if resume or from_step is not None:
            _demand_run(loaded)
        # The reward's turn comes when it is built; what a check warns of, the run says again.
        _refuse(launch_problems(loaded, run_path(loaded), lambda _: None))
        trainer = loaded.build()
        result = trainer.fit(
            resume=resume is not False,
            from_step=from_step,
            accept_changed_data=accept_changed_data,
            console=console,
        )
    elsewhere = result.run_dir != run_path(loaded) or run_dir is not None
    options = ["--run-dir", str(result.run_dir)] if elsewhere else []
    options += ["--locked"] * locked + (["--lock-file", str(lock_file)] if lock_file is not None else [])
    _conclude(result, shlex.join(["nemorl", "train", str(config), *(overrides or []), *options]), as_json=as_json)


def _rehearse(config: Path, loaded: RunConfig, console: Console, *, as_json: bool) -> None:
    """All checks that come before a run, and what it would be."""
    from nemorl.storage.run_directory import run_path

    _refuse(loaded.dry_run(run_path(loaded), lambda text: console.message(f"warning: {text}")))
    planned = {"ok": True, "config": type(loaded).__name__, "run_dir": str(run_path(loaded))}
    memory_plan = MEMORY_PLAN.filled()
    memory = memory_plan(loaded) if memory_plan is not None else None
    if as_json:
        echo_json({**planned, "memory": memory})
        return
    if memory is not None:
        parts = ", ".join(f"{name} {gib:.2f}" for name, gib in memory["gib"].items() if gib >= 0.005)
        say(f"memory, GiB: {parts}; {memory['free_gib']:.2f} of {memory['capacity_gib']:.2f} free")
    say(f"{config}: ok, would run {planned['config']} in {planned['run_dir']}")


def _refuse(problems: Iterator[ConfigIssue]) -> None:
    if found := list(problems):
        raise ConfigError(found, source="before loading anything")


def _conclude(result: TrainResult, again: str, *, as_json: bool) -> None:
    """Say how a run ended; ``again`` is the command that continues it.

    Raises:
        TerminalLostError: it stopped because nobody watches.
    """
    summary = {
        "run_dir": str(result.run_dir),
        "report": str(result.run_dir / "report.html"),
        "steps": result.steps,
        "stopped": result.stopped,
        "continue": again if result.stopped else None,
        "best_checkpoint": str(result.best_checkpoint) if result.best_checkpoint else None,
        "metrics": dict(result.metrics),
    }
    if as_json:
        echo_json(summary)
    else:
        _tell(summary)
    if result.stopped in TERMINAL_LOST:
        raise TerminalLostError(
            f"the terminal went away ({result.stopped}): the run was saved after step {result.steps} and stopped",
            fix=f"continue it with: {again}; nohup or tmux let a run outlive its terminal",
        )


def _tell(summary: Mapping[str, Any]) -> None:
    ending = f", stopped: {summary['stopped']}" if summary["stopped"] else ""
    say(f"{summary['steps']} steps{ending}")
    if summary["stopped"]:
        say(f"to continue: {summary['continue']}")
    for name in ("validation/accuracy", "validation/val_loss", "train/reward"):
        if name in summary["metrics"]:
            say(f"{name}: {summary['metrics'][name]:.4f}")
    say(f"report: {summary['report']}")


def _checked_config(
    config: Path, overrides: list[str], run_dir: Path | None, locked: bool, lock_file: Path | None
) -> RunConfig:
    from nemorl.config.load import load_config
    from nemorl.storage.run_directory import run_path

    # In quotes, since a folder may have any name.
    changes = [*overrides, *([f"run_dir={json.dumps(str(run_dir))}"] if run_dir else [])]
    loaded = load_config(config, changes, for_launch=True)
    if locked or lock_file is not None:
        from nemorl_trust.lock import FILE, refuse_other_plugins

        refuse_other_plugins(loaded, lock_file or run_path(loaded) / FILE)
    return loaded


def _demand_run(config: RunConfig) -> None:
    from nemorl.storage.run_directory import run_path

    if not (run_path(config) / "config.yaml").is_file():
        raise UsageError(f"no run to continue in {run_path(config)}", fix="drop --resume, or give its --run-dir")


def generate(
    prompts: Annotated[list[str], typer.Argument(help="One or more prompts.", show_default=False)],
    model: Annotated[str, typer.Option(help="Hugging Face name or local folder.", show_default=False)],
    chat: Annotated[
        bool | None, typer.Option("--chat/--raw", help="Chat turn or raw text. Unset: chat if the model can.")
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="Responses per prompt.")] = 1,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 0.0,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest response.")] = 256,
    seed: Annotated[int, typer.Option(min=0, help="Seeds the sampling.")] = 0,
    backend: Annotated[str, typer.Option(help="Generation backend: a name, or {name: …, option: …}.")] = "hf",
    as_json: AsJson = False,
) -> None:
    """Let a model answer.

    Examples:

      nemorl generate --model runs/quickstart/model "12+7="

      nemorl generate --model Qwen/Qwen2.5-1.5B-Instruct --samples 4 --temperature 1 "Name a prime number."

      nemorl generate --model org/model --backend '{name: server, urls: ["http://10.0.0.7:8000"]}' "12+7="
    """
    from nemorl.base.text.mappings import apply_overrides
    from nemorl.config.load import validate
    from nemorl.config.models import GenerationConfig
    from nemorl_rl.evaluation.generating import respond
    from nemorl_trust.audit.recording import record
    from nemorl_trust.site_check import require_engine

    settings = {"temperature": temperature, "max_new_tokens": max_new_tokens}
    generation = validate(GenerationConfig, apply_overrides(settings, [f"backend={backend}"], "generate"), "generate")
    require_engine(model, generation.backend)
    record("generation_started", {"model": model, "prompts": len(prompts), "backend": backend})
    with Console(quiet=as_json) as console:
        console.message(f"loading {model}")
        answers = respond(model, prompts, generation=generation, chat=chat, samples=samples, seed=seed)
    if as_json:
        echo_json([{"prompt": prompt, "responses": texts} for prompt, texts in answers])
        return
    for prompt, texts in answers:
        for text in texts:
            lead = f"{typer.style(plain(prompt), bold=True)}{' ' if chat else ''}" if len(answers) > 1 else ""
            say(text, lead=lead)


def report(
    run_dir: Annotated[Path, typer.Argument(help="A run's directory.", show_default=False)],
    output: Annotated[Path | None, typer.Option(help="Where to write. Unset: report.html in the run.")] = None,
) -> None:
    """Write a run's report again: one HTML file, readable offline.

    Example:

      nemorl report runs/grpo-1a2b3c4d
    """
    from nemorl_cli.report.report import write_report
    from nemorl_cli.report.run_data import no_run

    if not (run_dir / "metrics.jsonl").is_file():
        raise no_run(run_dir, "metrics.jsonl")
    say(write_report(run_dir, output))


app = App(cls=group_with_default(lambda _: "list"), help="List runs (the default), and look after them.")
app.command()(prune)


@app.command("list")
def list_runs(
    folder: Annotated[Path, typer.Argument(help="Where runs are.")] = Path("runs"), as_json: AsJson = False
) -> None:
    """List the runs below a folder, the newest first: how far each is, and how well it does.

    A run is lost where its process is gone without a word: it was killed, or the machine was; --resume continues it.

    Examples:

      nemorl runs

      nemorl runs experiments/august --json
    """
    from nemorl_cli.following import was_killed
    from nemorl_cli.report.run_data import RunData, clock_time

    if not folder.is_dir():
        raise UsageError(f"no folder {str(folder)!r}", fix="give the folder that holds the runs' directories")
    runs = [(RunData.load(path.parent), was_killed(path.parent)) for path in folder.glob("*/config.yaml")]
    runs.sort(key=lambda run: run[0].times[0] if run[0].times else 0.0, reverse=True)
    found: list[dict[str, Any]] = [
        {
            "name": run.name,
            "status": "lost" if is_killed and run.status == "incomplete" else run.status,
            "algorithm": run.algorithm,
            "model": run.model,
            "step": run.last_step,
            "max_steps": run.max_steps,
            "reward": run.last("train/reward"),
            "accuracy": run.last("validation/accuracy"),
            "started": run.started,
            "seconds": round(run.duration_s, 1),
        }
        for run, is_killed in runs
    ]
    if as_json:
        echo_json(found, indent=2)
        return
    rows = []
    for facts in found:
        steps = f"{facts['step']}{f' of {most}' if (most := facts['max_steps']) else ''}"
        numbers = ("–" if facts[key] is None else f"{facts[key]:.3f}" for key in ("reward", "accuracy"))
        model, took = Path(facts["model"]).name, clock_time(facts["seconds"])
        rows.append((facts["name"], facts["status"], model, steps, *numbers, facts["started"], took))
    columns = ("NAME", "STATUS", "MODEL", "STEP", "REWARD", "ACCURACY", "STARTED", "TOOK")
    print_list(columns, rows, first_to_go=("TOOK", "STARTED", "MODEL"))
    if not found:
        say(f"no runs in {folder} yet: nemorl train CONFIG")


def export(
    run_dir: Annotated[Path, typer.Argument(help="A run's directory.", show_default=False)],
    output: Annotated[Path, typer.Argument(help="The folder to write.", show_default=False)],
    overrides: Overrides = None,
    step: Annotated[int | None, typer.Option(help="Of the checkpoint. Unset: the latest.")] = None,
    best: Annotated[bool, typer.Option("--best", help="The best checkpoint by the run's metric.")] = False,
    adapter: Annotated[bool, typer.Option("--adapter", help="The LoRA adapter alone, as a folder of peft.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write a checkpoint's policy as a Hugging Face folder, to start from with any training or generation backend.

    A finished run has the last one in its folder model/ already. With LoRA that is the adapted model; --adapter writes
    the adapter alone, which peft loads onto the model that the run started from, and vLLM serves beside others.

    Examples:

      nemorl export runs/grpo-1a2b3c4d models/best --best

      nemorl export runs/grpo-1a2b3c4d models/step-100 --step 100 cluster.launcher=local

      nemorl export runs/grpo-1a2b3c4d --adapter adapters/sums
    """
    from nemorl_rl.models.exporting import export_model

    with Console(quiet=as_json) as console:
        console.message(f"reading a checkpoint of {run_dir}")
        checkpoint = export_model(run_dir, output, step=step, best=best, adapter=adapter, overrides=overrides or [])
    found = {"step": checkpoint.step, "checkpoint": str(checkpoint.path)}
    found["adapter" if adapter else "model"] = str(output)
    if as_json:
        echo_json(found)
    else:
        say(f"wrote step {checkpoint.step} to {output}")

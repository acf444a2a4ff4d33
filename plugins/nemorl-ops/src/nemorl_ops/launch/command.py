"""``nemorl launch CONFIG`` and ``nemorl launch status | logs | cancel | attach NAME``."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from nemorl.base.process.stopping import GracefulStop
from nemorl.base.text.suggest import did_you_mean
from nemorl.errors import Interrupted, UsageError
from nemorl_cli.answers import AsJson, echo_json
from nemorl_cli.plugin_app import plugin_app
from nemorl_cli.runs import Overrides
from nemorl_cli.terminal import print_list, say
from typer.core import TyperGroup

if TYPE_CHECKING:
    from nemorl_ops.launch.base import Job, Launch, LauncherConfig, Status

SUBMIT = "submit"
WITH_VALUE = ("--on", "--name", "--folder")


class _SubmitByDefault(TyperGroup):
    """``nemorl launch run.yaml`` is ``nemorl launch submit run.yaml``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        first = next(
            (
                word
                for before, word in zip(["", *args], args, strict=False)
                if not word.startswith("-") and before not in WITH_VALUE
            ),
            None,
        )
        if first is not None and first not in self.commands:
            args = [SUBMIT, *args]
        return super().parse_args(ctx, args)


app = plugin_app(
    cls=_SubmitByDefault,
    help="Start a run on a cluster, over SSH or in the background here; look after it.\n\n"
    "Examples:\n\n"
    "  nemorl launch grpo.yaml --on slurm launch.partition=gpu launch.nodes=4 --dry-run\n\n"
    "  nemorl launch grpo.yaml --on local\n\n"
    "  nemorl launch status",
    no_args_is_help=True,
)

Name = Annotated[str, typer.Argument(help="Name of the launch.", show_default=False)]
Folder = Annotated[Path, typer.Option(help="Folder of all launches, which all nodes see.")]
CommandAsJson = Annotated[bool, typer.Option("--json", help="Print the command that does it, and run nothing.")]
LAUNCHES = Path("launches")


@app.command(SUBMIT)
def submit(
    config: Annotated[Path, typer.Argument(help="Config file of the run.", show_default=False)],
    overrides: Overrides = None,
    on: Annotated[
        str | None, typer.Option("--on", help="Launcher: slurm, kubernetes, ssh, local.", show_default=False)
    ] = None,
    name: Annotated[str | None, typer.Option(help="Of the launch. Unset: the run's.", show_default=False)] = None,
    folder: Folder = LAUNCHES,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Write and print what would be submitted.")] = False,
    as_json: AsJson = False,
) -> None:
    """Submit a run. The same command submits again what has stopped, and it continues.

    Options of the launcher are in the config's section `launch:`, or given as launch.OPTION=VALUE. Needs no GPU and no
    torch.

    Examples:

      nemorl launch grpo.yaml --on slurm launch.partition=gpu launch.nodes=4 launch.gpus_per_node=8

      nemorl launch grpo.yaml --dry-run

      nemorl launch grpo.yaml --on kubernetes launch.image=registry.example.org/nemorl:1

      nemorl launch grpo.yaml --on local --name try-1
    """
    from nemorl_ops.launch.base import CONFIG
    from nemorl_ops.launch.prepare import prepare, secret_values
    from nemorl_ops.launch.records import submitted

    _refuse_misspelt(config)
    prepared = prepare(config, overrides or [], on=on, name=name, root=folder)
    job, launcher = prepared.job, prepared.launcher
    found: dict[str, Any] = {"name": job.name, "folder": str(job.folder), "run_dir": str(job.run_dir)}
    found |= {"launcher": prepared.launcher_name, "command": prepared.submission}
    found |= {"plan": prepared.plan.words, "chosen": dict(prepared.plan.chosen)}
    if dry_run:
        prepared.write()
        if as_json:
            echo_json({**found, "files": prepared.files}, indent=2)
            return
        say(f"# {job.num_nodes} node{'s' * (job.num_nodes > 1)}, {_devices(job)}; nemorl plan: {prepared.plan.words}")
        config_lines = prepared.files[CONFIG].count("\n")
        say(f"# {job.folder / CONFIG}: the run's config, {config_lines} lines with all defaults")
        for file, text in prepared.files.items():
            if file != CONFIG:
                say(f"# {job.folder / file}")
                say(text)
        say(f"# would run\n{prepared.submission}")
        return
    secret_values(launcher)
    handle = submitted(prepared)
    if as_json:
        echo_json({**found, "handle": handle}, indent=2)
        return
    say(f"launched {job.name} on {prepared.launcher_name}: {', '.join(f'{k} {v}' for k, v in handle.items())}")
    if prepared.plan.chosen:
        say(f"nemorl plan: {prepared.plan.words}")
    say(f"nemorl launch status {job.name}")


def _devices(job: Job) -> str:
    if job.gpus_per_node:
        return f"{job.gpus_per_node} GPU{'s' * (job.gpus_per_node > 1)} each"
    return f"no GPUs, {job.workers_per_node} worker{'s' * (job.workers_per_node > 1)} each"


def _refuse_misspelt(config: Path) -> None:
    """`nemorl launch stauts` is a command, misspelt, rather than a config that is not there."""
    if not config.exists() and not config.suffix:
        commands = [
            command.name or command.callback.__name__ for command in app.registered_commands if command.callback
        ]
        if fix := did_you_mean(str(config), commands):
            raise UsageError(f"there is no config and no command {str(config)!r}", fix=fix)


@app.command()
def status(
    name: Annotated[str | None, typer.Argument(help="Of one launch. Unset: all.", show_default=False)] = None,
    folder: Folder = LAUNCHES,
    as_json: AsJson = False,
) -> None:
    """Show how launches are: pending, running, finished, stopped, failed, cancelled; which attempt, on which nodes.

    Examples:

      nemorl launch status

      nemorl launch status grpo-1a2b3c4d --json
    """
    from nemorl_ops.launch.records import all_facts, facts

    found = all_facts(folder) if name is None else [facts(folder, name)]
    if as_json:
        echo_json(found[0] if name is not None else found, indent=2)
        return
    rows = [(f["name"], f["launcher"], f["state"], str(f["attempt"]), " ".join(f["nodes"]), f["detail"]) for f in found]
    print_list(("NAME", "ON", "STATE", "ATTEMPT", "NODES", "DETAIL"), rows, first_to_go=("NODES", "DETAIL"))
    if not found:
        say(f"nothing was launched from {folder} yet: nemorl launch CONFIG --on LAUNCHER")


@app.command()
def logs(
    name: Name,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what is written.")] = False,
    folder: Folder = LAUNCHES,
    as_json: CommandAsJson = False,
) -> None:
    """Print the output of a launch's newest attempt.

    Examples:

      nemorl launch logs grpo-1a2b3c4d -f
    """
    launch, launcher, _ = found_job(folder, name)
    _become(name, launcher.logs(launch, follow=follow), as_json=as_json)


@app.command()
def cancel(
    name: Name,
    now: Annotated[bool, typer.Option("--now", help="At once, without finishing the step and saving.")] = False,
    folder: Folder = LAUNCHES,
    as_json: AsJson = False,
) -> None:
    """End a launch: it finishes its step, saves, and is not started again.

    Examples:

      nemorl launch cancel grpo-1a2b3c4d

      nemorl launch cancel grpo-1a2b3c4d --now
    """
    launch, launcher, now_is = found_job(folder, name)
    before = now_is.state
    if before not in ("pending", "running", "unknown"):
        raise UsageError(f"{name} is {before} already", fix="there is nothing to cancel")
    launcher.cancel(launch, now=now)
    if as_json:
        echo_json({"name": name, "was": before, "now": now})
        return
    ended = now or before == "pending"
    say(f"{name} is cancelled" if ended else f"{name} finishes its step, saves and ends; --now ends it at once")


@app.command()
def attach(
    name: Name,
    node: Annotated[int, typer.Option(min=0, help="Rank of the node, from 0.")] = 0,
    folder: Folder = LAUNCHES,
    as_json: CommandAsJson = False,
) -> None:
    """Open a shell on a node of a running launch.

    Examples:

      nemorl launch attach grpo-1a2b3c4d --node 1
    """
    launch, launcher, now_is = found_job(folder, name)
    if now_is.state != "running":
        raise UsageError(f"{name} is {now_is.state}: there is no node to attach to", fix=f"nemorl launch status {name}")
    if node >= launch.job.num_nodes:
        raise UsageError(f"{name} has nodes 0 to {launch.job.num_nodes - 1}", fix="--node 0")
    _become(name, launcher.attach(launch, node), as_json=as_json)


def found_job(folder: Path, name: str) -> tuple[Launch, LauncherConfig, Status]:
    """A launch that a job belongs to, and how that is.

    Raises:
        UsageError: there is none.
    """
    from nemorl_ops.launch.records import find

    launch, launcher, status = find(folder, name)
    if not launch.handle:
        raise UsageError(f"{name} has no job: {status.detail}", fix=f"nemorl launch CONFIG --name {name}")
    return launch, launcher, status


def _become(name: str, command: list[str], *, as_json: bool) -> None:
    """Run a program on this terminal, and end as it does; Ctrl-C is the program's, and ends it well."""
    if as_json:
        echo_json({"name": name, "command": command})
        return
    try:
        with GracefulStop(_unless_ctrl_c):
            done = subprocess.run(command, check=False)
    except OSError as error:
        raise UsageError(f"{command[0]} cannot be run: {error.strerror}", fix="check that it is installed") from error
    if done.returncode == -signal.SIGINT:
        return
    raise typer.Exit(done.returncode if done.returncode >= 0 else 128 - done.returncode)


def _unless_ctrl_c(name: str) -> None:
    if name != signal.SIGINT.name:
        raise Interrupted(f"received {name}")

"""The command tree, commands that plugins add, and how errors reach a person."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Annotated, Any

import typer
from nemorl import __version__
from nemorl.base.packages.standard_plugins import STANDARD_PLUGINS, how_to_install
from nemorl.base.process.stopping import note
from nemorl.base.text.reading import shown
from nemorl.base.text.secrets import redacted
from nemorl.errors import Interrupted, NemorlError, UsageError
from nemorl.plugins import PluginEntry, registry
from nemorl_trust.source import read_source
from rich.markup import escape
from typer.core import TyperGroup

from nemorl_cli import compare, configs, evals, plugin_installs, plugins, runs, samples, watch
from nemorl_cli.directory import commands as directory
from nemorl_cli.forwarding import forward
from nemorl_cli.help_texts import PANELS, App, group_with_default, panel_of
from nemorl_cli.leaving import Others, PromptStop, leave
from nemorl_cli.streams import SteadyStream
from nemorl_cli.terminal import plain, say

HELP = ("-h", "--help")
ANYTHING = {"ignore_unknown_options": True, "allow_extra_args": True}
"""Settings of a command that reads its arguments itself."""
USER_ERROR = 2
UNEXPECTED = 1
LOST_OUTPUT = 1
"""Nobody could read the answer."""
BY_SIGNAL = 128
"""A shell's convention: 128 + the number of the signal."""
ENOUGH = BY_SIGNAL + signal.SIGPIPE
"""The reader of the output has read what it wanted, as `head` does: that is no mistake, and no word is said of it."""
FIX_EXIT = "whose code that is must raise an Exception instead; only the command decides that all went well"
FIX_PATH = "check the path, and the permissions of its folders"
FIX_BUG = "--debug shows the traceback; if it is not in your own code, report it to whom it belongs"
FIX_OUTPUT = "what the command did is done; where its output matters, keep the pipe or terminal open, or use a file"
FIX_SIGNAL = "the same command continues a run from its last checkpoint"


class _CommandExit(SystemExit):
    """``sys.exit`` in code that a command ran. Typer's own, which says how a command ended, comes after all of it."""


class _Root(TyperGroup):
    """The command ``nemorl``."""

    def list_commands(self, ctx: Any) -> list[str]:
        """In the order of their panels, which typer shows as they come."""
        order = [name for names in PANELS.values() for name in names]
        return sorted(super().list_commands(ctx), key=lambda name: order.index(name) if name in order else len(order))

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except SystemExit as exit_:
            raise _CommandExit(exit_.code) from exit_


app = App(
    cls=_Root,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": [*HELP]},
    help="Post-train language models with reinforcement learning.",
    epilog="Start with: nemorl quickstart",
)
for _name, _command in {
    "train": runs.train,
    "eval": evals.evaluate,
    "generate": runs.generate,
    "export": runs.export,
    "report": runs.report,
}.items():
    app.command(_name, rich_help_panel=panel_of(_name))(_command)
view_app = App(
    cls=group_with_default(lambda _: "page"),
    no_args_is_help=True,
    help="Look into runs: on a local page, or in the terminal.\n\n`nemorl view RUN` is `view page`.",
)
view_app.command()(samples.samples)
view_app.command()(watch.watch)
plugins.app.command("install", context_settings=plugin_installs.PASS_ON)(plugin_installs.install)
plugins.app.command("uninstall")(plugin_installs.uninstall)
plugins.app.command("search")(directory.search)
plugins.app.command("index")(directory.index)
GROUPS = {"plugins": plugins.app, "config": configs.app, "runs": runs.app, "view": view_app, "compare": compare.app}
"""Commands that have commands. Plugins may add to them: the entry ``config.migrate`` is `nemorl config migrate`."""
for _name, _group in GROUPS.items():
    app.add_typer(_group, name=_name, rich_help_panel=panel_of(_name))


def _show_version(wanted: bool) -> None:
    if wanted:
        say(f"nemorl {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show it.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")] = False,
) -> None:
    """Options that every command has."""


@contextmanager
def _plugin_commands(arguments: Sequence[str]) -> Iterator[None]:
    """One command per entry of ``nemorl.commands``: described by its source, imported when it is called.

    The next command of this process finds the tree without them: it may see other plugins.
    """
    own = [(group, len(group.registered_commands)) for group in (app, *GROUPS.values())]
    try:
        _add_plugin_commands(described=len(arguments) <= 1 or bool({*HELP} & {*arguments}))
        yield
    finally:
        for group, count in own:
            del group.registered_commands[count:]


def _add_plugin_commands(*, described: bool) -> None:
    for entry in registry().index.of_kind("commands"):
        if entry.diagnostics:
            continue
        summary = read_source(entry).summary if described else ""  # only a help text shows it
        group, _, name = entry.name.rpartition(".")
        GROUPS.get(group, app).command(
            name if group in GROUPS else entry.name,
            help=escape(plain(summary or f"from {entry.distribution}")),  # help texts are rich's markup
            rich_help_panel=None if group in GROUPS else panel_of(entry.name),
            add_help_option=False,
            context_settings=ANYTHING,
        )(_forward_to(entry))

    have = {entry.name for entry in registry().index.of_kind("commands")}
    known = (item for item in STANDARD_PLUGINS.items() if item[0].startswith("commands:"))
    for name, distribution in ((key.partition(":")[2], distribution) for key, distribution in known):
        if name not in have:
            group, _, last = name.rpartition(".")
            lacking = GROUPS.get(group, app).command(
                last, hidden=True, add_help_option=False, context_settings=ANYTHING
            )
            lacking(_missing(name.replace(".", " "), distribution))


def _missing(name: str, distribution: str) -> Callable[[], None]:
    def run() -> None:
        message = f"`nemorl {name}` comes with {distribution}, which is not installed"
        raise UsageError(message, fix=how_to_install(distribution))

    return run


def _forward_to(entry: PluginEntry) -> Callable[[typer.Context], None]:
    def run(ctx: typer.Context) -> None:
        forward(entry, ctx.args)

    return run


def main() -> None:
    """Run the command of ``sys.argv`` and exit. Whatever ends it, the exit code is 0 only where all went well.

    A user's mistake prints what happened and how to fix it, without a traceback, and exits 2.
    """
    others, stdout, stderr = Others.now(), SteadyStream(sys.stdout), SteadyStream(sys.stderr)
    with redirect_stdout(stdout), redirect_stderr(stderr):  # type: ignore[type-var]
        code = _run([argument for argument in sys.argv[1:] if argument != "--debug"], debug="--debug" in sys.argv)
        stdout.flush()
        if stdout.had_enough and code == 0:
            code = ENOUGH
        elif stdout.is_lost and code == 0:
            code = _report("nobody read all of what went to standard output", FIX_OUTPUT, debug=False, code=LOST_OUTPUT)
        stderr.flush()
        note(exit=code)
        leave(code, others)


def _run(arguments: list[str], *, debug: bool) -> int:
    """The exit code; errors are printed."""
    with PromptStop() as stop:
        try:
            with _plugin_commands(arguments):
                app(arguments, prog_name="nemorl")
            return 0
        except SystemExit as exit_:
            if isinstance(exit_.__context__, BrokenPipeError):  # typer's answer to one
                return ENOUGH
            if stop.name is None and isinstance(exit_, _CommandExit):
                cause = exit_.__cause__ or exit_
                return _report(f"{type(cause).__name__}: {exit_.code}{_raised_at(cause)}", FIX_EXIT, debug=debug)
            code = exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
            if stop.name is None and code == BY_SIGNAL + signal.SIGINT:
                return _report("KeyboardInterrupt, though nobody pressed Ctrl-C", FIX_EXIT, debug=debug, code=code)
        except Interrupted:
            code = 0
        except NemorlError as error:
            return _report(error.message, error.fix, debug=debug, code=USER_ERROR)
        except OSError as error:
            if _is_named(error.filename, arguments):
                message = f"{shown(str(error.filename))} cannot be used ({error.strerror})"
                return _report(message, FIX_PATH, debug=debug, code=USER_ERROR)
            return _report(f"{type(error).__name__}: {error}{_raised_at(error)}", FIX_BUG, debug=debug)
        except BaseException as error:
            return _report(f"{type(error).__name__}: {error}{_raised_at(error)}", FIX_BUG, debug=debug)
        if stop.name is not None:
            number = BY_SIGNAL + signal.Signals[stop.name]
            return _report(f"received {stop.name}: ended at once", FIX_SIGNAL, debug=debug, code=number)
        return code


def _is_named(path: object, arguments: Sequence[str]) -> bool:
    """A path that was written on the command line, or one below it."""
    written = (value for argument in arguments for value in (argument, argument.partition("=")[2]) if value)
    places = {os.path.abspath(os.path.expanduser(value)) for value in written}
    return isinstance(path, str | os.PathLike) and any(
        Path(os.path.abspath(path)).is_relative_to(place) for place in places
    )


def _raised_at(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return f" (in {frames[-1].filename}, line {frames[-1].lineno}, {frames[-1].name})" if frames else ""


def _report(message: str, fix: str | None, *, debug: bool, code: int = UNEXPECTED) -> int:
    """Say what went wrong, without secrets: libraries put keys into messages, and this often goes to a log."""
    if debug:
        say(redacted(traceback.format_exc()), err=True)
    text = redacted(f"{message}\n  fix: {fix}" if fix else message)
    say(text, lead=typer.style("error: ", fg="red", bold=True), err=True)
    return code

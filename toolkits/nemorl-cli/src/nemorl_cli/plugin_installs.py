"""``nemorl plugins install | uninstall``: pip, here or in a virtual environment of the plugin's own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated
from urllib.parse import unquote, urlparse

import typer
from nemorl import __version__
from nemorl.base.packages.plugin_policy import normalize
from nemorl.base.text.reading import expanded
from nemorl.errors import PluginError, PluginNotFoundError, UsageError
from nemorl.plugins import Index
from nemorl.plugins.index import PREFIX, singular
from nemorl_trust.audit.recording import record
from nemorl_trust.isolation.venvs import IsolatedPoint, distribution_name, remove_venv, venv_of, write_record
from nemorl_trust.site import require

from nemorl_cli.answers import AsJson, echo_json
from nemorl_cli.plugins import as_dict
from nemorl_cli.terminal import say

PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True}

CHECKING = ("nemorl-testing", "nemorl-tensors", "nemorl-rl")
"""Toolkits that checks of a plugin import; those that are here are installed beside it."""


def install(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(help="What pip calls it: a name, name==version, wheel or folder.")],
    isolated: Annotated[
        bool, typer.Option("--isolated", help="In a virtual environment of its own, beside the rest.")
    ] = False,
    pass_env: Annotated[
        list[str] | None,
        typer.Option(
            "--pass-env", help="A variable that an isolated plugin may read, such as a key.", show_default=False
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Install a plugin with pip. What follows `--` goes to pip.

    With --isolated the plugin gets an environment of its own, with the same nemorl-core and Ray: its dependencies may
    conflict with all others. Environments, datasets and loggers then run in a process of theirs, training and
    generation backends on Ray workers.

    Examples:

      nemorl plugins install nemorl-megatron

      nemorl plugins install acme-grader --isolated

      nemorl plugins install ./my-plugin --isolated -- --find-links dist
    """
    distribution = distribution_named_by(name)
    require("install", distribution)
    if isolated:
        found = install_isolated(name, distribution, ctx.args, variables=pass_env or (), quiet=as_json)
    elif pass_env:
        raise UsageError("--pass-env is for isolated plugins: others share this environment", fix="add --isolated")
    else:
        _pip(Path(sys.executable), ["install", name, *ctx.args], quiet=as_json)
        found = Index.installed()
    installed = [entry for entry in found.entries if normalize(entry.distribution) == distribution]
    versions = sorted({entry.version for entry in installed})
    record("plugin_installed", {"distribution": distribution, "versions": versions, "isolated": isolated})
    entries = [as_dict(entry) for entry in installed]
    if as_json:
        echo_json(entries, indent=2)
        return
    for entry in entries:
        say(f"{singular(entry['kind'])} {entry['name']}: {entry['status']}  {entry['summary']}")
    if not entries:
        say(f"{distribution} is installed, and offers no plugin")


def uninstall(
    name: Annotated[str, typer.Argument(help="Name of the distribution.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Remove a plugin: its own virtual environment if it has one, else with pip. Asks first.

    Examples:

      nemorl plugins uninstall acme-grader

      nemorl plugins uninstall acme-grader --yes
    """
    distribution = distribution_name(name)
    venv = venv_of(distribution)
    if os.path.lexists(venv.folder):
        _ask(f"remove {venv.folder}", yes=yes)
        remove_venv(venv)
        record("plugin_uninstalled", {"distribution": distribution, "isolated": True})
        say(f"removed {venv.folder}")
        return
    try:
        version = metadata.version(distribution)
    except metadata.PackageNotFoundError as error:
        raise PluginNotFoundError(f"no distribution {name!r} is installed", fix="nemorl plugins list") from error
    if distribution not in {normalize(entry.distribution) for entry in Index.installed().entries}:
        raise UsageError(
            f"{distribution} brings no plugin", fix=f"pip uninstall {distribution}, if that is what you want"
        )
    _ask(f"pip uninstall {distribution} {version} from {sys.prefix}", yes=yes)
    _pip(Path(sys.executable), ["uninstall", "--yes", distribution], quiet=False)
    record("plugin_uninstalled", {"distribution": distribution, "isolated": False})


def _ask(what: str, *, yes: bool) -> None:
    """Go on only with a person's consent, or with ``--yes``.

    Raises:
        UsageError: nobody can be asked.
    """
    if yes:
        return
    if not sys.stdin.isatty():
        raise UsageError(f"nothing was removed: {what} needs a yes, and no terminal can be asked", fix="add --yes")
    typer.confirm(f"{what}?", abort=True)


def install_isolated(
    name: str, distribution: str, pip_args: Sequence[str], *, variables: Sequence[str] = (), quiet: bool
) -> Index:
    """Make the virtual environment of a plugin, in place of one that it has.

    Args:
        name: What pip is asked for.
        distribution: The name that it has, normalised.
        pip_args: Further arguments for pip.
        variables: Environment variables that its process gets besides the harmless ones.
        quiet: Keep standard output free.

    Returns:
        What is installed now.

    Raises:
        PluginError: pip fails, or what it installed offers no plugin. Nothing is left behind.
    """
    here = [entry for entry in Index.installed().entries if normalize(entry.distribution) == distribution]
    if any(entry.venv is None for entry in here):
        raise UsageError(
            f"{distribution} is installed in this environment already, which would be used first",
            fix=f"nemorl plugins uninstall {distribution}, then install it isolated",
        )
    venv = venv_of(distribution)
    if os.path.lexists(venv.folder):
        remove_venv(venv)
    facts: dict[str, str | list[str]] = {"requirement": name, "nemorl-core": __version__}
    facts["environment"] = list(variables)
    write_record(venv, complete=False, **facts)
    try:
        _run([sys.executable, "-m", "venv", str(venv.folder)], quiet=quiet)
        same = [*map(_same, ("nemorl-core", "nemorl-trust")), f"ray=={metadata.version('ray')}"]
        _pip(venv.python, ["install", *same, name, *pip_args], quiet=quiet)
        # What `plugins check` runs there; it brings no torch where the plugin has none.
        checking = [_same(part) for part in CHECKING if find_spec(part.replace("-", "_"))]
        _pip(venv.python, ["install", "--no-deps", *checking, *pip_args], quiet=quiet)
        if not any(isinstance(point, IsolatedPoint) for point in venv.points(PREFIX)):
            raise PluginError(f"{distribution} offers no plugin", fix="check the name; see `nemorl plugins install -h`")
        write_record(venv, complete=True, **facts)
    except BaseException:
        remove_venv(venv)
        raise
    return Index.installed()


def distribution_named_by(name: str) -> str:
    """The normalised distribution that a pip requirement, wheel file or project folder means."""
    from packaging.requirements import InvalidRequirement, Requirement
    from packaging.utils import InvalidWheelFilename, parse_wheel_filename

    path = expanded(name)
    try:
        if name and path.is_dir():
            text = (path / "pyproject.toml").read_text(encoding="utf-8")
            return distribution_name(tomllib.loads(text)["project"]["name"])
        if path.suffix == ".whl":
            return distribution_name(parse_wheel_filename(path.name)[0])
        return distribution_name(Requirement(name).name)
    except (InvalidRequirement, InvalidWheelFilename, OSError, LookupError, TypeError, ValueError) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(
            f"{name!r} is no package: {error}", fix="give a name, name==version, a .whl file or a project's folder"
        ) from error


def _same(distribution: str) -> str:
    """A part of nemorl as pip must be asked for it to get this one: by version, or the folder that it came from."""
    text = metadata.distribution(distribution).read_text("direct_url.json")
    address = urlparse(json.loads(text)["url"]) if text else None
    if address is not None and address.scheme == "file":
        return unquote(address.path)
    return f"{distribution}=={__version__}"


def _pip(python: Path, arguments: Sequence[str], *, quiet: bool) -> None:
    if python == Path(sys.executable) and find_spec("pip") is None:
        raise PluginError("this environment has no pip", fix=f"uv pip {' '.join(arguments)}")
    _run([str(python), "-m", "pip", *arguments, *(["--quiet"] if quiet else [])], quiet=quiet)


def _run(command: Sequence[str], *, quiet: bool) -> None:
    """Run a module of Python, ``pip`` or ``venv``."""
    done = subprocess.run(command, check=False, stdout=sys.stderr if quiet else None)
    if done.returncode:
        raise PluginError(f"{command[2]} failed: {' '.join(command)}", fix="see what it says above")

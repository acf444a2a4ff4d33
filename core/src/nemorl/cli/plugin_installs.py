"""``nemorl plugins install | uninstall``: pip, here or in a virtual environment of the plugin's own."""

from __future__ import annotations

import json
import shutil
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
from nemorl.cli.plugins import as_dict
from nemorl.cli.runs import AsJson
from nemorl.errors import PluginError, PluginNotFoundError, UsageError
from nemorl.plugins import Index
from nemorl.plugins.index import PREFIX, singular
from nemorl.plugins.policy import KERNEL, normalize
from nemorl.plugins.venvs import RECORD, PluginVenv, venv_of

PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True}


def install(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(help="What pip calls it: a name, name==version, wheel or folder.")],
    isolated: Annotated[
        bool, typer.Option("--isolated", help="In a virtual environment of its own, beside the rest.")
    ] = False,
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
    if isolated:
        found = install_isolated(name, distribution, ctx.args, quiet=as_json)
    else:
        _pip(Path(sys.executable), ["install", name, *ctx.args], quiet=as_json)
        found = Index.installed()
    entries = [as_dict(entry) for entry in found.entries if normalize(entry.distribution) == distribution]
    if as_json:
        typer.echo(json.dumps(entries, indent=2))
        return
    for entry in entries:
        typer.echo(f"{singular(entry['kind'])} {entry['name']}: {entry['status']}  {entry['summary']}")
    if not entries:
        typer.echo(f"{distribution} is installed, and offers no plugin")


def uninstall(name: Annotated[str, typer.Argument(help="Name of the distribution.")]) -> None:
    """Remove a plugin: its own virtual environment if it has one, else with pip.

    Example:

      nemorl plugins uninstall acme-grader
    """
    venv = venv_of(name)
    if venv.folder.is_dir():
        shutil.rmtree(venv.folder)
        typer.echo(f"removed {venv.folder}")
        return
    try:
        metadata.distribution(name)
    except metadata.PackageNotFoundError as error:
        raise PluginNotFoundError(f"no distribution {name!r} is installed", fix="nemorl plugins list") from error
    _pip(Path(sys.executable), ["uninstall", "--yes", name], quiet=False)


def install_isolated(name: str, distribution: str, pip_args: Sequence[str], *, quiet: bool) -> Index:
    """Make the virtual environment of a plugin, in place of one that it has.

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
    if venv.folder.exists():
        shutil.rmtree(venv.folder)
    try:
        subprocess.run([sys.executable, "-m", "venv", str(venv.folder)], check=True)
        same = [_same_kernel(), f"ray=={metadata.version('ray')}"]
        _pip(venv.python, ["install", *same, name, *pip_args], quiet=quiet)
        if not any(point.group.startswith(PREFIX) for point in venv.points):
            raise PluginError(f"{distribution} offers no plugin", fix="check the name; see `nemorl plugins install -h`")
        _write_record(venv, name)
    except BaseException:
        shutil.rmtree(venv.folder, ignore_errors=True)
        raise
    return Index.installed()


def distribution_named_by(name: str) -> str:
    """The normalised distribution that a pip requirement, wheel file or project folder means."""
    from packaging.requirements import InvalidRequirement, Requirement
    from packaging.utils import InvalidWheelFilename, parse_wheel_filename

    path = Path(name).expanduser()
    try:
        if name and path.is_dir():
            return normalize(tomllib.loads((path / "pyproject.toml").read_text())["project"]["name"])
        if path.suffix == ".whl":
            return normalize(parse_wheel_filename(path.name)[0])
        return normalize(Requirement(name).name)
    except (InvalidRequirement, InvalidWheelFilename, OSError, KeyError, tomllib.TOMLDecodeError) as error:
        raise UsageError(
            f"{name!r} is no package: {error}", fix="give a name, name==version, a .whl file or a project's folder"
        ) from error


def _same_kernel() -> str:
    """nemorl-core as pip must be asked for it to get this one: by version, or the folder that it came from."""
    text = metadata.distribution(KERNEL).read_text("direct_url.json")
    address = urlparse(json.loads(text)["url"]) if text else None
    if address is not None and address.scheme == "file":
        return unquote(address.path)
    return f"{KERNEL}=={__version__}"


def _write_record(venv: PluginVenv, requirement: str) -> None:
    facts = {"distribution": venv.distribution, "requirement": requirement, "nemorl-core": __version__}
    (venv.folder / RECORD).write_text(json.dumps(facts, indent=1))


def _pip(python: Path, arguments: Sequence[str], *, quiet: bool) -> None:
    if python == Path(sys.executable) and find_spec("pip") is None:
        raise PluginError("this environment has no pip", fix=f"uv pip {' '.join(arguments)}")
    command = [str(python), "-m", "pip", *arguments, *(["--quiet"] if quiet else [])]
    done = subprocess.run(command, check=False, stdout=sys.stderr if quiet else None)
    if done.returncode:
        raise PluginError(f"pip failed: {' '.join(command)}", fix="see what it says above")

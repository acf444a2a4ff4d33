"""Writes ``docs/stable-surface.txt``: all that a release promises to keep, a line each, taken from the code.

    python docs/generate_stable_surface.py            write it
    python docs/generate_stable_surface.py --check    exit 1 if something differs

Public names with signatures, hooks among them; parts by kind; commands with options; config keys with defaults; metrics
with units; file formats with versions. docs/versions.md says what a line that changes or goes needs.
"""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "docs"))

import generate_api as api  # noqa: E402  (beside this program)
import generate_metrics as metrics  # noqa: E402
import generate_reference as reference  # noqa: E402
import typer  # noqa: E402
from nemorl.config import RESUMABLE, Config, RunConfig  # noqa: E402
from nemorl.plugins import registry  # noqa: E402
from nemorl.plugins.index import KINDS, PluginEntry, singular  # noqa: E402
from nemorl_cli.report.records.schema import SCHEMA  # noqa: E402
from nemorl_rl.config import RolloutRunConfig  # noqa: E402
from nemorl_rl.policy_gradient.config import PolicyGradientConfig  # noqa: E402
from stable_surface import SURFACE  # noqa: E402

PAGE = ROOT / "docs" / "stable-surface.txt"
INTRO = """\
# What nemorl promises to keep (docs/versions.md). Written by docs/generate_stable_surface.py; not by hand.
"""
FORMATS: Mapping[str, tuple[str, str]] = {
    "checkpoint folder": ("core/src/nemorl/base/files/checkpoints.py", "FORMAT"),
    "state of the backend dtensor": ("nemorl-dtensor/src/nemorl_dtensor/checkpoint.py", "FORMAT"),
    "state of the backend megatron": ("nemorl-megatron/src/nemorl_megatron/storage.py", "VERSION"),
    "rollout records": ("toolkits/nemorl-cli/src/nemorl_cli/report/records/schema.py", "VERSION"),
    "signed set of plugins": ("toolkits/nemorl-trust/src/nemorl_trust/signatures.py", "SET"),
    "signed index of plugins": ("toolkits/nemorl-cli/src/nemorl_cli/directory/indexes.py", "INDEX"),
    "nemorl doctor --json": ("plugins/nemorl-insight/src/nemorl_insight/doctor/examination.py", "SCHEMA"),
}
"""Files that a later version must read or refuse by number: name -> where their number is."""
BASES = (
    ("every run", RunConfig),
    ("every run that samples", RolloutRunConfig),
    ("every policy-gradient run", PolicyGradientConfig),
)
"""Keys that several algorithms share, the widest first."""


def text() -> str:
    """The whole file."""
    sections = {
        "names": names(),
        "parts": parts(),
        "commands": commands(),
        "config": config_keys(),
        "metrics": metric_names(),
        "formats": formats(),
    }
    return INTRO + "".join(f"\n[{title}]\n" + "\n".join(lines) + "\n" for title, lines in sections.items())


def entries(kind: str) -> list[PluginEntry]:
    """Parts of one kind that this repository's distributions provide."""
    return [entry for entry in registry().index.of_kind(kind) if entry.distribution in distributions()]


@cache
def distributions() -> frozenset[str]:
    """The names of this repository's packages."""
    files = [path for pattern in ("*", "toolkits/*", "plugins/*") for path in ROOT.glob(f"{pattern}/pyproject.toml")]
    return frozenset(tomllib.loads(file.read_text("utf-8"))["project"]["name"] for file in files)


def names() -> Iterator[str]:
    """Each public name with its signature, and the public members of classes."""
    for module, offered in SURFACE.items():
        for name in sorted(offered):
            found, home = api.documented(module, name), api.home_of(module, name)
            if home is not None:
                yield f"{module}.{name} is {home}.{name}"
                continue
            yield f"{module}.{_one_line(api.signature(found, name).removeprefix('def ').removeprefix('class '))}"
            members = found.members.items() if found.is_class else ()
            yield from (f"{module}.{name}.{line}" for key, member in members for line in _member(key, member))


def _member(name: str, member: Any) -> Iterator[str]:
    if name.startswith("_") or member.is_alias or member.is_class:
        return
    if member.is_function:
        yield _one_line(f"{name}{api.arguments(member.parameters)}{api.returned(member)}")
    elif member.annotation is not None:
        has_default = member.value is not None and "property" not in member.labels
        yield _one_line(f"{name}: {member.annotation}" + (f" = {member.value}" if has_default else ""))


def _one_line(signature: str) -> str:
    return " ".join(signature.split())


def parts() -> Iterator[str]:
    """What plugins may be, and what is there by which name."""
    for kind in KINDS:
        yield f"nemorl.{kind}: {', '.join(sorted(entry.name for entry in entries(kind)))}"


def commands() -> Iterator[str]:
    """Every command with its arguments and options, those of plugins included."""
    from nemorl_cli.app import app

    found = dict(commands_of("nemorl", typer.main.get_command(app)))
    for entry in entries("commands"):
        loaded = registry().load("commands", entry.id)
        command = typer.main.get_command(loaded) if isinstance(loaded, typer.Typer) else loaded
        found |= dict(commands_of(f"nemorl {entry.name.replace('.', ' ')}", command))
    yield from (line for _, line in sorted(found.items()))


def commands_of(path: str, command: Any) -> Iterator[tuple[str, str]]:
    """(path, line) of a Click command and of those below it that are shown."""
    shown = [_parameter(p) for p in command.params if not p.name.startswith(("install_", "show_")) and p.name != "help"]
    yield path, " ".join([path, *sorted(shown)])
    for name, below in getattr(command, "commands", {}).items():
        if not below.hidden:
            yield from commands_of(f"{path} {name}", below)


def _parameter(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return f"{parameter.name.upper()}" + ("" if parameter.required else "?") + ("…" if parameter.nargs < 0 else "")
    default = parameter.default
    is_told = isinstance(default, int | float | str) and not isinstance(default, bool)
    is_required = "!" if parameter.required else ""
    return "|".join((*parameter.opts, *parameter.secondary_opts)) + is_required + (f"={default}" if is_told else "")


def config_keys() -> Iterator[str]:
    """Each key with its type and default; of algorithms and backends those that the ones above them do not have."""
    shared: dict[type[RunConfig], dict[str, str]] = {}
    above: dict[str, str] = {}
    for title, base in BASES:
        shared[base] = keys_of(base)
        yield from _titled(title, beyond(shared[base], above))
        above = shared[base]
    for entry in entries("algorithms"):
        algorithm = registry().load("algorithms", entry.id)
        above = next((shared[base] for _, base in reversed(BASES) if issubclass(algorithm, base)), {})
        yield from _titled(f"algorithm {entry.name}", beyond(keys_of(algorithm), above))
    for kind in KINDS:
        for entry in entries(kind) if kind not in ("algorithms", "commands", "templates") else ():
            yield from _titled(f"{singular(kind)} {entry.name}", keys_of(registry().load(kind, entry.id)))


def _titled(title: str, keys: Mapping[str, str]) -> Iterator[str]:
    yield from (f"{title}: {key}: {what}" for key, what in sorted(keys.items()))


def beyond(keys: Mapping[str, str], above: Mapping[str, str]) -> dict[str, str]:
    """Keys that ``above`` lacks, or has otherwise."""
    return {key: what for key, what in keys.items() if above.get(key) != what}


def keys_of(owner: type[Config], prefix: str = "", within: tuple[type[Config], ...] = ()) -> dict[str, str]:
    """Dotted key -> type, default and whether a resumed run may change it."""
    found: dict[str, str] = {}
    for name, info in owner.model_fields.items():
        if info.exclude:
            continue
        mark = ", may change on resumption" if RESUMABLE in info.metadata else ""
        told = f"{reference.type_of(info)} = {reference.default_of(info)}{mark}"
        found[prefix + name] = told.replace("`", "").replace("\\|", "|")
        for position, inner in enumerate(reference.configs_in(info)):
            if inner not in within:
                variant = f"<{inner.model_fields['name'].default}>" if position else ""
                found |= keys_of(inner, f"{prefix}{name}{variant}.", (*within, owner))
    return found


def metric_names() -> Iterator[str]:
    """Every declared metric with its unit."""
    known: dict[str, str] = {}
    groups = [RunConfig.metrics, RolloutRunConfig.metrics, metrics.WORK_METRICS]
    for kind in ("algorithms", "environments", "training_backends", "generation_backends", "hooks"):
        groups += [registry().load(kind, entry.id).metrics for entry in entries(kind)]
    for group in groups:
        known |= {name: info.unit for name, info in group.items()}
    yield from (f"{name} [{unit}]" for name, unit in sorted(known.items()))


def formats() -> Iterator[str]:
    """Each file format with its version, and the columns of rollout records."""
    for name, (file, constant) in FORMATS.items():
        yield f"{name}: {_constant(ROOT / file, constant)}"
    yield from (f"rollout records: {field.name}: {field.type}" for field in SCHEMA)


def _constant(file: Path, name: str) -> object:
    """The value of ``NAME = …`` in a source, or the first argument of ``NAME = SignedFormat(…)``. Sources are not
    imported: some need torch or megatron-core."""
    assigned = (node for node in ast.parse(file.read_text("utf-8")).body if isinstance(node, ast.Assign))
    (found,) = (node for node in assigned if [ast.unparse(target) for target in node.targets] == [name])
    value = found.value
    return ast.literal_eval(value.args[0] if isinstance(value, ast.Call) else value)


if __name__ == "__main__":
    from pages import update

    sys.exit(update({PAGE: text()}))

"""Signed sets of plugins: every file of each distribution by its hash, under one Ed25519 signature.

A site's policy may demand that a run uses only plugins of such sets (``signed_plugins``). Then the files that are
installed are hashed again, and whatever differs is named. What a signature is over: :mod:`nemorl_trust.signed_json`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from nemorl.base.packages.plugin_policy import normalize
from nemorl.errors import UsageError
from nemorl.plugins import PluginEntry

from nemorl_trust.lock import entries_by_distribution
from nemorl_trust.lock_files import files_of, foreign_bytecode, hashes_of
from nemorl_trust.signed_json import SignedFormat, read_public_key
from nemorl_trust.site_policy import SignedPlugins, site_policies

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

SET = SignedFormat("nemorl plugin set 1", "plugins", "signed set of plugins", "nemorl plugins sign")


@dataclass(frozen=True)
class SignedPlugin:
    """One distribution as it was signed."""

    distribution: str
    version: str
    files: Mapping[str, str]
    """SHA-256 of each file, by a name that is the same on every machine."""


def installed_plugins(names: Iterable[str] = ()) -> list[SignedPlugin]:
    """The distributions that offer plugins here, toolkits included, as they are installed.

    Args:
        names: Of distributions. Unset: all.

    Raises:
        UsageError: One of them is not installed, or offers no plugin.
    """
    offered = _offered()
    for name in names:
        if normalize(name) not in offered:
            raise UsageError(f"no plugin of {name!r} is installed", fix="nemorl plugins list")
    chosen = sorted({normalize(name) for name in names} or offered)
    return [SignedPlugin(name, offered[name][0].version, hashes_of(files_of(offered[name]))) for name in chosen]


def sign(plugins: Iterable[SignedPlugin], key: Ed25519PrivateKey) -> str:
    """The text of a signature file."""
    return SET.sign([asdict(plugin) for plugin in plugins], key)


def read_set(path: Path, keys: Iterable[Ed25519PublicKey]) -> list[SignedPlugin]:
    """The plugins of a signature file.

    Raises:
        UsageError: It is none, or none of the keys signed it.
    """
    try:
        plugins = [SignedPlugin(**plugin) for plugin in SET.read(path.read_bytes(), path, keys)]
        if all(isinstance(plugin.files, dict) for plugin in plugins):
            return plugins
        why = "its files are no table"
    except (OSError, TypeError) as error:
        why = str(error)
    raise UsageError(f"{path} is no {SET.called}: {why}", fix=f"write it: {SET.write_it}")


def differences_from(signed: Iterable[SignedPlugin], names: Iterable[str]) -> Iterator[str]:
    """How what is installed of some distributions differs from what was signed, a line each.

    Args:
        signed: Of one or more sets; one distribution may stand in several, in different versions.
        names: Of the distributions to look at.
    """
    known: dict[str, list[SignedPlugin]] = {}
    for plugin in signed:
        known.setdefault(normalize(plugin.distribution), []).append(plugin)
    offered = _offered()
    for name in sorted(map(normalize, names)):
        if name not in offered:
            yield f"{name} is no distribution that is installed"
            continue
        entries = offered[name]
        versions = {plugin.version: plugin for plugin in known.get(name, [])}
        if not versions:
            yield f"{name} {entries[0].version} is in no set that was signed"
        elif entries[0].version not in versions:
            yield f"{name} is {entries[0].version}, and {', '.join(sorted(versions))} was signed"
        else:
            yield from _changes(versions[entries[0].version], entries)


def signature_problems(names: Iterable[str]) -> Iterator[str]:
    """Refusals of these distributions where the site's policy demands signed ones; nothing where it does not."""
    for policy in site_policies():
        if policy.signed_plugins is not None:
            try:
                signed = _signed_by(policy.signed_plugins)
            except UsageError as error:
                yield f"the site demands signed plugins, and {error.message}"
            else:
                yield from (f"{line} (the site demands it)" for line in differences_from(signed, names))


def _signed_by(demanded: SignedPlugins) -> list[SignedPlugin]:
    keys = [read_public_key(path) for path in demanded.keys]
    return [plugin for path in demanded.sets for plugin in read_set(path, keys)]


def _changes(signed: SignedPlugin, entries: list[PluginEntry]) -> Iterator[str]:
    files = files_of(entries)
    present, about = hashes_of(files), f"{signed.distribution} {signed.version}"
    for name in sorted(signed.files.keys() - present.keys()):
        yield f"{about}: {name} is missing"
    for name in sorted(present.keys() - signed.files.keys()):
        yield f"{about}: {name} was added"
    for name in sorted(signed.files.keys() & present.keys()):
        if signed.files[name] != present[name]:
            yield f"{about}: {name} was changed"
    for compiled in foreign_bytecode(files, entries[0].point.dist):
        yield f"{about}: {compiled} does not come from the source beside it"


def _offered() -> dict[str, list[PluginEntry]]:
    found = entries_by_distribution().items()
    return {normalize(name): entries for name, entries in found if entries[0].point.dist is not None}

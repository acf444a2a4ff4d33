"""Signed sets of plugins: every file of each distribution by its hash, under one Ed25519 signature.

A site's policy may demand that a run uses only plugins of such sets (``signed_plugins``). Then the files that are
installed are hashed again, and whatever differs is named. The signature is over the set in JSON with sorted keys and no
spaces, after the word ``nemorl plugin set 1`` and a line break.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemorl.base.packages.plugin_policy import normalize
from nemorl.errors import UsageError
from nemorl.plugins import PluginEntry

from nemorl_trust.lock import entries_by_distribution
from nemorl_trust.lock_files import files_of, foreign_bytecode, hashes_of
from nemorl_trust.site_policy import SignedPlugins, site_policies

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

FORMAT = "nemorl plugin set 1"


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
    content = [asdict(plugin) for plugin in plugins]
    signature = base64.b64encode(key.sign(_message(content))).decode()
    return json.dumps({"format": FORMAT, "plugins": content, "signature": signature}, indent=1) + "\n"


def read_set(path: Path, keys: Iterable[Ed25519PublicKey]) -> list[SignedPlugin]:
    """The plugins of a signature file.

    Raises:
        UsageError: It is none, or none of the keys signed it.
    """
    from cryptography.exceptions import InvalidSignature

    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        signature, content = base64.b64decode(found["signature"], validate=True), found["plugins"]
        plugins = [SignedPlugin(**plugin) for plugin in content]
        is_right = found["format"] == FORMAT and all(isinstance(plugin.files, dict) for plugin in plugins)
    except (OSError, ValueError, KeyError, TypeError, binascii.Error) as error:
        raise UsageError(f"{path} is no signed set of plugins: {error}", fix="write it: nemorl plugins sign") from error
    for key in keys if is_right else ():
        try:
            key.verify(signature, _message(content))
        except InvalidSignature:
            continue
        return plugins
    raise UsageError(f"{path} was changed, or another key signed it", fix="sign the set again, or give its public key")


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


def read_public_key(path: Path) -> Ed25519PublicKey:
    """
    Raises:
        UsageError: There is no Ed25519 key in the file.
    """
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    try:
        key = load_pem_public_key(path.read_bytes())
    except (OSError, ValueError, UnsupportedAlgorithm) as error:
        raise UsageError(f"{path} holds no public key: {error}", fix="give the .pub file of the signing key") from error
    if not isinstance(key, Ed25519PublicKey):
        raise UsageError(f"{path} holds a key that is not Ed25519", fix="make one: nemorl plugins sign --new-key FILE")
    return key


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


def _message(content: Any) -> bytes:
    return f"{FORMAT}\n{json.dumps(content, sort_keys=True, separators=(',', ':'))}".encode()

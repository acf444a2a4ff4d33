"""JSON under an Ed25519 signature (RFC 8032), and the keys for it, as PEM files.

A signed text is one JSON object: ``format``, the content under a name of the format's, and ``signature``. The signature
is over the format, a line break, and the content in JSON with sorted keys and no spaces, so that what was signed as one
format is nothing in another.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemorl.base.files.atomic import replace_text
from nemorl.base.text.reading import UnreadableError, parse_json
from nemorl.errors import UsageError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey


@dataclass(frozen=True)
class SignedFormat:
    """One kind of signed text."""

    name: str
    """The word that is signed along, e.g. ``nemorl plugin set 1``."""
    field: str
    """Where the content stands."""
    called: str
    """In messages, e.g. ``signed set of plugins``."""
    write_it: str
    """The command that writes one."""

    def sign(self, content: Any, key: Ed25519PrivateKey) -> str:
        """The text of a signed file."""
        signature = base64.b64encode(key.sign(self._message(content))).decode()
        return json.dumps({"format": self.name, self.field: content, "signature": signature}, indent=1) + "\n"

    def read(self, text: bytes, source: object, keys: Iterable[Ed25519PublicKey]) -> Any:
        """The content of a signed text.

        Args:
            text: Of the file.
            source: Where it is from, for messages.
            keys: Public keys, one of which must have signed it.

        Raises:
            UsageError: It is of another format, carries no signature, or none of the keys signed it.
        """
        from cryptography.exceptions import InvalidSignature

        found = self.parse(text, source)
        if not isinstance(found.get("signature"), str):
            raise UsageError(f"{source} is not signed", fix=f"sign it: {self.write_it}")
        try:
            signature = base64.b64decode(found["signature"], validate=True)
        except (ValueError, binascii.Error):
            signature = b""
        for key in keys:
            try:
                key.verify(signature, self._message(found[self.field]))
            except InvalidSignature:
                continue
            return found[self.field]
        raise UsageError(
            f"{source} was changed, or another key signed it", fix=f"sign it again ({self.write_it}), or give its key"
        )

    def parse(self, text: bytes, source: object) -> dict[str, Any]:
        """The whole object, whoever wrote it.

        Raises:
            UsageError: It is of another format.
        """
        try:
            found = parse_json(text)
        except UnreadableError as error:
            raise UsageError(f"{source} is no {self.called}: {error}", fix=f"write it: {self.write_it}") from error
        if not isinstance(found, dict) or found.get("format") != self.name or self.field not in found:
            what = found.get("format") if isinstance(found, dict) else type(found).__name__
            why = f"its format is {str(what)[:80]!r}, not {self.name!r}"
            raise UsageError(f"{source} is no {self.called}: {why}", fix=f"write it: {self.write_it}")
        return found

    def _message(self, content: Any) -> bytes:
        return f"{self.name}\n{json.dumps(content, sort_keys=True, separators=(',', ':'))}".encode()


def make_key(path: Path) -> None:
    """Write a new private key, for nobody else to read, and its public key beside it.

    Raises:
        UsageError: There is a file already.
    """
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = Ed25519PrivateKey.generate()
    text = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    public = key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise UsageError(f"{path} exists", fix="choose another file: a key is never overwritten") from None
    with os.fdopen(file, "wb") as target:
        target.write(text)
    replace_text(public_of(path), public.decode())


def public_of(path: Path) -> Path:
    """Where the public key of a private one is."""
    return path.with_name(f"{path.name}.pub")


def read_private_key(path: Path) -> Ed25519PrivateKey:
    """
    Raises:
        UsageError: There is no Ed25519 key in the file, or it has a passphrase.
    """
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    fix = "make one: nemorl plugins sign --new-key FILE"
    try:
        key = load_pem_private_key(path.read_bytes(), None)
    except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise UsageError(f"{path} holds no private key: {error}", fix=fix) from error
    if not isinstance(key, Ed25519PrivateKey):
        raise UsageError(f"{path} holds a key that is not Ed25519", fix=fix)
    return key


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

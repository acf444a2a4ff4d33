"""A small authority of certificates in a folder: ``ca.pem`` and ``ca.key``, and ``NAME.pem`` and ``NAME.key`` of hosts.

ECDSA on P-256. A host's certificate serves both sides of a connection, as Ray's processes need, and holds for the
host's name and addresses and for its loopback.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from nemorl.base.files.atomic import replacing
from nemorl.errors import UsageError

from nemorl_trust.encryption import LOOPBACK

CA = "ca"
CA_DAYS = 3650
EARLIER = datetime.timedelta(minutes=5)
"""Before now at which a certificate begins to hold: clocks of machines differ."""
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?|[0-9A-Fa-f:.]+")


@dataclass(frozen=True)
class Certificate:
    """Facts of a certificate."""

    path: Path
    subject: str
    names: tuple[str, ...]
    is_authority: bool
    expires: datetime.datetime

    @property
    def days_left(self) -> int:
        """Whole days, negative after the end."""
        return (self.expires - datetime.datetime.now(datetime.UTC)).days


def make(folder: Path, hosts: Sequence[str], *, days: int) -> list[Path]:
    """Certificates for hosts; the authority too, if the folder has none.

    Args:
        folder: Made if it is not there; nobody else may read keys in it.
        hosts: Names or addresses. ``node7,10.0.0.7``: one certificate for both, under the first name.
        days: Until they end.

    Returns:
        The certificates.

    Raises:
        UsageError: A host has one already, or is none.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    named = {(parts := host.split(","))[0]: parts for host in hosts}
    for name, parts in named.items():
        for part in parts:
            if _HOST.fullmatch(part) is None or name == CA:
                raise UsageError(f"{part!r} is no host", fix="give names or addresses, e.g. node7 or node7,10.0.0.7")
        if (folder / f"{name}.pem").exists():
            raise UsageError(f"{name} has a certificate in {folder}", fix=f"nemorl certs renew {folder}")
    if not (folder / f"{CA}.pem").exists():
        _make_authority(folder)
    return [_issue(folder, name, [*dict.fromkeys([*parts, *LOOPBACK])], days) for name, parts in named.items()]


def renew(folder: Path, *, days: int, within: int | None) -> list[Path]:
    """New keys and certificates for the hosts of a folder, in place of those that it has.

    Args:
        folder: With the authority.
        days: Until the new ones end.
        within: Only those that end within so many days; ``None``: all.
    """
    found = [one for one in read(folder) if not one.is_authority and (within is None or one.days_left <= within)]
    return [_issue(folder, one.path.stem, one.names, days) for one in found]


def read(place: Path) -> list[Certificate]:
    """The certificates in a folder, or in a file.

    Raises:
        UsageError: There is none, or one is damaged.
    """
    paths = sorted(place.glob("*.pem")) if place.is_dir() else [place]
    found = [_read(path) for path in paths]
    if not found:
        raise UsageError(f"no certificate in {place}", fix=f"nemorl certs make {place} HOST …")
    return found


def _read(path: Path) -> Certificate:
    try:
        found = x509.load_pem_x509_certificate(path.read_bytes())
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} is no PEM certificate: {error}", fix="give a certificate, or their folder") from error
    try:
        names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        texts = tuple(str(name.value) for name in names)
    except x509.ExtensionNotFound:
        texts = ()
    try:
        is_authority = found.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    except x509.ExtensionNotFound:
        is_authority = False
    return Certificate(path, found.subject.rfc4514_string(), texts, is_authority, found.not_valid_after_utc)


def _make_authority(folder: Path) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    name = _name("nemorl authority")
    builder = _builder(name, name, key, CA_DAYS).add_extension(x509.BasicConstraints(ca=True, path_length=0), True)
    usage = {"key_cert_sign": True, "crl_sign": True}
    _write(folder, CA, key, builder.add_extension(_usage(**usage), True).sign(key, hashes.SHA256()))


def _issue(folder: Path, name: str, names: Sequence[str], days: int) -> Path:
    authority, authority_key = _authority(folder)
    left = (authority.not_valid_after_utc - datetime.datetime.now(datetime.UTC)).days
    if left < 1:
        ends = f"{folder / CA}.pem ends on {authority.not_valid_after_utc:%Y-%m-%d}, and signs nothing that would last"
        raise UsageError(ends, fix="make an authority in another folder, and give its ca.pem to all who trust this one")
    key = ec.generate_private_key(ec.SECP256R1())
    certificate = (
        _builder(_name(name[:64]), authority.subject, key, min(days, left))
        .add_extension(x509.SubjectAlternativeName([*map(_general_name, names)]), False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), True)
        .add_extension(_usage(digital_signature=True), True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]), False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()), False)
        .sign(authority_key, hashes.SHA256())
    )
    return _write(folder, name, key, certificate)


def _authority(folder: Path) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    try:
        certificate = x509.load_pem_x509_certificate((folder / f"{CA}.pem").read_bytes())
        key: Any = serialization.load_pem_private_key((folder / f"{CA}.key").read_bytes(), None)
    except (OSError, ValueError, TypeError) as error:
        fix = "bring ca.pem and ca.key back, or begin in another folder"
        raise UsageError(f"the authority in {folder} cannot be used: {error}", fix=fix) from error
    return certificate, key


def _builder(name: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, days: int) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - EARLIER)
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False)
    )


def _usage(**granted: bool) -> x509.KeyUsage:
    names = ("digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement")
    others = ("key_cert_sign", "crl_sign", "encipher_only", "decipher_only")
    return x509.KeyUsage(**{name: granted.get(name, False) for name in (*names, *others)})


def _general_name(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        return x509.DNSName(text)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _write(folder: Path, name: str, key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate) -> Path:
    """The key first, and for its owner alone from its first byte on."""
    text = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    before = os.umask(0o077)
    try:
        with replacing(folder / f"{name}.key") as file:
            file.write(text)
    finally:
        os.umask(before)
    with replacing(folder / f"{name}.pem") as file:
        file.write(certificate.public_bytes(serialization.Encoding.PEM))
    return folder / f"{name}.pem"

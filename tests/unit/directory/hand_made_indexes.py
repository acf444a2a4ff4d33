"""Indexes of plugins, written and signed by hand: by the library for keys, not by what is tested."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

Content = dict[str, Any]


class Publisher:
    """Who holds a key."""

    def __init__(self, folder: Path) -> None:
        self._key = Ed25519PrivateKey.generate()
        self.public = folder / "publisher.pub"
        self.public.write_bytes(self._key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))

    def signed(self, content: Content, said: str = "nemorl plugin index 1", field: str = "index") -> bytes:
        message = f"{said}\n{json.dumps(content, sort_keys=True, separators=(',', ':'))}".encode()
        signature = base64.b64encode(self._key.sign(message)).decode()
        return json.dumps({"format": said, field: content, "signature": signature}).encode()


def listing(name: str = "acme-grader", **others: Any) -> Content:
    """A plugin with one environment and one version."""
    parts = {"environments": {"acme_grader": "grades essays by length"}}
    return {"name": name, "summary": "Graders of essays", "parts": parts, "versions": [{"version": "1.0"}], **others}


def content(*plugins: Content, serial: int = 1_795_000_000, name: str = "acme") -> Content:
    return {"name": name, "serial": serial, "plugins": [*(plugins or (listing(),))]}

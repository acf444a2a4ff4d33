"""The protobuf messages of the Tinker API, which the client's own wheel describes."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from nemorl.errors import UsageError

NEEDED = "tinker.proto.tinker_public_pb2"
FIRST, BEFORE = "0.38", "0.39"
"""Versions of the client whose messages this server speaks."""


def require_descriptors() -> None:
    """Refuse to start a server that could not read its clients.

    Raises:
        UsageError: The wheel is not installed.
    """
    if find_spec("tinker") is None or find_spec("google.protobuf") is None:
        raise UsageError(
            "the package tinker is not installed, whose messages a Tinker server speaks",
            fix="pip install 'nemorl-agents[tinker]'",
        )


def messages() -> Any:
    """The module of messages: ``ForwardBackwardRequest``, ``ForwardBackwardOutput``, ``SampleResponse``, …"""
    require_descriptors()
    from tinker.proto import tinker_public_pb2  # type: ignore[import-not-found, import-untyped, unused-ignore]

    return tinker_public_pb2

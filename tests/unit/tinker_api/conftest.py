"""The fixture of a Tinker server without a socket."""

from __future__ import annotations

from tinker_talk import talk

__all__ = ["talk"]

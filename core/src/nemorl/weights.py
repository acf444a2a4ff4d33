"""How new weights get from the trainer to the generator.

A transport is chosen once, when the config loads: the first one that the training backend offers and the
generation backend accepts. The handle is what crosses; its payload belongs to the transport.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

IN_PROCESS = "in_process"
"""Both sides live in one process: the payload is a function that yields the live parameters, and nothing is copied."""


@dataclass(frozen=True)
class WeightHandle:
    """Permission to fetch one version of the policy's weights."""

    transport: str
    version: int
    payload: Any
    """``in_process``: ``() -> Iterator[Mapping[Hugging Face name, Tensor]]``, the backend's ``export_weights``."""


def in_process_handle(export: Callable[[], Iterator[Mapping[str, Tensor]]], version: int) -> WeightHandle:
    """The handle for a generator in the same process as the trainer."""
    return WeightHandle(IN_PROCESS, version, export)


def choose_transport(offered: Sequence[str], accepted: Sequence[str]) -> str | None:
    """The sender's first choice that the receiver accepts; ``None`` if there is none."""
    return next((name for name in offered if name in accepted), None)

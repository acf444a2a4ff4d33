"""The transport ``in_process``, the kernel's own: trainer and generator live in one process, nothing is copied."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, ClassVar

from nemorl.plugins.kinds import WeightTransportConfig
from nemorl.weights import Distance, Export

if TYPE_CHECKING:
    from torch import Tensor

    from nemorl.contracts import WeightTransport


class InProcessConfig(WeightTransportConfig):
    """Hand over the live parameters."""

    summary: ClassVar[str] = "The trainer's live tensors, nothing copied (one process)"
    reach: ClassVar[Distance] = "process"

    def build(self) -> WeightTransport:
        return InProcess()


class InProcess:
    """The payload is the export function itself."""

    def publish(self, export: Export) -> Export:
        return export

    def fetch(self, payload: Export) -> Iterator[Mapping[str, Tensor]]:
        return payload()

    def close(self) -> None:
        pass

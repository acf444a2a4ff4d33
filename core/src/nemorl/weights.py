"""How new weights get from the trainer to the generator.

The handle is what crosses; its payload belongs to the transport, which is chosen once for a run
(``nemorl_rl.placement.place``). Transports are plugins (``nemorl.weight_transports``); the kernel's own is
``nemorl.resources.in_process``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from nemorl.plugins.registry import registry

if TYPE_CHECKING:
    from torch import Tensor

Export = Callable[[], Iterator[Mapping[str, "Tensor"]]]
"""A training backend's ``export_weights``."""

IN_PROCESS = "in_process"
"""Both sides live in one process: the payload is a function that yields the live parameters, and nothing is copied."""

_OWN = f"nemorl-core:{IN_PROCESS}"

Distance = Literal["process", "node", "cluster"]
"""The closest thing that trainer and generator share: their process, their node, or only the network."""
Form = Literal["model", "adapters"]
"""The policy as a plain model, or the tensors of its LoRA adapters alone (capability ``adapters``)."""


class Digest(NamedTuple):
    """A number that depends on every bit of a tensor and on its place (``nemorl_tensors.engines.digests``)."""

    dtype: str
    """torch's, without ``torch.``"""
    shape: tuple[int, ...]
    value: int


class Digests(dict[str, Digest]):
    """By name, and what they have cost."""

    seconds: float = 0.0


Digested = Callable[[Export], tuple[Export, Digests]]
"""The same export, and digests by name of all that it has yielded so far."""


@dataclass(frozen=True)
class WeightHandle:
    """Permission to fetch one version of the policy's weights."""

    transport: str
    """Id of the plugin that carries them: it means the same in every process."""
    version: int
    payload: Any
    """Whatever the transport's ``publish`` returned; ``in_process``: the backend's ``export_weights``."""
    form: Form = "model"
    digests: Digests | None = None
    """Of the tensors as they were sent, by their Hugging Face names; ``None``: nobody asked. ``in_process`` they are
    complete once the buckets have been read."""

    @property
    def is_in_process(self) -> bool:
        """The weights are the trainer's own, in this process."""
        return self.transport == _OWN

    def buckets(self) -> Iterator[Mapping[str, Tensor]]:
        """The weights, bucket by bucket, under their Hugging Face names.

        Tensors may be views of memory that the trainer owns: valid until the next but one version is published, and
        not to be written to.
        """
        buckets: Iterator[Mapping[str, Tensor]] = transport(self.transport).fetch(self.payload)
        return buckets


def transport(name: str) -> Any:
    """A transport by the id of its plugin, ready to publish and fetch. Raises ``PluginNotFoundError``."""
    return registry().load("weight_transports", name)().build()


def in_process_handle(export: Export | None, version: int) -> WeightHandle:
    """The handle for a generator in the trainer's process; one that shares its weights needs no ``export``."""
    return WeightHandle(_OWN, version, export)

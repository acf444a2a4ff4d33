"""Device memory that is given back while another model needs it, and taken again: bit for bit, in the same tensors.

What moves is the memory below a tensor, its storage. The tensor, its views, the parameters and modules that hold it
stay the objects they were: an optimizer, an engine over a trainer's weights and a sharded parameter notice nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from nemorl.contracts.memory import WeightsForgottenError
from nemorl.errors import BackendError
from torch import Tensor
from torch.distributed.tensor import DTensor

from nemorl_tensors.devices import empty_cache, has_streams


@dataclass(frozen=True)
class _Parked:
    storage: torch.UntypedStorage
    size: int
    content: Tensor | None
    """[size] uint8 in the host's memory; ``None``: forgotten"""


class Parking:
    """Storages whose content is in the host's memory, by the part of a model that they belong to."""

    def __init__(self) -> None:
        self._parked: dict[str, list[_Parked]] = {}
        self._forgotten: set[str] = set()
        """Parts whose content was not kept, and has not been renewed."""

    def leave(self, part: str, tensors: Iterable[Tensor], *, forget: bool = False) -> None:
        """Copy what these tensors hold to the host and free it on the device. A part that is away already stays away;
        if it is to be forgotten now, the host's copy goes as well.

        Args:
            part: A name for them together.
            tensors: Any, also views of each other, and DTensors.
            forget: Copy nothing: they will be filled anew once they are back.

        Until they come back the tensors must not be used: their shapes are as before, their memory is gone. What is
        mapped from a file or shared with another process stays: it takes no device memory.
        """
        leaving = [*tensors]
        if forget and leaving:
            self._forgotten.add(part)  # also what cannot leave: an update is due in any case
        if part in self._parked:
            if forget:
                self._parked[part] = [replace(parked, content=None) for parked in self._parked[part]]
            return
        parked = []
        on_device = False
        for storage in _storages(leaving):
            on_device |= storage.device.type != "cpu"
            parked.append(_Parked(storage, storage.nbytes(), None if forget else _to_host(storage)))
            storage.resize_(0)
        if parked:
            self._parked[part] = parked
        if on_device:
            empty_cache()  # engines have allocators of their own, often in other processes

    def has(self, part: str) -> bool:
        """Whether it is away."""
        return part in self._parked

    def rename(self, part: str, other: str) -> None:
        """What is away as ``part`` is from now on away as ``other``; nothing moves. Nothing to do where it is here."""
        if part in self._parked:
            self._parked[other] = self._parked.pop(part)

    def come_back(self, part: str) -> None:
        """Allocate the part's memory anew and fill it as it was. Nothing to do for one that is here."""
        for parked in self._parked.pop(part, ()):
            parked.storage.resize_(parked.size)
            if parked.content is not None:
                _bytes_of(parked.storage).copy_(parked.content)

    def renewed(self, part: str) -> None:
        """All of the part is new: it was filled, or other tensors have taken the place of those that are away."""
        self._parked.pop(part, None)
        self._forgotten.discard(part)

    def require(self, *parts: str) -> None:
        """Refuse to work with what is away: it would read freed memory.

        Raises:
            BackendError: names the part.
        """
        for part in parts:
            if part in self._parked:
                raise BackendError(
                    f"the {part} of this model are not in the device's memory", fix="bring them back first"
                )

    def require_content(self, *parts: str) -> None:
        """Refuse to compute with what is away, or was forgotten and not renewed since.

        Raises:
            BackendError: A part is away; names it.
            WeightsForgottenError: A part was forgotten; names it.
        """
        self.require(*parts)
        for part in parts:
            if part in self._forgotten:
                raise forgotten_error(part)


def forgotten_error(part: str) -> WeightsForgottenError:
    """The error of work with a part whose content nobody has kept."""
    return WeightsForgottenError(
        f"the {part} of this engine's model were let go of as it fell asleep (level 2), and no others have come since",
        fix="update the weights after waking and before generating (in a trainer: sync_weights() after train_step; "
        "cluster.take_turns: false lets nothing sleep), or call sleep(1), which keeps them",
    )


def bytes_held(tensors: Iterable[Tensor]) -> int:
    """Bytes of device memory below these tensors, each storage once."""
    return sum(storage.nbytes() for storage in _storages(tensors))


def held_alone(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Those of these tensors whose memory nothing but these tensors holds, no view or detached tensor either.

    >>> mine, theirs = torch.zeros(2), torch.zeros(2)
    >>> len(held_alone([mine, theirs.detach()]))
    1
    """
    groups: dict[int, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.untyped_storage()._cdata, []).append(tensor)
    # The count that torch frees memory by, as its CUDA graphs read it. The storage's Python object is a holder, too.
    counts = {storage: torch._C._storage_Use_Count(storage) for storage in groups}  # type: ignore[attr-defined]
    return [tensor for storage, group in groups.items() if counts[storage] == len(group) + 1 for tensor in group]


def _storages(tensors: Iterable[Tensor]) -> Iterator[torch.UntypedStorage]:
    """Those below the tensors that have memory, each once. Scalars that an optimizer keeps on the CPU are left out
    where other tensors are on a device."""
    whole = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    has_device = any(tensor.device.type != "cpu" for tensor in whole)
    seen: set[int] = set()
    for tensor in whole:
        storage = tensor.untyped_storage()
        is_elsewhere = not storage.resizable() or (has_device and tensor.device.type == "cpu")
        if storage.nbytes() and storage.data_ptr() not in seen and not is_elsewhere:
            seen.add(storage.data_ptr())
            yield storage


def _to_host(storage: torch.UntypedStorage) -> Tensor:
    content = _bytes_of(storage)
    return torch.empty_like(content, device="cpu", pin_memory=has_streams(storage.device)).copy_(content)


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # type: ignore[call-overload, no-any-return]

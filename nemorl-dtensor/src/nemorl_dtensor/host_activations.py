"""Activations that wait for the backward pass in the host's memory: what decoder layers save, in place of the device's.

Each layer's forward pass runs under hooks of autograd. What it saves is copied to page-locked memory, on a stream of
its own where the device has streams, so that the next layer computes meanwhile; at most two layers have theirs still on
the device. The backward pass fetches it as it needs it. The same bits come back, so results do not change.

Weights stay, whose memory is the model's or FSDP2's, and so does what all layers are given (masks, rotary factors).
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from nemorl_tensors.devices import has_streams, streams_of
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from nemorl_dtensor.ranks import as_part, own_memory

LEAST_BYTES = 4096
"""Of a tensor that is worth a copy."""
LAYERS_ON_DEVICE = 2
"""Whose copies may be under way."""


class HostActivations:
    """What the layers of one model have saved.

    >>> HostActivations("cuda:0").take_over(layers)
    """

    def __init__(self, device: str) -> None:
        self._kind = torch.device(device).type
        self._streams: Any = streams_of(device) if has_streams(device) else None
        self._stream: Any = self._streams and self._streams.Stream(device)
        self._leaving: deque[tuple[Any, list[Tensor]]] = deque()
        """Of the last layers: when their copies are done, and what is copied, which keeps its memory until then."""
        self.moved_bytes = 0
        """To the host, so far."""

    def take_over(self, layers: list[nn.Module]) -> None:
        """Run the forward passes of ``layers`` under the hooks. After they were told to recompute, before sharding."""
        for layer in layers:
            layer.forward = partial(self._forward, layer.forward)

    def _forward(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if len(self._leaving) >= LAYERS_ON_DEVICE:
            self._let_go()
        given = [value for name, value in kwargs.items() if name != "hidden_states"]
        common = {_storage(one) for one in tree_leaves([args[1:], given]) if isinstance(one, Tensor)}
        saved: dict[Any, tuple[Tensor, _Kept]] = {}
        with saved_tensors_hooks(partial(self._pack, common, saved), self._unpack):
            found = forward(*args, **kwargs)
        if self._stream is not None:
            self._leaving.append((self._stream.record_event(), [tensor for tensor, _ in saved.values()]))
        saved.clear()  # autograd keeps the hooks as long as the graph, and these hold what is on the device
        return found

    def _pack(self, common: set[int], saved: dict[Any, tuple[Tensor, _Kept]], tensor: Tensor) -> Any:
        own = own_memory(tensor)
        if not self._moves(tensor, own) or _storage(own) in common:
            # A node that saves its own output would otherwise hold itself.
            return tensor if tensor.is_leaf else tensor.detach()
        key = (_storage(own), own.storage_offset(), own.shape, own.stride(), own.dtype, own._version)
        if key not in saved:  # one that several operations save is one copy
            saved[key] = (own.detach(), _Kept(self._copied(own.detach()), own.device))
        kept = saved[key][1]
        return (kept, tensor._spec) if isinstance(tensor, DTensor) else (kept, None)

    def _moves(self, tensor: Tensor, own: Tensor) -> bool:
        is_weight = isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)
        return not is_weight and own.nbytes >= LEAST_BYTES and own.device.type == self._kind

    def _copied(self, tensor: Tensor) -> Tensor:
        self.moved_bytes += tensor.nbytes
        host = torch.empty_like(tensor, device="cpu", pin_memory=self._stream is not None)
        if self._stream is None:
            return host.copy_(tensor)
        self._stream.wait_stream(self._streams.current_stream(tensor.device))
        with self._streams.stream(self._stream):
            return host.copy_(tensor, non_blocking=True)

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        while self._leaving:
            self._let_go()
        kept, spec = packed
        tensor: Tensor = kept.tensor()
        return tensor if spec is None else as_part(tensor, spec)

    def _let_go(self) -> None:
        """The device's memory of the earliest layer: what comes after in its stream waits for the copies."""
        copied, tensors = self._leaving.popleft()
        self._streams.current_stream(tensors[0].device if tensors else None).wait_event(copied)


class _Kept:
    """A tensor in the host's memory, and the one on the device while some operation has it."""

    def __init__(self, host: Tensor, device: torch.device) -> None:
        self._host, self._device = host, device
        self._here: weakref.ref[Tensor] | None = None

    def tensor(self) -> Tensor:
        """On the device."""
        found = self._here() if self._here is not None else None
        if found is None:
            found = self._host.to(self._device, non_blocking=True)
            self._here = weakref.ref(found)
        return found


def _storage(tensor: Tensor) -> int:
    """Names the memory below a tensor."""
    return int(own_memory(tensor).untyped_storage()._cdata)

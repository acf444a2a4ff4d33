"""Tensors of the simulated device: they hold their elements in the host's memory, and every operation of PyTorch on
them comes by here."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from nemorl_testing.simulated_device import streams, waits
from nemorl_testing.simulated_device.memory import Allocator, Piece
from nemorl_testing.simulated_device.streams import Uses

NAME = "sim"
CPU = torch.device("cpu")
INDEXED = frozenset({"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"})
"""Operations whose indices may be on the CPU: they are copied, while the host waits."""
COPIES = frozenset({"copy_", "_to_copy", "copy", "_copy_from", "_copy_from_and_resize"})
allocator = Allocator()
races: list[str] = []
"""Memory that was freed while a stream used it, which the allocator does not know of."""
_blocks: weakref.WeakValueDictionary[int, Block] = weakref.WeakValueDictionary()
_pinned: dict[int, tuple[Any, Uses]] = {}
"""Page-locked memory of the host, by its storage: a weak reference to it, and who uses it."""


class Block:
    """Memory of the device below tensors that are views of each other."""

    def __init__(self, size: int) -> None:
        self.uses = Uses()
        self.lent: set[streams.Stream] = set()
        """Streams that the allocator waits for before the memory is another's."""
        self._of = streams.current()
        self.piece: Piece | None = None
        self.piece = allocator.allocate(size)

    def __del__(self, allocator: Allocator = allocator, races: list[str] = races) -> None:  # also as Python ends
        allocator.free(self.piece)
        if not self.uses.is_done(self._of, self.lent):
            races.append(f"memory of stream {self._of.number} is free while another stream uses it")

    def resize(self, size: int) -> None:
        """Memory for as many bytes in place of what there was."""
        held, self.piece = self.piece, None
        allocator.free(held)
        self.piece = allocator.allocate(size)


class SimulatedTensor(Tensor):
    """A tensor of the simulated device."""

    held: Tensor
    """Its elements."""
    block: Block

    @staticmethod
    def __new__(cls, held: Tensor) -> SimulatedTensor:
        layout: dict[str, Any] = {"strides": held.stride(), "storage_offset": held.storage_offset()}
        made: Any = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, held.size(), dtype=held.dtype, device=torch.device(NAME, 0), **layout
        )
        made.held = held
        key = held.untyped_storage()._cdata
        block = _blocks.get(key)
        if block is None:
            _blocks[key] = block = Block(held.untyped_storage().nbytes())
        made.block = block
        return made  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return run(function, args, kwargs or {})

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"SimulatedTensor({self.held!r})"

    def __reduce_ex__(self, _protocol: Any) -> Any:
        return _moved_here, (self.held,)

    def __deepcopy__(self, memo: dict[int, Any]) -> SimulatedTensor:
        copied = self.detach().clone().requires_grad_(self.requires_grad)
        if isinstance(self, torch.nn.Parameter):
            copied = torch.nn.Parameter(copied, self.requires_grad)
        memo[id(self)] = copied
        return copied  # type: ignore[return-value]

    def tolist(self) -> Any:
        waits.wait()
        return self.held.tolist()

    def numpy(self, **_: Any) -> Any:  # type: ignore[override]
        raise TypeError(f"can't convert a tensor of {NAME} to numpy: copy it to the CPU first")

    def record_stream(self, stream: Any) -> None:
        """The allocator keeps the memory until the stream is done with it."""
        self.block.lent.add(stream)

    def data_ptr(self) -> int:
        return self.held.data_ptr()

    def untyped_storage(self) -> Any:
        return SimulatedStorage(self)

    def set_(self, source: Any, *place: Any) -> Any:  # type: ignore[override]
        if isinstance(source, SimulatedStorage):
            return SimulatedTensor(torch.empty(0, dtype=self.dtype).set_(source.held, *place))
        return super().set_(source, *place)


class SimulatedStorage:
    """The storage of a simulated tensor, as far as memory is moved by it."""

    def __init__(self, tensor: SimulatedTensor) -> None:
        self.held, self._block, self.device = tensor.held.untyped_storage(), tensor.block, tensor.device
        self._cdata = self.held._cdata

    def nbytes(self) -> int:
        return self.held.nbytes()

    def data_ptr(self) -> int:
        return self.held.data_ptr()

    def resizable(self) -> bool:
        return self.held.resizable()

    def resize_(self, size: int) -> None:
        self.held.resize_(size)
        self._block.resize(size)


def run(function: Any, args: Any, kwargs: Any) -> Any:
    """The operation on the elements; its results are where CUDA would have them.

    Raises:
        RuntimeError: Operands of different devices.
        StreamError: It uses what another stream has not finished.
    """
    name = function.name().removeprefix("aten::").partition(".")[0]
    leaves = tree_leaves((args, kwargs))
    ours = [leaf for leaf in leaves if isinstance(leaf, SimulatedTensor)]
    others = [leaf for leaf in leaves if isinstance(leaf, Tensor) and not isinstance(leaf, SimulatedTensor)]
    _require_one_device(name, ours, others)
    target = _target(name, args, kwargs, bool(ours))
    is_late = _count_waits(name, args, kwargs, ours, others, target)
    stream = streams.current()
    _follow(function, name, args, kwargs, stream)
    if is_late:
        return _later(function, name, args, kwargs, stream)
    known = {id(tensor.held): tensor for tensor in ours}
    compute = partial(_histogram, function) if name == "histc" else function
    found = compute(*tree_map(_elements, args), **{**tree_map(_elements, kwargs), **_unpinned(kwargs)})
    stream.done += 1
    if target == NAME:
        return tree_map(lambda value: _wrapped(value, known, stream), found)
    if kwargs.get("pin_memory"):
        _pin(found)
    return found


def _histogram(function: Any, values: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Of whole numbers too, as on CUDA."""
    found = function(values if values.is_floating_point() else values.double(), *args, **kwargs)
    return found.to(values.dtype)


def _require_one_device(name: str, ours: list[SimulatedTensor], others: list[Tensor]) -> None:
    strangers = [tensor for tensor in others if tensor.dim() > 0]
    if ours and strangers and name not in COPIES and name not in INDEXED:
        shapes = ", ".join(f"{tuple(tensor.shape)} {tensor.dtype}" for tensor in strangers)
        raise RuntimeError(
            f"Expected all tensors to be on the same device: {name} was given {NAME}:0 and, on the CPU, {shapes}"
        )


def _target(name: str, args: Any, kwargs: Any, has_ours: bool) -> str:
    """The device of the results."""
    device = kwargs.get("device")
    if name == "copy_":
        return NAME if isinstance(args[0], SimulatedTensor) else "cpu"
    if device is not None:
        return torch.device(device).type
    return NAME if has_ours else "cpu"


def _count_waits(
    name: str, args: Any, kwargs: Any, ours: list[SimulatedTensor], others: list[Tensor], target: str
) -> bool:
    """Whether the operation copies to the host without it waiting; other waits are counted."""
    is_copy = name in COPIES and ((bool(ours) and (target != NAME or bool(others))) or (target == NAME and not ours))
    if is_copy and not args[0].numel():
        return False
    if is_copy:
        non_blocking = kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2])
        if not non_blocking:
            waits.wait()
            streams.current().reached(streams.current().done)
            return False
        return target != NAME and (name == "_to_copy" or is_pinned(args[0]))
    is_masked = name in INDEXED and any(
        one is not None and (one.dtype == torch.bool or not isinstance(one, SimulatedTensor)) for one in args[1]
    )
    sizes_itself = name == "repeat_interleave" and kwargs.get("output_size") is None and ours
    if ours and (name in waits.ALWAYS or is_masked or sizes_itself):
        waits.wait()
        streams.current().reached(streams.current().done)
    return False


def _follow(function: Any, name: str, args: Any, kwargs: Any, stream: streams.Stream) -> None:
    """Hold the operands against what other streams do with them."""
    named = {**dict(zip((a.name for a in function._schema.arguments), args, strict=False)), **kwargs}
    for argument in function._schema.arguments:
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        for value in tree_leaves(named.get(argument.name)):
            uses = _uses(value)
            if uses is not None and is_written:
                uses.writes(stream, name)
            elif uses is not None:
                uses.reads(stream, name)
            if uses is not None and uses.written is not None and not isinstance(value, SimulatedTensor):
                uses.written[0].reached(uses.written[1])


def _uses(value: Any) -> Uses | None:
    if isinstance(value, SimulatedTensor):
        return value.block.uses
    if isinstance(value, Tensor) and _pinned:
        entry = _pinned.get(value.untyped_storage()._cdata)
        return entry[1] if entry and entry[0]() is not None else None
    return None


def _later(function: Any, name: str, args: Any, kwargs: Any, stream: streams.Stream) -> Tensor:
    """The copy to the host is done when somebody waits for it: its place holds nonsense until then."""
    source = args[1] if name == "copy_" else args[0]
    if name == "copy_":
        place: Tensor = args[0]
    else:
        dtype = kwargs.get("dtype") or source.dtype
        place = torch.empty_strided(source.size(), source.stride(), dtype=dtype)
        _pin(place)
        entry = _uses(place)
        assert entry is not None
        entry.writes(stream, name)
    place.fill_(_nonsense(place.dtype))
    stream.done += 1
    kept = source.held.clone()  # later work of the same stream may write over it
    stream.late.append((stream.done, partial(place.copy_, kept)))
    return place


def _nonsense(dtype: torch.dtype) -> Any:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return True if dtype == torch.bool else torch.iinfo(dtype).max


def _pin(tensor: Tensor) -> None:
    storage = tensor.untyped_storage()
    _pinned[storage._cdata] = (weakref.ref(storage), Uses())


def is_pinned(tensor: Tensor) -> bool:
    """Whether it is in page-locked memory."""
    return _uses(tensor) is not None


def _unpinned(kwargs: Any) -> dict[str, Any]:
    return {"pin_memory": False} if kwargs.get("pin_memory") else {}


def _elements(value: Any) -> Any:
    if isinstance(value, SimulatedTensor):
        return value.held
    return CPU if isinstance(value, torch.device) and value.type == NAME else value


def _wrapped(value: Any, known: dict[int, SimulatedTensor], stream: streams.Stream) -> Any:
    if not isinstance(value, Tensor) or isinstance(value, SimulatedTensor):
        return value
    if id(value) in known:
        return known[id(value)]
    made = SimulatedTensor(value)
    if made.block.uses.written is None:
        made.block.uses.written = (stream, stream.done)
    return made


def _moved_here(held: Tensor) -> SimulatedTensor:
    return SimulatedTensor(held.clone())

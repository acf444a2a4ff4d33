"""A GPU that is not there: tensors that name ``gpu:0`` as their device, hold their elements on the CPU, and do not mix.

Code that forgets a device (``torch.zeros(n)`` beside a tensor on the GPU) works wherever there is none. Here it fails
as it would on CUDA: an operation takes tensors of one device, except for single numbers, indices and copies. Kernels,
streams, memory and speed are CUDA's own affair and are not pretended.

It changes torch for the whole process (a device module, inference mode), so it is for processes of their own:
``pretended_gpu_checks``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "gpu"
DEVICE = f"{NAME}:0"
CPU = torch.device("cpu")
aten = torch.ops.aten
COPIES = {aten.copy_, aten._to_copy, aten.to}
INDEXED = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}
"""Operations whose index may be on the CPU."""


class GpuTensor(Tensor):
    """A tensor on the pretended GPU."""

    held: Tensor
    """Its elements"""

    @staticmethod
    def __new__(cls, held: Tensor) -> GpuTensor:
        layout: dict[str, Any] = {"strides": held.stride(), "storage_offset": held.storage_offset()}
        made: Any = Tensor._make_wrapper_subclass(cls, held.size(), dtype=held.dtype, device=DEVICE, **layout)  # type: ignore[attr-defined]
        made.held = held
        return made  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(cls, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(function, args, kwargs or {})

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"GpuTensor({self.held!r})"


class _NewTensors(TorchDispatchMode):
    """Makes tensors where a function is told to make them on the GPU."""

    def __torch_dispatch__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves = tree_leaves((args, kwargs or {}))
        if any(isinstance(leaf, GpuTensor) or _is_gpu(leaf) for leaf in leaves):
            return _run(function, args, kwargs or {})
        return function(*args, **(kwargs or {}))


class _FromPython(TorchFunctionMode):
    """What torch does with Python numbers and lists below the level of operations."""

    def __torch_function__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if function in (torch.tensor, torch.as_tensor) and kwargs.get("device") is not None:
            device = kwargs.pop("device")
            return function(*args, **kwargs).to(device)
        if args and isinstance(args[0], GpuTensor):
            if function is Tensor.tolist:
                return args[0].held.tolist()
            if function is Tensor.numpy:
                raise TypeError("a tensor on the GPU is no numpy array: copy it to the CPU first")
            if function in (Tensor.__getitem__, Tensor.__setitem__):
                places = args[1] if isinstance(args[1], tuple) else (args[1],)
                args = (args[0], tuple(map(_index, places)), *args[2:])
        return function(*args, **kwargs)


class _NoGrad:
    """In place of inference mode, which tensors that wrap others cannot enter."""

    def __init__(self, _is_on: bool = True) -> None:
        self._inner = torch.no_grad()

    def __enter__(self) -> None:
        self._inner.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._inner.__exit__(*error)


def _run(function: Any, args: Any, kwargs: Any) -> Any:
    """The operation on the elements, its results where CUDA would have them."""
    leaves = tree_leaves((args, kwargs))
    wanted = next((leaf for leaf in leaves if isinstance(leaf, torch.device)), None)
    has_gpu = any(isinstance(leaf, GpuTensor) for leaf in leaves)
    _require_one_device(function, args, leaves)
    found = function(*tree_map(_elements, args), **tree_map(_elements, kwargs))
    if function in (aten._local_scalar_dense.default, aten.copy_.default) and not isinstance(args[0], GpuTensor):
        return found
    if wanted is not None and _is_gpu(wanted) != has_gpu:  # a copy to or from the GPU, or a new tensor on it
        return tree_map(_moved(GpuTensor if _is_gpu(wanted) else Tensor), found)
    return return_and_correct_aliasing(function, args, kwargs, tree_map(_wrapped, found))


def _require_one_device(function: Any, args: Any, leaves: list[Any]) -> None:
    looked_at = args[:1] if function.overloadpacket in INDEXED else leaves
    tensors = [leaf for leaf in looked_at if isinstance(leaf, Tensor)]
    strangers = [tensor for tensor in tensors if not isinstance(tensor, GpuTensor) and tensor.ndim > 0]
    on_gpu = any(isinstance(leaf, GpuTensor) for leaf in leaves)
    if strangers and on_gpu and function.overloadpacket not in COPIES:
        shapes = ", ".join(f"{tuple(tensor.shape)} {tensor.dtype}" for tensor in strangers)
        raise RuntimeError(f"{function} takes tensors of one device; on the CPU are those of shape {shapes}")


def _is_gpu(value: Any) -> bool:
    return isinstance(value, torch.device) and value.type == NAME


def _elements(value: Any) -> Any:
    if isinstance(value, GpuTensor):
        return value.held
    return CPU if _is_gpu(value) else value


def _index(place: Any) -> Any:
    return torch.tensor(place, dtype=torch.int64) if isinstance(place, list) else place


def _wrapped(value: Any) -> Any:
    return GpuTensor(value) if isinstance(value, Tensor) and not isinstance(value, GpuTensor) else value


def _moved(kind: type[Tensor]) -> Callable[[Any], Any]:
    def move(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return GpuTensor(value.clone()) if kind is GpuTensor else value.clone()

    return move


@contextmanager
def pretended_gpu() -> Iterator[str]:
    """Within it there is a device of this name."""
    _setup_privateuseone_for_python_backend(NAME)
    torch.__future__.set_swap_module_params_on_conversion(True)  # ``module.to`` cannot put a GpuTensor into a Parameter
    torch._C._InferenceMode = _NoGrad
    run = threading.Thread.run

    def run_pretending(thread: threading.Thread) -> None:
        with _NewTensors(), _FromPython():  # both are of one thread
            run(thread)

    with patch.object(threading.Thread, "run", run_pretending), _NewTensors(), _FromPython():
        yield DEVICE

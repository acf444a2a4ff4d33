"""The one place that knows that megatron-core is made for CUDA: lets it run where there is none.

megatron-core names the device it wants ("cuda") in many places and asks torch about it in more. Within
:func:`cuda_or_cpu` these mean the CPU. Where CUDA is available nothing is replaced, nothing is installed.

What is replaced until the block ends:

- ``device="cuda"`` arguments, ``Tensor.cuda()``, ``.to("cuda")`` and what ``Tensor.type()`` says, by a torch function
  mode;
- the current device, synchronisation, streams, events and the random state of ``torch.cuda``;
- the same names where ``megatron.core.tensor_parallel.random`` holds them;
- how mixtures of experts fetch token counts from the device, which turns them into numpy on the way.

Replacements are seen by the whole process, so only one thread at a time may be within a block.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")


def cuda_or_cpu(*, torch_functions: bool = True) -> AbstractContextManager[None]:
    """Within the block megatron-core computes on CUDA if there is CUDA, on the CPU otherwise. Blocks may nest.

    Args:
        torch_functions: Watch every call of a torch function, which costs microseconds each: a third of the time that a
            tiny model takes to generate. Passes that only compute, over a model that is there, do without.
    """
    return nullcontext() if torch.cuda.is_available() else _on_cpu(torch_functions)


@contextmanager
def _on_cpu(torch_functions: bool) -> Iterator[None]:
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import token_dispatcher

    replacements: list[tuple[Any, str, Any]] = [
        (torch.cuda, "current_device", lambda: CPU),
        (torch.cuda, "synchronize", _nothing),
        (torch.cuda, "_lazy_init", _nothing),
        (torch.cuda, "get_rng_state", _get_rng_state),
        (torch.cuda, "set_rng_state", _set_rng_state),
        (torch.cuda, "manual_seed", torch.manual_seed),
        (torch.cuda, "current_stream", _Idle),
        (torch.cuda, "stream", lambda _: nullcontext()),
        (torch.cuda, "Stream", _Idle),
        (torch.cuda, "Event", _Idle),
        (random, "_lazy_init", _nothing),
        (random, "_get_cuda_rng_state", _get_rng_state),
        (random, "_set_cuda_rng_state", _set_rng_state),
        (token_dispatcher, "maybe_move_tensor_to_cpu", _moved_to_cpu),
    ]
    with ExitStack() as stack, warnings.catch_warnings():
        # The mode sees every question for a gradient, also where there is none; megatron-core calls torch by old names.
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf", UserWarning)
        warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
        for owner, name, value in replacements:
            stack.enter_context(_replaced(owner, name, value))
        if torch_functions:
            stack.enter_context(_CudaMeansCpu())
        yield


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


class _CudaMeansCpu(TorchFunctionMode):
    """Calls of torch functions and tensor methods that name CUDA are made for the CPU."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.to:
            args = (args[0], *(CPU if _is_cuda(value) else value for value in args[1:]))
        if _is_cuda(kwargs.get("device")):
            kwargs = {**kwargs, "device": CPU}
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        found = func(*args, **kwargs)
        if func is torch.Tensor.type and isinstance(found, str):
            # The optimizer recognises parameters by this text.
            return found.replace("torch.", "torch.cuda.", 1)
        return found


def _is_cuda(device: Any) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and device.startswith("cuda")


class _Idle:
    """A stream or event where all work is done when the call returns."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def record(self, *_: Any) -> None:
        pass

    def record_event(self, *_: Any) -> _Idle:
        return self

    def wait(self, *_: Any) -> None:
        pass

    def wait_stream(self, *_: Any) -> None:
        pass

    def wait_event(self, *_: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


def _nothing(*_: Any, **__: Any) -> None:
    pass


def _get_rng_state(*_: Any, **__: Any) -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(state: torch.Tensor, *_: Any, **__: Any) -> None:
    torch.set_rng_state(state)


def _moved_to_cpu(tensor: Any, as_numpy: bool = False, **_: Any) -> Any:
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor

"""Makes the simulated device one of PyTorch's, for the whole process."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from nemorl_testing.simulated_device import streams
from nemorl_testing.simulated_device.tensors import NAME, allocator, run

DEVICE = f"{NAME}:0"
_library: list[torch.library.Library] = []
"""Kept: operations are registered as long as it lives."""


class DeviceModule:
    """``torch.sim``: what ``torch.cuda`` is for CUDA."""

    Stream = streams.Stream
    Event = streams.Event
    current_stream = staticmethod(streams.current)
    stream = staticmethod(streams.on)
    synchronize = staticmethod(streams.synchronize)

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def set_device(self, _device: Any) -> None:
        """There is one."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def get_rng_state(self, _device: Any = None) -> Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: Tensor, _device: Any = None) -> None:
        torch.set_rng_state(state)

    def manual_seed_all(self, _seed: int) -> None:
        """Its operations draw from the CPU's generator, which has been given the seed."""

    def empty_cache(self) -> None:
        allocator.empty_cache()

    def memory_allocated(self, _device: Any = None) -> int:
        return allocator.allocated

    def memory_reserved(self, _device: Any = None) -> int:
        return allocator.reserved

    def max_memory_allocated(self, _device: Any = None) -> int:
        return allocator.peak

    def reset_peak_memory_stats(self, _device: Any = None) -> None:
        allocator.reset_peak()

    def mem_get_info(self, _device: Any = None) -> tuple[int, int]:
        return allocator.total - allocator.reserved, allocator.total


class NoGrad:
    """In place of inference mode, in which PyTorch hands over operations before it has taken them apart: other kernels
    would compute them than with gradients."""

    def __init__(self, is_on: bool = True) -> None:
        self._inner = torch.set_grad_enabled(not is_on and torch.is_grad_enabled())

    def __enter__(self) -> None:
        self._inner.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._inner.__exit__(*error)


def install() -> str:
    """The device's name. Doing it twice is doing it once."""
    if _library:
        return DEVICE
    module = DeviceModule()
    _setup_privateuseone_for_python_backend(NAME, module)
    # ``Module.to`` keeps the identity of parameters, as for CUDA: tied weights stay tied.
    torch.__future__.set_swap_module_params_on_conversion(True)
    torch._C._InferenceMode = NoGrad  # type: ignore[misc,assignment]
    for name in ("synchronize", "empty_cache", "memory_allocated", "memory_reserved", "max_memory_allocated"):
        setattr(torch.accelerator, name, getattr(module, name))
    _library.extend([_registered(), _without_autocast()])
    return DEVICE


def _registered() -> torch.library.Library:
    """Each operation by itself: with a fallback alone, lists as tensors and indices end in an assertion of PyTorch."""
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    for qualified in torch._C._dispatch_get_all_op_names():
        if not qualified.startswith("aten::"):
            continue
        base, _, overload = qualified.removeprefix("aten::").partition(".")
        packet = getattr(torch.ops.aten, base, None)
        operation = getattr(packet, overload or "default", None)
        composite = torch._C._dispatch_has_kernel_for_dispatch_key(qualified, "CompositeImplicitAutograd")
        if operation is None or composite:
            continue
        kernel = partial(_called, operation)
        library.impl(qualified.removeprefix("aten::"), kernel, "PrivateUse1")  # type: ignore[no-untyped-call]
    for key in ("PrivateUse1", "AutogradPrivateUse1"):
        library.impl("scaled_dot_product_attention", _attention, key)  # type: ignore[no-untyped-call]
    return library


def _without_autocast() -> torch.library.Library:
    """Regions of autocast change no operation: nemorl has none, and transformers asks only to leave them."""
    library = torch.library.Library("_", "IMPL")  # type: ignore[no-untyped-call]
    library.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")  # type: ignore[no-untyped-call]
    return library


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention whose scores are never whole in memory, as on CUDA, where the plain one is the last resort."""
    if enable_gqa:
        key, value = (one.repeat_interleave(query.size(-3) // one.size(-3), -3) for one in (key, value))
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        nothing = torch.zeros((), dtype=query.dtype, device=query.device)
        attn_mask = torch.where(attn_mask, nothing, nothing - torch.inf)
    found: Tensor = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
    )[0]
    return found


def _called(operation: Any, *args: Any, **kwargs: Any) -> Any:
    return run(operation, args, kwargs)

"""The one place that knows that megatron-core is made for CUDA: lets it run where there is none.

megatron-core names the device it wants ("cuda") in a dozen places and asks torch about it in more. Importing this
module makes these mean the CPU, once and for the process. Where CUDA is available nothing is replaced.

What is replaced:

- the current device, synchronisation, streams, events and the random state of ``torch.cuda``, and the same names where
  ``megatron.core.tensor_parallel.random`` holds them;
- ``Tensor.cuda()`` and the text of ``Tensor.type()``, by which megatron-core's optimizer recognises parameters;
- ``torch`` as those modules of megatron-core see it that make tensors for ``device="cuda"``. For all others that stays
  the error that it is;
- how mixtures of experts fetch token counts from the device, which turns them into numpy on the way.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from megatron.core import utils
from megatron.core.dist_checkpointing import exchange_utils
from megatron.core.dist_checkpointing.strategies import state_dict_saver
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.optimizer import clip_grads, grad_scaler, optimizer
from megatron.core.pipeline_parallel import schedules
from megatron.core.tensor_parallel import data, random
from megatron.core.transformer import utils as transformer_utils
from megatron.core.transformer.moe import moe_utils, token_dispatcher

CPU = torch.device("cpu")
MAKERS = ("empty", "empty_like", "ones", "tensor", "zeros")
"""Functions of torch to which megatron-core passes ``device="cuda"`` or ``pin_memory=True``."""
USERS = (
    utils,
    exchange_utils,
    state_dict_saver,
    rope_utils,
    clip_grads,
    grad_scaler,
    optimizer,
    schedules,
    data,
    transformer_utils,
    moe_utils,
)
"""Modules that call them so."""


class _Torch(types.ModuleType):
    """``torch`` whose :data:`MAKERS` make tensors on the CPU."""

    def __init__(self) -> None:
        super().__init__("torch")
        for name in MAKERS:
            setattr(self, name, _on_cpu(getattr(torch, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _on_cpu(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(make)
    def made(*args: Any, pin_memory: bool = False, device: Any = None, **options: Any) -> torch.Tensor:
        return make(*args, **options, device=CPU if str(device).startswith("cuda") else device)

    return made


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


def _type_text(tensor: torch.Tensor, dtype: Any = None, *args: Any, **options: Any) -> Any:
    found = _TYPE(tensor, dtype, *args, **options)
    return found.replace("torch.", "torch.cuda.", 1) if isinstance(found, str) else found


def _moved_to_cpu(tensor: Any, as_numpy: bool = False, **_: Any) -> Any:
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


_TYPE = torch.Tensor.type


def _replace() -> None:
    replacements: list[tuple[Any, str, Any]] = [
        (torch.cuda, "current_device", lambda: CPU),
        (torch.cuda, "synchronize", _nothing),
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
        (torch.Tensor, "cuda", lambda tensor, *_, **__: tensor),
        (torch.Tensor, "type", _type_text),
        (token_dispatcher, "maybe_move_tensor_to_cpu", _moved_to_cpu),
        # Made here: vLLM on a CPU puts a stream of its own in torch's place, which knows no events.
        (token_dispatcher.MoEAlltoAllTokenDispatcher, "cuda_dtoh_stream", _Idle()),
    ]
    view = _Torch()
    for owner, name, value in (*replacements, *((module, "torch", view) for module in USERS)):
        setattr(owner, name, value)


if not torch.cuda.is_available():
    _replace()

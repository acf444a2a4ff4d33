"""Layers that are computed a second time in the backward pass, with the experts chosen as the first time.

A second pass may round otherwise than the first (another kernel, another order of a sum), and a token between two
experts would then go to the other one: gradients would be of another model than the loss. So the choices of a pass are
kept, a few integers per token, and taken again. Their scores are computed anew, as everything else.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from nemorl.errors import BackendError
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint as recompute


class _Running(threading.local):
    """What the pass of this thread does; the backward pass of a GPU has a thread of its own."""

    noted: list[Tensor] | None = None
    """Choices are added to it."""
    taken: Iterator[Tensor] | None = None
    """Choices come from it."""


_running = _Running()


def recompute_layers(model: nn.Module) -> None:
    """Recompute each decoder layer in the backward pass.

    Not by transformers' own switch: that one works in training mode only, which would turn dropout on as well.

    Raises:
        BackendError: The model does not mark its layers.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise BackendError(
            f"{type(model).__name__} does not mark its layers for activation checkpointing",
            fix="set policy.activation_checkpointing: false",
        )
    for layer in layers:
        layer.forward = partial(recompute, layer.forward, use_reentrant=False, context_fn=_passes)


def is_second_pass() -> bool:
    """A layer is being recomputed: what it counts was counted before."""
    return _running.taken is not None


class KeptChoices(TorchFunctionMode):
    """Within it ``topk`` chooses as it did in the first pass. Around what chooses experts.

    In both passes the values are gathered, with which the second saves as many tensors for the gradient as the first.
    """

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in (torch.topk, Tensor.topk) or (_running.noted is None and _running.taken is None):
            return func(*args, **kwargs)
        scores = args[0] if args else kwargs["input"]
        axis = args[2] if len(args) > 2 else kwargs.get("dim", -1)
        with torch.no_grad():
            chosen = func(*args, **kwargs)[1]
        if _running.taken is not None:
            chosen = next(_running.taken)
        elif _running.noted is not None:
            _running.noted.append(chosen)
        return torch.return_types.topk((scores.gather(axis, chosen), chosen))  # type: ignore[attr-defined]


def _passes() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Around the first pass of a layer, and around the second."""
    choices: list[Tensor] = []
    return _first(choices), _second(choices)


@contextmanager
def _first(choices: list[Tensor]) -> Iterator[None]:
    _running.noted = choices
    try:
        yield
    finally:
        _running.noted = None


@contextmanager
def _second(choices: list[Tensor]) -> Iterator[None]:
    _running.taken = iter(choices)
    try:
        yield
    finally:
        _running.taken = None

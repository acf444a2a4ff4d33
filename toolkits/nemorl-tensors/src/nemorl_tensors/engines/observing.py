"""Activations of a model on the way from tokens to logits, recorded piece by piece under names that engines share.

A backend that declares the capability ``activations`` can be asked for them (:class:`ObservableTrainer`,
:class:`ObservableSampler`); ``nemorl_rl.audit.divergence`` compares those of two. Here are the names, the recorder and
where the pieces are in models whose modules are named as in transformers, which vLLM's are as well. Other engines bring
a table of their own.

# T = tokens of a forward pass, F = features
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from nemorl.errors import BackendError
from torch import Tensor, nn

LAYER_ROLES: Mapping[str, str] = {
    "layer_input": "the residual stream that enters the layer",
    "input_norm": "the norm before attention",
    "query": "the query projection",
    "key": "the key projection",
    "value": "the value projection",
    "query_norm": "the norm of the queries",
    "key_norm": "the norm of the keys",
    "rotated_query": "the queries after the rotary embedding",
    "rotated_key": "the keys after the rotary embedding",
    "heads": "attention itself, before its output projection",
    "attention": "the output projection of attention",
    "attention_norm": "the norm of attention's output",
    "mlp_input": "the residual stream after attention",
    "mlp_norm": "the norm before the MLP",
    "mlp_activation": "the MLP's activation, before its last projection",
    "mlp": "the output of the MLP",
    "mlp_out_norm": "the norm of the MLP's output",
}
"""Roles of tensors within a layer, in the order in which they are computed, for people."""

LAST_ROLES: Mapping[str, str] = {
    "last_output": "the residual stream after the last layer",
    "final_norm": "the final norm",
    "logits": "the logits",
}
"""The same after the last layer."""


@dataclass(frozen=True)
class Place:
    """A tensor that a model computes."""

    layer: int | None
    """Counted from 0; ``None``: after the last layer."""
    role: str
    """One of ``LAYER_ROLES`` or ``LAST_ROLES``."""

    @property
    def order(self) -> tuple[int, int, int]:
        """Places sort by it as they are computed."""
        if self.layer is None:
            return 1, 0, list(LAST_ROLES).index(self.role)
        return 0, self.layer, list(LAYER_ROLES).index(self.role)

    @property
    def description(self) -> str:
        """For people."""
        return LAST_ROLES[self.role] if self.layer is None else f"{LAYER_ROLES[self.role]} of layer {self.layer}"


Activations = Mapping[Place, Tensor]
"""[T, F] float32 on the CPU of each place: of all tokens that were fed to the model, or of the last of them."""


class Recorder:
    """Collects activations of one sequence over the passes that compute them."""

    def __init__(self) -> None:
        self._parts: dict[Place, list[Tensor]] = {}
        self._tokens = 1

    def begin_pass(self, tokens: int) -> None:
        """Announce a forward pass over this many new tokens."""
        self._tokens = tokens

    def add(self, layer: int | None, role: str, tensor: Tensor) -> None:
        """Record a tensor of all tokens of the pass. Its first axis of as many counts them."""
        self._keep(Place(layer, role), _rows(tensor, self._tokens))

    def add_last(self, role: str, tensor: Tensor) -> None:
        """Record a tensor […, F] after the last layer, which may be of the last tokens of the pass alone."""
        self._keep(Place(None, role), tensor.reshape(-1, tensor.shape[-1]))

    def add_newest(self, layer: int, role: str, tensor: Tensor, axis: int) -> None:
        """The same of a tensor that begins with earlier tokens along ``axis``."""
        newest = tensor.narrow(axis, tensor.shape[axis] - self._tokens, self._tokens)
        self.add(layer, role, newest.movedim(axis, 0))

    def _keep(self, place: Place, rows: Tensor) -> None:
        self._parts.setdefault(place, []).append(rows.detach().to("cpu", torch.float32, copy=True))

    def activations(self) -> dict[Place, Tensor]:
        """Everything so far, in the order of computation."""
        return {place: torch.cat(self._parts[place]) for place in sorted(self._parts, key=lambda place: place.order)}


def _rows(tensor: Tensor, tokens: int) -> Tensor:
    """[T, F]"""
    if tokens == 1:
        return tensor.reshape(1, -1)
    axis = next((axis for axis, size in enumerate(tensor.shape) if size == tokens), None)
    if axis is None:
        raise BackendError(
            f"a tensor of shape {list(tensor.shape)} has no axis of {tokens} tokens",
            fix="the layout of this model's activations is not known; log-probs can be compared all the same",
        )
    return tensor.movedim(axis, 0).reshape(tokens, -1)


@dataclass(frozen=True)
class Tap:
    """A tensor of a module's call, and the role under which it is recorded."""

    role: str
    pick: Callable[[tuple[Any, ...], Any], Tensor]
    """(inputs, output) of the call -> the tensor"""
    before: bool = False
    """Taken before the call, which may overwrite it; there is no output then."""
    newest_of: int | None = None
    """The axis along which the tensor may begin with earlier tokens."""


def first(output: Any) -> Any:
    """The output of a module that returns it alone or with something else."""
    return output[0] if isinstance(output, tuple) else output


def entering(role: str, index: int = 0, newest_of: int | None = None) -> Tap:
    """The module's input."""
    return Tap(role, lambda inputs, _: inputs[index], before=True, newest_of=newest_of)


def leaving(role: str) -> Tap:
    """The module's output."""
    return Tap(role, lambda _, output: first(output))


def norm_taps(stream: str, role: str) -> tuple[Tap, ...]:
    """Of a norm: the residual stream that it reads, and its output. vLLM's norms may add the branch to the stream."""
    return Tap(stream, lambda inputs, output: output[1] if isinstance(output, tuple) else inputs[0]), leaving(role)


@contextmanager
def watching(
    recorder: Recorder, embedding: nn.Module, taps: Sequence[tuple[nn.Module, int | None, Tap]]
) -> Iterator[None]:
    """Within it the taps record, and each call of the embedding begins a pass."""

    def begin(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
        recorder.begin_pass(output.numel() // output.shape[-1])

    handles = [embedding.register_forward_hook(begin)]
    try:
        for module, layer, tap in taps:
            handles.append(_attach(recorder, module, layer, tap))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _attach(recorder: Recorder, module: nn.Module, layer: int | None, tap: Tap) -> Any:
    def record(tensor: Tensor) -> None:
        if layer is None:
            recorder.add_last(tap.role, tensor)
        elif tap.newest_of is None:
            recorder.add(layer, tap.role, tensor)
        else:
            recorder.add_newest(layer, tap.role, tensor, tap.newest_of)

    if tap.before:
        return module.register_forward_pre_hook(lambda _, inputs: record(tap.pick(inputs, None)))
    return module.register_forward_hook(lambda _, inputs, output: record(tap.pick(inputs, output)))


# Modules named as in transformers

Modules = Mapping[str, nn.Module]
"""The modules of a layer by their names within it."""
Taps = Mapping[str, tuple[Tap, ...]]
"""By the name of a module within its layer; what a layer lacks is left out."""

PROJECTIONS: Taps = {
    "self_attn.q_proj": (leaving("query"),),
    "self_attn.k_proj": (leaving("key"),),
    "self_attn.v_proj": (leaving("value"),),
    "self_attn.q_norm": (leaving("query_norm"),),
    "self_attn.k_norm": (leaving("key_norm"),),
    "self_attn.o_proj": (entering("heads"), leaving("attention")),
    "mlp.down_proj": (entering("mlp_activation"),),
    "mlp": (leaving("mlp"),),
}


@dataclass(frozen=True)
class Body:
    """A decoder whose modules are named as in transformers."""

    embedding: nn.Module
    layers: Sequence[nn.Module]
    norm: nn.Module

    @classmethod
    def of(cls, model: nn.Module) -> Body:
        """The first module of a model that has the parts of a decoder.

        Raises:
            BackendError: There is none.
        """
        for module in model.modules():
            parts = dict(module.named_children())
            if {"embed_tokens", "layers", "norm"} <= parts.keys():
                return cls(parts["embed_tokens"], [*parts["layers"].children()], parts["norm"])
        raise BackendError(
            f"the layers of {type(model).__name__} are not named as those of Llama, Qwen, Gemma and their kin",
            fix="log-probs can be compared all the same",
        )

    def taps(self, more: Callable[[Modules], Taps] = lambda _: {}) -> list[tuple[nn.Module, int | None, Tap]]:
        """Modules to record: ``PROJECTIONS``, norms, and those that ``more`` names in each layer."""
        found: list[tuple[nn.Module, int | None, Tap]] = []
        for index, layer in enumerate(self.layers):
            modules = dict(layer.named_modules())
            wanted = {**PROJECTIONS, **_norms(modules), **more(modules)}
            found += [(modules[name], index, tap) for name, taps in wanted.items() if name in modules for tap in taps]
        return found + [(self.norm, None, tap) for tap in norm_taps("last_output", "final_norm")]


def _norms(modules: Modules) -> dict[str, tuple[Tap, ...]]:
    """A norm after attention is of the MLP's input, unless the MLP has norms of its own (Gemma, OLMo 2)."""
    mlp_has_own = {"pre_feedforward_layernorm", "post_feedforward_layernorm"} & modules.keys()
    return {
        "input_layernorm": norm_taps("layer_input", "input_norm"),
        "post_attention_layernorm": (
            (leaving("attention_norm"),) if mlp_has_own else norm_taps("mlp_input", "mlp_norm")
        ),
        "pre_feedforward_layernorm": norm_taps("mlp_input", "mlp_norm"),
        "post_feedforward_layernorm": (leaving("mlp_out_norm"),),
    }

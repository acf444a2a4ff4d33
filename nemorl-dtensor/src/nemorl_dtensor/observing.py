"""Recording of transformers' models' values (``nemorl_tensors.engines.observing``): in training and in decoding.

Projections, norms and MLPs are modules. Rotated queries and keys are not: they are recorded where transformers hands
them to its attention function. ``decode_llama`` computes without modules and has an observed form below.
"""

# T = tokens of a pass, N = the same, Q = query heads, H = key-value heads, d = head size

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial, wraps
from typing import Any
from unittest.mock import patch

import torch
from nemorl_tensors.engines.decoding import Decoder
from nemorl_tensors.engines.observing import Body, Place, Recorder, watching
from nemorl_tensors.engines.rows import Rows
from torch import Tensor, nn

from nemorl_dtensor.decode import build_decoder
from nemorl_dtensor.decode_llama import Attend, LlamaDecoder, is_llama_like
from nemorl_dtensor.model_head import Scorer


@contextmanager
def observed_modules(model: nn.Module, recorder: Recorder) -> Iterator[None]:
    """Within it, forward passes of a transformers model are recorded, all but the logits."""
    body = Body.of(model)
    with watching(recorder, body.embedding, body.taps()), _observed_attention(recorder):
        yield


@contextmanager
def observed_logits(model: nn.Module, recorder: Recorder) -> Iterator[None]:
    """Within it, the logits that a transformers model returns are recorded."""
    handle = model.register_forward_hook(lambda _, _inputs, output: recorder.add_last("logits", output.logits))
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _observed_attention(recorder: Recorder) -> Iterator[None]:
    """Attention functions of transformers record what they are given."""
    from transformers import AttentionInterface

    choose = AttentionInterface.get_interface

    def choose_observed(self: Any, *names: Any, **options: Any) -> Callable[..., Any]:
        function = choose(self, *names, **options)

        @wraps(function)
        def attend(module: Any, query: Tensor, key: Tensor, *rest: Any, **further: Any) -> Any:
            # [1, Q, T, d] and [1, H, T or more, d], which begin with cached tokens
            recorder.add_newest(module.layer_idx, "rotated_query", query, 2)
            recorder.add_newest(module.layer_idx, "rotated_key", key, 2)
            return function(module, query, key, *rest, **further)

        return attend

    with patch.object(AttentionInterface, "get_interface", choose_observed):
        yield


@dataclass(frozen=True)
class _Tapped:
    """A projection of ``decode_llama`` whose input or output is recorded."""

    project: Callable[[Tensor], Tensor]
    note_input: Callable[[Tensor], None] | None = None
    note_output: Callable[[Tensor], None] | None = None

    def __call__(self, x: Tensor) -> Tensor:
        if self.note_input is not None:
            self.note_input(x)
        found = self.project(x)
        if self.note_output is not None:
            self.note_output(found)
        return found


class ObservedLlamaDecoder(LlamaDecoder):
    """``LlamaDecoder``, which records what it computes."""

    def __init__(self, model: Any, max_tokens: int, recorder: Recorder) -> None:
        super().__init__(model, max_tokens)
        self._recorder = recorder
        self._layers = [self._tapped(index, layer) for index, layer in enumerate(self._layers)]
        self._numbers = {id(layer): index for index, layer in enumerate(self._layers)}
        note_norm, note_logits = partial(recorder.add_last, "final_norm"), partial(recorder.add_last, "logits")
        self._head = _Tapped(self._head, note_norm, note_logits)  # type: ignore[assignment]

    def _tapped(self, index: int, layer: Any) -> Any:
        note = partial(partial, self._recorder.add, index)
        output = _Tapped(layer.output, note("heads"), note("attention"))
        down = _Tapped(layer.down, note("mlp_activation"), note("mlp"))
        note_norm = note("mlp_norm")
        joined = None if layer.gate_up is None else _Tapped(layer.gate_up, note_norm)
        return replace(layer, output=output, down=down, gate=_Tapped(layer.gate, note_norm), gate_up=joined)

    def _forward(
        self, tokens: Tensor, cos: Tensor, sin: Tensor, attend: Attend, select: Tensor | None = None
    ) -> Tensor:
        self._recorder.begin_pass(len(tokens))

        def observed(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self._recorder.add(layer, "rotated_query", q)
            self._recorder.add(layer, "rotated_key", k)
            return attend(layer, q, k, v)

        return super()._forward(tokens, cos, sin, observed, select)

    def _project(self, layer: Any, normed: Tensor) -> tuple[Tensor, Tensor]:
        index = self._numbers[id(layer)]
        qk, v = super()._project(layer, normed)
        query, key = ("query", "key") if layer.query_norm is None else ("query_norm", "key_norm")
        self._recorder.add(index, "input_norm", normed)
        self._recorder.add(index, query, qk[:, : self._heads])
        self._recorder.add(index, key, qk[:, self._heads :])
        self._recorder.add(index, "value", v)
        return qk, v


@torch.no_grad()
def observe_scoring(model: nn.Module, scorer: Scorer, rows: Rows) -> dict[Place, Tensor]:
    """Values computed by the pass that scores the rows of one sequence."""
    recorder = Recorder()
    with observed_modules(model, recorder):
        states = scorer.states(rows)
    recorder.add_last("logits", scorer.logits(states))
    return recorder.activations()


@contextmanager
def observed_decoding(model: Any, max_tokens: int, recorder: Recorder) -> Iterator[Decoder]:
    """The decoder that ``decode.build_decoder`` chooses for the model. What it computes meanwhile is recorded."""
    if is_llama_like(model, max_tokens):
        yield ObservedLlamaDecoder(model, max_tokens, recorder)
        return
    with observed_modules(model, recorder), observed_logits(model, recorder):
        yield build_decoder(model, max_tokens)

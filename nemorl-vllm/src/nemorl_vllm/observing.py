"""Recording of the values that vLLM's model computes, in its worker (``nemorl_tensors.engines.observing``).

Modules are named as in transformers, with three differences: queries, keys and values are one projection, norms add the
branch to the residual stream first, and attention is a module, which is given queries and keys after their rotation.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

from nemorl_tensors.engines.observing import Body, Modules, Recorder, Tap, Taps, entering, first, leaving, watching
from torch import Tensor, nn
from vllm.model_executor.layers.linear import QKVParallelLinear
from vllm.model_executor.layers.logits_processor import LogitsProcessor


@contextmanager
def observed(model: nn.Module, recorder: Recorder) -> Iterator[None]:
    """Within it, forward passes of a model on one device are recorded."""
    body = Body.of(model)
    heads = [module for module in model.modules() if isinstance(module, LogitsProcessor)]
    taps = body.taps(_attention) + [(module, None, leaving("logits")) for module in heads]
    with watching(recorder, body.embedding, taps):
        yield


def _attention(modules: Modules) -> Taps:
    """Taps of a layer that transformers' modules do not have."""
    joined = [(name, module) for name, module in modules.items() if isinstance(module, QKVParallelLinear)]
    projections = {name: tuple(_parts(module)) for name, module in joined}
    return {**projections, "self_attn.attn": (entering("rotated_query", 0), entering("rotated_key", 1))}


def _parts(projection: QKVParallelLinear) -> Iterator[Tap]:
    ends = [*accumulate(projection.output_sizes)]
    for role, end, size in zip(("query", "key", "value"), ends, projection.output_sizes, strict=True):
        part = slice(end - size, end)

        def pick(_: Any, output: Any, part: slice = part) -> Tensor:
            found: Tensor = first(output)[..., part]
            return found

        yield Tap(role, pick)

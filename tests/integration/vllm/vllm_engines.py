"""What the tests of the vLLM backend share: building engines, and comparing them with plain transformers models."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from nemorl.config import PolicyConfig
from nemorl.resources.worker import WorkerContext
from nemorl.types import Completion, GenerationRequest
from nemorl.weights import WeightHandle, in_process_handle
from nemorl_testing.models import response_logprobs

KV_CACHE_GIB = 0.1
"""Room for 200k tokens of the tiny model."""


def build_generator(
    model: Path, weights: WeightHandle | None = None, *, policy: Mapping[str, Any] | None = None, **options: Any
) -> Any:
    """A vLLM generator in this process."""
    from nemorl_vllm.config import VLLMConfig
    from nemorl_vllm.generation import VLLMGeneration

    settings = {"model_name": str(model), "max_sequence_tokens": 256, **(policy or {})}
    backend = VLLMConfig(**{"kv_cache_gib": KV_CACHE_GIB, **options})
    return VLLMGeneration(PolicyConfig.model_validate(settings), WorkerContext(), weights, backend)


def gaps(model: Any, requests: Sequence[GenerationRequest], groups: Sequence[Sequence[Completion]]) -> list[float]:
    """|difference| in nats of every log-prob from that of a transformers model."""
    return [
        abs(found - wanted)
        for request, group in zip(requests, groups, strict=True)
        for completion in group
        for found, wanted in zip(
            completion.logprobs,
            response_logprobs(model, request.token_ids, completion.token_ids, request.sampling.temperature),
            strict=True,
        )
    ]


def handle_of(model: Any, version: int) -> WeightHandle:
    """The parameters of a transformers model, in two buckets."""

    def export() -> Iterator[Mapping[str, torch.Tensor]]:
        parameters = list(model.named_parameters())
        half = len(parameters) // 2
        yield dict(parameters[:half])
        yield dict(parameters[half:])

    return in_process_handle(export, version)


def changed(model: Any, seed: int) -> Any:
    """The same model after all of its weights have been changed a lot."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(noise * (0.1 if parameter.ndim > 1 else 0.05))
    return model

"""What the tests of the vLLM backend share: building engines, and comparing them with plain transformers models."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from nemorl.config import PolicyConfig
from nemorl.resources.worker import WorkerContext
from nemorl.types import Completion, GenerationRequest
from nemorl.weights import WeightHandle, in_process_handle
from nemorl_testing.models import load_reference, response_logprobs, tiny_model
from safetensors.torch import save_file

KV_CACHE_GIB = 0.1
"""Room for 200k tokens of the tiny model."""
VOCABULARY = 89
"""Of the tiny model."""


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


def write_eagle_head(folder: Path, target: Path) -> Path:
    """A head of EAGLE-3 with random weights, which reads the hidden states of a model folder's model."""
    sizes = json.loads((target / "config.json").read_text())
    width, inner, vocabulary = (sizes[name] for name in ("hidden_size", "intermediate_size", "vocab_size"))
    heads, shared = sizes["num_attention_heads"], sizes["num_key_value_heads"]
    kept = ("hidden_size", "intermediate_size", "vocab_size", "num_attention_heads", "num_key_value_heads",
            "max_position_embeddings", "eos_token_id")  # fmt: skip
    config = {name: sizes[name] for name in kept} | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "draft_vocab_size": vocabulary,
        "dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    head_size = width // heads
    shapes = {
        "midlayer.self_attn.q_proj": (heads * head_size, 2 * width),  # of the embedding and the hidden state
        "midlayer.self_attn.k_proj": (shared * head_size, 2 * width),
        "midlayer.self_attn.v_proj": (shared * head_size, 2 * width),
        "midlayer.self_attn.o_proj": (width, heads * head_size),
        "midlayer.mlp.gate_proj": (inner, width),
        "midlayer.mlp.up_proj": (inner, width),
        "midlayer.mlp.down_proj": (width, inner),
        "fc": (width, 3 * width),  # of hidden states at three depths
        "lm_head": (vocabulary, width),
    }
    generator = torch.Generator().manual_seed(1)
    weights = {f"{name}.weight": torch.randn(shape, generator=generator) * 0.15 for name, shape in shapes.items()}
    norms = ("midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm", "norm")
    weights |= {f"{name}.weight": torch.ones(width) for name in norms}
    save_file(weights, folder / "model.safetensors")
    return folder


def second_tokens(
    group: Sequence[Completion], prompt: tuple[int, ...], temperature: float
) -> tuple[torch.Tensor, torch.Tensor, float, int]:
    """Second tokens of the tiny model's responses beside their probabilities.

    Returns:
        [V] the number expected of each token; [V] those that are expected five times or more; chi-squared over these
        and the rest as one class; and its degrees of freedom.
    """
    second = torch.tensor([c.token_ids[1] for c in group if len(c.token_ids) == 2])
    expected = _exact_second_token(prompt, temperature) * len(second)
    counts = torch.bincount(second, minlength=VOCABULARY).float()
    common = expected >= 5
    observed = torch.cat([counts[common], counts[~common].sum()[None]])
    wanted = torch.cat([expected[common], expected[~common].sum().clamp(min=1)[None]])
    return expected, common, float(((observed - wanted) ** 2 / wanted).sum()), len(wanted) - 1


@torch.no_grad()
def _exact_second_token(prompt: tuple[int, ...], temperature: float) -> torch.Tensor:
    """[V] probability of the second token of a response, over all first ones that do not end it."""
    model = load_reference(tiny_model())
    first = torch.softmax(model(input_ids=torch.tensor([prompt])).logits[0, -1] / temperature, -1)
    rows = torch.tensor([[*prompt, token] for token in range(VOCABULARY)])
    second = torch.softmax(model(input_ids=rows).logits[:, -1] / temperature, -1)
    first[model.generation_config.eos_token_id] = 0.0
    found: torch.Tensor = first @ second
    return found / found.sum()

"""A tiny Hugging Face model on disk, and what transformers itself computes with it: the yardstick of backend checks.

# N = tokens of all sequences concatenated
"""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from nemorl_rl.models.tiny import write_tiny_model
from nemorl_tensors import TokenBatch
from torch import Tensor

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}
"""Head size 32, the smallest that all attention kernels take."""


@cache
def tiny_model(*, seed: int = 7, **sizes: Any) -> Path:
    """A Qwen2 folder with float32 weights whose log-probs are far from uniform. Made once per process. Read only."""
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = Path(tempfile.mkdtemp(prefix="nemorl-tiny-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    write_tiny_model(folder, **{**SIZES, **sizes})
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for parameter in model.parameters():
            # Every tensor differs from what a fresh model has, so that one which does not arrive is noticed.
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise * 0.15 if parameter.ndim > 1 else parameter + noise * 0.05)
    model.save_pretrained(folder)
    return folder


def tiny_mixture() -> Path:
    """The same of a Qwen3 mixture: two layers of eight experts, two for each token."""
    routed = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "head_dim": 32}
    return tiny_model(architecture="qwen3_moe", norm_topk_prob=True, **routed)


def chosen_experts(model: Any, token_ids: Sequence[int]) -> Tensor:
    """[T, L, K] experts that each token goes to in a forward pass of transformers over such a mixture, in order."""
    found: list[Tensor] = []

    def note(_module: Any, _inputs: Any, output: Any) -> None:
        found.append(output[2].sort(-1)[0])

    hooks = [layer.mlp.gate.register_forward_hook(note) for layer in model.model.layers]
    with torch.no_grad():
        model(input_ids=torch.tensor([list(token_ids)]), use_cache=False)
    for hook in hooks:
        hook.remove()
    return torch.stack(found, 1)


def load_reference(folder: Path | str) -> Any:
    """The model as plain transformers loads it: float32, evaluation mode, on CPU."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()  # type: ignore[no-untyped-call]


def plain_logprobs(model: Any, batch: TokenBatch) -> Tensor:
    """[N] float32 nats, one sequence at a time; 0.0 where masked out and at first tokens. Keeps the gradient."""
    results = []
    for ids in torch.split(batch.token_ids, batch.lengths.tolist()):
        logits = model(input_ids=ids[None]).logits[0].float() / batch.temperature
        scored = torch.log_softmax(logits[:-1], -1).gather(1, ids[1:, None]).squeeze(1)
        results.append(torch.cat([torch.zeros(1), scored]))
    return torch.where(batch.mask, torch.cat(results), 0.0)


@torch.no_grad()
def response_logprobs(
    model: Any, prompt: Sequence[int], response: Sequence[int], temperature: float = 1.0
) -> list[float]:
    """Nats of each response token given all before it."""
    batch = TokenBatch.from_sequences(
        [[*prompt, *response]], [[False] * len(prompt) + [True] * len(response)], temperature=temperature or 1.0
    )
    found: list[float] = plain_logprobs(model, batch)[len(prompt) :].tolist()
    return found


@torch.no_grad()
def greedy_continuation(model: Any, prompt: Sequence[int], count: int, stop: frozenset[int]) -> tuple[int, ...]:
    """The most likely token, ``count`` times or until one of ``stop``, each from a full forward pass."""
    ids = list(prompt)
    while len(ids) < len(prompt) + count and (len(ids) == len(prompt) or ids[-1] not in stop):
        ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
    return tuple(ids[len(prompt) :])

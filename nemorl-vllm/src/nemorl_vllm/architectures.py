"""Architectures that vLLM gets wrong or cannot run, known from a model's ``config.json`` before anything starts.

What is wrong was found by comparing its log-probs with transformers', which trains: tiny models of random weights, on
the CPU in float32 (``docs/backends/architectures.md``). Importing this imports neither torch nor vLLM.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

WRONG: Mapping[str, str] = {
    "bloom": "vLLM 0.32 computes its activation by the error function, transformers by its tanh approximation",
    "cohere2": "vLLM 0.32 lets its sliding-window layers see one token more than transformers does",
    "paligemma": "the tokens of its prompt see each other in transformers, and in vLLM 0.32 on the CPU each sees those "
    "before it alone (on CUDA nobody has compared)",
}
"""transformers' ``model_type`` -> why samples have other log-probs than training computes, on any device."""
CAUSAL: Mapping[str, str] = dict.fromkeys(
    ("gemma3",),
    "the tokens of an image see each other in transformers, and in vLLM 0.32 on the CPU each sees those before it "
    "alone (on CUDA nobody has compared)",
)
"""The same of models that are right for text: why they cannot be shown anything."""
UNUSABLE: Mapping[str, str] = {
    "mpt": "vLLM has no code for this architecture since 0.28",
    "minimax_m2": "vLLM 0.32 cannot replace its weights: its reload fails on the norms of this model's attention",
}
"""The same: why it cannot be run on any device."""
ON_CPU: Mapping[str, str] = {
    **dict.fromkeys(
        ("mamba", "mamba2", "falcon_mamba", "rwkv"), "vLLM 0.32 on the CPU cannot generate with recurrent models"
    ),
    **dict.fromkeys(
        ("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"),
        "vLLM 0.32 on the CPU has linear attention (gated delta rule) in bfloat16 and without shared prefixes only",
    ),
    "phimoe": "vLLM 0.32 on the CPU has no kernel for the way in which it chooses experts",
}
LATENT_ATTENTION = "vLLM 0.32 on the CPU cannot exchange the weights of models with multi-head latent attention (MLA)"
USE_HF = "set generation.backend: hf"


def obstacles(stored: Mapping[str, Any], device: str) -> Iterator[tuple[str, str]]:
    """Why vLLM cannot sample from a model, and what to do.

    Args:
        stored: The model's ``config.json``.
        device: torch device string.

    >>> [fix for _, fix in obstacles({"model_type": "cohere2"}, "cuda:0")]
    ['set generation.backend: hf']
    """
    inner = stored.get("text_config")
    kinds = [str(part.get("model_type")) for part in (stored, inner) if isinstance(part, Mapping)]
    reasons = {**WRONG, **UNUSABLE, **(ON_CPU if device == "cpu" else {})}
    for kind in kinds:
        if kind in reasons:
            yield f"{kind}: {reasons[kind]}", USE_HF
            return
    if device == "cpu" and any(part.get("kv_lora_rank") for part in (stored, inner) if isinstance(part, Mapping)):
        yield f"{kinds[0]}: {LATENT_ATTENTION}", USE_HF

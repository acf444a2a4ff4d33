"""Models of published shapes with random weights and a character tokenizer: nothing is downloaded."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemorl.config import GenerationConfig, PolicyConfig
from nemorl.resources.worker import WorkerContext
from nemorl_rl.models.model_geometry import Geometry
from nemorl_tensors import TokenBatch


@dataclass(frozen=True)
class Shape:
    """A Llama with tied embeddings."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @property
    def geometry(self) -> Geometry:
        """Its counts: parameters, FLOPs, bytes of the cache."""
        return Geometry.from_config({**vars(self), "model_type": "llama", "tie_word_embeddings": True})


SMOLLM2_135M = Shape(49152, 576, 1536, 30, 9, 3)
SMOLLM2_1_7B = Shape(49152, 2048, 8192, 24, 32, 32)
LLAMA_8B = Shape(128256, 4096, 14336, 32, 32, 8)
"""Llama 3.1 8B, whose head is a matrix of its own: 7.5 billion parameters here."""
TINY = Shape(96, 64, 128, 2, 4, 2)
"""In miniature, for the CPU."""


def write_model(folder: Path, shape: Shape, device: str, dtype: str = "bfloat16") -> Path:
    """A folder with that config, a tokenizer and random weights, which are drawn on the device: on a CPU 1.7 billion
    take half a minute."""
    import torch
    from nemorl_rl.models.tiny import write_tiny_model
    from transformers import AutoConfig, AutoModelForCausalLM

    write_tiny_model(folder, architecture="llama")
    file = folder / "config.json"
    config: dict[str, Any] = json.loads(file.read_text())
    config.update({**vars(shape), "head_dim": shape.head_size, "max_position_embeddings": 4096})
    file.write_text(json.dumps(config))
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=getattr(torch, dtype))
    model.save_pretrained(folder)
    return folder


def policy(folder: Path, precision: str = "bfloat16", **more: Any) -> PolicyConfig:
    """Of the weights in the folder."""
    fields = {"model_name": str(folder), "precision": precision, "max_sequence_tokens": 2048, **more}
    return PolicyConfig.model_validate(fields)


def trainer(folder: Path, device: str, precision: str = "bfloat16", **more: Any) -> Any:
    """The backend ``dtensor``."""
    config = policy(folder, precision, **more)
    return config.backend.build(config, WorkerContext(device=device), reference=False)


def generator(folder: Path, device: str, precision: str = "bfloat16") -> Any:
    """The backend ``hf``."""
    config = GenerationConfig()
    return config.backend.build(config, policy(folder, precision), WorkerContext(device=device), None)


def drawn_batch(
    shape: Shape, *, groups: int, group_size: int, prompt: int, response: int, seed: int = 0, **more: Any
) -> TokenBatch:
    """Groups of sequences with one prompt each; responses are trained on, with advantages in [-1, 1]."""
    import random

    import torch

    draw = random.Random(seed)

    def text(count: int) -> list[int]:
        return [draw.randrange(8, shape.vocab_size) for _ in range(count)]

    prompts = [text(prompt) for _ in range(groups)]
    sequences = [given + text(response) for given in prompts for _ in range(group_size)]
    masks = [[False] * prompt + [True] * response for _ in sequences]
    batch = TokenBatch.from_sequences(sequences, masks, **more)
    return batch.with_tokens(advantages=torch.empty(batch.num_tokens).uniform_(-1, 1, generator=_seeded(seed)))


def _seeded(seed: int) -> Any:
    import torch

    return torch.Generator().manual_seed(seed)

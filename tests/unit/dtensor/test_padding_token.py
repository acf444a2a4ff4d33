"""The padding token is a token: where it is sampled, its embedding learns as any other's."""

from __future__ import annotations

from pathlib import Path

import torch
from nemorl.config import PolicyConfig
from nemorl_dtensor.model import load_model, skeleton
from nemorl_rl.models.tiny import write_tiny_model


def test_the_row_of_a_sampled_padding_token_has_a_gradient(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "model", hidden_size=32, intermediate_size=64)
    policy = PolicyConfig(model_name=str(folder), init="random")
    model = load_model(policy, seed=1)
    pad = model.config.pad_token_id
    assert pad is not None
    tokens = torch.tensor([[5, pad, 7]])
    model(tokens).logits.logsumexp(-1).sum().backward()
    slope = model.get_input_embeddings().weight.grad
    assert slope is not None
    assert bool(slope[pad].abs().max() > 0)
    assert skeleton(policy).get_input_embeddings().padding_idx is None

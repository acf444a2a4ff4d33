"""A tiny reward model on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from nemorl_rl.models.tiny import write_tiny_model


def write_classifier(folder: Path, **config: Any) -> Path:
    """A sequence classifier with random weights, whose scores are of the order of 1."""
    from transformers import AutoConfig, AutoModelForSequenceClassification

    write_tiny_model(folder, hidden_size=32, intermediate_size=64, num_attention_heads=2, num_key_value_heads=1)
    torch.manual_seed(3)
    model = AutoModelForSequenceClassification.from_config(AutoConfig.from_pretrained(folder, **config))
    with torch.no_grad():
        model.score.weight.normal_(std=0.5)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its padding token is that of end-of-sequence, as in many models."""
    return write_classifier(tmp_path_factory.mktemp("classifier"), num_labels=1, pad_token_id=2)

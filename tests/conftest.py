"""What all tests share: one thread, and a tiny model that is written once per session."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen2 folder with a character tokenizer and no weights: use ``policy.init: random``."""
    from nemorl.tiny import write_tiny_model

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return write_tiny_model(tmp_path_factory.mktemp("tiny_model"), **sizes)

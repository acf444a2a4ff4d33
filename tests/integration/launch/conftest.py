from __future__ import annotations

from pathlib import Path

import pytest
from nemorl_rl.models.tiny import write_tiny_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return write_tiny_model(tmp_path_factory.mktemp("model"), **sizes)

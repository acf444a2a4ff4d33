"""The algorithm ``rm`` and the environment ``reward_model`` against every clause of their kinds."""

from __future__ import annotations

import shutil
import tempfile

import pytest
import torch
from nemorl_testing import conformance

FOLDER = tempfile.TemporaryDirectory(prefix="nemorl-classifier-")


@pytest.fixture(scope="module", autouse=True)
def _classifier() -> None:
    """A reward model over the tiny model's tokens."""
    from nemorl_testing.models import tiny_model
    from transformers import AutoModelForSequenceClassification

    shutil.copytree(tiny_model(), FOLDER.name, dirs_exist_ok=True)
    torch.manual_seed(0)
    AutoModelForSequenceClassification.from_pretrained(tiny_model(), num_labels=1).save_pretrained(FOLDER.name)


test_rm = conformance("algorithms", {"name": "rm", "batch_size": 4})
test_reward_model = conformance(
    "environments",
    {"name": "reward_model", "model": FOLDER.name, "device": "cpu", "max_tokens": 256, "batch_tokens": 1},
    examples=[("1+1=", "2", None), ("1+1=", "3", None)],
)

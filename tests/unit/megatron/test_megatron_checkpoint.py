"""Checkpoints in one process: what is refused, and what is in the files. Other layouts are integration tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("megatron.core", reason="megatron-core is not installed: pip install nemorl-megatron")

from nemorl.config import PolicyConfig
from nemorl.contracts import TrainingBackend
from nemorl.errors import CheckpointError
from nemorl.resources.worker import WorkerContext
from nemorl.testing.batches import WeightedNLL, ragged_batch
from nemorl.testing.models import tiny_model
from nemorl.tiny import write_tiny_model
from safetensors.torch import load_file

pytestmark = pytest.mark.megatron


def build(model: Path, backend: str = "megatron", **policy: Any) -> TrainingBackend:
    config = PolicyConfig.model_validate({"model_name": str(model), "backend": backend, **policy})
    return config.backend.build(config, WorkerContext(), reference=False)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint after one step."""
    folder = tmp_path / "saved"
    folder.mkdir()
    backend = build(tiny_model())
    backend.train_step(ragged_batch(), WeightedNLL())
    backend.save_checkpoint(folder)
    backend.shutdown()
    return folder


def refusal(backend: TrainingBackend, folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        backend.load_checkpoint(folder)
    backend.shutdown()
    return str(caught.value)


def test_a_file_holds_masters_and_moments_in_float32(saved: Path) -> None:
    index = json.loads((saved / "megatron.json").read_text())
    assert (index["steps"], index["updates"]) == (1, 1)
    tensors = load_file(saved / "state-00000.safetensors")
    assert {name.split(".weight.")[-1] for name in tensors if ".weight." in name} == {
        "master.0.0", "exp_avg.0.0", "exp_avg_sq.0.0",
    }  # fmt: skip
    assert len(tensors) == 3 * len(index["pieces"])
    assert all(tensor.dtype.itemsize == 4 for tensor in tensors.values())


def test_the_checkpoint_of_another_backend_is_refused_with_a_way_to_go_on(tmp_path: Path) -> None:
    other = build(tiny_model(), "dtensor")
    other.save_checkpoint(tmp_path)
    assert "nemorl export" in refusal(build(tiny_model()), tmp_path)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({"num_hidden_layers": 3}, "decoder.layers.2.input_layernorm.weight is missing"),
        ({"num_hidden_layers": 1}, "decoder.layers.1.input_layernorm.weight is unknown"),
        ({"intermediate_size": 64}, "elements in each part"),
    ],
)
def test_the_checkpoint_of_another_model_is_refused(
    sizes: dict[str, int], expected: str, saved: Path, tmp_path: Path
) -> None:
    own = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}
    other = write_tiny_model(tmp_path / "other", **{**own, **sizes})
    assert expected in refusal(build(other, init="random"), saved)


def test_a_damaged_checkpoint_is_named(saved: Path) -> None:
    file = saved / "state-00000.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    assert f"{file} cannot be read" in refusal(build(tiny_model()), saved)

"""Checkpoints in one process: what is refused, and what is in the files. Other layouts are integration tests."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core", reason="megatron-core is not installed: pip install nemorl-megatron")

from megatron.core.dist_checkpointing import load_plain_tensors
from nemorl.config import PolicyConfig
from nemorl.contracts import TrainingBackend
from nemorl.errors import CheckpointError
from nemorl.resources.worker import WorkerContext
from nemorl_megatron.checkpoint import boxes
from nemorl_megatron.storage import Box
from nemorl_rl.models.tiny import write_tiny_model
from nemorl_testing.batches import WeightedNLL, ragged_batch
from nemorl_testing.models import tiny_model
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


def test_a_file_holds_masters_and_moments_in_float32_under_the_names_of_weights(saved: Path) -> None:
    assert json.loads((saved / "common.json").read_text()) == {"steps": 1, "updates": 1, "rate_scale": 1.0}
    assert json.loads((saved / "metadata.json").read_text())["sharded_backend"] == "nemorl_safetensors"
    tensors = load_file(saved / "state-00000.safetensors")
    gate = "decoder.layers.1.mlp.linear_fc1.weight_w"
    names = (gate, f"optimizer.state.exp_avg.{gate}", f"optimizer.state.exp_avg_sq.{gate}")
    for name in names:
        assert tensors[f"{name}.0.0"].shape == (128, 64)  # all of it in one rectangle
    assert len(tensors) == 3 * len([name for name in tensors if not name.startswith("optimizer.state.")])
    assert all(tensor.dtype.itemsize == 4 for tensor in tensors.values())


def test_megatron_core_itself_reads_a_checkpoint(saved: Path) -> None:
    found = load_plain_tensors(str(saved))
    assert [found.pop(name) for name in ("steps", "updates", "rate_scale")] == [1, 1, 1.0]
    stored = load_file(saved / "state-00000.safetensors")
    assert {key: tensor.shape for key, tensor in found.items()} == {
        name.rsplit(".", tensor.ndim)[0]: tensor.shape for name, tensor in stored.items()
    }
    name = "optimizer.state.exp_avg.decoder.layers.0.self_attention.linear_qkv.weight"
    assert torch.equal(found[name], stored[f"{name}.0.0"])


@pytest.mark.parametrize(
    ("shape", "start", "stop", "expected"),
    [
        ((7,), 2, 6, [((2,), (4,))]),
        ((4, 10), 13, 17, [((1, 3), (1, 4))]),
        ((4, 10), 13, 20, [((1, 3), (1, 7))]),
        ((4, 10), 10, 30, [((1, 0), (2, 10))]),
        ((4, 10), 13, 34, [((1, 3), (1, 7)), ((2, 0), (1, 10)), ((3, 0), (1, 4))]),
        ((4, 10), 7, 7, []),
        ((2, 2, 2), 1, 6, [((0, 0, 1), (1, 1, 1)), ((0, 1, 0), (1, 1, 2)), ((1, 0, 0), (1, 1, 2))]),
    ],
)
def test_a_range_of_elements_is_a_few_rectangles(
    shape: tuple[int, ...], start: int, stop: int, expected: list[Box]
) -> None:
    assert list(boxes(shape, start, stop)) == expected
    numbers = torch.arange(prod(shape)).view(shape)
    found = [
        numbers[tuple(slice(a, a + n) for a, n in zip(offset, size, strict=True))].flatten()
        for offset, size in boxes(shape, start, stop)
    ]
    assert torch.cat([numbers[:0].flatten(), *found]).tolist() == [*range(start, stop)]


def test_the_checkpoint_of_another_backend_is_refused_with_a_way_to_go_on(tmp_path: Path) -> None:
    other = build(tiny_model(), "dtensor")
    other.save_checkpoint(tmp_path)
    assert "nemorl export" in refusal(build(tiny_model()), tmp_path)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({"num_hidden_layers": 3}, "decoder.layers.2.input_layernorm.weight is missing"),
        ({"num_hidden_layers": 1}, "decoder.layers.1.input_layernorm.weight is unknown"),
        ({"intermediate_size": 64}, "has shape [128, 64], here [64, 64]"),
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

"""Optimizer state and reference that rest in the host's memory change no number."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core", reason="megatron-core is not installed: pip install nemorl-megatron")

from nemorl.config import PolicyConfig
from nemorl.resources.worker import WorkerContext
from nemorl_dtensor.model import load_model
from nemorl_megatron.training import MegatronBackend
from nemorl_rl.models.tiny import write_tiny_model
from nemorl_testing.batches import WeightedNLL, ragged_batch
from torch import Tensor

pytestmark = pytest.mark.megatron

RESTS = {"offload": {"optimizer": True, "reference": True}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_tiny_model(tmp_path_factory.mktemp("model"), hidden_size=32, intermediate_size=64)
    load_model(PolicyConfig(model_name=str(folder), init="random"), seed=7).save_pretrained(folder)
    return folder


def build(model: Path, options: dict[str, Any], **policy: Any) -> MegatronBackend:
    fields = {"model_name": str(model), "backend": {"name": "megatron", **options}, "optimizer": {"lr": 1e-2}}
    config = PolicyConfig.model_validate({**fields, "microbatch_tokens": 64, **policy})
    made = config.backend.build(config, WorkerContext(seed=3), reference=True)
    assert isinstance(made, MegatronBackend)
    return made


def learnt(backend: MegatronBackend, folder: Path) -> list[Tensor]:
    """Of two steps, a checkpoint after the first, and of what goes on from it."""
    batch = ragged_batch()
    found = [backend.get_logprobs(batch, "reference")]
    backend.train_step(batch, WeightedNLL())
    folder.mkdir()
    backend.save_checkpoint(folder)
    for _ in range(2):
        metrics = backend.train_step(batch, WeightedNLL())
        found += [torch.tensor(metrics["grad_norm"].value), backend.get_logprobs(batch)]
        backend.load_checkpoint(folder)
    return found


@pytest.mark.parametrize("distributed", [False, True])
@pytest.mark.parametrize("policy", [{}, {"precision": "bfloat16"}, {"lora": {"rank": 4}}], ids=str)
def test_steps_and_checkpoints_are_the_same_bit_for_bit(
    policy: dict[str, Any], distributed: bool, model: Path, tmp_path: Path
) -> None:
    options = {"distributed_optimizer": distributed}
    plain, resting = build(model, options, **policy), build(model, {**options, **RESTS}, **policy)
    wanted, found = learnt(plain, tmp_path / "plain"), learnt(resting, tmp_path / "resting")
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
    assert torch.equal(found[1], found[3]), "a checkpoint was read while the state rested"
    assert torch.equal(found[2], found[4])
    resting.train_step(ragged_batch(), WeightedNLL())
    held = resting.held_bytes()
    assert held["optimizer"] == held["reference"] == 0
    assert plain.held_bytes()["optimizer"] > 0
    for backend in (plain, resting):
        backend.shutdown()

"""float32 masters of a bfloat16 model begin as its weights were before they were rounded."""

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

MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
MODELS: dict[str, dict[str, Any]] = {
    "qwen2": {"tie_word_embeddings": True},
    "llama": {"architecture": "llama", "tie_word_embeddings": False},
    "qwen3_moe": {"architecture": "qwen3_moe", **MIXTURE},
}


def write(folder: Path, sizes: dict[str, Any]) -> Path:
    write_tiny_model(folder, **{"hidden_size": 32, "intermediate_size": 64, **sizes})
    load_model(PolicyConfig(model_name=str(folder), init="random"), seed=7).save_pretrained(folder)
    return folder


def build(folder: Path, *, head: Any = "language_model", **policy: Any) -> MegatronBackend:
    fields = {"model_name": str(folder), "backend": "megatron", "optimizer": {"lr": 1e-4}, **policy}
    config = PolicyConfig.model_validate(fields)
    made = config.backend.build(config, WorkerContext(seed=3), reference=False, head=head)
    assert isinstance(made, MegatronBackend)
    return made


def masters(backend: MegatronBackend) -> dict[str, Tensor]:
    """By parameter, in its shape."""
    learner = backend._optimizer
    learner.refine()
    found = {}
    for name, parameter in backend._pieces[0].named_parameters():
        share = learner.share(parameter)
        assert share is not None
        found[name] = share.master.detach().clone().view(parameter.shape)
    backend.shutdown()
    return found


@pytest.mark.parametrize("distributed", [False, True])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("init", ["pretrained", "random"])
def test_they_are_what_float32_has(name: str, distributed: bool, init: str, tmp_path: Path) -> None:
    folder = write(tmp_path, MODELS[name])
    options = {"name": "megatron", "distributed_optimizer": distributed}
    expected = masters(build(folder, backend=options, init=init))
    found = masters(build(folder, backend=options, init=init, precision="bfloat16"))
    assert found.keys() == expected.keys()
    for key, master in found.items():
        assert torch.equal(master, expected[key]), key
    assert any(not torch.equal(tensor, tensor.bfloat16().float()) for tensor in found.values())


def test_a_weight_that_does_not_come_from_the_file_is_its_own_master(tmp_path: Path) -> None:
    folder = write(tmp_path, MODELS["llama"])
    backend = build(folder, precision="bfloat16")
    changed = "decoder.layers.0.mlp.linear_fc2.weight"
    with torch.no_grad():
        backend._pieces[0].get_parameter(changed)[1, 2] += 1
    expected = backend._pieces[0].get_parameter(changed).detach().float()
    assert torch.equal(masters(backend)[changed], expected)


def test_masters_of_a_checkpoint_are_not_read_from_the_model_s_files(tmp_path: Path) -> None:
    folder = write(tmp_path / "model", MODELS["llama"])
    first, saved = build(folder, precision="bfloat16"), tmp_path / "saved"
    saved.mkdir()
    first.train_step(ragged_batch(), WeightedNLL())
    first.save_checkpoint(saved)
    expected = masters(first)
    second = build(folder, precision="bfloat16")
    (folder / "model.safetensors").unlink()
    second.load_checkpoint(saved)
    assert all(torch.equal(master, expected[name]) for name, master in masters(second).items())

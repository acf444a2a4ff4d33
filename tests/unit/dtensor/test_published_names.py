"""What leaves a trainer has the names of published checkpoints, mixtures included, and a generator understands them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from nemorl.config import GenerationConfig, PolicyConfig
from nemorl.resources.worker import WorkerContext
from nemorl.weights import in_process_handle
from nemorl_dtensor import DTensorConfig, HFGenerationConfig
from nemorl_dtensor.generation import HFGeneration
from nemorl_dtensor.model import skeleton
from nemorl_dtensor.published_names import PublishedNames
from nemorl_dtensor.training import DTensorBackend
from nemorl_rl.models.tiny import write_tiny_model
from nemorl_testing.batches import WeightedNLL, ragged_batch
from nemorl_testing.models import load_reference, plain_logprobs
from safetensors import safe_open
from torch import Tensor

SIZES = {"hidden_size": 32, "intermediate_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2}
LATENT = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
SPARSE = {"first_k_dense_replace": 1, "n_group": 2, "topk_group": 1, "n_shared_experts": 1, **LATENT}
MIXTURES: list[tuple[str, dict[str, Any], set[str]]] = [
    (
        "mixtral",
        {"num_local_experts": 3, "num_experts_per_tok": 2},
        {f"block_sparse_moe.experts.{n}.w{m}.weight" for n in range(3) for m in (1, 2, 3)}
        | {"block_sparse_moe.gate.weight"},
    ),
    (
        "qwen3_moe",
        {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8},
        {f"mlp.experts.{n}.{m}_proj.weight" for n in range(3) for m in ("gate", "up", "down")} | {"mlp.gate.weight"},
    ),
    (
        "deepseek_v3",
        {
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            **SPARSE,
            "num_key_value_heads": 4,
        },
        {f"mlp.experts.{n}.{m}_proj.weight" for n in range(4) for m in ("gate", "up", "down")}
        | {f"mlp.shared_experts.{m}_proj.weight" for m in ("gate", "up", "down")}
        | {"mlp.gate.weight", "mlp.gate.e_score_correction_bias"},
    ),
    (
        "granitemoe",
        {"num_local_experts": 3, "num_experts_per_tok": 2},
        {f"block_sparse_moe.{m}.weight" for m in ("input_linear", "output_linear", "router.layer")},
    ),
]
"""Architecture, sizes, and the names of a layer's mixture in its checkpoints on the hub."""


@pytest.fixture(params=MIXTURES, ids=[name for name, *_ in MIXTURES])
def mixture(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, set[str]]:
    architecture, sizes, names = request.param
    return write_tiny_model(tmp_path / "m", architecture=architecture, **{**SIZES, **sizes}), names


def _trainer(folder: Path, **policy: Any) -> DTensorBackend:
    fields = {"model_name": str(folder), "init": "random", "optimizer": {"lr": 1e-2}, **policy}
    config = PolicyConfig.model_validate(fields)
    return DTensorBackend(config, WorkerContext(), DTensorConfig(), reference=False, head="language_model")


def _exported(trainer: DTensorBackend) -> dict[str, Tensor]:
    return {name: tensor.clone() for bucket in trainer.export_weights() for name, tensor in bucket.items()}


def test_mixtures_are_exported_as_their_published_checkpoints(mixture: tuple[Path, set[str]], tmp_path: Path) -> None:
    folder, names = mixture
    trainer, batch = _trainer(folder), ragged_batch()
    trainer.train_step(batch, WeightedNLL())
    prefix = "model.layers.1."
    inside = ("block_sparse_moe", "mlp")
    weights = _exported(trainer)
    assert {n.removeprefix(prefix) for n in weights if n.startswith(tuple(prefix + part for part in inside))} == names

    trainer.save_pretrained(tmp_path / "saved")
    with safe_open(tmp_path / "saved" / "model.safetensors", framework="pt") as file:
        saved = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  not a mapping
    assert saved.keys() == weights.keys()
    assert all(saved[name].equal(weights[name]) for name in saved)
    found = plain_logprobs(load_reference(tmp_path / "saved"), batch).detach()
    torch.testing.assert_close(found, trainer.get_logprobs(batch), atol=1e-5, rtol=0)


def test_the_hf_generator_takes_them_back(mixture: tuple[Path, set[str]]) -> None:
    folder, _ = mixture
    trainer = _trainer(folder)
    engine = HFGeneration(
        GenerationConfig(),
        PolicyConfig(model_name=str(folder)),
        WorkerContext(),
        in_process_handle(trainer.export_weights, 0),
        HFGenerationConfig(),
    )
    for version in (1, 2):
        trainer.train_step(ragged_batch(), WeightedNLL())
        engine.update_weights(in_process_handle(trainer.export_weights, version), version)
        theirs, ours = engine._versions.newest.model._model.state_dict(), trainer._model.state_dict()
        assert all(theirs[name].equal(ours[name]) for name in ours)


def test_a_generator_takes_the_names_of_models_in_memory_as_well(mixture: tuple[Path, set[str]]) -> None:
    trainer = _trainer(mixture[0])
    names = PublishedNames(trainer._model)
    plain = dict(trainer._model.state_dict())
    assert {name: tensor.data_ptr() for name, tensor in names.in_memory(plain.items())} == {
        name: tensor.data_ptr() for name, tensor in plain.items()
    }


def test_of_a_mixture_only_the_tensors_of_one_layer_wait_for_each_other(mixture: tuple[Path, set[str]]) -> None:
    model = skeleton(PolicyConfig(model_name=str(mixture[0])))
    names = PublishedNames(model)
    taken: list[str] = []

    def stream(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors.items():
            taken.append(name)
            yield name, tensor

    published = dict(names.published(model.state_dict().items()))
    longest = 0
    for made, _ in names.in_memory(stream(published)):
        longest = max(longest, len(taken))
        assert made in model.state_dict()
        taken.clear()
    assert longest <= len(mixture[1])

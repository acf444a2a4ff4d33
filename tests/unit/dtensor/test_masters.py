"""float32 masters of a bfloat16 model begin as its weights were before they were rounded, wherever these come from."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from nemorl.config import PolicyConfig
from nemorl.resources.worker import WorkerContext
from nemorl_dtensor import DTensorConfig
from nemorl_dtensor.model import load_model, skeleton
from nemorl_dtensor.training import DTensorBackend
from nemorl_rl.models.tiny import write_tiny_model
from nemorl_tensors import TokenBatch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
MODELS: dict[str, dict[str, Any]] = {
    "qwen2, tied": {**SIZES, "tie_word_embeddings": True},
    "qwen2": {**SIZES, "tie_word_embeddings": False},
    "gpt2": {"architecture": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4},
    "mixtral": {**SIZES, "architecture": "mixtral", "num_local_experts": 3, "num_experts_per_tok": 2},
    "gemma2": {**SIZES, "architecture": "gemma2", "head_dim": 8, "num_key_value_heads": 2},
}


def build(folder: Path, **policy: Any) -> DTensorBackend:
    fields = {
        "model_name": str(folder),
        "precision": "bfloat16",
        "optimizer": {"lr": 1e-4, "weight_decay": 0.0},
        "max_grad_norm": None,
        **policy,
    }
    head = fields.pop("head", "language_model")
    context = WorkerContext(seed=3)
    return DTensorBackend(PolicyConfig.model_validate(fields), context, DTensorConfig(), reference=False, head=head)


def masters(backend: DTensorBackend) -> dict[str, Tensor]:
    found = backend._optimizer.tensors()
    return {name.removesuffix(".master"): tensor for name, tensor in found.items() if name.endswith(".master")}


def exact(folder: Path, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    return dict(AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).named_parameters())


def write(folder: Path, sizes: dict[str, Any], **saving: Any) -> Path:
    """A folder with float32 weights that bfloat16 does not hold."""
    tiny = write_tiny_model(folder / "tiny", **sizes)
    model = load_model(PolicyConfig(model_name=str(tiny), init="random"), seed=7)
    model.save_pretrained(folder / "model", **saving)
    shutil.copytree(tiny, folder / "model", dirs_exist_ok=True, ignore=shutil.ignore_patterns("config.json"))
    return folder / "model"


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize("sizes", MODELS.values(), ids=[*MODELS])
@pytest.mark.parametrize("saving", [{}, {"max_shard_size": "20KB"}], ids=["one file", "several"])
def test_they_are_what_the_file_has(sizes: dict[str, Any], saving: dict[str, Any], tmp_path: Path) -> None:
    folder = write(tmp_path, sizes, **saving)
    assert len([*folder.glob("*.safetensors")]) == (1 if not saving else len([*folder.glob("model-*")]))
    backend = build(folder)
    found, expected = masters(backend), exact(folder)
    assert_equal(found, expected)
    rounded = exact(folder, torch.bfloat16)
    assert_equal(dict(backend._model.named_parameters()), rounded)
    assert any(not torch.equal(rounded[name].float(), tensor) for name, tensor in found.items())


def test_a_file_of_the_base_model_alone_serves_as_well(tmp_path: Path) -> None:
    folder = write(tmp_path, MODELS["qwen2, tied"])
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.model.save_pretrained(folder)
    assert_equal(masters(build(folder)), dict(model.named_parameters()))


@pytest.mark.parametrize("name", ["qwen2, tied", "mixtral"])
def test_random_weights_are_those_that_float32_has(name: str, tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "tiny", **MODELS[name])
    full = build(folder, init="random", precision="float32")
    assert_equal(masters(build(folder, init="random")), dict(full._model.named_parameters()))


def test_random_weights_in_bfloat16_have_the_rotary_frequencies_of_loaded_ones(tmp_path: Path) -> None:
    policy = PolicyConfig(model_name=str(write_tiny_model(tmp_path, **SIZES)), init="random", precision="bfloat16")
    model, like = load_model(policy), skeleton(policy)
    types = [{name: tensor.dtype for name, tensor in one.state_dict().items()} for one in (model, like)]
    assert types[0] == types[1]
    assert {name: buffer.dtype for name, buffer in model.named_buffers() if "inv_freq" in name} == {
        "model.rotary_emb.inv_freq": torch.float32,
        "model.rotary_emb.original_inv_freq": torch.float32,
    }
    assert model.config.dtype == torch.bfloat16


def test_a_value_head_that_no_file_has_begins_with_its_own_rounding(tmp_path: Path) -> None:
    folder = write(tmp_path, MODELS["qwen2, tied"])
    backend = build(folder, head="value")
    found, parameters = masters(backend), dict(backend._model.named_parameters())
    expected = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1).state_dict()
    for name, master in found.items():
        own = parameters[name].float() if name == "score.weight" else expected[name]
        assert torch.equal(master, own), name


def test_of_bfloat16_files_nothing_is_read_again(tmp_path: Path, batch: TokenBatch, weighted_nll: Any) -> None:
    folder = write(tmp_path, MODELS["qwen2"])
    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(folder)
    assert_equal(masters(build(folder)), {name: tensor.float() for name, tensor in exact(folder).items()})


def test_a_tensor_that_the_weights_do_not_come_from_is_left_alone(tmp_path: Path) -> None:
    """Whoever changed weight or file in between: a master is never anything but what its weight is the rounding of."""
    folder = write(tmp_path, MODELS["qwen2"])
    backend, changed = build(folder), "model.layers.0.mlp.up_proj.weight"
    with torch.no_grad():
        backend._model.get_parameter(changed)[1, 2] += 1
        backend._optimizer._masters[changed].copy_(backend._model.get_parameter(changed))
    found, expected = masters(backend), exact(folder)
    expected[changed] = backend._model.get_parameter(changed).float()
    assert_equal(found, expected)


@pytest.mark.parametrize("with_optimizer", [True, False])
def test_what_a_checkpoint_holds_is_not_read_from_the_model_s_files(
    with_optimizer: bool, tmp_path: Path, batch: TokenBatch, weighted_nll: Any
) -> None:
    folder = write(tmp_path, MODELS["qwen2"])
    first = build(folder)
    first.train_step(batch, weighted_nll)
    saved = tmp_path / "saved"
    saved.mkdir()
    first.save_checkpoint(saved, optimizer=with_optimizer)
    second = build(folder)
    (folder / "model.safetensors").unlink()
    second.load_checkpoint(saved)
    weights = {name: p.detach().float() for name, p in second._model.named_parameters()}
    assert_equal(masters(second), masters(first) if with_optimizer else weights)


def test_adapters_are_float32_and_their_base_is_not_read_again(tmp_path: Path) -> None:
    folder = write(tmp_path, MODELS["qwen2"])
    backend = build(folder, lora={"rank": 2})
    (folder / "model.safetensors").unlink()
    assert masters(backend) == {}


Step = Callable[[Any], None]


def loss_of(model: Any, batch: TokenBatch) -> Tensor:
    """Advantage-weighted negative log-likelihood, by transformers, one sequence at a time."""
    loss, start = torch.zeros(()), 0
    for length in batch.lengths.tolist():
        part = slice(start, start + length)
        ids, keep = batch.token_ids[part], batch.mask[part]
        logps = torch.log_softmax(model(input_ids=ids[None]).logits[0, :-1].float(), -1)
        chosen = logps.gather(1, ids[1:, None]).squeeze(1)
        weights = (batch["advantages"] * batch.loss_weights)[part][1:]
        loss = loss - (chosen * weights)[keep[1:]].sum()
        start += length
    return loss


def test_an_update_is_that_of_plain_pytorch_with_float32_masters(
    tmp_path: Path, batch: TokenBatch, weighted_nll: Any
) -> None:
    """Gradients of the rounded model, AdamW over the exact weights: what torch does, in a few lines of its own."""
    folder = write(tmp_path, {**MODELS["qwen2"], "vocab_size": 96})
    backend = build(folder, optimizer={"lr": 1e-4, "weight_decay": 0.0, "eps": 1e-4})
    backend.train_step(batch, weighted_nll)

    low = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    full = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    loss_of(low, batch).backward()
    for exact_, rounded in zip(full.parameters(), low.parameters(), strict=True):
        exact_.grad = rounded.grad.float()
    torch.optim.AdamW(full.parameters(), lr=1e-4, eps=1e-4, weight_decay=0.0).step()

    found = masters(backend)
    expected = dict(full.named_parameters())
    total = math.sqrt(sum(float(tensor.double().square().sum()) for tensor in expected.values()))
    difference = math.sqrt(sum(float((found[n] - t).double().square().sum()) for n, t in expected.items()))
    # Gradients differ by bfloat16's rounding in another order of products. Masters that begin rounded would be off by
    # 2^-9 / sqrt(3) = 1.1e-3 of each weight.
    assert difference < 1e-4 * total

"""Resume is bit for bit; exported weights are the policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from batch_metrics import of_the_batch
from nemorl.config import PolicyConfig
from nemorl.errors import CheckpointError
from nemorl_dtensor import checkpoint_plan
from nemorl_dtensor.checkpoint import MODEL, OPTIMIZER
from nemorl_dtensor.model import load_model
from nemorl_dtensor.training import DTensorBackend
from nemorl_tensors import TokenBatch
from recorded_messages import Raises
from torch import Tensor
from transformers import AutoModelForCausalLM

from .conftest import Build, plain_logprobs

VARIANTS: dict[str, dict[str, Any]] = {
    "full": {"schedule": {"kind": "linear", "decay_steps": 8}},
    "bfloat16": {"precision": "bfloat16"},
    "lora": {"lora": {"rank": 4, "dropout": 0.2}},
    "muon": {"optimizer": {"name": "muon", "lr": 1e-2}},
    "muon in bfloat16": {"optimizer": {"name": "muon", "lr": 1e-2}, "precision": "bfloat16"},
}


def exported(backend: DTensorBackend) -> dict[str, Tensor]:
    return {name: tensor.clone() for bucket in backend.export_weights() for name, tensor in bucket.items()}


@pytest.mark.parametrize("is_snapshot", [False, True])
@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(
    variant: str, is_snapshot: bool, build: Build, batch: TokenBatch, weighted_nll: Any, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    straight = build(**VARIANTS[variant])
    for _ in range(2):
        straight.train_step(batch, weighted_nll)
    if is_snapshot:
        straight.snapshot_checkpoint(tmp_path)  # and trains while that is being written
    else:
        straight.save_checkpoint(tmp_path)
    expected = [of_the_batch(straight.train_step(batch, weighted_nll)) for _ in range(2)]
    straight.snapshot_files(wait=True)

    torch.manual_seed(1)
    resumed = build(seed=5, **VARIANTS[variant])
    resumed.load_checkpoint(tmp_path)
    found = [of_the_batch(resumed.train_step(batch, weighted_nll)) for _ in range(2)]

    assert found == expected
    assert all(
        torch.equal(a, b) for a, b in zip(straight._trainable.values(), resumed._trainable.values(), strict=True)
    )
    assert torch.equal(straight.get_logprobs(batch), resumed.get_logprobs(batch))


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_checkpoint_without_optimizer_goes_on_from_the_weights_with_a_new_one(
    precision: str, build: Build, batch: TokenBatch, weighted_nll: Any, tmp_path: Path
) -> None:
    straight = build(precision=precision, schedule={"kind": "linear", "decay_steps": 8})
    for _ in range(2):
        straight.train_step(batch, weighted_nll)
    straight.save_checkpoint(tmp_path, optimizer=False)
    assert not (tmp_path / OPTIMIZER).exists()

    resumed = build(seed=5, precision=precision, schedule={"kind": "linear", "decay_steps": 8})
    resumed.train_step(batch, weighted_nll)  # what it knew is forgotten, masters included
    resumed.load_checkpoint(tmp_path)
    assert all(
        torch.equal(a, b) for a, b in zip(straight._trainable.values(), resumed._trainable.values(), strict=True)
    )
    assert not any("exp_avg" in name for name in resumed._optimizer.tensors())
    assert resumed._optimizer.steps == 2
    assert all(
        torch.equal(master, resumed._trainable[name].float()) for name, master in resumed._optimizer._masters.items()
    )
    # Steps 1 to 8 of a linear decay have rates 1, 7/8, 6/8: the third is reached, whatever the optimizer forgot.
    assert resumed.train_step(batch, weighted_nll)["lr"].value == pytest.approx(1e-2 * 6 / 8)


def test_a_checkpoint_holds_adapters_only_and_no_pickle(
    build: Build, batch: TokenBatch, weighted_nll: Any, tmp_path: Path
) -> None:
    backend = build(lora={"rank": 2})
    backend.train_step(batch, weighted_nll)
    backend.save_checkpoint(tmp_path)
    from safetensors import safe_open

    (only,) = (tmp_path / MODEL).iterdir()
    with safe_open(only, "pt") as file:
        assert all("lora_" in name for name in file.keys())  # noqa: SIM118
    assert {file.suffix for file in tmp_path.rglob("*") if file.is_file()} == {".safetensors", ".json"}


def test_a_large_checkpoint_is_cut_into_files(
    build: Build, batch: TokenBatch, weighted_nll: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_plan, "FILE_BYTES", 20_000)
    backend, other = build(), build()
    backend.train_step(batch, weighted_nll)
    backend.save_checkpoint(tmp_path)
    assert len([*(tmp_path / MODEL).iterdir()]) > 2
    other.load_checkpoint(tmp_path)
    one, same = (policy.train_step(batch, weighted_nll) for policy in (other, backend))
    assert of_the_batch(one) == of_the_batch(same)


def test_a_checkpoint_of_another_model_is_refused(build: Build, tmp_path: Path, raises: Raises) -> None:
    build().save_checkpoint(tmp_path)
    with raises(CheckpointError):
        build(lora={"rank": 2}).load_checkpoint(tmp_path)


def test_missing_and_damaged_files_are_named(
    build: Build, batch: TokenBatch, weighted_nll: Any, tmp_path: Path, raises: Raises
) -> None:
    with raises(CheckpointError):
        build().load_checkpoint(tmp_path)
    backend = build()
    backend.train_step(batch, weighted_nll)
    backend.save_checkpoint(tmp_path)
    (only,) = (tmp_path / OPTIMIZER).iterdir()
    only.write_bytes(b"not a checkpoint")
    with raises(CheckpointError):
        build().load_checkpoint(tmp_path)


def test_exported_weights_are_the_live_parameters_without_tied_duplicates(build: Build) -> None:
    backend = build()
    (bucket,) = backend.export_weights()
    assert bucket.keys() == dict(backend._model.named_parameters()).keys()
    assert "lm_head.weight" not in bucket
    assert all(bucket[name].data_ptr() == p.data_ptr() for name, p in backend._model.named_parameters())


def test_lora_exports_the_merged_model_and_the_reference_is_the_base(
    build: Build, batch: TokenBatch, weighted_nll: Any, pretrained: Path
) -> None:
    backend = build(lora={"rank": 4}, reference=True)
    base = AutoModelForCausalLM.from_pretrained(pretrained)
    before = plain_logprobs(base, batch)
    for _ in range(3):
        backend.train_step(batch, weighted_nll)
    torch.testing.assert_close(backend.get_logprobs(batch, weights="reference"), before, atol=1e-5, rtol=1e-5)

    weights = exported(backend)
    assert weights.keys() == dict(base.named_parameters()).keys()
    base.load_state_dict(weights, strict=False)
    merged = plain_logprobs(base, batch)
    assert float((merged - before).abs().max()) > 0.1
    torch.testing.assert_close(backend.get_logprobs(batch), merged, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("lora", [None, {"rank": 4}])
def test_a_saved_policy_loads_in_plain_transformers(
    lora: Any, build: Build, batch: TokenBatch, weighted_nll: Any, tmp_path: Path, tiny: Path
) -> None:
    backend = build(lora=lora)
    backend.train_step(batch, weighted_nll)
    backend.save_pretrained(tmp_path / "model")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    torch.testing.assert_close(plain_logprobs(plain, batch), backend.get_logprobs(batch), atol=2e-5, rtol=1e-4)
    for file in tiny.glob("tokenizer*"):
        assert (tmp_path / "model" / file.name).read_bytes() == file.read_bytes()
    assert backend.train_step(batch, weighted_nll)["loss"].value != 0  # saving leaves the policy usable


def test_an_untied_head_is_exported(build: Build, tmp_path: Path, pretrained: Path, tiny: Path) -> None:
    from nemorl_rl.models.tiny import write_tiny_model

    folder = write_tiny_model(tmp_path / "untied", hidden_size=32, intermediate_size=64, tie_word_embeddings=False)
    backend = build(model_name=str(folder), init="random")
    assert "lm_head.weight" in exported(backend)
    backend.save_pretrained(tmp_path / "saved")
    again = load_model(PolicyConfig(model_name=str(tmp_path / "saved")))
    assert torch.equal(again.lm_head.weight, backend._model.lm_head.weight)  # type: ignore[union-attr,arg-type]

"""Receipts of vLLM, whose layout fuses, stacks, pads and divides what it is sent."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from nemorl.config import PolicyConfig
from nemorl.resources.worker import WorkerContext
from nemorl.weights import Digests, WeightHandle, in_process_handle
from nemorl_dtensor import DTensorConfig
from nemorl_rl.config import WeightsConfig
from nemorl_rl.data.tokenizer import Tokenizer
from nemorl_rl.serving.proving import WeightReceipts
from nemorl_rl.serving.receipts import PROBE, Receipt
from nemorl_tensors.engines.digests import digested, digests
from nemorl_testing.models import load_reference, tiny_model, write_tiny_model
from nemorl_testing.receipts import planted, receipt_of, receipted
from torch import Tensor
from vllm_engines import changed

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

MIXTURE = {
    "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "num_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 64,
}  # fmt: skip
LORA = {"lora": {"rank": 3, "alpha": 12.0}}


def tensors_of(folder: Path, seed: int) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in changed(load_reference(folder), seed).named_parameters()}


@pytest.mark.full
def test_two_processes_prove_one_model_together(build: Any) -> None:
    # Keys and values of one head are held twice, the vocabulary of 89 is padded, rows and columns are divided.
    folder = tiny_model(num_key_value_heads=1)
    engine = build(folder, tensor_parallel_size=2)
    old, new = tensors_of(folder, 1), tensors_of(folder, 2)
    for version, tensors in ((1, old), (2, new)):
        engine.update_weights(receipted(tensors, version), version)
        told = receipt_of(engine, tensors, version)
        assert (told.proven, dict(told.faults), dict(told.incomparable)) == (len(tensors), {}, {})
    for number, (_, arriving) in enumerate(planted(old, new, list(new)), start=3):
        engine.update_weights(receipted(new, number, arriving), number)
        meant = {name for name in new if not torch.equal(arriving[name], new[name])}
        assert receipt_of(engine, new, number).faults.keys() == meant


@pytest.mark.full
def test_a_stale_expert_is_named(build: Any, tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "tiny", architecture="qwen3_moe", **MIXTURE)
    policy = PolicyConfig(model_name=str(tmp_path / "tiny"), init="random")
    trainer: Any = DTensorConfig().build(policy, WorkerContext(), reference=False)
    trainer.save_pretrained(tmp_path)
    engine = build(tmp_path)
    old = exported(trainer)
    changed(trainer._model, seed=1)
    new = exported(trainer)
    stale = next(name for name in new if ".experts.2." in name)
    for arriving, faults in ((new, set()), ({**new, stale: old[stale]}, {stale})):
        engine.update_weights(receipted(new, 2, arriving), 2)
        told = receipt_of(engine, new, 2)
        assert told.faults.keys() == faults
        assert told.proven == len(new) - len(faults)


def exported(trainer: Any) -> dict[str, Tensor]:
    return {name: tensor.clone() for bucket in trainer.export_weights() for name, tensor in bucket.items()}


class OneEngine:
    """An engine as the driver sees it."""

    answered_s, lives, replicas = 0.0, 0, 1

    def __init__(self, engine: Any) -> None:
        self.generate, self._engine = engine.generate, engine

    def update_weights(self, handle: WeightHandle) -> int:
        read: int = self._engine.update_weights(handle, handle.version)
        assert handle.digests is not None
        self.answers = [self._engine.held_digests(list(handle.digests))]
        return read


def prove(engine: Any, trainer: Any, handle: WeightHandle) -> Receipt:
    """With the probe where there are no digests."""
    policy = SimpleNamespace(get_logprobs=trainer.get_logprobs, workers=SimpleNamespace(data_parallel_size=1))
    receipts = WeightReceipts(
        WeightsConfig(), OneEngine(engine), policy, Tokenizer.of(PolicyConfig(model_name=str(tiny_model()))),
        can_answer=True, precision="float32", warn=print,
    )  # fmt: skip
    receipt = receipts.update(lambda _: handle)[1]
    assert receipt is not None
    return receipt


@pytest.mark.parametrize("base", ["the same", "another"])
def test_adapters_over_another_base_are_found_by_the_probe(build: Any, base: str) -> None:
    folder = tiny_model(num_key_value_heads=2)
    trainer: Any = DTensorConfig().build(
        PolicyConfig.model_validate({"model_name": str(folder), **LORA}), WorkerContext(), reference=False
    )

    def handle(version: int) -> WeightHandle:
        export, found = digested(trainer.export_adapters)
        return replace(in_process_handle(export, version), form="adapters", digests=found)

    other = tiny_model(num_key_value_heads=2, seed=8)
    engine = build(folder if base == "the same" else other, handle(1), policy=LORA)
    receipt = prove(engine, trainer, handle(2))
    assert set(receipt.incomparable.values()) == {"vLLM scales and packs adapters"}
    assert receipt.is_proven is (base == "the same")
    assert receipt.faults.keys() == (set() if base == "the same" else {PROBE})


def test_a_tied_head_of_older_weights_is_found_by_the_probe(build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny_model(tie_word_embeddings=True)
    trainer: Any = DTensorConfig().build(PolicyConfig(model_name=str(folder)), WorkerContext(), reference=False)
    engine = build(folder)
    changed(trainer._model, seed=1)
    monkeypatch.setattr("nemorl_vllm.transfer._repack_tied_heads", lambda _: None)

    def handle(version: int) -> WeightHandle:
        tensors: Mapping[str, Tensor] = exported(trainer)

        def export() -> Iterator[Mapping[str, Tensor]]:
            yield tensors

        # One name of a quantised layer, for which the probe is asked.
        return replace(in_process_handle(export, version), digests=Digests(digests(tensors)))

    monkeypatch.setattr(engine, "_rounds", True)
    receipt = prove(engine, trainer, handle(1))
    assert receipt.faults.keys() == {PROBE}
    monkeypatch.undo()
    monkeypatch.setattr(engine, "_rounds", True)
    assert prove(engine, trainer, handle(2)).is_proven is True
